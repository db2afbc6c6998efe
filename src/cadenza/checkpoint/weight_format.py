"""How a model's tensors are held in memory: `WeightFormat`, and the format of each tensor.

Owns the formats and their sizes. Knows no files and no layouts. Invariant: memory plans, bounds and
loading derive the format of a tensor from `format_of`, so that they agree.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cadenza.checkpoint.declaration import TensorKind, TensorSpec
from cadenza.checkpoint.dtypes import FORMAT_OF_NAME, WEIGHT_DTYPES, WeightDType
from cadenza.checkpoint.quantised_weight import GROUP
from cadenza.config import Quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """The representation of a tensor's elements.

    Args:
        bits: of each element.
        group: consecutive elements of the last axis that have one scale; None for floats.
        group_bits: of what a group has beside its elements.
    """

    name: str
    bits: int
    group: int | None = None
    group_bits: int = 0

    @property
    def is_quantised(self) -> bool:
        return self.group is not None

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor [..., K]; its last group is complete."""
        *rows, columns = shape
        if self.group is None:
            return math.prod(shape) * self.bits // 8
        groups = -(-columns // self.group)
        return math.prod(rows) * groups * (self.group * self.bits + self.group_bits) // 8


FLOAT_FORMATS: dict[WeightDType, WeightFormat] = {
    name: WeightFormat(name=name, bits=8 * FORMAT_OF_NAME[name].numpy.itemsize)
    for name in WEIGHT_DTYPES
}


INT8 = WeightFormat(name="int8", bits=8, group=GROUP, group_bits=16)
"""Codes from -127 to 127 with one float16 scale for each group."""

INT4 = WeightFormat(name="int4", bits=4, group=GROUP, group_bits=24)
"""Codes from 0 to 15 with a float16 scale and an integer zero point of a byte for each group."""

_QUANTISED_KINDS: frozenset[TensorKind] = frozenset({"embedding", "head", "linear"})
"""Routers choose experts, where a small error is a large one; norms and biases are small. Embedding
and head have 8 bits in either case: 4 bits there would cost much accuracy."""


def format_of(
    spec: TensorSpec, dtype: WeightDType, quantization: Quantization = "none"
) -> WeightFormat:
    """The format in which a tensor is held by a model that computes in `dtype`."""
    if quantization == "none" or spec.kind not in _QUANTISED_KINDS:
        return FLOAT_FORMATS[dtype]
    return INT4 if quantization == "int4" and spec.kind == "linear" else INT8


def stored_bytes(
    specs: Iterable[TensorSpec], dtype: WeightDType, quantization: Quantization = "none"
) -> int:
    """Bytes of tensors in their formats."""
    return sum(format_of(spec, dtype, quantization).num_bytes(spec.shape) for spec in specs)
