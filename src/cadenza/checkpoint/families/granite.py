"""Granite 3: Llama with multipliers for embeddings, scores and residuals, and a logit divisor."""

from dataclasses import replace

from cadenza.checkpoint.families.family import Family
from cadenza.checkpoint.families.llama import BIAS_KEYS, format_biases, read_biases
from cadenza.checkpoint.json_object import JsonObject
from cadenza.checkpoint.model_config import ModelConfig

_EMBEDDING, _ATTENTION = "embedding_multiplier", "attention_multiplier"
_RESIDUAL, _LOGITS = "residual_multiplier", "logits_scaling"


def _read(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    def multiplier(key: str) -> float:
        return raw.number(key, 1e-6, 1e6, 1.0)

    return replace(
        read_biases(raw, model),
        embedding_scale=multiplier(_EMBEDDING),
        attention_scale=multiplier(_ATTENTION),
        residual_scale=multiplier(_RESIDUAL),
        logit_divisor=multiplier(_LOGITS),
    )


def _format(config: ModelConfig) -> dict[str, object]:
    return {
        **format_biases(config),
        _EMBEDDING: config.embedding_scale,
        _ATTENTION: config.attention_scale,
        _RESIDUAL: config.residual_scale,
        _LOGITS: config.logit_divisor,
    }


GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    read=_read,
    format=_format,
    own_keys=BIAS_KEYS | {_EMBEDDING, _ATTENTION, _RESIDUAL, _LOGITS},
    has_kv_head_for_each_by_default=True,
    default_max_positions=2048,
)
