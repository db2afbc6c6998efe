"""Qwen2, Qwen2.5, Qwen3 and MiMo. Qwen2 has biases on q, k and v; Qwen3 norms each query and key
head. MiMo is Qwen2 with MTP layers (multi-token prediction), and with those biases whatever
`attention_bias` says; its published files name code in `auto_map`, which is not needed and never
run.

Qwen3 may have MTP layers beside it, as Qwen3-Next or DeepSeek-V3 stores them, which only
speculation reads.

The window applies only if `use_sliding_window` is set: to the sliding layers of `layer_types`, or
without that list to the layers from `max_window_layers` on.
"""

from dataclasses import replace

from cadenza.checkpoint.families.family import (
    LAYER_KEYS,
    Family,
    read_attention_bias,
    read_layer_kinds,
    read_used_window,
    refuse_other_code,
    shortest_pattern,
)
from cadenza.checkpoint.json_object import JsonObject
from cadenza.checkpoint.model_config import MAX_LAYERS, ModelConfig
from cadenza.checkpoint.mtp_layout import DEEPSEEK_MTP, MIMO_MTP, QWEN_MTP

_DEFAULT_WINDOW = 4096
_DEFAULT_FULL_LAYERS = 28
_KEYS = LAYER_KEYS | {"use_sliding_window"}
_MIMO_CODE = frozenset(
    {
        "configuration_mimo.MiMoConfig",
        "modeling_mimo.MiMoModel",
        "modeling_mimo.MiMoForCausalLM",
    }
)


def _read_layers(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    window = read_used_window(raw, _DEFAULT_WINDOW)
    num_full = raw.integer("max_window_layers", 0, MAX_LAYERS, _DEFAULT_FULL_LAYERS)
    are_sliding = [window is not None and i >= num_full for i in range(model.num_layers)]
    kinds = read_layer_kinds(raw, are_sliding, window)
    return replace(model, layer_pattern=shortest_pattern(kinds))


def _read_qwen2(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    return replace(_read_layers(raw, model), has_qkv_bias=True)


def _read_qwen3(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    return replace(_read_layers(raw, model), qk_norm="head", **read_attention_bias(raw))


def _read_mimo(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    refuse_other_code(raw, "MiMo", _MIMO_CODE)
    return _read_qwen2(raw, model)


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    read=_read_qwen2,
    own_keys=_KEYS,
    default_max_positions=32_768,
)

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    read=_read_qwen3,
    own_keys=_KEYS | {"attention_bias"},
    default_head_dim=128,
    default_max_positions=32_768,
    mtp_layouts=(QWEN_MTP, DEEPSEEK_MTP),
)

MIMO = Family(
    model_type="mimo",
    architecture="MiMoForCausalLM",
    read=_read_mimo,
    own_keys=_KEYS | {"auto_map", "attention_bias"},
    default_max_positions=32_768,
    mtp_layouts=(MIMO_MTP,),
)
