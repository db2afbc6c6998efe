"""What the tests of the kernels for GPUs share: the kernels over emulated threads and blocks, as a
library for the host (`make -C csrc cuda-emulated`), and calling an operation once."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from cadenza.backends.xla.ops.cuda import CudaProgram
from cadenza.backends.xla.ops.cuda_library import CudaLibrary, open_cuda_library
from cadenza.backends.xla.ops.native_library import load_native_library
from tests.native.test_kernel_builds import CSRC, build

EMULATED = CSRC / "build" / "native" / "emulated_gpu" / "_cuda.so"

Call = Callable[..., Any]


@pytest.fixture(scope="session")
def emulated_path() -> Path:
    build(load_native_library(), "cuda-emulated")
    return EMULATED


@pytest.fixture(scope="session")
def library(request: pytest.FixtureRequest) -> CudaLibrary:
    """The emulation, or the library that CADENZA_TEST_GPU names, on a card."""
    if real := os.environ.get("CADENZA_TEST_GPU"):
        return open_cuda_library(Path(real), platform="CUDA", prefix="tested_")
    path = request.getfixturevalue("emulated_path")
    return open_cuda_library(path, platform="cpu", prefix="emulated_")


@pytest.fixture
def call(library: CudaLibrary) -> Call:
    """Calls an operation as a program of its own; `aliases` also donates the operands they name."""

    def run(
        name: str, out: Any, *args: Any, aliases: dict[int, int] | None = None, **attrs: Any
    ) -> Any:
        def compute(*operands: Any) -> Any:
            program = CudaProgram(library)
            return program.emit(program.call(name, out, aliases)(*operands, **attrs))

        return jax.jit(compute, donate_argnums=tuple(aliases or ()))(*args)

    return run
