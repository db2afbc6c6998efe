"""Measuring through the native library: memory bandwidth, FLOP/s, and time per operation
(`csrc/ffi/c_api_bench.cpp`). Counters are active only between `start_profile` and `stop_profile`;
otherwise they cost one relaxed atomic load per operation."""

import ctypes

import numpy as np
import numpy.typing as npt

from cadenza.backends.base import OpTotals, ProductDType
from cadenza.backends.xla.ops.native_library import load_native_library
from cadenza.errors import ConfigError
from cadenza.weights.dtypes import WeightDType

_ALIGNMENT = 64
# The types of the result and of the arguments.
_ENTRY_POINTS = {
    "measure_read": (ctypes.c_double, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int),
    "measure_multiply": (ctypes.c_double, ctypes.c_int, ctypes.c_int),
    "measure_multiply_codes": (ctypes.c_double, ctypes.c_int),
    "profile_read": (ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p),
}
_DTYPE_CODES: dict[WeightDType, int] = {"bfloat16": 0, "float32": 1}


class NativeInstruments:
    """Raises ConfigError if the library cannot be loaded or lacks the entry points."""

    def __init__(self) -> None:
        self._library = load_native_library()
        handle = self._handle = self._library.handle
        try:
            for name, (result, *arguments) in _ENTRY_POINTS.items():
                entry = getattr(handle, f"cadenza_{name}")
                entry.restype, entry.argtypes = result, arguments
        except AttributeError as error:
            raise ConfigError(
                "the native CPU kernels are older than this package; install it again"
            ) from error

    @property
    def cpu_isa(self) -> str:
        return self._library.cpu_isa

    @property
    def num_threads(self) -> int:
        return self._library.num_threads

    def new_buffer(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """A buffer aligned to 64 bytes whose pages are all resident."""
        memory = np.ones(num_bytes + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        return memory[start : start + num_bytes]

    def read_bytes_per_s(self, buffer: npt.NDArray[np.uint8], *, repeats: int) -> float:
        return self._handle.cadenza_measure_read(buffer.ctypes.data, buffer.nbytes, repeats)

    def operations_per_s(self, dtype: ProductDType, *, repeats: int) -> float:
        if dtype == "int8":
            return self._handle.cadenza_measure_multiply_codes(repeats)
        return self._handle.cadenza_measure_multiply(_DTYPE_CODES[dtype], repeats)

    def start_profile(self) -> None:
        self._handle.cadenza_profile_start()

    def stop_profile(self) -> tuple[OpTotals, ...]:
        self._handle.cadenza_profile_stop()
        return tuple(map(self._totals, range(self._handle.cadenza_profile_num_ops())))

    def _totals(self, op: int) -> OpTotals:
        totals = (ctypes.c_int64 * 3)()  # calls, nanoseconds, bytes read
        name = self._handle.cadenza_profile_read(op, totals).decode()
        return OpTotals(
            name=name, num_calls=totals[0], elapsed_s=totals[1] / 1e9, read_bytes=totals[2]
        )
