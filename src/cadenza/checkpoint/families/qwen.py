"""Qwen2, Qwen2.5 and Qwen3. Qwen2 has biases on q, k and v; Qwen3 norms each query and key head.

Qwen3 may have MTP layers beside it, as Qwen3-Next or DeepSeek-V3 stores them, which only
speculation reads.

The window applies only if `use_sliding_window` is set: to the sliding layers of `layer_types`, or
without that list to the layers from `max_window_layers` on.
"""

from dataclasses import replace

from cadenza.checkpoint.families.family import Family
from cadenza.checkpoint.families.layer_types import (
    FULL,
    LAYER_KEYS,
    SLIDING,
    layer_types_of,
    read_layer_types,
    read_window,
    shortest_pattern,
    window_of,
    windowed_kinds,
)
from cadenza.checkpoint.json_object import JsonObject
from cadenza.checkpoint.model_config import MAX_LAYERS, ModelConfig
from cadenza.checkpoint.mtp_layout import DEEPSEEK_MTP, QWEN_MTP

_DEFAULT_WINDOW = 4096
_DEFAULT_FULL_LAYERS = 28


def read_layers(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    is_used = raw.flag("use_sliding_window", False)
    window = read_window(raw, _DEFAULT_WINDOW) if is_used else None
    num_full = raw.integer("max_window_layers", 0, MAX_LAYERS, _DEFAULT_FULL_LAYERS)
    default = [
        FULL if window is None or index < num_full else SLIDING for index in range(model.num_layers)
    ]
    kinds = windowed_kinds(raw, read_layer_types(raw, default), window)
    return replace(model, layer_pattern=shortest_pattern(kinds))


def format_layers(config: ModelConfig) -> dict[str, object]:
    window = window_of(config)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": layer_types_of(config),
    }


def _read_qwen2(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    return replace(read_layers(raw, model), has_qkv_bias=True)


def _read_qwen3(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    has_bias = raw.flag("attention_bias", False)
    return replace(
        read_layers(raw, model),
        qk_norm="head",
        has_qkv_bias=has_bias,
        has_attention_out_bias=has_bias,
    )


def _format_qwen3(config: ModelConfig) -> dict[str, object]:
    return {**format_layers(config), "attention_bias": config.has_qkv_bias}


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    read=_read_qwen2,
    format=format_layers,
    own_keys=LAYER_KEYS,
    default_max_positions=32_768,
)

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    read=_read_qwen3,
    format=_format_qwen3,
    own_keys=LAYER_KEYS | {"attention_bias"},
    default_head_dim=128,
    default_max_positions=32_768,
    mtp_layouts=(QWEN_MTP, DEEPSEEK_MTP),
)
