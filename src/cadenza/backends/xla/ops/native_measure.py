"""Measuring through the native library: what the machine can do, and where a step's time goes.

Owns the C entry points that only measure (`csrc/ffi/c_api_bench.cpp`). Knows no step and no model.
Invariant: counters count only between `start_profile` and `stop_profile`; otherwise an operation
pays one load.
"""

import ctypes

import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.ops.native_library import load_native_library
from cadenza.errors import ConfigError

_ALIGNMENT = 64
_DTYPE_CODES = {"bfloat16": 0, "float32": 1}


def new_buffer(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory to be read, aligned, each page of it there."""
    memory = np.ones(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes]


class NativeMeasure:
    """The loaded library's measuring side. Raises ConfigError as `load_native_library`."""

    def __init__(self) -> None:
        self._library = load_native_library()
        handle = self._handle = self._library.handle
        try:
            handle.cadenza_measure_read.restype = ctypes.c_double
            handle.cadenza_measure_multiply.restype = ctypes.c_double
            handle.cadenza_profile_read.restype = ctypes.c_char_p
        except AttributeError as error:
            raise ConfigError(
                "the native CPU kernels are older than this package; install it again"
            ) from error
        handle.cadenza_measure_read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
        handle.cadenza_measure_multiply.argtypes = [ctypes.c_int, ctypes.c_int]

    @property
    def cpu_isa(self) -> str:
        return self._library.cpu_isa

    @property
    def num_threads(self) -> int:
        return self._library.num_threads

    def read_bytes_per_s(self, buffer: npt.NDArray[np.uint8], repeats: int) -> float:
        """All threads read a buffer of `new_buffer`; the fastest of the passes."""
        return self._handle.cadenza_measure_read(buffer.ctypes.data, buffer.nbytes, repeats)

    def operations_per_s(self, dtype: str, repeats: int) -> float:
        """All threads multiply in registers; a multiplication and its sum are two operations."""
        return self._handle.cadenza_measure_multiply(_DTYPE_CODES[dtype], repeats)

    def start_profile(self) -> None:
        self._handle.cadenza_profile_start()

    def stop_profile(self) -> None:
        self._handle.cadenza_profile_stop()

    def profile_totals(self) -> list[tuple[str, int, int, int]]:
        """(operation, calls, nanoseconds, bytes read) since the start, in the library's order."""
        found: list[tuple[str, int, int, int]] = []
        totals = (ctypes.c_int64 * 3)()
        for op in range(self._handle.cadenza_profile_num_ops()):
            name = self._handle.cadenza_profile_read(op, totals).decode()
            found.append((name, totals[0], totals[1], totals[2]))
        return found
