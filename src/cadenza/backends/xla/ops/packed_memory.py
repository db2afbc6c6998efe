"""`PackedMemory`: where packed weights lie, one behind the other, in the system's large pages.

A model's weights are hundreds of arrays, most of them smaller than what a system gives large pages
for on its own; side by side they have them all, which spares faults while they are written and
address translation whenever they are read. Invariant: an array is untouched memory of its own at a
boundary of 64 bytes, which JAX takes without a copy; it lives as long as somebody holds it, and the
chunk around it as long as any of its arrays.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

CHUNK_BYTES = 256 << 20
_ALIGNMENT = 64
_LARGE_PAGE = 2 << 20


class PackedMemory:
    """Hands out parts of large chunks. What is never written costs no memory."""

    def __init__(self) -> None:
        self._left: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An uninitialised array."""
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if num_bytes > len(self._left):
            self._left = _new_chunk(max(num_bytes, CHUNK_BYTES))
        memory = self._left[:num_bytes]
        self._left = self._left[-(-num_bytes // _ALIGNMENT) * _ALIGNMENT :]
        return memory.view(dtype).reshape(shape)


def _new_chunk(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Begins at a large page; numpy asks for such pages where arrays are as large as this."""
    memory = np.empty(num_bytes + _LARGE_PAGE, np.uint8)
    start = -memory.ctypes.data % _LARGE_PAGE
    return memory[start : start + num_bytes]
