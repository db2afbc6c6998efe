"""What the tests of the kernels for GPUs share: the kernels over emulated threads and blocks, as a
library for the host (`make -C csrc cuda-emulated`), or a library on a card, calling an operation
once, and references, which the first CPU computes."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from cadenza.backends.xla.ops.cuda import CudaProgram
from cadenza.backends.xla.ops.cuda_library import (
    CudaLibrary,
    faulty_cuda_library_path,
    open_cuda_library,
)
from cadenza.backends.xla.ops.native_library import load_native_library
from tests.native.quantised_definition import call as call_by_default
from tests.native.test_kernel_builds import CSRC, build

EMULATED = CSRC / "build" / "native" / "emulated_gpu" / "_cuda.so"

Call = Callable[..., Any]

CARD = "CADENZA_TEST_GPU"  # names a library; the tests then run on a card

# Names a library with faults, for a card; else it is where make puts it.
FAULTS = "CADENZA_TEST_GPU_FAULTS"


def on_cpu(compute: Call) -> Call:
    def moved(value: Any) -> Any:
        return np.asarray(value) if isinstance(value, jax.Array) else value

    def run(*operands: Any, **named: Any) -> Any:
        with jax.default_device(jax.devices("cpu")[0]):
            found = compute(*jax.tree.map(moved, operands), **jax.tree.map(moved, named))
            return jax.tree.map(moved, found)

    return run


# Calls an operation of the kernels for CPUs as a program of its own.
call_on_cpu = on_cpu(call_by_default)


@pytest.fixture(scope="session")
def emulated_path() -> Path:
    build(load_native_library(), "cuda-emulated")
    return EMULATED


@pytest.fixture(scope="session")
def library(request: pytest.FixtureRequest) -> CudaLibrary:
    """The emulation, or the library that CADENZA_TEST_GPU names, on a card."""
    if real := os.environ.get(CARD):
        return open_cuda_library(Path(real), platform="CUDA", prefix="tested_")
    path = request.getfixturevalue("emulated_path")
    return open_cuda_library(path, platform="cpu", prefix="emulated_")


@pytest.fixture(scope="session")
def faulty_library(library: CudaLibrary) -> CudaLibrary:
    """One whose faults can be injected: the emulation, or beside the library on a card."""
    if not os.environ.get(CARD):
        return library
    path = Path(os.environ.get(FAULTS) or faulty_cuda_library_path())
    if not path.is_file():
        pytest.skip(
            f"{path} is not there; `make -C csrc cuda-faults` makes it, or name it: {FAULTS}"
        )
    return open_cuda_library(path, platform="CUDA", prefix="tested_faulty_")


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
