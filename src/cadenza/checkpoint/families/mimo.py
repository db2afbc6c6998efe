"""MiMo: Qwen2 with MTP layers (multi-token prediction) stored beside those of the decoder.

The decoder's arithmetic is Qwen2's, with biases whatever `attention_bias` says. The number of MTP
layers is `num_nextn_predict_layers`; only speculation reads them. Published files name code in
`auto_map`, which is not needed and never run.
"""

from dataclasses import replace

from cadenza.checkpoint.families.family import Family, refuse_other_code
from cadenza.checkpoint.families.layer_types import LAYER_KEYS
from cadenza.checkpoint.families.qwen import format_layers, read_layers
from cadenza.checkpoint.json_object import JsonObject
from cadenza.checkpoint.model_config import MAX_LAYERS, ModelConfig

_PUBLISHED_CODE = frozenset(
    {
        "configuration_mimo.MiMoConfig",
        "modeling_mimo.MiMoModel",
        "modeling_mimo.MiMoForCausalLM",
    }
)
_NUM_MTP_LAYERS = "num_nextn_predict_layers"


def _read(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    refuse_other_code(raw, "MiMo", _PUBLISHED_CODE)
    return replace(
        read_layers(raw, model),
        has_qkv_bias=True,
        num_mtp_layers=raw.integer(_NUM_MTP_LAYERS, 0, MAX_LAYERS, 0),
    )


def _format(config: ModelConfig) -> dict[str, object]:
    return {**format_layers(config), "attention_bias": True, _NUM_MTP_LAYERS: config.num_mtp_layers}


MIMO = Family(
    model_type="mimo",
    architecture="MiMoForCausalLM",
    read=_read,
    format=_format,
    own_keys=LAYER_KEYS | {"auto_map", "attention_bias"},
    default_max_positions=32_768,
)
