"""gpt-oss: mixtures of experts with biases, windows in every other layer, and attention sinks. Its
experts bound gate and up before they multiply them (`Activation` of `clamped_swiglu`), whatever
`hidden_act` says; the bounds are part of the kernels, so other values are refused."""

from dataclasses import replace

from cadenza.checkpoint.families.experts import read_experts
from cadenza.checkpoint.families.family import (
    LAYER_KEYS,
    Family,
    read_attention_bias,
    read_layer_kinds,
    read_window,
    shortest_pattern,
)
from cadenza.checkpoint.json_object import JsonObject
from cadenza.checkpoint.model_config import (
    CLAMPED_ALPHA,
    CLAMPED_LIMIT,
    ExpertNames,
    ModelConfig,
)
from cadenza.checkpoint.rope_config import RopeConfig, RopeRules, read_rope, read_rope_entry

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
