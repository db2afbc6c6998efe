"""The data types of stored weights.

Owns the table of Cadenza's names, safetensors codes and numpy dtypes. Knows no files. Invariant:
every type here converts to float32 exactly.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np

WeightDType = Literal["bfloat16", "float16", "float32"]

WEIGHT_DTYPES: tuple[WeightDType, ...] = get_args(WeightDType)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A data type: Cadenza's name, the safetensors code and the numpy dtype."""

    name: WeightDType
    code: str
    numpy: np.dtype[Any]


_FORMATS: tuple[Format, ...] = (
    Format(name="bfloat16", code="BF16", numpy=np.dtype(ml_dtypes.bfloat16)),
    Format(name="float16", code="F16", numpy=np.dtype("<f2")),
    Format(name="float32", code="F32", numpy=np.dtype("<f4")),
)

FORMAT_OF_NAME: dict[WeightDType, Format] = {format.name: format for format in _FORMATS}
FORMAT_OF_CODE: dict[str, Format] = {format.code: format for format in _FORMATS}


def item_bytes(dtype: WeightDType) -> int:
    """Bytes of one element."""
    return FORMAT_OF_NAME[dtype].numpy.itemsize
