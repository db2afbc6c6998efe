"""Llama 2 and 3, and the models of the same architecture, such as SmolLM and SmolLM2."""

from dataclasses import replace

from cadenza.checkpoint.families.family import Family
from cadenza.checkpoint.json_object import JsonObject
from cadenza.checkpoint.model_config import ModelConfig

BIAS_KEYS = frozenset({"attention_bias", "mlp_bias"})


def read_biases(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    """`attention_bias` applies to q, k, v and o, `mlp_bias` to gate, up and down."""
    has_attention_bias = raw.flag("attention_bias", False)
    return replace(
        model,
        has_qkv_bias=has_attention_bias,
        has_attention_out_bias=has_attention_bias,
        has_mlp_bias=raw.flag("mlp_bias", False),
    )


def format_biases(config: ModelConfig) -> dict[str, object]:
    return {"attention_bias": config.has_qkv_bias, "mlp_bias": config.has_mlp_bias}


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    read=read_biases,
    format=format_biases,
    own_keys=BIAS_KEYS,
    has_kv_head_for_each_by_default=True,
    default_max_positions=2048,
)
