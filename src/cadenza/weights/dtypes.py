"""The data types of stored tensors: Cadenza's names, safetensors codes and numpy dtypes. Every
`WeightDType` converts to float32 exactly; the other types occur in quantised weights only."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np

WeightDType = Literal["bfloat16", "float16", "float32"]

WEIGHT_DTYPES: tuple[WeightDType, ...] = get_args(WeightDType)

StoredDType = Literal[
    WeightDType, "float8_e4m3", "float8_e8m0", "int8", "uint8", "int32", "uint32", "int64"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A data type: Cadenza's name, the safetensors code and the numpy dtype."""

    name: StoredDType
    code: str
    numpy: np.dtype[Any]


_FORMATS: tuple[Format, ...] = (
    Format(name="bfloat16", code="BF16", numpy=np.dtype(ml_dtypes.bfloat16)),
    Format(name="float16", code="F16", numpy=np.dtype("<f2")),
    Format(name="float32", code="F32", numpy=np.dtype("<f4")),
    Format(name="float8_e4m3", code="F8_E4M3", numpy=np.dtype(ml_dtypes.float8_e4m3fn)),
    Format(name="float8_e8m0", code="F8_E8M0", numpy=np.dtype(ml_dtypes.float8_e8m0fnu)),
    Format(name="int8", code="I8", numpy=np.dtype("i1")),
    Format(name="uint8", code="U8", numpy=np.dtype("u1")),
    Format(name="int32", code="I32", numpy=np.dtype("<i4")),
    Format(name="uint32", code="U32", numpy=np.dtype("<u4")),
    Format(name="int64", code="I64", numpy=np.dtype("<i8")),
)

FORMAT_OF_NAME: dict[StoredDType, Format] = {format.name: format for format in _FORMATS}
FORMAT_OF_CODE: dict[str, Format] = {format.code: format for format in _FORMATS}


def item_bytes(dtype: StoredDType) -> int:
    return FORMAT_OF_NAME[dtype].numpy.itemsize


def as_weight_dtype(dtype: str) -> WeightDType | None:
    """The same type if weights that are not quantised can have it, otherwise None."""
    return next((each for each in WEIGHT_DTYPES if each == dtype), None)
