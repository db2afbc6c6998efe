"""The shared library of kernels for NVIDIA GPUs (`csrc/cuda/`): loading, FFI target, the workspace
of a program, the rates of a card. Tests use the same kernels over an emulation of threads and
blocks, as a library for the host (`make -C csrc cuda-emulated`)."""

import ctypes
import functools
import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt

from cadenza.backends.base import OpTotals, ProductDType
from cadenza.backends.xla.ops.native_program import ProgramLibrary
from cadenza.backends.xla.ops.program_ops import Product
from cadenza.errors import ConfigError

CUDA_LIBRARY_NAME = "_cuda.so"

_TARGET = "cadenza_cuda_program"
# The types of arrays as XLA's FFI numbers them (`XLA_FFI_DataType`).
_CODE_OF_ELEMENT = {
    np.dtype(np.int8): 2,
    np.dtype(np.int32): 4,
    np.dtype(np.uint8): 6,
    np.dtype(np.uint16): 7,
    np.dtype(np.uint32): 8,
    np.dtype(np.float16): 10,
    np.dtype(np.float32): 11,
    np.dtype(ml_dtypes.bfloat16): 16,
    np.dtype(ml_dtypes.float8_e4m3fn): 20,
}
# Formats of weights (`WeightFormat` of csrc/core/types.h) by the type of their array.
_FORMATS = {
    np.dtype(ml_dtypes.bfloat16): 0,
    np.dtype(np.float32): 1,
    np.dtype(np.uint8): 2,
    np.dtype(ml_dtypes.float8_e4m3fn): 3,
}
# What tensor cores multiply; products of float32 are not theirs.
_RATES: dict[ProductDType, str] = {"bfloat16": "bf16", "int8": "int8"}


@dataclass(frozen=True)
class CudaLibrary(ProgramLibrary):
    """`platform` is XLA's name of where its target runs: "CUDA", or "cpu" of the emulation.
    `prefix` tells its target from those of other libraries in the process."""

    platform: str
    prefix: str = ""

    @property
    def target(self) -> str:
        return self.prefix + _TARGET

    def workspace_bytes(
        self, operations: Sequence[int], arrays: Sequence[jax.ShapeDtypeStruct], row_bound: int
    ) -> int:
        """What a program's operations need for themselves. Raises ConfigError if one cannot be
        computed with such arrays."""
        shapes = [word for each in arrays for word in _shape_words(each)]
        needed = ctypes.c_int64()
        error = self.handle.cadenza_cuda_workspace(
            *(_longs(shapes), len(shapes), _longs(operations), len(operations)),
            *(row_bound, ctypes.byref(needed)),
        )
        if error is not None:
            raise ConfigError(error.decode())
        return needed.value

    def prove_product(self, product: Product, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The kernel that computes a product from now on, for each number of rows and type of the
        result (`cadenza_cuda_prove` of csrc/cuda/c_api.cu). Raises ConfigError, with the weight's
        shape, if a row has other bits than alone."""
        weight = product.weight
        proof = _Proof(
            *(weight.unsafe_buffer_pointer(), _FORMATS[np.dtype(weight.dtype)]),
            *(_longs(weight.shape), weight.ndim, product.n, product.k),
            *(product.is_gated, product.x_dtype == np.float32, _longs(rows), len(rows)),
        )
        report = ctypes.c_char_p()
        error = self.handle.cadenza_cuda_prove(ctypes.byref(proof), ctypes.byref(report))
        if error is not None:
            raise ConfigError(
                f"the kernels for this device are not exact: {error.decode()}; use --ops "
                f"reference, and report the device and its driver"
            )
        return json.loads(report.value or b"[]")


class _Proof(ctypes.Structure):
    """`CadenzaCudaProof` of csrc/cuda/c_api.cu."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("format", ctypes.c_int64),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        *((name, ctypes.c_int64) for name in ("rank", "n", "k", "is_gated", "x_is_f32")),
        ("rows", ctypes.POINTER(ctypes.c_int64)),
        ("num_rows", ctypes.c_int64),
    )


def cuda_library_path() -> Path:
    return Path(__file__).resolve().parents[3] / CUDA_LIBRARY_NAME


def has_cuda_library() -> bool:
    return cuda_library_path().exists()


@functools.cache
def load_cuda_library() -> CudaLibrary:
    """Raises ConfigError if it was not built or cannot be loaded."""
    path = cuda_library_path()
    if not path.exists():
        raise ConfigError(
            f"the kernels for NVIDIA GPUs are not built ({path.name} is missing); reinstall with "
            "CADENZA_CUDA=1 and nvcc on PATH"
        )
    return open_cuda_library(path, platform="CUDA")


def faulty_cuda_library_path() -> Path:
    folder = Path(__file__).resolve().parents[5] / "csrc" / "build" / "native" / "faults"
    return folder / CUDA_LIBRARY_NAME


@functools.cache
def load_faulty_cuda_library() -> CudaLibrary:
    return open_cuda_library(faulty_cuda_library_path(), platform="CUDA", prefix="faulty_")


def open_cuda_library(path: Path, *, platform: str, prefix: str = "") -> CudaLibrary:
    """Registers its target under `prefix`. Raises ConfigError if it cannot be loaded."""
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(f"the kernels for NVIDIA GPUs cannot be loaded: {error}") from error
    measure = handle.cadenza_cuda_workspace
    measure.restype = ctypes.c_char_p
    longs = ctypes.POINTER(ctypes.c_int64)
    measure.argtypes = (*(longs, ctypes.c_int64, longs, ctypes.c_int64), *(ctypes.c_int64, longs))
    handle.cadenza_cuda_search_cublaslt.restype = None
    handle.cadenza_cuda_search_cublaslt.argtypes = (ctypes.c_char_p,)
    handle.cadenza_cuda_prove.restype = ctypes.c_char_p
    _find_cublaslt(handle)
    library = CudaLibrary(handle, platform, prefix)
    capsule = jax.ffi.pycapsule(handle.CadenzaCudaProgram)
    jax.ffi.register_ffi_target(library.target, capsule, platform=platform)
    return library


def _find_cublaslt(handle: ctypes.CDLL) -> None:
    # No search path of the system has the folders of NVIDIA's wheels.
    for package, folder in (("nvidia.cu13", "lib"), ("nvidia.cublas", "lib")):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for place in (spec and spec.submodule_search_locations) or ():
            handle.cadenza_cuda_search_cublaslt(str(Path(place) / folder).encode())


def _shape_words(array: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    return _CODE_OF_ELEMENT[np.dtype(array.dtype)], len(array.shape), *array.shape


def _longs(words: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(words))(*words)


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
