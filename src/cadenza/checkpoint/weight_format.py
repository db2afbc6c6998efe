"""How a model's tensors are held in memory: `WeightFormat`, and the format of each tensor.

Owns the formats and their sizes. Knows no files and no layouts. Invariant: memory plans, bounds and
loading derive the format of a tensor from `format_of`, so that they agree.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from cadenza.checkpoint.declaration import TensorSpec
from cadenza.checkpoint.dtypes import FORMAT_OF_NAME, WEIGHT_DTYPES, WeightDType


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """The representation of a tensor's elements: `bits` for each."""

    name: str
    bits: int

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor [..., K]."""
        elements = 1
        for size in shape:
            elements *= size
        return elements * self.bits // 8


FLOAT_FORMATS: dict[WeightDType, WeightFormat] = {
    name: WeightFormat(name=name, bits=8 * FORMAT_OF_NAME[name].numpy.itemsize)
    for name in WEIGHT_DTYPES
}


def format_of(spec: TensorSpec, dtype: WeightDType) -> WeightFormat:
    """The format in which a tensor is held by a model that computes in `dtype`."""
    del spec  # every tensor has the same format
    return FLOAT_FORMATS[dtype]


def stored_bytes(specs: Iterable[TensorSpec], dtype: WeightDType) -> int:
    """Bytes of tensors in their formats."""
    return sum(format_of(spec, dtype).num_bytes(spec.shape) for spec in specs)
