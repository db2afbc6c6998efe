"""Run in a process of its own: loads weights, reads their files, prints how long each took.

`python -m cadenza.bench.load_probe JSON` with `{"model", "config", "repeats"}`; the answer is one
JSON line of `cadenza.bench.load.Load`'s fields. The first load is watched for memory, before
anything else has taken any, and is not timed.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from cadenza import EngineConfig
from cadenza.backends import find_backend
from cadenza.bench.roofline import num_usable_cores
from cadenza.checkpoint import Checkpoint
from cadenza.loading.build import find_checkpoint, load_runner, plan_model
from cadenza.loading.memory import private_memory_bytes

_BLOCK_BYTES = 64 << 20
"""Of memory that is read into again and again: beyond the caches of a core."""

_SAMPLE_S = 0.002


class FileReader:
    """Reads files whole, with several threads, each its own part of every file."""

    def __init__(self, paths: Sequence[Path], num_threads: int) -> None:
        self._paths = paths
        self._num_threads = num_threads
        self.num_bytes = sum(path.stat().st_size for path in paths)
        self._buffers = [np.ones(_BLOCK_BYTES, np.uint8) for _ in range(num_threads)]

    def read(self) -> None:
        """Into memory that is there, a block at a time."""
        self._in_threads(self._read_again)

    def read_new(self) -> None:
        """Into memory of the files' whole size that nobody has touched yet."""
        self._in_threads(self._read_anew)

    def _in_threads(self, action: Callable[[int], None]) -> None:
        with ThreadPoolExecutor(self._num_threads) as pool:
            list(pool.map(action, range(self._num_threads)))

    def _read_again(self, index: int) -> None:
        for path in self._paths:
            with path.open("rb", buffering=0) as file:
                begin, end = self._bounds(file.fileno(), index)
                while begin < end:
                    memory = self._buffers[index].data[: end - begin]
                    begin += os.preadv(file.fileno(), [memory], begin)

    def _read_anew(self, index: int) -> None:
        for path in self._paths:
            with path.open("rb", buffering=0) as file:
                begin, end = self._bounds(file.fileno(), index)
                memory = np.empty(end - begin, np.uint8).data
                while memory:
                    count = os.preadv(file.fileno(), [memory], begin)
                    begin, memory = begin + count, memory[count:]

    def _bounds(self, descriptor: int, index: int) -> tuple[int, int]:
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


def main(text: str) -> None:
    """Prints the object that the module's docstring describes."""
    asked = json.loads(text)
    config = EngineConfig(**asked["config"])
    checkpoint = find_checkpoint(asked["model"], revision=config.revision)
    plan = plan_model(checkpoint, config)

    def load() -> None:
        load_runner(checkpoint, plan, config).close()

    with MemoryWatch() as watch:
        load()
    instruments = find_backend(config.backend).open_instruments()
    num_threads = num_usable_cores() if instruments is None else instruments.num_threads
    paths = [checkpoint.folder / file.name for file in checkpoint.weights.files]
    reader = FileReader(paths, num_threads)
    reader.read()
    times: dict[str, list[float]] = {"read_s": [], "read_new_s": [], "load_s": []}
    actions = (reader.read, reader.read_new, load)
    for _ in range(asked["repeats"]):
        for runs_s, action in zip(times.values(), actions, strict=True):
            start_s = time.perf_counter()
            action()
            runs_s.append(time.perf_counter() - start_s)
    found = {
        "file_bytes": reader.num_bytes,
        "weight_bytes": plan.weight_bytes,
        "largest_tensor_bytes": largest_tensor_bytes(checkpoint),
        "num_threads": num_threads,
        "peak_private_bytes": watch.peak_bytes,
        **times,
    }
    print(json.dumps(found), flush=True)


def largest_tensor_bytes(checkpoint: Checkpoint) -> int:
    """As it is stored."""
    return max(checkpoint.weights.entry(name).num_bytes for name in checkpoint.weights)


if __name__ == "__main__":
    main(sys.argv[1])
