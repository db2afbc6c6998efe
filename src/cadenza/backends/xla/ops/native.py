"""The op table over the native CPU kernels, called through XLA's FFI: one call for a whole step. A
kernel receives the true number of rows, so padding is not computed. Legend as in `ops.table`."""

import ctypes
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cadenza.backends.base import OpTotals, ProductDType
from cadenza.backends.xla.ops.native_library import NativeLibrary, load_native_library
from cadenza.backends.xla.ops.native_program import NativeProgram
from cadenza.backends.xla.ops.packed_memory import PackedFile, PackedMemory, plan_packing
from cadenza.backends.xla.ops.program_ops import ProgramOps
from cadenza.backends.xla.ops.table import DecoderSpec, Linear
from cadenza.errors import ConfigError
from cadenza.weights.quantised_weight import HostWeight
from cadenza.weights.weight_format import WeightDType, WeightFormat

# Steps of at most this many tokens use smaller arrays; the arithmetic is the same.
DECODE_BUCKET = 64

# Enough rows for matrix products to reach full speed. 512 would double the inter-token latency of
# running streams while a prompt is computed, for 3 % more prompt tokens per second.
DEFAULT_MAX_TOKENS = 256
_ALIGNMENT = 64
# The types of the result and of the arguments.
_ENTRY_POINTS = {
    "measure_read": (ctypes.c_double, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int),
    "measure_multiply": (ctypes.c_double, ctypes.c_int, ctypes.c_int),
    "measure_multiply_codes": (ctypes.c_double, ctypes.c_int),
    "profile_read": (ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p),
}
_DTYPE_CODES: dict[WeightDType, int] = {"bfloat16": 0, "float32": 1}


class NativeOps(ProgramOps):
    """Calls kernels; weights are packed once, when the checkpoint is loaded."""

    name = "native"
    skips_padding = True

    def __init__(self, spec: DecoderSpec, library: NativeLibrary | None = None) -> None:
        super().__init__(spec)
        self._library = library or load_native_library()
        self._memory = PackedMemory(place=self._library.place_pages)

    def token_buckets(self, max_num_batched_tokens: int) -> tuple[int, ...]:
        """A small bucket for decode steps, and the full token budget."""
        small = min(DECODE_BUCKET, max_num_batched_tokens)
        return tuple(sorted({small, max_num_batched_tokens}))

    @contextmanager
    def loading(self, packed: Path | None) -> Generator[None]:
        file = None if packed is None else PackedFile(packed)
        self._memory = PackedMemory(file, self._library.place_pages)
        yield
        self._memory.keep()

    def _hold(
        self,
        experts: Sequence[Sequence[HostWeight]],
        format: WeightFormat | None,
        *,
        is_gated: bool = False,
    ) -> Linear:
        own = format or self._spec.weight_format
        packing = plan_packing(self._library, experts, own, is_gated=is_gated)

        def write_all(packed: npt.NDArray[Any]) -> None:
            for place, write in zip(packed, packing.writers, strict=True):
                write(place)

        shape = (len(experts), *packing.shape)
        weight = self._memory.hold(shape, packing.dtype, write_all)
        return Linear(weight, None, packing.format, sum(map(len, experts[0])))

    def _new_program(self) -> NativeProgram:
        return NativeProgram(self._library, is_portable=self._spec.is_portable)


class NativeInstruments:
    """Counters are active only between `start_profile` and `stop_profile`; otherwise they cost one
    relaxed atomic load per operation. Raises ConfigError if the library cannot be loaded or lacks
    the entry points (`csrc/ffi/c_api_bench.cpp`)."""

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
