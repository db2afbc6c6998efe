"""What config.json says, by family: traits that follow from settings, spellings that mean the same,
and what is refused by its name. `tests/xla/test_fixtures.py` shows that the arithmetic is right."""

import json
from collections.abc import Callable
from dataclasses import asdict, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.checkpoint.random_checkpoint import named_shape, shape_names
from cadenza.checkpoint.stacked_experts import split_stacks
from cadenza.errors import CheckpointError
from cadenza.models.config_json import parse_model_config
from cadenza.models.declaration import check_weights, declare, declare_layer
from cadenza.models.families import FAMILIES
from cadenza.models.model_config import ModelConfig
from cadenza.models.rope_config import (
    axes_of,
)
from cadenza.models.towers.registry import READERS
from cadenza.models.wrapped_text import WRAPPERS
from cadenza.weights.weights import open_weights
from tests.checkpoint.config_writer import format_files, format_model_config
from tests.checkpoint.files import SMALL_CONFIG

Settings = dict[str, Any]

FIXTURES = Path(__file__).parent.parent / "fixtures"
FULL = "full_attention"
# by family: settings and the traits that follow; two spellings; settings and why not
ROWS: dict[str, list[Any]] = json.loads(Path(__file__).with_name("configs.json").read_text())

SHARED: Settings = {
    "vocab_size": 13,
    "hidden_size": 24,
    "intermediate_size": 10,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}
NEEDED: dict[str, Settings] = {
    "lfm2": {"hidden_size": 48},
    "lfm2_moe": {"hidden_size": 48},
    "granitemoehybrid": {"hidden_size": 48, "mamba_n_heads": 6},
}
"""Settings of families whose defaults do not fit models as small as these."""


def values_of(family: str, /, **changes: Any) -> Settings:
    """The text model's within the model's, of a model that has towers; a key whose value
    is "absent" is left out."""
    own = {**SHARED, **NEEDED.get(family, {}), "model_type": family, **changes}
    own = {key: value for key, value in own.items() if value != "absent"}
    if family not in WRAPPERS:
        return own
    text = {**own, "model_type": f"{family}_text"}
    return {"model_type": family, "vision_config": {}, "text_config": text}


def read(family: str, /, **changes: Any) -> ModelConfig:
    return parse_model_config(values_of(family, **changes))


def layernorms(config: ModelConfig) -> list[str]:
    names = [spec.name.split(".") for spec in declare(config) if ".layers.0." in spec.name]
    return [parts[3] for parts in names if parts[3].endswith("layernorm")]


TRAITS: dict[str, Callable[[ModelConfig], Any]] = {
    "windows": lambda config: [kind.window for kind in config.layer_kinds],
    "pattern_windows": lambda config: [kind.window for kind in config.layer_pattern],
    "are_rotated": lambda config: [config.rope_of(kind) is not None for kind in config.layer_kinds],
    "have_experts": lambda config: [kind.has_experts for kind in config.layer_kinds],
    "recurrences": lambda config: [kind.recurrence for kind in config.layer_kinds],
    "thetas": lambda config: [rope and rope.theta for rope in config.ropes],
    "layernorms": layernorms,
    "num_biases": lambda config: sum(spec.kind == "bias" for spec in declare(config)),
}
"""Beside the fields of `ModelConfig`, by their paths, and the shapes of tensors, by their names."""


def trait(config: ModelConfig, name: str) -> Any:
    if name.startswith("model."):
        return plain({spec.name: spec.shape for spec in declare(config)}.get(name))
    return plain(TRAITS.get(name, attrgetter(name))(config))


