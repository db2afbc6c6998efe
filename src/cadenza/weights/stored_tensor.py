"""A tensor in a mapped file, `StoredTensor`, and a weight in several tensors, `StoredWeight`.
Loading a tensor copies nothing, unless a vector has to be decoded or the rows of floats have to be
put into order."""

import math
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cadenza.errors import CheckpointError
from cadenza.weights.quantised_weight import BlockWeight, Encoding, HostWeight
from cadenza.weights.weight_format import FORMAT_OF_NAME, StoredDType, WeightFormat

AnyArray = npt.NDArray[Any]

FileBytes = mmap.mmap | bytes


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MappedFile:
    """An open file, mapped as long as this object or a view of its bytes exists."""

    name: str
    data: mmap.mmap
    modified_ns: int  # the time of its last change, in nanoseconds since 1970
    path: Path
    header: bytes | memoryview = b""  # of a file of tensors: the bytes before them

    def release_pages(self) -> None:
        """Takes the mapped pages out of this process's resident memory. The page cache keeps them,
        and the next access maps them again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED)


def map_file(path: Path) -> MappedFile:
    """Maps a file that is not empty. Raises `CheckpointError`."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            modified_ns = os.fstat(file.fileno()).st_mtime_ns
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} cannot be mapped into memory") from error
    return MappedFile(name=path.name, data=data, modified_ns=modified_ns, path=path)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StoredTensor:
    """A tensor in bytes [start, stop) of a file's `data`."""

    name: str
    dtype: StoredDType  # of the elements, of the decoded ones if there is an `encoding`
    shape: tuple[int, ...]
    data: FileBytes
    start: int
    stop: int
    encoding: Encoding | None = None
    # the rows are those of so many heads, each stored in the order 0, D / 2, 1, D / 2 + 1, …; None:
    # in order
    num_paired_heads: int | None = None

    @property
    def stored_type(self) -> str:
        return self.dtype if self.encoding is None else self.encoding.name

    @property
    def format(self) -> WeightFormat | None:
        """That of a weight of codes; None if the tensor is read as floats."""
        return self.encoding.format if self.encoding and len(self.shape) > 1 else None

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    @property
    def raw_bytes(self) -> memoryview:
        """As they are stored, without a copy."""
        return memoryview(self.data)[self.start : self.stop]

    def load(self) -> AnyArray | BlockWeight:
        """An array over the mapped bytes, read-only and possibly unaligned, or the blocks of an
        encoded weight; a new array if a vector is encoded or the rows of floats are paired."""
        if self.encoding is not None:
            stored = np.frombuffer(self.data, np.uint8, self.num_bytes, self.start)
            if self.format is not None:
                return BlockWeight(
                    encoding=self.encoding,
                    stored=stored.reshape(self.shape[0], -1),
                    num_paired_heads=self.num_paired_heads,
                )
            flat: AnyArray = self.encoding.decode(stored)
        else:
            dtype = FORMAT_OF_NAME[self.dtype].numpy
            flat = np.frombuffer(self.data, dtype, math.prod(self.shape), self.start)
        if self.num_paired_heads is None:
            return flat.reshape(self.shape)
        pairs = flat.reshape(self.num_paired_heads, -1, 2, *self.shape[1:])  # [H, D / 2, 2, …]
        return pairs.swapaxes(1, 2).reshape(self.shape)

    def array(self) -> AnyArray:
        """As `load`, of a tensor that is not in blocks."""
        found = self.load()
        assert not isinstance(found, BlockWeight), f"{self.name} is in blocks"
        return found


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StoredWeight:
    """One quantised weight [N, K], in tensors of other names, and how it is read."""

    shape: tuple[int, ...]
    stored_type: str  # the method and the type of the codes, such as "awq int4"
    format: WeightFormat | None  # of what `load` gives; None if that is floats
    parts: tuple[StoredTensor, ...]  # the tensors that it is stored in
    load: Callable[[], HostWeight]  # reads it, on each call
    num_sharing: int = 1  # weights that are stored in these parts, evenly

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts) // self.num_sharing


Stored = StoredTensor | StoredWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredScheme:
    """How a checkpoint is quantised."""

    name: str  # the method with its main settings, for messages and `info`
    activations: str | None = None  # the rounding of activations that it asks for; None if none
