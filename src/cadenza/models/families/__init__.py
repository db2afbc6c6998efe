"""The supported model families, by `model_type`.

A family is data (`Family`) and a function that reads its own settings of a config.json into a
`ModelConfig`; the decoder implements the arithmetic. To add a family, declare it in the module of
its kin or in a new one, list it here
"""

from cadenza.models.families.deepseek import DEEPSEEK_V3, GLM4_MOE_LITE
from cadenza.models.families.experts import GPT_OSS, MIXTRAL, OLMOE, QWEN3_MOE
from cadenza.models.families.family import Family
from cadenza.models.families.gemma import GEMMA2, GEMMA3, GEMMA4, GEMMA4_UNIFIED
from cadenza.models.families.hybrid import GRANITE_HYBRID, LFM2, LFM2_MOE
from cadenza.models.families.llama import (
    GRANITE,
    LLAMA,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    OLMO2,
    PHI3,
    SMOLLM3,
)
from cadenza.models.families.qwen import MIMO, QWEN2, QWEN3, QWEN35, QWEN35_MOE

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        MINISTRAL,
        MINISTRAL3,
        QWEN2,
        QWEN3,
        SMOLLM3,
        GEMMA2,
        GEMMA3,
        GEMMA4,
        GEMMA4_UNIFIED,
        PHI3,
        OLMO2,
        GRANITE,
        MIXTRAL,
        QWEN3_MOE,
        OLMOE,
        MIMO,
        QWEN35,
        QWEN35_MOE,
        GPT_OSS,
        LFM2,
        LFM2_MOE,
        GRANITE_HYBRID,
        DEEPSEEK_V3,
        GLM4_MOE_LITE,
    )
}

__all__ = ["FAMILIES", "Family"]