def plain(value: Any) -> Any:
    """As the table has it; numbers to nine digits."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__, **plain(asdict(value))}
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize(("family", "settings", "traits"), ROWS["read"])
def test_settings_of_a_family_have_their_traits(family: str, settings: Settings, traits: Settings):
    config = read(family, **settings)
    for name, expected in traits.items():
        assert trait(config, name) == plain(expected), name


@pytest.mark.parametrize(("family", "one", "other"), ROWS["alike"])
def test_two_spellings_say_the_same(family: str, one: Settings, other: Settings):
    assert read(family, **one) == read(family, **other)


@pytest.mark.parametrize(("family", "settings", "said"), ROWS["refused"])
def test_what_is_not_supported_is_a_named_error(family: str, settings: Settings, said: str):
    with pytest.raises(CheckpointError, match=said):
        read(family, **settings)


def sections(*numbers: int) -> Settings:
    rope = {"rope_type": "default", "mrope_section": list(numbers)}
    return {"head_dim": 16, "partial_rotary_factor": 1.0, "rope_scaling": rope}


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_older_files_of_qwen2_vl_have_no_text_config(model_type: str):
    rope = {"type": "mrope", "mrope_section": [4, 2, 2]}
    flat = {**SHARED, "head_dim": 16, "rope_scaling": rope, "model_type": model_type}
    nested = values_of(model_type, **sections(4, 2, 2))
    assert parse_model_config({**flat, "vision_config": {"depth": 1}}) == parse_model_config(nested)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reads_a_file_that_leaves_its_own_settings_out(family: str):
    config = read(family)
    assert config.family == family
    assert len(config.layer_kinds) == 4
    named = read(family, architectures=[FAMILIES[family].architecture], model_type=None)
    assert named == config


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_mtp_layers_are_no_part_of_the_decoder(family: str):
    assert declare(read(family, mtp_num_hidden_layers=1)) == declare(read(family))
    assert declare(read("mimo", num_nextn_predict_layers=2)) == declare(read("qwen2"))


def test_mlps_are_mixtures_in_the_layers_that_say_so():
    config = read("qwen3_moe", mlp_only_layers=[0, 2])
    kinds = [type(declare_layer(config, index).mlp).__name__ for index in range(4)]
    assert kinds == ["GatedMLPSpec", "ExpertMLPSpec"] * 2


def test_pairs_of_a_head_are_shared_out_among_three_axes():
    assert axes_of((24, 20, 20), 64, "interleaved") == (0, 1, 2) * 20 + (0, 0, 0, 0)
    assert axes_of((11, 11, 10), 32, "interleaved") == (0, 1, 2) * 10 + (0, 1)
    assert axes_of((2, 3, 1), 6, "joined") == (0, 0, 1, 1, 1, 2)


USES_ITS_WINDOW_WHEN_TOLD = ("qwen2", "qwen3", "qwen3_moe", "smollm3", "mimo")
SETTING_OF_BIASES_CHANGES_NOTHING = ("mimo", "gpt_oss")
"""MiMo has biases whatever it says, and those of gpt-oss are there by default."""
HAS_EXPERTS_WHEN_TOLD = "gemma4_text"
OF_ONE_FAMILY: Settings = {
    "attention_bias": True,
    "mlp_bias": True,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256,
    "attention_multiplier": 0.5,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "sliding_window": 9,
    "no_rope_layers": [1, 1, 0, 1],
    "partial_rotary_factor": 0.5,
    "num_experts": 3,
    "num_local_experts": 3,
}
OF_NO_FAMILY: Settings = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 8,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "vision_config": {"hidden_size": 8},
    "quantization_config": {"quant_method": "fp8"},
    "auto_map": {"AutoConfig": "evil.Config"},
    "clip_qkv": 8.0,
    "use_bidirectional_attention": True,
    "attention_chunk_size": 8192,
    "logit_scale": 0.0625,
    "lm_head_bias": True,
    "rope_interleaved": True,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
    "kv_lora_rank": 512,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_setting_of_another_family_is_refused_by_its_name(family: str):
    """Read where it is the family's own, and then it makes a difference; refused elsewhere."""
    for key, value in OF_ONE_FAMILY.items():
        values = values_of(family, **{key: value})
        is_own = key in FAMILIES[family].own_keys
        if is_own or (key == "partial_rotary_factor" and FAMILIES[family].may_be_partly_rotated):
            needs_use = key == "sliding_window" and family in USES_ITS_WINDOW_WHEN_TOLD
            config = parse_model_config(values)
            needs_use |= key == "attention_bias" and family in SETTING_OF_BIASES_CHANGES_NOTHING
            needs_use |= key == "num_experts" and family == HAS_EXPERTS_WHEN_TOLD
            if not needs_use and value not in (50.0, 30.0, 256):
                assert config != read(family), key
        else:
            with pytest.raises(CheckpointError, match=key):
                parse_model_config(values)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_setting_that_nothing_here_computes_is_refused_by_its_name(family: str):
    for key, value in OF_NO_FAMILY.items():
        if key in FAMILIES[family].own_keys:
            continue
        is_dynamic = key == "rope_scaling" and not family.startswith("gemma4")
        with pytest.raises(CheckpointError, match="dynamic" if is_dynamic else key):
            read(family, **{key: value})


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_that_change_nothing_are_ignored(family: str):
    harmless = {
        "initializer_range": 0.02,
        "use_cache": False,
        "attention_dropout": 0.1,
        "pretraining_tp": 4,
        "transformers_version": "9.9",
        "cache_implementation": "hybrid",
        "attention_bias": False,
        "num_experts": None,
        "layer_types": [FULL] * 4,
        "something_new": {"a": [1]},
    }
    assert trait(read(family, **harmless), "windows") == [None] * 4


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
            read("llama", **{key: lie})


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
        config = parse_model_config({**SMALL_CONFIG, key: value})
    except CheckpointError:
        return
    assert parse_model_config(format_model_config(config)) == config


