"""How fast weights are loaded, beside the page cache's own speed, in a fresh process (`python -m
cadenza_bench.load JSON`), so that the first load's memory is watched before anything else has taken
any. Invariant: the page cache is warm; each timed load has readings of the same files right before
it."""

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from cadenza import EngineConfig
from cadenza.backends import find_backend
from cadenza.bench import OnStatus
from cadenza.bench.machine import num_usable_cores
from cadenza.bench.workloads import check_repeats
from cadenza.checkpoint.folder import Checkpoint
from cadenza.cli.report import Machine, Result, counted, machine_text, picked, section_text
from cadenza.loading.build import find_configured, open_planned
from cadenza.loading.memory import private_memory_bytes
from cadenza_bench.fresh_process import run_in_fresh_process

# Private memory that loading may take beside the weights and the largest tensor.
ALLOWED_BYTES = 500_000_000

_TIMEOUT_S = 3600.0
_BLOCK_BYTES = 64 << 20  # memory that is read into again and again: larger than a core's caches

_SAMPLE_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Seconds of each measured load and reading. `file_bytes`: of the checkpoint's files;
    `read_bytes`: of the files that timed loads read: these, or the weights that were kept of
    --quantization."""

    file_bytes: int
    read_bytes: int
    weight_bytes: int
    largest_tensor_bytes: int
    num_threads: int
    load_s: Sequence[float]
    read_s: Sequence[float]  # into memory that is already resident
    read_new_s: Sequence[float]  # into memory that the system has yet to provide
    peak_private_bytes: int | None

    @property
    def load_gb_s(self) -> float:
        return self._gb_s(self.load_s)

    @property
    def read_gb_s(self) -> float:
        return self._gb_s(self.read_s)

    @property
    def read_new_gb_s(self) -> float:
        return self._gb_s(self.read_new_s)

    @property
    def share_of_read(self) -> float:
        return self.load_gb_s / self.read_gb_s

    @property
    def share_of_read_new(self) -> float:
        return self.load_gb_s / self.read_new_gb_s

    @property
    def allowed_private_bytes(self) -> int:
        return self.weight_bytes + self.largest_tensor_bytes + ALLOWED_BYTES

    def _gb_s(self, runs_s: Sequence[float]) -> float:
        return self.read_bytes / statistics.median(runs_s) / 1e9


def measure_load(
    model: str | Path | None, config: EngineConfig, *, repeats: int, report: OnStatus
) -> Load:
    """One load that warms the page cache and whose memory is watched, then `repeats` timed ones.
    Raises CheckpointError, ConfigError where the model cannot be found, or `repeats` is out of
    bounds, RunnerError where the loading process failed."""
    check_repeats(repeats)
    find_configured(model, config)
    report(f"loading {repeats + 1} times")
    name = None if model is None else str(model)
    argument = json.dumps({"model": name, "config": asdict(config), "repeats": repeats})
    found = run_in_fresh_process(
        "cadenza_bench.load", argument, what="loading", timeout_s=_TIMEOUT_S
    )
    return Load(**found)


_FIGURES = (
    *("file_bytes", "read_bytes", "weight_bytes", "largest_tensor_bytes", "num_threads"),
    *("load_gb_s", "read_gb_s", "share_of_read", "read_new_gb_s", "share_of_read_new"),
    *("peak_private_bytes", "allowed_private_bytes", "load_s", "read_s", "read_new_s"),
)


def load_result(machine: Machine, found: Load) -> Result:
    """The rates, their shares, and the memory that loading took."""
    figures = picked(found, *_FIGURES)
    title = f"medians of {counted(len(found.load_s), 'load')}"
    text = (machine_text(machine), section_text(title, figures))
    return Result(facts={"machine": machine, "results": figures}, text=text)


class FileReader:
    """Reads files with several threads, each its own part of every file."""

    def __init__(self, paths: Sequence[Path], num_threads: int) -> None:
        self._paths = paths
        self._num_threads = num_threads
        self.num_bytes = sum(path.stat().st_size for path in paths)
        self._buffers = [np.ones(_BLOCK_BYTES, np.uint8) for _ in range(num_threads)]

    def read(self) -> None:
        """Into resident memory, a block at a time."""
        self._in_threads(self._read_resident)

    def read_new(self) -> None:
        """Into new memory of the files' size."""
        self._in_threads(self._read_new)

    def _in_threads(self, action: Callable[[int], None]) -> None:
        with ThreadPoolExecutor(self._num_threads) as pool:
            list(pool.map(action, range(self._num_threads)))

    def _read_resident(self, index: int) -> None:
        for path in self._paths:
            with path.open("rb", buffering=0) as file:
                begin, end = self._part(file.fileno(), index)
                while begin < end:
                    memory = self._buffers[index].data[: end - begin]
                    begin += os.preadv(file.fileno(), [memory], begin)

    def _read_new(self, index: int) -> None:
        for path in self._paths:
            with path.open("rb", buffering=0) as file:
                begin, end = self._part(file.fileno(), index)
                memory = np.empty(end - begin, np.uint8).data
                while memory:
                    count = os.preadv(file.fileno(), [memory], begin)
                    begin, memory = begin + count, memory[count:]

    def _part(self, descriptor: int, index: int) -> tuple[int, int]:
        size = os.fstat(descriptor).st_size
        return size * index // self._num_threads, size * (index + 1) // self._num_threads


class MemoryWatch:
    """The most private memory that the process held between entering and leaving."""

    def __init__(self) -> None:
        self.peak_bytes = private_memory_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._take()

    def _sample(self) -> None:
        while not self._done.wait(_SAMPLE_S):
            self._take()

    def _take(self) -> None:
        now = private_memory_bytes()
        if now is not None and self.peak_bytes is not None:
            self.peak_bytes = max(self.peak_bytes, now)


def largest_tensor_bytes(checkpoint: Checkpoint) -> int:
    return max(checkpoint.weights.num_bytes(name) for name in checkpoint.weights)


def measure_here(argument: str) -> Load:
    """Loads and reads in this process. `argument` is JSON: `{"model", "config", "repeats"}`."""
    asked = json.loads(argument)
    config = EngineConfig(**asked["config"])
    engine = open_planned(asked["model"], config)
    checkpoint, plan = engine.checkpoint, engine.plan

    def load() -> None:
        engine.load_runner().close()

    with MemoryWatch() as watch:
        load()
    instruments = find_backend(config.backend).open_instruments()
    num_threads = num_usable_cores() if instruments is None else instruments.num_threads
    paths = [checkpoint.folder / file.name for file in checkpoint.weights.files]
    kept = engine.kept_weights()
    reader = FileReader(paths if kept is None else [kept], num_threads)
    reader.read()
    timed: list[list[float]] = [[], [], []]
    for _ in range(asked["repeats"]):
        for seconds, action in zip(timed, (reader.read, reader.read_new, load), strict=True):
            start_s = time.perf_counter()
            action()
            seconds.append(time.perf_counter() - start_s)
    read_s, read_new_s, load_s = timed
    return Load(
        file_bytes=sum(path.stat().st_size for path in paths),
        read_bytes=reader.num_bytes,
        weight_bytes=plan.weight_bytes,
        largest_tensor_bytes=largest_tensor_bytes(checkpoint),
        num_threads=num_threads,
        load_s=load_s,
        read_s=read_s,
        read_new_s=read_new_s,
        peak_private_bytes=watch.peak_bytes,
    )


if __name__ == "__main__":
    print(json.dumps(asdict(measure_here(sys.argv[1]))), flush=True)
