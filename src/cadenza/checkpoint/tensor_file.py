"""A file of tensors mapped into memory: `TensorFile`, and the place of each tensor, `TensorEntry`.

Owns views of the mapped bytes. Knows no format: `safetensors_file` and `gguf/tensors` read the
entries and check them. Invariant: a view copies nothing, unless a vector has to be decoded or the
rows of floats have to be put into order.
"""

import math
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cadenza.checkpoint.block_weight import BlockWeight, Encoding
from cadenza.checkpoint.dtypes import FORMAT_OF_NAME, StoredDType
from cadenza.checkpoint.weight_format import WeightFormat

AnyArray = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor's data type, shape and place: bytes [start, stop) of its file.

    With an `encoding` the type is that of the decoded elements.

    With `num_paired_heads` the rows are those of so many heads, each stored in the order 0, D / 2,
    1, D / 2 + 1, …
    """

    name: str
    dtype: StoredDType
    shape: tuple[int, ...]
    start: int
    stop: int
    encoding: Encoding | None = None
    num_paired_heads: int | None = None

    @property
    def stored_type(self) -> str:
        """The name of the data type or of the encoding."""
        return self.dtype if self.encoding is None else self.encoding.name

    @property
    def format(self) -> WeightFormat | None:
        """That of a weight of codes; None if the tensor is read as floats."""
        return self.encoding.format if self.encoding and len(self.shape) > 1 else None

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(slots=True, eq=False)
class TensorFile:
    """An open file, mapped as long as this object or one of its views exists.

    `modified_ns` is the time of its last change, in nanoseconds since 1970.
    """

    name: str
    header: bytes | memoryview
    entries: dict[str, TensorEntry]
    data: mmap.mmap
    modified_ns: int

    def view(self, name: str) -> AnyArray | BlockWeight:
        """An array over the mapped bytes, read-only and possibly unaligned, or the blocks of an
        encoded weight; a new array if a vector is encoded or the rows of floats are paired.
        """
        entry = self.entries[name]
        if entry.encoding is not None and entry.format is not None:
            stored = np.frombuffer(self.data, np.uint8, entry.num_bytes, entry.start)
            return BlockWeight(
                encoding=entry.encoding,
                stored=stored.reshape(entry.shape[0], -1),
                num_paired_heads=entry.num_paired_heads,
            )
        if entry.encoding is None:
            dtype = FORMAT_OF_NAME[entry.dtype].numpy
            count = math.prod(entry.shape)
            flat = np.frombuffer(self.data, dtype=dtype, count=count, offset=entry.start)
        else:
            stored = np.frombuffer(self.data, np.uint8, entry.num_bytes, entry.start)
            flat = entry.encoding.decode(stored)
        if entry.num_paired_heads is None:
            return flat.reshape(entry.shape)
        pairs = flat.reshape(entry.num_paired_heads, -1, 2, *entry.shape[1:])  # [H, D / 2, 2, …]
        return pairs.swapaxes(1, 2).reshape(entry.shape)

    def array(self, name: str) -> AnyArray:
        """As `view`, of a tensor that is not in blocks."""
        found = self.view(name)
        assert not isinstance(found, BlockWeight), f"{name} is in blocks"
        return found

    def release_pages(self) -> None:
        """Takes the mapped pages out of this process's resident memory. The page cache keeps them,
        and the next access maps them again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED)

    def raw_bytes(self, name: str) -> memoryview:
        """A tensor's stored bytes, without a copy."""
        entry = self.entries[name]
        return memoryview(self.data)[entry.start : entry.stop]
