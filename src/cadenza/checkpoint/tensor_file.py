"""A file of tensors mapped into memory: `TensorFile`, and the place of each tensor, `TensorEntry`.

Owns views of the mapped bytes. Knows no format: `safetensors_file` reads the entries and checks
them. Invariant: a view copies nothing.
"""

import math
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cadenza.checkpoint.dtypes import FORMAT_OF_NAME, WeightDType

AnyArray = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor's data type, shape and place: bytes [start, stop) of its file."""

    name: str
    dtype: WeightDType
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(slots=True, eq=False)
class TensorFile:
    """An open file, mapped as long as this object or one of its views exists."""

    name: str
    header: bytes
    entries: dict[str, TensorEntry]
    data: mmap.mmap

    def view(self, name: str) -> AnyArray:
        """A read-only, possibly unaligned array over the mapped bytes."""
        entry = self.entries[name]
        dtype = FORMAT_OF_NAME[entry.dtype].numpy
        count = math.prod(entry.shape)
        flat = np.frombuffer(self.data, dtype=dtype, count=count, offset=entry.start)
        return flat.reshape(entry.shape)

    def raw_bytes(self, name: str) -> memoryview:
        """A tensor's stored bytes, without a copy."""
        entry = self.entries[name]
        return memoryview(self.data)[entry.start : entry.stop]
