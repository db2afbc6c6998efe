"""`PackedMemory`: allocates packed weights contiguously from chunks backed by huge pages.

A model has hundreds of weights, most of them too small for huge pages of their own. Allocating them
contiguously puts all of them on huge pages, which means fewer page faults when they are written and
fewer TLB misses when they are read. Where the weights were packed before, their content comes from
a file. Invariant: arrays do not overlap and are aligned to 64 bytes, which lets JAX use them
without a copy. A chunk is freed when none of its arrays is referenced.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.ops.packed_file import ArraySpec, PackedContent, PackedFile

CHUNK_BYTES = 256 << 20
_ALIGNMENT = 64
_LARGE_PAGE = 2 << 20

Bytes = npt.NDArray[np.uint8]


class PackedMemory:
    """Arrays of a `file` are taken in the order in which they were written; `keep` writes it if one
    was packed anew. `place` is called with each chunk before anything is written to it."""

    def __init__(
        self, file: PackedFile | None = None, place: Callable[[Bytes], None] | None = None
    ) -> None:
        self._place = place
        self._left: Bytes = np.empty(0, np.uint8)
        self._file = file
        self._stored: PackedContent = []
        self._arrays: list[npt.NDArray[Any]] = []
        self._has_packed = False
        stored = None if file is None else file.read(self._allocate_all)
        if stored is None:
            self._left = np.empty(0, np.uint8)
        else:
            self._stored = stored

    def hold(
        self,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        pack: Callable[[npt.NDArray[Any]], None],
    ) -> npt.NDArray[Any]:
        """With the content that `pack` writes into it."""
        array = self._take_stored(ArraySpec.of(shape, dtype))
        if array is None:
            array = self.empty(shape, dtype)
            pack(array)
            self._has_packed = True
        if self._file is not None:
            self._arrays.append(array)
        return array

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self._allocate(num_bytes).view(dtype).reshape(shape)

    def keep(self) -> None:
        """Ends the loading: writes the file if it lacked an array."""
        if self._file is not None and self._has_packed:
            self._file.write(self._arrays)
        self._file = None
        self._arrays, self._stored = [], []

    def _take_stored(self, wanted: ArraySpec) -> npt.NDArray[Any] | None:
        if not self._stored:
            return None
        spec, content = self._stored.pop(0)
        if spec != wanted:
            self._stored = []
            return None
        return content.view(np.dtype(spec.dtype)).reshape(spec.shape)

    def _allocate_all(self, sizes: Sequence[int]) -> list[Bytes]:
        self._left = self._new_chunk(sum(map(_aligned, sizes)))
        return [self._allocate(size) for size in sizes]

    def _allocate(self, num_bytes: int) -> Bytes:
        if num_bytes > len(self._left):
            self._left = self._new_chunk(max(num_bytes, CHUNK_BYTES))
        memory = self._left[:num_bytes]
        self._left = self._left[_aligned(num_bytes) :]
        return memory

    def _new_chunk(self, num_bytes: int) -> Bytes:
        # On Linux, numpy requests huge pages for arrays this large.
        memory = np.empty(num_bytes + _LARGE_PAGE, np.uint8)
        if self._place is not None:
            self._place(memory)
        start = -memory.ctypes.data % _LARGE_PAGE
        return memory[start : start + num_bytes]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
