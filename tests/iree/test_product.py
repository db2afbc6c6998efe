"""The order of sums in a compiled product, which `exactness = "bitwise"` rests on.

Each result is one ascending chain over the reduction, whatever the number of rows. No document of
IREE promises it: a module that another version compiles may have another order, and this test tells
at once.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

DATA = Path(__file__).with_name("data")
MODULE = DATA / "product.vmfb"
"""Of `product.mlir`, compiled with the flags of the bundled model's modules."""

needs_compiler = pytest.mark.skipif(
    find_spec("iree") is None or find_spec("iree.compiler") is None,
    reason="IREE's compiler is not installed: pip install '.[iree-export]'",
)


def run(module: bytes, x: np.ndarray, w: np.ndarray, driver: str = "local-task") -> np.ndarray:
    from cadenza.backends.iree.runner import IreeDevice, LoadedProgram

    device = IreeDevice(driver)
    program = LoadedProgram(device, "product", module, None)
    (made,) = program.call([device.upload(x), device.upload(w)])
    result = device.read(made)
    del made, program  # before the device
    return result


def chain(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The sums in ascending order, of products and sums that are each rounded to float32: generic
    x86-64 has no fused multiply-add."""
    total = np.zeros((len(x), len(w)), np.float32)
    for k in range(x.shape[1]):
        total = total + np.multiply.outer(x[:, k], w[:, k])
    return total


def operands() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    return (
        rng.standard_normal((8, 576), np.float32),
        rng.standard_normal((96, 576), np.float32),
    )


@pytest.mark.parametrize("driver", ["local-sync", "local-task"])
def test_a_compiled_product_is_one_ascending_chain(driver: str):
    x, w = operands()
    found = run(MODULE.read_bytes(), x, w, driver)
    assert np.array_equal(found.view(np.int32), chain(x, w).view(np.int32))
    backwards = chain(x[:, ::-1], w[:, ::-1])
    assert (found != backwards).mean() > 0.5, "another order has other bits"


def test_a_row_has_the_same_bits_beside_others_that_are_not_finite():
    x, w = operands()
    expected = run(MODULE.read_bytes(), x, w)
    spoilt = x.copy()
    spoilt[1:] = np.nan
    found = run(MODULE.read_bytes(), spoilt, w)
    assert np.array_equal(found[0].view(np.int32), expected[0].view(np.int32))


@needs_compiler
def test_the_installed_compiler_makes_the_same_product():
    from cadenza.backends.exporting import compile_module, compiler_flags

    text = (DATA / "product.mlir").read_text(encoding="utf-8")
    x, w = operands()
    made = compile_module(text, compiler_flags("llvm-cpu", "generic"))
    expected = run(MODULE.read_bytes(), x, w)
    assert np.array_equal(run(made, x, w).view(np.int32), expected.view(np.int32))
