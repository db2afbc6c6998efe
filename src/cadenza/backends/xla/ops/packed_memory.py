"""`PackedMemory`: allocates packed weights contiguously from chunks backed by huge pages.

A model has hundreds of weights, most of them too small for huge pages of their own. Allocating them
contiguously puts all of them on huge pages, which means fewer page faults when they are written and
fewer TLB misses when they are read. Invariant: arrays do not overlap and are aligned to 64 bytes,
which lets JAX use them without a copy. A chunk is freed when none of its arrays is referenced.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

CHUNK_BYTES = 256 << 20
_ALIGNMENT = 64
_LARGE_PAGE = 2 << 20


class PackedMemory:
    """Allocates from large chunks, whose pages become resident when they are first written."""

    def __init__(self) -> None:
        self._left: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An uninitialised array, aligned to 64 bytes."""
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if num_bytes > len(self._left):
            self._left = _new_chunk(max(num_bytes, CHUNK_BYTES))
        memory = self._left[:num_bytes]
        self._left = self._left[-(-num_bytes // _ALIGNMENT) * _ALIGNMENT :]
        return memory.view(dtype).reshape(shape)


def _new_chunk(num_bytes: int) -> npt.NDArray[np.uint8]:
    """A chunk aligned to a huge page. On Linux, numpy requests huge pages for arrays this large."""
    memory = np.empty(num_bytes + _LARGE_PAGE, np.uint8)
    start = -memory.ctypes.data % _LARGE_PAGE
    return memory[start : start + num_bytes]
