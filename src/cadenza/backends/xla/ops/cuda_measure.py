"""Measuring through the library of kernels for GPUs: the rates of a card."""

import ctypes
import os

import numpy as np
import numpy.typing as npt

from cadenza.backends.base import OpTotals, ProductDType
from cadenza.backends.xla.ops.cuda_library import CudaLibrary
from cadenza.errors import ConfigError

# What tensor cores multiply; products of float32 are not theirs.
_RATES: dict[ProductDType, str] = {"bfloat16": "bf16", "int8": "int8"}


class CudaInstruments:
    """Implements `backends.base.Instruments`; a measurement has memory and repeats of its own."""

    def __init__(self, library: CudaLibrary) -> None:
        self._library = library

    @property
    def cpu_isa(self) -> str:
        return "cuda"

    @property
    def num_threads(self) -> int:
        return os.cpu_count() or 1

    def new_buffer(self, num_bytes: int) -> npt.NDArray[np.uint8]:  # noqa: ARG002
        return np.zeros(0, np.uint8)

    def read_bytes_per_s(self, buffer: npt.NDArray[np.uint8], *, repeats: int) -> float:  # noqa: ARG002
        return self._measure("read")

    def operations_per_s(self, dtype: ProductDType, *, repeats: int) -> float:  # noqa: ARG002
        """Raises ConfigError for float32."""
        if dtype not in _RATES:
            raise ConfigError(f"the rate of a card's products in {dtype} is not measured")
        return self._measure(_RATES[dtype])

    def start_profile(self) -> None:
        """Counts nothing."""

    def stop_profile(self) -> tuple[OpTotals, ...]:
        return ()

    def _measure(self, name: str) -> float:
        rate = ctypes.c_double()
        measure = getattr(self._library.handle, f"cadenza_cuda_measure_{name}")
        measure.restype = ctypes.c_char_p
        error = measure(ctypes.byref(rate))
        if error is not None:
            raise ConfigError(f"the card's rates cannot be measured: {error.decode()}")
        return rate.value
