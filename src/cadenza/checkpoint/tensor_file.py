"""A file of tensors mapped into memory: `TensorFile`, and the place of each tensor, `TensorEntry`.

Owns views of the mapped bytes. Knows no format: `safetensors_file` and `gguf/tensors` read the
entries and check them. Invariant: a view copies nothing, unless rows have to be put into order.
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
    """A tensor's data type, shape and place: bytes [start, stop) of its file.

    With `num_paired_heads` the rows are those of so many heads, each stored in the order 0, D / 2,
    1, D / 2 + 1, …
    """

    name: str
    dtype: WeightDType
    shape: tuple[int, ...]
    start: int
    stop: int
    num_paired_heads: int | None = None

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(slots=True, eq=False)
class TensorFile:
    """An open file, mapped as long as this object or one of its views exists."""

    name: str
    header: bytes | memoryview
    entries: dict[str, TensorEntry]
    data: mmap.mmap

    def view(self, name: str) -> AnyArray:
        """An array over the mapped bytes, read-only and possibly unaligned; its rows are copied if
        they are paired.
        """
        entry = self.entries[name]
        dtype = FORMAT_OF_NAME[entry.dtype].numpy
        count = math.prod(entry.shape)
        flat = np.frombuffer(self.data, dtype=dtype, count=count, offset=entry.start)
        if entry.num_paired_heads is None:
            return flat.reshape(entry.shape)
        pairs = flat.reshape(entry.num_paired_heads, -1, 2, *entry.shape[1:])  # [H, D / 2, 2, …]
        return pairs.swapaxes(1, 2).reshape(entry.shape)

    def raw_bytes(self, name: str) -> memoryview:
        """A tensor's stored bytes, without a copy."""
        entry = self.entries[name]
        return memoryview(self.data)[entry.start : entry.stop]
