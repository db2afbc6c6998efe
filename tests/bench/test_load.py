"""`cadenza bench load`: its figures agree with each other, and loading holds no weight twice."""

import gc
import json
import mmap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cadenza import EngineConfig
from cadenza.bench.checkpoints import cached_checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.loading.build import plan_model
from cadenza.loading.memory import private_memory_bytes
from cadenza.loading.planned_engine import PlannedEngine
from cadenza_bench.load import (
    FileReader,
    Load,
    MemoryWatch,
    largest_tensor_bytes,
    measure_here,
    measure_load,
)
from tests.bench.shapes import TINY
from tests.checkpoint.config_writer import write_random_checkpoint

SHAPE = replace(TINY, vocab_size=160_000, hidden_size=128, tie_word_embeddings=False)
# For what is no weight; less than half of the weights, so that a second copy shows.
SLACK_BYTES = 24 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "wide"
    write_random_checkpoint(SHAPE, path, seed=1, dtype="bfloat16")
    return path


def excess_bytes(folder: Path, beside: Callable[[], object]) -> int:
    """Private memory at the peak of a load, beyond what was there, the weights, and one tensor."""
    checkpoint = open_checkpoint(folder)
    config = EngineConfig(max_num_seqs=1)
    plan = plan_model(checkpoint, config)
    gc.collect()  # what an earlier load left
    before = private_memory_bytes()
    assert before is not None
    with MemoryWatch() as watch:
        kept = beside()
        runner = PlannedEngine(checkpoint=checkpoint, plan=plan, config=config).load_runner()
    del kept  # the last look was before, so that it was seen even if no other one was
    runner.close()
    assert watch.peak_bytes is not None
    return watch.peak_bytes - before - plan.weight_bytes - largest_tensor_bytes(checkpoint)


def new_memory(num_bytes: int) -> np.ndarray:
    """Touched, and not from the heap, which may have had that much to give again."""
    block = np.frombuffer(mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    block.fill(1)
    return block


@pytest.mark.native
@pytest.mark.skipif(private_memory_bytes() is None, reason="the system does not tell")
def test_loading_holds_the_weights_once_and_at_most_one_tensor_more(folder: Path):
    num_bytes = (folder / "model.safetensors").stat().st_size
    assert num_bytes > 2 * SLACK_BYTES
    assert excess_bytes(folder, lambda: None) < SLACK_BYTES
    # The control: a copy of all of it is seen.
    assert excess_bytes(folder, lambda: new_memory(num_bytes + SLACK_BYTES)) > SLACK_BYTES


@pytest.mark.soak
def test_a_run_in_a_new_process_holds_no_more_memory_than_is_allowed(folder: Path):
    lines: list[str] = []
    found = measure_load(folder, EngineConfig(), repeats=2, report=lines.append)
    assert lines
    if found.peak_private_bytes is not None:
        assert found.weight_bytes < found.peak_private_bytes < found.allowed_private_bytes


def test_a_run_says_what_was_read_and_how_fast(shape_file: Path, tmp_path: Path):
    """In this process, and so without a look at its memory."""
    path = cached_checkpoint(str(shape_file), tmp_path)
    asked = {"model": str(path), "config": {"max_num_seqs": 1}, "repeats": 2}
    found = measure_here(json.dumps(asked))
    assert found.file_bytes == (path / "model.safetensors").stat().st_size
    assert 0 < found.weight_bytes <= found.file_bytes
    assert found.largest_tensor_bytes == TINY.vocab_size * TINY.hidden_size * 2
    assert len(found.load_s) == len(found.read_s) == len(found.read_new_s) == 2
    assert found.read_bytes == found.file_bytes
    assert found.load_gb_s == pytest.approx(found.file_bytes / sum(found.load_s) * 2e-9)


def test_loads_that_read_kept_weights_are_beside_readings_of_these(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CADENZA_CACHE_DIR", str(tmp_path))
    config = {"max_num_seqs": 1, "quantization": "int8"}
    asked = {"model": str(folder), "config": config, "repeats": 2}
    found = measure_here(json.dumps(asked))
    assert found.file_bytes == (folder / "model.safetensors").stat().st_size
    kept = [path.stat().st_size for path in (tmp_path / "weights").glob("*.packed")]
    assert [found.read_bytes] == (kept or [found.file_bytes])
    assert found.share_of_read == found.load_gb_s / found.read_gb_s


def test_shares_are_those_of_the_rates_beside_them():
    found = Load(
        file_bytes=12,
        read_bytes=12,
        weight_bytes=10,
        largest_tensor_bytes=2,
        num_threads=1,
        load_s=(2.0, 4.0, 30.0),
        read_s=(1.0, 3.0, 3.0),
        read_new_s=(2.0, 2.0, 60.0),
        peak_private_bytes=None,
    )
    assert (found.load_gb_s, found.read_gb_s) == (pytest.approx(3e-9), pytest.approx(4e-9))
    assert (found.share_of_read, found.share_of_read_new) == (0.75, 0.5)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_reader_reads_every_byte_of_every_file(tmp_path: Path, num_threads: int):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, size in zip(paths, (5, 70_000), strict=True):
        path.write_bytes(bytes(size))
    reader = FileReader(paths, num_threads)
    reader.read()
    reader.read_new()
    assert reader.num_bytes == 70_005
