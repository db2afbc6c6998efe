"""MiMo: Qwen2 with MTP layers (multi-token prediction) stored beside those of the decoder.

The decoder's arithmetic is Qwen2's, with biases whatever `attention_bias` says. Published files
name code in `auto_map`, which is not needed and never run.
"""

from dataclasses import replace

from cadenza.checkpoint.families.family import Family, refuse_other_code
from cadenza.checkpoint.families.layer_types import LAYER_KEYS
from cadenza.checkpoint.families.qwen import format_layers, read_layers
from cadenza.checkpoint.json_object import JsonObject
from cadenza.checkpoint.model_config import ModelConfig
from cadenza.checkpoint.mtp_layout import MIMO_MTP

_PUBLISHED_CODE = frozenset(
    {
        "configuration_mimo.MiMoConfig",
        "modeling_mimo.MiMoModel",
        "modeling_mimo.MiMoForCausalLM",
    }
)


def _read(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    refuse_other_code(raw, "MiMo", _PUBLISHED_CODE)
    return replace(read_layers(raw, model), has_qkv_bias=True)


def _format(config: ModelConfig) -> dict[str, object]:
    return {**format_layers(config), "attention_bias": True}


MIMO = Family(
    model_type="mimo",
    architecture="MiMoForCausalLM",
    read=_read,
    format=_format,
    own_keys=LAYER_KEYS | {"auto_map", "attention_bias"},
    default_max_positions=32_768,
    mtp_layouts=(MIMO_MTP,),
)
