"""Memory for packed weights: parts of their own, aligned, that live as long as they are held."""

import gc
import weakref

import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.ops.native_library import NativeLibrary
from cadenza.backends.xla.ops.packed_memory import CHUNK_BYTES, PackedMemory


def test_arrays_are_aligned_and_share_no_byte():
    memory = PackedMemory()
    arrays = [memory.empty((count, 3), np.float32) for count in (1, 5, 1000, 7)]
    for number, array in enumerate(arrays):
        array[:] = number
        assert array.ctypes.data % 64 == 0
        assert array.flags.c_contiguous
    for number, array in enumerate(arrays):
        assert (array == number).all()


def test_neighbours_lie_side_by_side_until_a_chunk_is_full():
    memory = PackedMemory()
    first, second = memory.empty((100,), np.uint8), memory.empty((100,), np.uint8)
    assert second.ctypes.data - first.ctypes.data == 128
    whole = memory.empty((CHUNK_BYTES,), np.uint8)
    assert whole.nbytes == CHUNK_BYTES
    larger = memory.empty((CHUNK_BYTES + 1,), np.uint8)
    assert larger.nbytes == CHUNK_BYTES + 1


def test_a_chunk_is_placed_before_its_first_array_is_handed_out():
    placed: list[int] = []

    def place(chunk: npt.NDArray[np.uint8]) -> None:
        placed.append(chunk.nbytes)

    memory = PackedMemory(place=place)
    assert not placed
    memory.empty((100,), np.uint8)
    memory.empty((100,), np.uint8)
    assert len(placed) == 1
    assert placed[0] >= CHUNK_BYTES
    memory.empty((CHUNK_BYTES,), np.uint8)
    assert len(placed) == 2


def test_placed_memory_keeps_what_was_written(library: NativeLibrary):
    memory = np.arange(3 << 20, dtype=np.uint32).view(np.uint8)
    library.place_pages(memory)
    assert (memory.view(np.uint32) == np.arange(3 << 20)).all()


def test_a_chunk_goes_with_the_last_of_its_arrays():
    memory = PackedMemory()
    first, second = memory.empty((64,), np.uint8), memory.empty((64,), np.uint8)
    chunk = weakref.ref(first.base)
    del memory, first
    gc.collect()
    assert chunk() is not None
    second[:] = 1
    del second
    gc.collect()
    assert chunk() is None
