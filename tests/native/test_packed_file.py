"""Packed weights on disk: what is read is what was written, and anything else is packed again."""

import gc
import logging
import weakref
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import numpy.typing as npt
import pytest

from cadenza.backends.xla.decoder import load_decoder
from cadenza.backends.xla.layers.weight_source import WeightSource
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.native_library import NativeLibrary
from cadenza.backends.xla.ops.packed_memory import (
    CHUNK_BYTES,
    PIECE_BYTES,
    PackedFile,
    PackedMemory,
)
from cadenza.backends.xla.ops.table import DecoderSpec
from cadenza.checkpoint.opening import open_checkpoint

SHAPES = ((3, 100), (1, 70_001), (2, 5, 64))


def load(
    file: PackedFile, shapes: tuple[tuple[int, ...], ...] = SHAPES
) -> tuple[list[Any], list[int]]:
    memory, packed = PackedMemory(file), list[int]()

    def pack(array: npt.NDArray[Any], index: int) -> None:
        array[...] = np.random.default_rng(index).integers(0, 256, array.shape)
        packed.append(index)

    def hold(index: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        dtype = np.uint8 if index % 2 else np.float32
        return memory.hold(shape, dtype, lambda array: pack(array, index))

    arrays = [hold(index, shape) for index, shape in enumerate(shapes)]
    memory.keep()
    return arrays, packed


def are_equal(first: list[Any], second: list[Any]) -> bool:
    return all(np.array_equal(*both) for both in zip(first, second, strict=True))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "weights.packed"


@pytest.fixture(params=[PIECE_BYTES, 4096], ids=["whole", "in pieces"])
def file(path: Path, request: pytest.FixtureRequest) -> PackedFile:
    return PackedFile(path, request.param)


def test_a_second_loading_packs_nothing_and_has_the_same_arrays(path: Path, file: PackedFile):
    first, packed = load(file)
    assert packed == [0, 1, 2]
    second, packed_again = load(file)
    assert packed_again == []
    assert are_equal(first, second)
    assert all(array.ctypes.data % 64 == 0 for array in second)
    assert [path] == [*path.parent.iterdir()]


def test_without_a_file_nothing_is_written(tmp_path: Path):
    memory = PackedMemory()
    memory.hold((8,), np.uint8, lambda array: array.fill(1))
    memory.keep()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("place", [0.0, 0.3, 0.999])
def test_a_changed_bit_is_seen_and_the_file_replaced(
    path: Path, file: PackedFile, place: float, caplog: pytest.LogCaptureFixture
):
    first, _ = load(file)
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 4
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        second, packed = load(file)
    assert packed == [0, 1, 2]
    assert are_equal(first, second)
    assert "quantised again" in caplog.text
    assert load(file)[1] == []


@pytest.mark.parametrize("share", [0.0, 0.00001, 0.5, 0.9999])
def test_a_file_that_was_cut_is_not_read(path: Path, file: PackedFile, share: float):
    first, _ = load(file)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    second, packed = load(file)
    assert packed == [0, 1, 2]
    assert are_equal(first, second)


def test_arrays_of_another_shape_are_packed_from_there_on(file: PackedFile):
    load(file)
    others = (SHAPES[0], (1, 70_002), SHAPES[2])
    arrays, packed = load(file, others)
    assert packed == [1, 2]
    again, packed = load(file, others)
    assert packed == []
    assert are_equal(arrays, again)


def test_a_file_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").write_text("no folder")
    with caplog.at_level(logging.WARNING):
        _, packed = load(PackedFile(tmp_path / "file" / "weights.packed"))
    assert packed == [0, 1, 2]
    assert "cannot be kept" in caplog.text


class CountingLibrary:
    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self.num_packed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def pack(self, *operands: Any, **options: Any) -> None:
        self.num_packed += 1
        self._library.pack(*operands, **options)

    def pack_quantised(self, *operands: Any, **options: Any) -> None:
        self.num_packed += 1
        self._library.pack_quantised(*operands, **options)


def loaded(path: Path | None, library: NativeLibrary) -> tuple[list[Any], int]:
    """The bundled model's weights in 4 bits, and how many operands were packed for them."""
    checkpoint = open_checkpoint(None)
    spec = DecoderSpec(model=checkpoint.config, dtype=np.float32, page_size=16, quantization="int4")
    counting = CountingLibrary(library)
    ops = NativeOps(spec, cast(NativeLibrary, counting))
    with ops.loading(path):
        weights = load_decoder(WeightSource(ops, spec, checkpoint.weights), 64)
    return jax.tree.leaves(weights), counting.num_packed


def test_a_models_weights_have_the_same_bits_from_the_file(path: Path, library: NativeLibrary):
    plain, count = loaded(None, library)
    first, first_count = loaded(path, library)
    second, second_count = loaded(path, library)
    assert count == first_count > 0
    assert second_count == 0
    assert are_equal(plain, first)
    assert are_equal(plain, second)


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
