"""What each family's config.json says beyond the others', and what of it is refused.

Values under `old` names are spelled as published checkpoints spell them; that the arithmetic which
follows is right is the fixtures' to show (`tests/xla/test_fixtures.py`).
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.checkpoint.stacked_experts import split_stacks
from cadenza.errors import CheckpointError
from cadenza.models.config_json import parse_model_config
from cadenza.models.declaration import check_weights, declare
from cadenza.models.families import FAMILIES
from cadenza.models.layer_kind import ConvShape, LayerKind, ScanShape
from cadenza.models.model_config import ModelConfig, SigmoidChoice
from cadenza.models.mtp_layout import DEEPSEEK_MTP, QWEN_MTP
from cadenza.models.rope_config import LinearRopeScaling, LongRopeScaling, YarnRopeScaling
from cadenza.models.towers.registry import READERS
from cadenza.weights.weights import open_weights
from tests.checkpoint.config_writer import format_model_config

FIXTURES = Path(__file__).parent.parent / "fixtures"
SLIDING, FULL = "sliding_attention", "full_attention"
SHARED: dict[str, Any] = {
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


NEEDED: dict[str, dict[str, Any]] = {
    "lfm2": {"hidden_size": 48},
    "lfm2_moe": {"hidden_size": 48},
    "granitemoehybrid": {"hidden_size": 48, "mamba_n_heads": 6},
}
"""Settings of families whose defaults do not fit models as small as these."""


def values_of(family: str, **changes: Any) -> dict[str, Any]:
    return {**SHARED, **NEEDED.get(family, {}), "model_type": family, **changes}


def read(model_type: str, **changes: Any) -> ModelConfig:
    return parse_model_config(values_of(model_type, **changes))


def windows(config: ModelConfig) -> list[int | None]:
    return [kind.window for kind in config.layer_kinds]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reads_a_file_that_leaves_its_own_settings_out(family: str):
    config = read(family)
    assert config.family == family
    assert len(config.layer_kinds) == 4
    values = values_of(family, architectures=[FAMILIES[family].architecture], model_type=None)
    assert parse_model_config(values) == config


@pytest.mark.parametrize("folder", sorted(path.name for path in FIXTURES.iterdir()))
def test_the_declaration_is_what_transformers_wrote(folder: str):
    config, weights = named_shape(str(FIXTURES / folder)), open_weights(FIXTURES / folder)
    weights = split_stacks(config, weights)
    check_weights(config, weights)


MIXED = [SLIDING, FULL, FULL, SLIDING]
FROM_1 = {"sliding_window": 9, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("family", "settings", "expected"),
    [
        ("mistral", {}, [4096] * 4),
        ("mistral", {"sliding_window": None}, [None] * 4),
        ("ministral", {"sliding_window": 9}, [9] * 4),
        ("mistral", {"sliding_window": 9, "layer_types": MIXED}, [9, None, None, 9]),
        ("ministral", {"sliding_window": 9, "layer_types": MIXED}, [9, None, None, 9]),
        ("qwen2", FROM_1, [None] * 4),
        ("qwen2", {**FROM_1, "use_sliding_window": True}, [None, 9, 9, 9]),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 3}, [None] * 3 + [4096]),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 9}, [None] * 3 + [9]),
        ("gemma2", {}, [4096, None] * 2),
        ("gemma3_text", {"num_hidden_layers": 12}, ([4096] * 5 + [None]) * 2),
    ],
)
def test_each_family_has_its_windows(
    family: str, settings: dict[str, Any], expected: list[int | None]
):
    assert windows(read(family, **settings)) == expected


def test_a_pattern_is_the_shortest_that_says_the_same():
    config = read("ministral", sliding_window=9, layer_types=[SLIDING, FULL] * 2)
    assert config.layer_pattern == (LayerKind(window=9), LayerKind())
    assert read("llama").layer_pattern == (LayerKind(),)


def test_qwen2_has_biases_on_its_queries_keys_and_values_alone():
    config = read("qwen2")
    assert config.has_qkv_bias
    assert not config.has_attention_out_bias
    biases = [spec.name for spec in declare(config) if spec.kind == "bias"]
    assert len(biases) == 4 * 3


def test_smollm3_leaves_layers_unrotated():
    ropes = [kind.has_rope for kind in read("smollm3").layer_kinds]
    assert ropes == [True, True, True, False]
    listed = read("smollm3", no_rope_layers=[0, 1, 1, 0])
    unrotated = [listed.rope_of(kind) is None for kind in listed.layer_kinds]
    assert unrotated == [True, False, False, True]
    assert read("smollm3").rope.theta == 2e6


def test_gemma2_caps_scales_and_norms_as_published():
    config = read("gemma2", head_dim=8)
    assert (config.attention_soft_cap, config.logit_soft_cap) == (50.0, 30.0)
    assert config.attention_scale == 1 / 16
    assert config.embedding_scale == math.sqrt(24)
    assert config.activation == "gelu_tanh"
    assert config.norm_adds_one
    assert config.tie_word_embeddings
    uncapped = read("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (uncapped.attention_soft_cap, uncapped.logit_soft_cap) == (None, None)


def test_gemma2_layers_have_four_norms():
    names = [spec.name.split(".")[3] for spec in declare(read("gemma2")) if ".0." in spec.name]
    assert [name for name in names if name.endswith("layernorm")] == [
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ]


def test_gemma3_rotates_its_two_kinds_of_layers_differently_in_both_spellings():
    old = read(
        "gemma3_text",
        rope_theta=5e5,
        rope_local_base_freq=7e3,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=2,
    )
    new = read(
        "gemma3_text",
        rope_parameters={
            FULL: {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
            SLIDING: {"rope_type": "default", "rope_theta": 7e3},
        },
        layer_types=[SLIDING, FULL] * 2,
    )
    assert old == new
    sliding, full = (old.rope_of(kind) for kind in old.layer_pattern)
    assert sliding is not None
    assert full is not None
    assert (sliding.theta, sliding.scaling) == (7e3, None)
    assert (full.theta, full.scaling) == (5e5, LinearRopeScaling(factor=8.0))
    assert old.ropes == (sliding, full)


def test_gemma3_has_its_defaults():
    config = read("gemma3_text")
    assert config.window_rope is not None
    assert (config.rope.theta, config.window_rope.theta) == (1e6, 1e4)
    assert (config.attention_soft_cap, config.logit_soft_cap) == (None, None)


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}


def test_phi3_takes_its_original_length_from_the_top_of_the_file():
    config = read(
        "phi3",
        partial_rotary_factor=0.75,
        original_max_position_embeddings=16,
        rope_scaling={**LONGROPE, "type": "su", "original_max_position_embeddings": 8},
    )
    assert config.rope.rotary_dim == 6
    assert config.rope.scaling == LongRopeScaling(
        short_factor=(1.0,) * 3,
        long_factor=(2.0,) * 3,
        original_max_position_embeddings=16,
        attention_factor=math.sqrt(1 + math.log(4) / math.log(16)),
    )


def test_phi3_tensors_are_fused():
    names = {spec.name: spec.shape for spec in declare(read("phi3"))}
    assert names["model.layers.3.self_attn.qkv_proj.weight"] == (40, 24)
    assert names["model.layers.3.mlp.gate_up_proj.weight"] == (20, 24)


def test_phi3s_published_code_is_ignored_and_other_code_is_refused():
    published = {"AutoConfig": "configuration_phi3.Phi3Config"}
    assert read("phi3", auto_map=published) == read("phi3")
    for other in ({"AutoConfig": "evil.Config"}, {**published, "AutoModel": ["a", "b"]}):
        with pytest.raises(CheckpointError, match="never run"):
            read("phi3", auto_map=other)


def test_mimo_is_a_qwen2_whose_mtp_layers_are_no_part_of_the_decoder():
    config = read("mimo", num_nextn_predict_layers=2)
    assert config.num_mtp_layers == 2
    assert read("mimo").num_mtp_layers == 0
    assert declare(config) == declare(read("qwen2"))
    assert parse_model_config(format_model_config(config)) == config


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_qwen3_may_have_mtp_layers_as_qwen3_next_or_deepseek_has_them(family: str):
    config = read(family, mtp_num_hidden_layers=1)
    assert (config.num_mtp_layers, config.mtp_layout) == (1, QWEN_MTP)
    assert declare(config) == declare(read(family))
    assert parse_model_config(format_model_config(config)) == config
    assert read(family, mtp_num_hidden_layers=0) == read(family)
    assert "mtp_num_hidden_layers" not in format_model_config(read(family))
    other = read(family, num_nextn_predict_layers=2)
    assert (other.num_mtp_layers, other.mtp_layout) == (2, DEEPSEEK_MTP)
    assert parse_model_config(format_model_config(other)) == other
    with pytest.raises(CheckpointError, match="are both set"):
        read(family, num_nextn_predict_layers=1, mtp_num_hidden_layers=1)
    with pytest.raises(CheckpointError, match="mtp_use_dedicated_embeddings"):
        read(family, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=True)


def test_mimos_published_code_is_ignored_and_other_code_is_refused():
    published = {"AutoConfig": "configuration_mimo.MiMoConfig"}
    assert read("mimo", auto_map=published) == read("mimo")
    with pytest.raises(CheckpointError, match="never run"):
        read("mimo", auto_map={**published, "AutoModel": "modeling_phi3.Phi3ForCausalLM"})


def test_tensors_of_mtp_layers_are_ignored_up_to_the_number_of_these_layers():
    folder = FIXTURES / "mimo-untied-bias"
    config, weights = named_shape(str(folder)), open_weights(folder)
    assert any(name.startswith("model.mtp_layers.0.") for name in weights)
    check_weights(config, weights)
    with pytest.raises(CheckpointError, match="mtp_layers"):
        check_weights(replace(config, num_mtp_layers=0), weights)
    check_weights(config, weights.with_parts({name: {} for name in weights if "mtp_" in name}))


def test_olmo2_norms_outputs_and_all_heads_together():
    shapes = {spec.name: spec.shape for spec in declare(read("olmo2"))}
    assert shapes["model.layers.0.self_attn.q_norm.weight"] == (24,)
    assert shapes["model.layers.0.self_attn.k_norm.weight"] == (8,)
    norms = {name.split(".")[3] for name in shapes if "layernorm" in name}
    assert norms == {"post_attention_layernorm", "post_feedforward_layernorm"}


def test_granites_multipliers_are_read():
    config = read(
        "granite",
        embedding_multiplier=12,
        attention_multiplier=0.25,
        residual_multiplier=0.22,
        logits_scaling=8.0,
    )
    assert (config.embedding_scale, config.attention_scale) == (12.0, 0.25)
    assert (config.residual_scale, config.logit_divisor) == (0.22, 8.0)
    assert read("granite").attention_scale == 1.0


def test_yarn_has_its_defaults_and_its_own_attention_factor():
    scaling = read("llama", rope_scaling={"type": "yarn", "factor": 4.0}).rope.scaling
    assert scaling == YarnRopeScaling(
        factor=4.0,
        original_max_position_embeddings=64,
        attention_factor=0.1 * math.log(4) + 1,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=True,
    )


YARN = {"rope_type": "yarn", "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"factor": 8.0, "attention_factor": 1.5}, 1.5),
        ({"factor": 8.0, "mscale": 2.0}, 0.1 * math.log(8) + 1),
        ({"factor": None}, 0.1 * math.log(4) + 1),
        (
            {"factor": 8.0, "mscale": 2.0, "mscale_all_dim": 0.5},
            (0.2 * math.log(8) + 1) / (0.05 * math.log(8) + 1),
        ),
    ],
)
def test_yarns_attention_factor_follows_from_the_file(rope: dict[str, Any], expected: float):
    config = read("llama", rope_parameters={**YARN, **rope})
    assert config.rope.attention_factor == pytest.approx(expected)


USES_ITS_WINDOW_WHEN_TOLD = ("qwen2", "qwen3", "qwen3_moe", "smollm3", "mimo")
SETTING_OF_BIASES_CHANGES_NOTHING = ("mimo", "gpt_oss")
"""MiMo has biases whatever it says, and those of gpt-oss are there by default."""
HAS_EXPERTS_WHEN_TOLD = "gemma4_text"
OF_ONE_FAMILY: dict[str, Any] = {
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
OF_NO_FAMILY: dict[str, Any] = {
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
            parse_model_config(values_of(family, **{key: value}))


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
    config = parse_model_config(values_of(family, **harmless))
    assert windows(config) == [None] * 4


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a kind of layer": (
        values_of("gemma2", layer_types=["chunked_attention"] * 4),
        "chunked_attention",
    ),
    "too few layer types": (values_of("gemma2", layer_types=[FULL]), "1 entries for 4 layers"),
    "a sliding layer without a window": (
        values_of("qwen2", sliding_window=9, layer_types=[SLIDING] * 4),
        "sliding_window is not set",
    ),
    "a sliding layer in llama": (values_of("llama", layer_types=[SLIDING] * 4), SLIDING),
    "too few rope layers": (values_of("smollm3", no_rope_layers=[1, 1]), "no_rope_layers"),
    "rope layers that are no flags": (values_of("smollm3", no_rope_layers=[2] * 4), "a 0 or a 1"),
    "one rope for gemma 3": (
        values_of("gemma3_text", rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        "one for each of",
    ),
    "gemma 3's scores capped": (
        values_of("gemma3_text", attn_logit_softcapping=50.0),
        "attn_logit_softcapping",
    ),
    "linear rope in phi3": (
        values_of("phi3", rope_scaling={"type": "linear", "factor": 2.0}),
        "default or longrope",
    ),
    "longrope of another size": (
        values_of("phi3", rope_scaling=LONGROPE),
        "short_factor has 3 numbers; a rope of 8 values needs 4",
    ),
    "longrope factors that are no numbers": (
        values_of("phi3", rope_scaling={**LONGROPE, "short_factor": ["1"] * 4}),
        "short_factor",
    ),
    "phi3's small models": (
        values_of("phi3", rope_scaling={**LONGROPE, "short_mscale": 1.1}),
        "short_mscale",
    ),
    "a rotated part that is odd": (values_of("phi3", partial_rotary_factor=0.4), "even"),
    "two local bases": (
        values_of(
            "gemma3_text",
            rope_local_base_freq=1e3,
            rope_parameters={SLIDING: {"rope_theta": 1e4}, FULL: {"rope_theta": 1e6}},
        ),
        "rope_local_base_freq",
    ),
    "a cap of nothing": (values_of("gemma2", final_logit_softcapping=0.0), "final_logit"),
    "a divisor of nothing": (values_of("granite", logits_scaling=0), "logits_scaling"),
}


@pytest.mark.parametrize(("values", "said"), REFUSED.values(), ids=REFUSED)
def test_what_a_family_cannot_mean_is_a_named_error(values: dict[str, Any], said: str):
    with pytest.raises(CheckpointError, match=said):
        parse_model_config(values)


def test_published_names_of_families_are_known():
    shapes = Path("src/cadenza/checkpoint/shapes")
    tiny = {json.loads(path.read_text())["model_type"] for path in shapes.glob("tiny-*.json")}
    needed = FAMILIES.keys() | {reader.model_types[0] for reader in READERS.values()}
    assert needed <= tiny <= needed | READERS.keys()


def test_lfm2_names_its_attention_layers_in_two_ways():
    listed = read("lfm2", layer_types=["conv", FULL, "conv", "conv"])
    assert read("lfm2", full_attn_idxs=[1]) == listed
    shape = ConvShape(num_channels=48, num_inputs=3)
    assert [kind.recurrence for kind in listed.layer_kinds] == [shape, None, shape, shape]
    assert read("lfm2").recurrence is None  # without either, all layers have attention
    assert read("lfm2", conv_L_cache=5, conv_bias=True, full_attn_idxs=[1]).recurrence == (
        ConvShape(num_channels=48, num_inputs=5, has_bias=True)
    )


def test_lfm2_adjusts_the_width_of_its_mlps_as_published():
    def width(**changes: Any) -> int:
        return read("lfm2", **changes).intermediate_size

    assert width(intermediate_size=12_288) == 8192
    assert width(block_ff_dim=6656) == 4608
    assert width(block_ff_dim=6656, block_ffn_dim_multiplier=1.3, block_multiple_of=64) == 5824
    assert width(block_ff_dim=6656, block_ffn_dim_multiplier=None) == 4437
    assert width(intermediate_size=10, block_auto_adjust_ff_dim=False) == 10


def test_lfm2_has_names_norms_and_a_head_of_its_own():
    config = read("lfm2", norm_eps=1e-3, layer_types=["conv", FULL, "conv", "conv"])
    assert config.rms_norm_eps == 1e-3
    assert config.tie_word_embeddings
    assert not read("lfm2", tie_embedding=False).tie_word_embeddings
    assert config.rope.theta == 1e6
    names = {spec.name for spec in declare(config)}
    assert names > {
        "model.embedding_norm.weight",
        "model.layers.0.operator_norm.weight",
        "model.layers.0.conv.conv.weight",
        "model.layers.0.feed_forward.w3.weight",
        "model.layers.1.self_attn.q_layernorm.weight",
        "model.layers.1.self_attn.out_proj.weight",
        "model.layers.1.ffn_norm.weight",
    }


def test_lfm2s_mixtures_are_chosen_by_sigmoids_behind_dense_layers():
    config = read("lfm2_moe", layer_types=["conv", FULL, "conv", "conv"])
    assert [kind.has_experts for kind in config.layer_kinds] == [False, False, True, True]
    experts = config.experts
    assert experts is not None
    assert (experts.num_experts, experts.num_chosen, experts.intermediate_size) == (32, 4, 1792)
    assert experts.sigmoid_choice == SigmoidChoice(least_sum=1e-6)
    assert experts.over_chosen
    assert config.intermediate_size == 10  # which is not adjusted
    names = {spec.name for spec in declare(config)}
    assert "model.layers.2.feed_forward.expert_bias" in names
    unbiased = read("lfm2_moe", use_expert_bias=False)
    assert not any("expert_bias" in spec.name for spec in declare(unbiased))


GRANITE4 = {"num_local_experts": 0, "shared_intermediate_size": 40, "mamba_d_state": 32}


def test_granite_4_reads_both_spellings_of_its_layers():
    old = read("granitemoehybrid", **GRANITE4, layer_types=["mamba", "attention", "mamba", "mamba"])
    linear = "linear_attention"
    new = read("granitemoehybrid", **GRANITE4, layers_block_type=[linear, FULL, linear, linear])
    shape = ScanShape(num_heads=6, num_groups=1, key_size=32, value_size=16, num_inputs=4)
    assert [kind.recurrence for kind in old.layer_kinds] == [shape, None, shape, shape]
    assert old == new
    assert old.intermediate_size == 40
    assert old.ropes == (None,)
    rotated = read(
        "granitemoehybrid", **GRANITE4, layer_types=[FULL] * 4, position_embedding_type="rope"
    )
    assert rotated.ropes == (rotated.rope,)


def test_granite_4_has_experts_beside_an_mlp_for_all_tokens():
    experts = read("granitemoehybrid").experts
    assert experts is not None
    assert (experts.num_experts, experts.num_chosen) == (8, 2)
    assert (experts.intermediate_size, experts.shared_size) == (10, 1024)
    assert read("granitemoehybrid", num_local_experts=0).experts is None


@pytest.mark.parametrize("limit", [None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}]])
def test_granite_4_has_steps_without_limits(limit: Any):
    assert read("granitemoehybrid", time_step_limit=limit) == read("granitemoehybrid")


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("lfm2", {"layer_types": [SLIDING] * 4}, "layer_types names 'sliding_attention'"),
        ("lfm2", {"layer_types": ["conv"]}, "has 1 entries for 4 layers"),
        ("lfm2", {"hidden_size": 24}, "hidden_size is 24; .* multiples of 16"),
        ("lfm2", {"block_ffn_dim_multiplier": 0.001, "block_multiple_of": 1}, "MLPs is 0"),
        ("granitemoehybrid", {"mamba_d_state": 24}, "mamba_d_state is 24; .* multiples of 16"),
        ("granitemoehybrid", {"mamba_d_head": 8}, "6 of 8 values are not .* 96"),
        ("granitemoehybrid", {"mamba_n_groups": 4}, "6 is not a multiple of mamba_n_groups 4"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type"),
        ("granitemoehybrid", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be silu"),
        ("granitemoehybrid", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
    ],
)
def test_what_hybrids_do_not_compute_is_refused(family: str, changes: dict[str, Any], words: str):
    with pytest.raises(CheckpointError, match=words):
        read(family, **changes)


def test_factors_of_queries_are_read_by_ministral_3_alone():
    rope = {"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1}
    config = read("ministral3", rope_parameters=rope)
    assert isinstance(config.rope.scaling, YarnRopeScaling)
    assert (config.rope.scaling.query_beta, config.rope.has_query_factors) == (0.1, True)
    assert parse_model_config(format_model_config(config)) == config
    with pytest.raises(CheckpointError, match="llama_4_scaling_beta is set, which is not"):
        read("llama", rope_parameters=rope)
    with pytest.raises(CheckpointError, match=r"llama_4_scaling_beta is 0\.1; it must be absent"):
        read("ministral3", rope_parameters={**rope, "rope_type": "default"})
    silent = read("ministral3").rope.scaling
    assert isinstance(silent, YarnRopeScaling)
    assert (silent.query_beta, silent.factor, silent.attention_factor) == (0.1, 16.0, 1.0)