def test_kv_bytes_per_token_count_keys_and_values_of_all_layers():
    config = parse_model_config(SMALL_CONFIG)
    assert config.kv_bytes_per_token("bfloat16") == 2 * 2 * 1 * 4 * 2
    assert config.kv_bytes_per_token("float32") == 2 * config.kv_bytes_per_token("float16")


def test_a_state_has_the_inputs_of_the_convolution_and_a_matrix_a_head():
    inputs, matrices = 3 * (3 * 16 * 128) * 2, 16 * 128 * 128 * 4
    assert named_shape("qwen3.5-0.8b").state_bytes("bfloat16") == 18 * (inputs + matrices)


# --- named shapes, and configs of fixtures --------------------------------------------------------


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


def test_every_family_has_a_tiny_shape():
    shapes = Path("src/cadenza/checkpoint/shapes")
    tiny = {json.loads(path.read_text())["model_type"] for path in shapes.glob("tiny-*.json")}
    needed = FAMILIES.keys() | {reader.model_types[0] for reader in READERS.values()}
    assert needed <= tiny <= needed | READERS.keys()


def test_a_shape_may_be_a_file_or_a_folder(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL_CONFIG))
    expected = parse_model_config(SMALL_CONFIG)
    assert named_shape(str(tmp_path)) == expected
    assert named_shape(str(tmp_path / "config.json")) == expected
    with pytest.raises(CheckpointError, match="tiny-llama"):
        named_shape("../tiny-llama")


@pytest.mark.parametrize(
    "folder", sorted(path.parent.name for path in FIXTURES.glob("*/config.json"))
)
def test_configs_that_transformers_wrote_are_read_and_declare_its_tensors(folder: str):
    config = named_shape(str(FIXTURES / folder))
    assert config.num_layers in (3, 4, 6)
    assert config.tie_word_embeddings == ("untied" not in folder)
    assert config.has_qkv_bias == ("bias" in folder)
    assert config.eos_token_ids == (2,)
    assert parse_model_config(format_model_config(config)) == config
    check_weights(config, split_stacks(config, open_weights(FIXTURES / folder)))


def test_tensors_of_mtp_layers_are_ignored_up_to_the_number_of_these_layers():
    folder = FIXTURES / "mimo-untied-bias"
    config, weights = named_shape(str(folder)), open_weights(folder)
    assert any(name.startswith("model.mtp_layers.0.") for name in weights)
    check_weights(config, weights)
    with pytest.raises(CheckpointError, match="mtp_layers"):
        check_weights(replace(config, num_mtp_layers=0), weights)
    check_weights(config, weights.with_parts({name: {} for name in weights if "mtp_" in name}))
