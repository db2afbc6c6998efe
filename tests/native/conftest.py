"""What the native tests share: the loaded library, and calling a target once."""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import pytest

from cadenza.backends.xla.ops.native_library import NativeLibrary, load_native_library, packed_shape
from cadenza.backends.xla.ops.native_program import NativeProgram
from cadenza.backends.xla.ops.packed_memory import PackedMemory

Call = Callable[..., Any]
Pack = Callable[..., npt.NDArray[Any]]


@pytest.fixture(scope="session")
def library() -> NativeLibrary:
    return load_native_library()


@pytest.fixture
def call(library: NativeLibrary) -> Call:
    """Calls an operation as a program of its own; `aliases` also donates the operands they name.

    A test's equal calls are one program.
    """
    programs: dict[Hashable, Callable[..., Any]] = {}

    def run(
        name: str, out: Any, *args: Any, aliases: dict[int, int] | None = None, **attrs: Any
    ) -> Any:
        assert library.num_threads >= 1

        def compute(*operands: Any) -> Any:
            program = NativeProgram(library)
            return program.emit(program.call(name, out, aliases)(*operands, **attrs))

        key = repr((name, out, aliases)), *sorted(attrs.items())
        if key not in programs:
            programs[key] = jax.jit(compute, donate_argnums=tuple(aliases or ()))
        return programs[key](*args)

    return run


@pytest.fixture
def pack(library: NativeLibrary) -> Pack:
    """Packs [n, K] weights side by side; a pair of equal weights with `is_gated`."""

    def run(*parts: npt.NDArray[Any], dtype: Any, is_gated: bool = False) -> npt.NDArray[Any]:
        columns = len(parts[0]) if is_gated else sum(map(len, parts))
        shape = packed_shape(columns, parts[0].shape[1], dtype, is_gated=is_gated)
        packed = PackedMemory().empty(shape, dtype)
        library.pack(parts, packed, is_gated=is_gated)
        return packed

    return run


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(20)
