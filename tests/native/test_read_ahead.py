"""Files of weights are read before they are needed, where that helps."""

import ctypes
import mmap
import os
import time
from pathlib import Path

import numpy as np
import pytest

from cadenza import EngineConfig
from cadenza.checkpoint.random_checkpoint import named_shape, write_random_checkpoint
from cadenza.loading import build
from cadenza.loading.build import find_checkpoint, open_planned
from cadenza.loading.read_ahead import read_ahead

ENOUGH_BYTES = 1 << 40

pytestmark = pytest.mark.skipif(
    not hasattr(os, "posix_fadvise"), reason="this system reads no files ahead on request"
)


def share_in_memory(path: Path) -> float:
    """Of the file's pages; asking reads none."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    data = np.frombuffer(mapped, np.uint8)
    pages = np.zeros(-(-len(data) // mmap.PAGESIZE), np.uint8)
    address, state = ctypes.c_void_p(data.ctypes.data), ctypes.c_void_p(pages.ctypes.data)
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(data)), state) == 0
    return float((pages & 1).mean())


def test_all_of_a_file_is_read_ahead(tmp_path: Path) -> None:
    """One of 269 MB, which is many times what a request may ask for."""
    write_random_checkpoint(named_shape("smollm2-135m"), tmp_path, seed=1, dtype="bfloat16")
    (path,) = tmp_path.glob("*.safetensors")
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if share_in_memory(path) > 0.1:
        pytest.skip("this file system keeps its files in memory")
    thread = read_ahead(find_checkpoint(tmp_path), ENOUGH_BYTES)
    assert thread is not None
    thread.join()  # the last parts are still being read
    until_s = time.monotonic() + 60
    while share_in_memory(path) < 1:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_files_too_large_to_stay_in_memory_are_not_read_ahead() -> None:
    checkpoint = find_checkpoint(None)
    num_bytes = sum(len(file.data) for file in checkpoint.weights.files)
    assert read_ahead(checkpoint, 2 * num_bytes - 1) is None
    thread = read_ahead(checkpoint, 2 * num_bytes)
    assert thread is not None
    thread.join()


def test_a_file_that_has_gone_is_no_error_yet(tmp_path: Path) -> None:
    write_random_checkpoint(named_shape("tiny-qwen3"), tmp_path, seed=1, dtype="bfloat16")
    checkpoint = find_checkpoint(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    thread = read_ahead(checkpoint, ENOUGH_BYTES)
    assert thread is not None
    thread.join()


@pytest.mark.parametrize(("quantization", "is_asked"), [("none", True), ("int8", False)])
def test_weights_that_may_be_stored_packed_are_not_read_ahead(
    monkeypatch: pytest.MonkeyPatch, quantization: str, is_asked: bool
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(build, "read_ahead", lambda _, available: asked.append(available))
    open_planned(None, EngineConfig(quantization=quantization, max_num_seqs=1))
    assert bool(asked) == is_asked
