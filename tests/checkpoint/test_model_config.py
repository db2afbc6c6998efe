"""What a config.json says, and what of it is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.checkpoint.random_checkpoint import named_shape, shape_names
from cadenza.errors import CheckpointError
from cadenza.models.config_json import parse_model_config
from cadenza.models.layer_kind import LayerKind
from cadenza.models.rope_config import LinearRopeScaling, Llama3RopeScaling
from tests.checkpoint.config_writer import format_files, format_model_config
from tests.checkpoint.files import SMALL_CONFIG

FIXTURES = Path(__file__).parent.parent / "fixtures"

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def changed(**changes: Any) -> dict[str, Any]:
    return {**SMALL_CONFIG, **changes}


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in SMALL_CONFIG.items() if key not in keys}


def qwen3(**changes: Any) -> dict[str, Any]:
    return changed(architectures=["Qwen3ForCausalLM"], model_type="qwen3", **changes)


def test_old_and_new_spelling_read_alike():
    old = changed(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3}, torch_dtype="float16")
    new = without("torch_dtype") | {
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
        "dtype": "float16",
    }
    config = parse_model_config(old)
    assert config == parse_model_config(new)
    assert config.rope.theta == 5e5
    assert config.rope.scaling == Llama3RopeScaling(**LLAMA3)
    assert config.dtype == "float16"


def test_linear_scaling_is_read():
    config = parse_model_config(changed(rope_scaling={"rope_type": "linear", "factor": 4}))
    assert config.rope.scaling == LinearRopeScaling(factor=4.0)
    assert config.rope.rotary_dim == 4


def test_llama3_scaling_takes_its_length_from_the_config_when_it_has_none():
    scaling = {key: value for key, value in LLAMA3.items() if not key.startswith("original")}
    config = parse_model_config(changed(rope_scaling={"type": "llama3", **scaling}))
    assert isinstance(config.rope.scaling, Llama3RopeScaling)
    assert config.rope.scaling.original_max_position_embeddings == 64


def test_families_differ_in_their_norms():
    assert parse_model_config(SMALL_CONFIG).qk_norm is None
    config = parse_model_config(qwen3())
    assert config.family == "qwen3"
    assert config.qk_norm == "head"


def test_architecture_or_model_type_alone_names_the_family():
    assert parse_model_config(without("architectures")).family == "llama"
    assert parse_model_config(without("model_type")).family == "llama"


def test_missing_fields_have_transformers_defaults():
    config = parse_model_config(without("head_dim", "num_key_value_heads", "torch_dtype"))
    assert (config.head_dim, config.num_kv_heads, config.dtype) == (2, 3, "float32")
    assert config.rms_norm_eps == 1e-6
    assert config.rope.theta == 10_000.0


def test_qwen3_heads_have_128_values_unless_the_config_says_otherwise():
    values = {key: value for key, value in qwen3().items() if key != "head_dim"}
    assert parse_model_config(values).head_dim == 128


def test_end_of_sequence_may_be_a_number_a_list_or_absent():
    assert parse_model_config(changed(eos_token_id=3)).eos_token_ids == (3,)
    assert parse_model_config(changed(eos_token_id=[5, 3, 5])).eos_token_ids == (3, 5)
    assert parse_model_config(changed(eos_token_id=None)).eos_token_ids == ()


def test_kv_bytes_per_token_count_keys_and_values_of_all_layers():
    config = parse_model_config(SMALL_CONFIG)
    assert config.kv_bytes_per_token("bfloat16") == 2 * 2 * 1 * 4 * 2
    assert config.kv_bytes_per_token("float32") == 2 * config.kv_bytes_per_token("float16")


@pytest.mark.parametrize("name", shape_names())
def test_named_shapes_survive_being_written_and_read(name: str, tmp_path: Path):
    config = named_shape(name)
    for file, content in format_files(config).items():
        (tmp_path / file).write_text(json.dumps(content))
    assert named_shape(str(tmp_path)) == config


def test_named_shapes_have_their_published_sizes():
    smollm2 = named_shape("smollm2-135m")
    assert (smollm2.num_layers, smollm2.num_heads, smollm2.num_kv_heads) == (30, 9, 3)
    assert named_shape("llama-3.2-1b").rope.theta == 5e5
    assert named_shape("qwen3-0.6b").qk_norm == "head"


def test_a_shape_may_be_a_file_or_a_folder(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL_CONFIG))
    expected = parse_model_config(SMALL_CONFIG)
    assert named_shape(str(tmp_path)) == expected
    assert named_shape(str(tmp_path / "config.json")) == expected


def test_an_unknown_shape_names_the_known_ones():
    with pytest.raises(CheckpointError, match="tiny-llama"):
        named_shape("../tiny-llama")


@pytest.mark.parametrize("folder", sorted(path.name for path in FIXTURES.iterdir()))
def test_configs_that_transformers_wrote_are_read(folder: str):
    config = parse_model_config(json.loads((FIXTURES / folder / "config.json").read_text()))
    assert config.num_layers in (3, 4, 6)
    assert config.tie_word_embeddings == ("untied" not in folder)
    assert config.has_qkv_bias == ("bias" in folder)
    assert config.eos_token_ids == (2,)
    assert parse_model_config(format_model_config(config)) == config


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": (changed(architectures=["MambaForCausalLM"]), "LlamaForCausalLM"),
    "two architectures": (changed(architectures=["LlamaForCausalLM"] * 2), "architectures"),
    "an architecture that is no name": (changed(architectures=[["x"]]), "architecture"),
    "another model type": (without("architectures") | {"model_type": "gpt2"}, "gpt2"),
    "a model type of another architecture": (changed(model_type="qwen3"), "does not match"),
    "no family": (without("architectures", "model_type"), "neither"),
    "custom code": (changed(auto_map={"AutoModel": "evil.Model"}), "auto_map"),
    "quantised weights": (
        changed(quantization_config={"quant_method": "awq"}),
        "remove",
    ),
    "another activation": (changed(hidden_act="relu2"), "silu"),
    "soft-capped logits": (changed(final_logit_softcapping=30.0), "final_logit_softcapping"),
    "experts": (changed(num_local_experts=8), "experts"),
    "a sliding window": (changed(sliding_window=4096), "sliding_window"),
    "a sliding layer": (changed(layer_types=["sliding_attention"]), "full_attention"),
    "dynamic rope": (changed(rope_scaling={"type": "dynamic", "factor": 2.0}), "dynamic"),
    "another rope": (changed(rope_scaling={"rope_type": "mrope"}), "llama3, yarn, longrope"),
    "longrope without its factors": (
        changed(rope_parameters={"rope_type": "longrope", "factor": 2.0}),
        "short_factor has 0 numbers",
    ),
    "yarn whose bounds cross": (
        changed(rope_scaling={"type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 2}),
        "beta_fast",
    ),
    "yarn over a base of one": (
        changed(rope_theta=1.0, rope_scaling={"type": "yarn", "factor": 2.0}),
        "rope_theta",
    ),
    "a rope of several sections": (
        changed(rope_scaling={"rope_type": "default", "mrope_section": [16, 24, 24]}),
        "mrope_section",
    ),
    "rope for each kind of layer": (
        changed(rope_parameters={"full_attention": {"rope_type": "default"}}),
        "an entry per layer type",
    ),
    "partial rope": (
        changed(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}),
        "partial_rotary_factor",
    ),
    "two ropes that disagree": (
        changed(
            rope_scaling={"type": "linear", "factor": 2.0},
            rope_parameters={"rope_type": "default"},
        ),
        "disagree",
    ),
    "two thetas that disagree": (
        changed(rope_theta=1e4, rope_parameters={"rope_theta": 1e6}),
        "rope_theta",
    ),
    "llama3 bounds that cross": (
        changed(rope_scaling={"type": "llama3", **LLAMA3, "high_freq_factor": 0.5}),
        "high_freq_factor",
    ),
    "linear rope without a factor": (changed(rope_scaling={"type": "linear"}), "factor"),
    "another dtype": (changed(torch_dtype="float8_e4m3fn"), "bfloat16"),
    "heads that do not divide": (changed(num_key_value_heads=2), "multiple"),
    "an odd head": (changed(head_dim=5), "even"),
    "a hidden size that does not divide": (
        {**without("head_dim"), "hidden_size": 7},
        "multiple",
    ),
    "an mlp bias in qwen3": (qwen3(mlp_bias=True), "mlp_bias"),
    "an end of sequence beyond the vocabulary": (changed(eos_token_id=13), "vocabulary"),
    "a negative end of sequence": (changed(eos_token_id=-1), "vocabulary"),
    "an end of sequence that is no number": (changed(eos_token_id="</s>"), "token id"),
    "a thousand ends of sequence": (changed(eos_token_id=[1] * 1000), "at most"),
}


@pytest.mark.parametrize(("values", "said"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_is_not_supported_is_a_named_error(values: dict[str, Any], said: str):
    with pytest.raises(CheckpointError, match=said):
        parse_model_config(values)


def test_a_window_that_is_not_in_use_is_no_hindrance():
    values = qwen3(
        use_sliding_window=False, sliding_window=4096, layer_types=["full_attention"] * 2
    )
    assert parse_model_config(values).layer_pattern == (LayerKind(),)


NUMBERS = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
]
LIES: list[object] = [0, -1, 1 << 40, 10**400, 1.5, "12", True, [1], {"a": 1}, float("nan")]


FLOAT_LIES: list[object] = [0, -1.0, float("inf"), float("nan"), "1e-5", True, 10**400]


@pytest.mark.parametrize(
    ("key", "lies"),
    [*((key, LIES) for key in NUMBERS), ("rms_norm_eps", FLOAT_LIES), ("rope_theta", FLOAT_LIES)],
)
def test_a_lying_number_is_an_error_that_names_its_key(key: str, lies: list[object]):
    for lie in lies:
        with pytest.raises(CheckpointError, match=key):
            parse_model_config(changed(**{key: lie}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(key=st.sampled_from([*SMALL_CONFIG, "rope_scaling", "rope_parameters"]), value=JSON)
def test_any_value_of_any_key_is_read_or_refused(key: str, value: object):
    try:
        config = parse_model_config(changed(**{key: value}))
    except CheckpointError:
        return
    assert parse_model_config(format_model_config(config)) == config
