"""Gemma 2 and the text models of Gemma 3. Norms before and after attention and MLP multiply by 1 +
weight, embeddings are scaled by sqrt(hidden_size) in float32 for every data type, and windowed and
full layers alternate. Gemma 2 has soft caps on scores and logits; Gemma 3 norms query and key heads
and has a different rope base in windowed layers."""

import math
from dataclasses import replace

from cadenza.checkpoint.families.family import (
    FULL,
    LAYER_KEYS,
    SLIDING,
    Family,
    read_attention_bias,
    read_layer_kinds,
    read_window,
    shortest_pattern,
)
from cadenza.checkpoint.json_object import JsonObject
from cadenza.checkpoint.model_config import MAX_LAYERS, ModelConfig
from cadenza.checkpoint.rope_config import RopeConfig, RopeRules, read_rope, read_rope_entry
from cadenza.errors import CheckpointError

_ATTENTION_CAP, LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"
_SCALAR = "query_pre_attn_scalar"
_DEFAULT_SCALAR = 256.0
_DEFAULT_WINDOW = 4096
_LOCAL_THETA = 10_000.0


def _read_common(raw: JsonObject, model: ModelConfig, *, interval: int) -> ModelConfig:
    """Without `layer_types` every `interval`-th layer is a full one."""
    are_sliding = [(index + 1) % interval != 0 for index in range(model.num_layers)]
    kinds = read_layer_kinds(raw, are_sliding, read_window(raw, _DEFAULT_WINDOW))
    return replace(
        model,
        layer_pattern=shortest_pattern(kinds),
        has_post_norms=True,
        norm_adds_one=True,
        **read_attention_bias(raw),
        attention_scale=1.0 / math.sqrt(raw.number(_SCALAR, 1e-3, 1e6, _DEFAULT_SCALAR)),
        embedding_scale=math.sqrt(model.hidden_size),
    )


def read_cap(raw: JsonObject, key: str, default: float | None) -> float | None:
    """A soft cap; `default` if the key is absent, None if it is null."""
    if key not in raw.values:
        return default
    return raw.number(key, 1e-3, 1e6) if raw.has(key) else None


def _read_gemma2(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    return replace(
        _read_common(raw, model, interval=2),
        attention_soft_cap=read_cap(raw, _ATTENTION_CAP, 50.0),
        logit_soft_cap=read_cap(raw, LOGIT_CAP, 30.0),
    )


def _read_gemma3(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    interval = raw.integer("sliding_window_pattern", 1, MAX_LAYERS, 6)
    rules = RopeRules(
        head_dim=model.head_dim,
        max_positions=model.max_position_embeddings,
        default_theta=_LOCAL_THETA,
        theta_key="rope_local_base_freq",
    )
    return replace(
        _read_common(raw, model, interval=interval),
        qk_norm="head",
        window_rope=_read_kind_of_rope(raw, rules, SLIDING),
        logit_soft_cap=read_cap(raw, LOGIT_CAP, None),
    )


def _read_gemma3_rope(raw: JsonObject, rules: RopeRules) -> RopeConfig:
    """The rope of full layers, to which the old `rope_theta` and `rope_scaling` apply."""
    if raw.has("rope_parameters"):
        return _read_kind_of_rope(raw, rules, FULL)
    return read_rope(raw, rules)


def _read_kind_of_rope(raw: JsonObject, rules: RopeRules, kind: str) -> RopeConfig:
    by_kind = raw.child("rope_parameters")
    if by_kind is None:
        return read_rope_entry(raw, JsonObject({}, raw.where), rules)
    if by_kind.has("rope_theta") or by_kind.has("rope_type"):
        raise CheckpointError(
            f"{by_kind.where} has one entry for all layers; models of type gemma3_text need one "
            f"for each of {FULL} and {SLIDING}"
        )
    return read_rope_entry(raw, by_kind.child(kind) or JsonObject({}, by_kind.where), rules)


GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    read=_read_gemma2,
    own_keys=LAYER_KEYS | {"attention_bias", _SCALAR, _ATTENTION_CAP, LOGIT_CAP},
    default_head_dim=256,
    default_max_positions=8192,
    activation_key="hidden_activation",
    default_activation="gelu_pytorch_tanh",
    ties_by_default=True,
)

GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    read=_read_gemma3,
    own_keys=LAYER_KEYS
    | {"attention_bias", _SCALAR, LOGIT_CAP, "sliding_window_pattern", "rope_local_base_freq"},
    read_rope=_read_gemma3_rope,
    default_max_positions=131_072,
    default_rope_theta=1_000_000.0,
)
