"""What the native tests share: the loaded library, and calling a target once."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import pytest

from cadenza.backends.xla.ops.native_library import (
    NativeLibrary,
    PackLayout,
    empty_packed,
    load_native_library,
)

Call = Callable[..., Any]
Pack = Callable[..., npt.NDArray[Any]]


@pytest.fixture(scope="session")
def library() -> NativeLibrary:
    return load_native_library()


@pytest.fixture
def call(library: NativeLibrary) -> Call:
    """Calls a target under jit; `aliases` also donates the operands they name."""

    def run(
        target: str, out: Any, *args: Any, aliases: dict[int, int] | None = None, **attrs: Any
    ) -> Any:
        assert library.num_threads >= 1
        function = jax.ffi.ffi_call(f"cadenza_{target}", out, input_output_aliases=aliases)
        donated = tuple(aliases or ())
        return jax.jit(lambda *a: function(*a, **attrs), donate_argnums=donated)(*args)

    return run


@pytest.fixture
def pack(library: NativeLibrary) -> Pack:
    """Packs [n, K] weights side by side; a pair of equal weights with `is_gated`."""

    def run(*parts: npt.NDArray[Any], dtype: Any, is_gated: bool = False) -> npt.NDArray[Any]:
        columns = len(parts[0]) if is_gated else sum(map(len, parts))
        packed = empty_packed(columns, parts[0].shape[1], dtype, is_gated=is_gated)
        if is_gated:
            for part, layout in zip(parts, (PackLayout.GATE, PackLayout.UP), strict=True):
                library.pack(part, packed, num_columns=columns, layout=layout)
            return packed
        offset = 0
        for part in parts:
            library.pack(part, packed, num_columns=columns, column_offset=offset)
            offset += len(part)
        return packed

    return run


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(20)
