"""OLMo 2: norms only after attention and MLP, and query and key norms over all heads."""

from dataclasses import replace

from cadenza.checkpoint.families.family import Family
from cadenza.checkpoint.json_object import JsonObject
from cadenza.checkpoint.model_config import ModelConfig


def _read(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    has_bias = raw.flag("attention_bias", False)
    return replace(
        model,
        qk_norm="all_heads",
        has_pre_norms=False,
        has_post_norms=True,
        has_qkv_bias=has_bias,
        has_attention_out_bias=has_bias,
    )


def _format(config: ModelConfig) -> dict[str, object]:
    return {"attention_bias": config.has_qkv_bias}


OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    read=_read,
    format=_format,
    own_keys=frozenset({"attention_bias"}),
    has_kv_head_for_each_by_default=True,
    default_max_positions=2048,
    default_norm_eps=1e-5,
)
