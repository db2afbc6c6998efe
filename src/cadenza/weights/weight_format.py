"""The types of stored tensors (every `WeightDType` converts to float32 exactly; the others occur in
quantised weights only), and how a tensor is held in memory: `WeightFormat`.
`csrc/core/code_format.h` has the layout of each format of codes."""

import math
from collections.abc import Iterable, Sequence
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


GROUP = 32  # consecutive elements of the last axis that are rounded together

HALF_GROUP = 16

# Nested scales are integers of a byte with one float16 factor for 256 elements; so are offsets.
# Those in bfloat16 are powers of two
ScaleType = Literal["float16", "float32", "nested", "bfloat16"]

NESTED = 256

FLOAT8_BLOCK = 128

# Of codes without sign: an integer that is subtracted from the codes of a group, or a number that
# is added to the products of its codes and its scale
Correction = Literal["zero_point", "offset"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """The representation of a tensor's elements."""

    name: str
    bits: int  # of each element
    # consecutive elements of the last axis that have one scale; None for floats
    group: int | None = None
    scale: ScaleType = "float16"  # the type of scales and offsets
    # what a group has beside its scale; a zero point is a byte
    correction: Correction | None = None
    # consecutive elements of the last axis that have one float32 scale, of floats of 8 bits; None
    # for others
    block: int | None = None

    @property
    def is_quantised(self) -> bool:
        """Whether the elements are integer codes, for which activations are rounded too."""
        return self.group is not None

    @property
    def group_bits(self) -> int:
        """Of what a group has beside its elements."""
        assert self.group is not None, "floats have no groups"
        nested = 8 + 16 * self.group // NESTED
        bits = {"float16": 16, "float32": 32, "nested": nested, "bfloat16": 16}
        scale = bits[self.scale]
        return scale + {None: 0, "zero_point": 8, "offset": scale}[self.correction]

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Of a tensor [..., K], or a number; its last `GROUP` elements are complete."""
        *rows, columns = shape or (1,)
        if self.group is None:
            blocks = 0 if self.block is None else -(-columns // self.block)
            return math.prod(shape) * self.bits // 8 + math.prod(rows) * blocks * 4
        groups = -(-columns // GROUP) * (GROUP // self.group)
        return math.prod(rows) * groups * (self.group * self.bits + self.group_bits) // 8


FLOAT_FORMATS: dict[WeightDType, WeightFormat] = {
    name: WeightFormat(name=name, bits=8 * FORMAT_OF_NAME[name].numpy.itemsize)
    for name in WEIGHT_DTYPES
}


def code_format(
    bits: Literal[4, 5, 6, 8],
    scale: ScaleType = "float16",
    correction: Correction | None = None,
    group: int = GROUP,
) -> WeightFormat:
    """A format of integer codes: with a correction from 0 to 15 in 4 bits, otherwise signed. Codes
    of 5 and 8 bits have no zero points (an offset -scale * zero point says the same), and groups of
    16 have 8 bits and scales in float32, or 6 bits and nested ones. Scales of 5 bits are not
    float32."""
    name = f"int{bits}"
    if group != GROUP:
        name += f"-g{group}"
    elif scale != "float16":
        name += f"-{scale}"
    if correction == "offset" or (bits != 8 and correction is None):
        name += f"-{correction or 'symmetric'}"
    return WeightFormat(name=name, bits=bits, group=group, scale=scale, correction=correction)


INT8 = code_format(8)  # from -127 to 127 with one float16 scale for each group

# from 0 to 15 with a float16 scale and an integer zero point of a byte for each group
INT4 = code_format(4, correction="zero_point")


# Codes that stand for twice the values of E2M1, which are integers, so that products are those of
# these integers in 8 bits
MXFP4 = WeightFormat(name="mxfp4", bits=4, group=GROUP, scale="bfloat16")

_MXFP4_IN_8_BITS = code_format(8, "float32")

# float8_e4m3fn with a float32 scale for each row and block, multiplied by activations as they are
FLOAT8 = WeightFormat(name="float8", bits=8, block=FLOAT8_BLOCK)


PANEL = 32  # columns of one panel of a packed weight, which has one format


def panel_formats(formats: Sequence[WeightFormat], num_rows: Sequence[int]) -> list[WeightFormat]:
    """The formats of codes for weights side by side: their own if each of them begins at a panel,
    otherwise one that holds all of them."""
    if any(rows % PANEL for rows in num_rows[:-1]):
        return [joined(formats)] * len(formats)
    return [*formats]


def joined(formats: Iterable[WeightFormat]) -> WeightFormat:
    """The smallest format of codes that holds weights of all `formats` exactly."""
    each = list(formats)
    if len(set(each)) == 1:
        return each[0]
    each = [_MXFP4_IN_8_BITS if format == MXFP4 else format for format in each]
    corrections: set[Correction | None] = {format.correction for format in each}
    group = min(format.group or GROUP for format in each)
    is_wide = group == HALF_GROUP or any(format.scale != "float16" for format in each)
    scale: ScaleType = "float32" if is_wide else "float16"
    if group == GROUP and all(format.bits == 4 for format in each):
        if len(corrections) == 1:
            return code_format(4, scale, corrections.pop())
        if "offset" not in corrections:
            return code_format(4, scale, "zero_point")
    return code_format(8, scale, "offset" if "offset" in corrections else None, group)
