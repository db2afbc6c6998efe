"""The shared library of kernels for NVIDIA GPUs: loading, FFI target, the workspace of a program.

`csrc/cuda/` has its sources; `csrc/README.md` their conventions. The same kernels over an emulation
of threads and blocks are a library for the host, which tests use (`make -C csrc cuda-emulated`).
"""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from cadenza.backends.xla.ops.native_program import ProgramLibrary
from cadenza.errors import ConfigError

CUDA_LIBRARY_NAME = "_cuda.so"

_TARGET = "cadenza_cuda_program"
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
"""The types of arrays as XLA's FFI numbers them (`XLA_FFI_DataType`)."""


@dataclass(frozen=True)
class CudaLibrary(ProgramLibrary):
    """The loaded library; created by `load_cuda_library` or `open_cuda_library`.

    `platform` is XLA's name of where its target runs: "CUDA", or "cpu" of the emulation. `prefix`
    tells its target from those of other libraries in the process.
    """

    platform: str
    prefix: str = ""

    @property
    def target(self) -> str:
        return self.prefix + _TARGET

    def workspace_bytes(
        self, operations: Sequence[int], arrays: Sequence[jax.ShapeDtypeStruct], row_bound: int
    ) -> int:
        """The bytes that a program's operations need for themselves, one after another.

        Raises ConfigError if an operation cannot be computed with such arrays.
        """
        shapes = [word for each in arrays for word in _shape_words(each)]
        needed = ctypes.c_int64()
        error = self.handle.cadenza_cuda_workspace(
            *(_longs(shapes), len(shapes), _longs(operations), len(operations)),
            *(row_bound, ctypes.byref(needed)),
        )
        if error is not None:
            raise ConfigError(error.decode())
        return needed.value


def cuda_library_path() -> Path:
    """The library's path, in the package's root folder."""
    return Path(__file__).resolve().parents[3] / CUDA_LIBRARY_NAME


def has_cuda_library() -> bool:
    """Whether the package was built with the kernels for GPUs."""
    return cuda_library_path().exists()


@functools.cache
def load_cuda_library() -> CudaLibrary:
    """Loads the package's library once and registers its target.

    Raises ConfigError if it was not built or cannot be loaded.
    """
    path = cuda_library_path()
    if not path.exists():
        raise ConfigError(
            f"the kernels for NVIDIA GPUs are not built ({path.name} is missing); reinstall with "
            "CADENZA_CUDA=1 and nvcc on PATH"
        )
    return open_cuda_library(path, platform="CUDA")


def open_cuda_library(path: Path, *, platform: str, prefix: str = "") -> CudaLibrary:
    """Loads a library and registers its target under `prefix`.

    Raises ConfigError if it cannot be loaded.
    """
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(f"the kernels for NVIDIA GPUs cannot be loaded: {error}") from error
    measure = handle.cadenza_cuda_workspace
    measure.restype = ctypes.c_char_p
    longs = ctypes.POINTER(ctypes.c_int64)
    measure.argtypes = (
        *(longs, ctypes.c_int64, longs, ctypes.c_int64),
        *(ctypes.c_int64, longs),
    )
    library = CudaLibrary(handle, platform, prefix)
    capsule = jax.ffi.pycapsule(handle.CadenzaCudaProgram)
    jax.ffi.register_ffi_target(library.target, capsule, platform=platform)
    return library


def _shape_words(array: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    return _CODE_OF_ELEMENT[np.dtype(array.dtype)], len(array.shape), *array.shape


def _longs(words: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(words))(*words)
