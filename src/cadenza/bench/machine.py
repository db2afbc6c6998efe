"""This machine: what it is, and the rates it reaches; each the best of its runs, because a bound is
what the machine can do. Invariant: the description holds neither the machine's name nor its
user's."""

import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

import cadenza
from cadenza.backends.base import Instruments, ProductDType
from cadenza.bench.bounds import Roofline

REPEATS = 15
"""Runs of a measurement by `cadenza bench roofline`."""

MIN_BUFFER_BYTES = 256 << 20
CACHES = 8
"""The buffer is at least this many times the largest cache."""

_BLOCK_BYTES = 1 << 20
_MAX_BUFFER_BYTES = 4 << 30
_CACHE_SIZES = "devices/system/cpu/cpu0/cache"
_CPU_INFO = Path("/proc/cpuinfo")
_MATRIX = 1024


def describe_machine(instruments: Instruments | None) -> dict[str, object]:
    return {
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "cores": num_usable_cores(),
        "threads": None if instruments is None else instruments.num_threads,
        "isa": None if instruments is None else instruments.cpu_isa,
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "jax": _version("jax"),
        "cadenza": cadenza.__version__,
    }


def cpu_name(cpu_info: Path = _CPU_INFO) -> str:
    """The processor's name from /proc/cpuinfo; elsewhere from Python."""
    try:
        lines = cpu_info.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), "") or platform.processor() or platform.machine()


def num_usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class RooflineProbe:
    """Measures read bandwidth and multiply peak for `dtype` with all threads; keeps its buffer, so
    that repeats are short."""

    def __init__(self, instruments: Instruments | None, dtype: ProductDType) -> None:
        self._instruments = instruments
        self._dtype: ProductDType = dtype
        self._buffer = None if instruments is None else instruments.new_buffer(buffer_bytes())

    def measure(self, repeats: int = REPEATS) -> Roofline:
        """The best of the repeats; with numpy where there are no native kernels."""
        if self._instruments is None or self._buffer is None:
            return _measure_in_numpy(repeats)
        read = self._instruments.read_bytes_per_s(self._buffer, repeats=repeats)
        multiply = self._instruments.operations_per_s(self._dtype, repeats=repeats)
        return Roofline(
            read_gb_s=read / 1e9, gflop_s=multiply / 1e9, dtype=self._dtype, method="native"
        )


def buffer_bytes() -> int:
    """The size of a buffer well beyond the last-level cache, a multiple of the kernels' block."""
    wanted = max(MIN_BUFFER_BYTES, CACHES * largest_cache_bytes())
    return min(wanted, _MAX_BUFFER_BYTES) // _BLOCK_BYTES * _BLOCK_BYTES


def largest_cache_bytes(system: Path = Path("/sys")) -> int:
    """The largest cache of the first core; 0 where the system does not list caches."""
    sizes = [0]
    for path in (system / _CACHE_SIZES).glob("index*/size"):
        text = path.read_text().strip()
        number, unit = text.rstrip("KMG"), text[-1:]
        if number.isdecimal():
            sizes.append(int(number) << {"K": 10, "M": 20, "G": 30}.get(unit, 0))
    return max(sizes)


def _measure_in_numpy(repeats: int) -> Roofline:
    """A lower estimate: reductions in threads, and numpy's own float32 product."""
    threads = num_usable_cores()
    data = np.ones(buffer_bytes() // 8, np.int64)
    parts = np.array_split(data, threads)
    left, right = (np.ones((_MATRIX, _MATRIX), np.float32) for _ in range(2))
    with ThreadPoolExecutor(threads) as pool:
        read_s = _best_s(lambda: list(pool.map(np.bitwise_xor.reduce, parts)), repeats)
    multiply_s = _best_s(lambda: left @ right, repeats)
    return Roofline(
        read_gb_s=data.nbytes / read_s / 1e9,
        gflop_s=2 * _MATRIX**3 / multiply_s / 1e9,
        dtype="float32",
        method="numpy",
    )


def _best_s(action: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return best
