"""The supported model families, by `model_type`.

A family is a small module that reads its config.json into a `ModelConfig`; the decoder implements
the arithmetic and knows no families. To add a family, write its module and list it here.
"""

from cadenza.checkpoint.families.experts import MIXTRAL, OLMOE, QWEN3_MOE
from cadenza.checkpoint.families.family import Family
from cadenza.checkpoint.families.gemma import GEMMA2, GEMMA3
from cadenza.checkpoint.families.granite import GRANITE
from cadenza.checkpoint.families.llama import LLAMA
from cadenza.checkpoint.families.mimo import MIMO
from cadenza.checkpoint.families.mistral import MINISTRAL, MISTRAL
from cadenza.checkpoint.families.olmo2 import OLMO2
from cadenza.checkpoint.families.phi3 import PHI3
from cadenza.checkpoint.families.qwen import QWEN2, QWEN3
from cadenza.checkpoint.families.smollm3 import SMOLLM3

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        MINISTRAL,
        QWEN2,
        QWEN3,
        SMOLLM3,
        GEMMA2,
        GEMMA3,
        PHI3,
        OLMO2,
        GRANITE,
        MIXTRAL,
        QWEN3_MOE,
        OLMOE,
        MIMO,
    )
}

__all__ = ["FAMILIES", "Family"]
