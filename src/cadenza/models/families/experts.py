"""Mixtral, Qwen3-MoE, OLMoE and gpt-oss: mixtures of experts in place of a dense family's MLPs."""

from dataclasses import replace

from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, shorten
from cadenza.models.families.family import (
    LAYER_KEYS,
    Family,
    read_attention_bias,
    read_layer_kinds,
    read_num_experts,
    read_used_window,
    read_window,
    shortest_pattern,
)
from cadenza.models.layer_kind import LayerKind
from cadenza.models.model_config import (
    CLAMPED_ALPHA,
    CLAMPED_LIMIT,
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_WIDTH,
    ExpertNames,
    ExpertsConfig,
    ModelConfig,
)
from cadenza.models.mtp_layout import DEEPSEEK_MTP, QWEN_MTP
from cadenza.models.rope_config import RopeConfig, RopeRules, read_rope, read_rope_entry

# two names of one setting; files of all families use either
_NUM_EXPERTS = ("num_experts", "num_local_experts")

_NUM_CHOSEN = "num_experts_per_tok"
EXPERT_KEYS = frozenset({*_NUM_EXPERTS, _NUM_CHOSEN})
_MIXTRAL_NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")
_QWEN_WINDOW = 4096


def read_experts(
    raw: JsonObject, model: ModelConfig, default_num: int, default_chosen: int
) -> ExpertsConfig:
    """The settings that families with experts share; the caller sets width and weighting."""
    given = [key for key in _NUM_EXPERTS if raw.has(key)]
    key = given[0] if given else _NUM_EXPERTS[0]
    num_experts = read_num_experts(raw, key, model.num_layers, default_num)
    if len(given) > 1 and raw.integer(given[1], 1, MAX_EXPERTS) != num_experts:
        raise CheckpointError(
            f"{raw.where}: {given[0]} and {given[1]} are {num_experts} and "
            f"{shorten(raw.get(given[1]))}; correct one of the two"
        )
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=raw.integer(_NUM_CHOSEN, 1, num_experts, min(default_chosen, num_experts)),
        intermediate_size=model.intermediate_size,
        over_chosen=True,
    )


def _read_mixtral(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    experts = replace(read_experts(raw, model, 8, 2), names=_MIXTRAL_NAMES)
    kind = LayerKind(window=read_window(raw, None), has_experts=True)
    return replace(model, layer_pattern=(kind,), experts=experts)


def _read_qwen3_moe(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    experts = replace(
        read_experts(raw, model, 128, 8),
        intermediate_size=raw.integer("moe_intermediate_size", 1, MAX_WIDTH, 768),
        over_chosen=raw.flag("norm_topk_prob", False),
    )
    window = read_used_window(raw, _QWEN_WINDOW)
    kinds = [
        LayerKind(window=window, has_experts=has_experts)
        for has_experts in _read_expert_layers(raw, model.num_layers)
    ]
    return replace(
        model,
        layer_pattern=shortest_pattern(kinds),
        experts=experts,
        qk_norm="head",
        **read_attention_bias(raw),
    )


def _read_expert_layers(raw: JsonObject, num_layers: int) -> list[bool]:
    """For each layer, whether its MLP is a mixture: not those in `mlp_only_layers`, and only every
    `decoder_sparse_step`-th."""
    step = raw.integer("decoder_sparse_step", 1, MAX_LAYERS, 1)
    plain = raw.items_of("mlp_only_layers")
    for index in plain:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < num_layers:
            raise CheckpointError(
                f"{raw.where}: mlp_only_layers names {shorten(index)}; "
                f"supported are layers from 0 to {num_layers - 1}"
            )
    listed = set(plain)
    return [index not in listed and (index + 1) % step == 0 for index in range(num_layers)]


def _read_olmoe(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    experts = read_experts(raw, model, 64, 8)
    return replace(
        model,
        layer_pattern=(LayerKind(has_experts=True),),
        experts=replace(experts, over_chosen=raw.flag("norm_topk_prob", False)),
        qk_norm="all_heads",
        **read_attention_bias(raw),
    )


# Weights a token's experts by a softmax over the chosen ones, which equals the softmax over all
# divided by the sum of the chosen; the other families do so if `norm_topk_prob` is set
MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    read=_read_mixtral,
    own_keys=EXPERT_KEYS | {"sliding_window"},
    experts_key="num_local_experts",
    has_kv_head_for_each_by_default=True,
    default_max_positions=131_072,
    default_norm_eps=1e-5,
    default_rope_theta=1_000_000.0,
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read=_read_qwen3_moe,
    own_keys=EXPERT_KEYS
    | {"use_sliding_window", "sliding_window", "attention_bias", "norm_topk_prob"}
    | {"moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers"},
    default_max_positions=32_768,
    rope_sections="interleaved",
    mtp_layouts=(QWEN_MTP, DEEPSEEK_MTP),
)

# `clip_qkv` is refused
OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    read=_read_olmoe,
    own_keys=EXPERT_KEYS | {"attention_bias", "norm_topk_prob"},
    has_kv_head_for_each_by_default=True,
    default_max_positions=4096,
    default_norm_eps=1e-5,
)


_WINDOW = 128
_NAMES = ExpertNames(router="router", are_interleaved=True)
_BOUNDS = {"swiglu_alpha": CLAMPED_ALPHA, "swiglu_limit": CLAMPED_LIMIT}
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read_gpt_oss(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    for key, built in _BOUNDS.items():
        if raw.number(key, 0.0, 1e6, built) != built:
            raise raw.wrong(key, f"{built:g}")
    if model.activation != "silu":
        raise raw.wrong("hidden_act", "silu")
    are_sliding = [index % 2 == 0 for index in range(model.num_layers)]
    kinds = read_layer_kinds(raw, are_sliding, read_window(raw, _WINDOW))
    return replace(
        model,
        layer_pattern=shortest_pattern([replace(kind, has_experts=True) for kind in kinds]),
        experts=replace(read_experts(raw, model, 128, 4), has_bias=True, names=_NAMES),
        activation="clamped_swiglu",
        has_attention_sinks=True,
        **read_attention_bias(raw, default=True),
    )


def _read_rope(raw: JsonObject, rules: RopeRules) -> RopeConfig:
    if raw.has("rope_parameters") or raw.has("rope_scaling"):
        return read_rope(raw, rules)
    return read_rope_entry(raw, JsonObject(_DEFAULT_ROPE, raw.where), rules)


# Experts with biases, windows in every other layer, and attention sinks. Gate and up are bounded
# before they are multiplied (`Activation` of `clamped_swiglu`), whatever `hidden_act` says; the
# bounds are part of the kernels, so other values are refused
GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    read=_read_gpt_oss,
    own_keys=LAYER_KEYS
    | {"num_experts", "num_local_experts", "num_experts_per_tok", "attention_bias", *_BOUNDS},
    read_rope=_read_rope,
    experts_key="num_local_experts",
    default_head_dim=64,
    default_max_positions=131_072,
    default_norm_eps=1e-5,
    default_rope_theta=150_000.0,
)
