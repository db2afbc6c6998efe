"""Products with float8_e4m3fn weights on GPUs: the bits of their definition."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cadenza.weights.quantised_weight import Float8Weight
from cadenza.weights.weight_format import FLOAT8_BLOCK
from tests.cuda.conftest import Call, call_on_cpu
from tests.native.float8_definition import pack, product, random_weight, values
from tests.native.quantised_definition import fma

pytestmark = [pytest.mark.native, pytest.mark.kernels]

NONE = np.zeros(0, np.float32)
BF16 = ml_dtypes.bfloat16
# Columns and reductions; the last has two rounds of blocks.
SHAPES = [(37, 256), (33, 31), (20, 300), (5, 1100)]


def linear(call: Call, x: npt.NDArray[Any], weight: Any, columns: int) -> npt.NDArray[Any]:
    out = jax.ShapeDtypeStruct((len(x), columns), jnp.float32)
    scale = np.float32(1.0)
    return np.asarray(call("linear", out, x, weight, np.int32(len(x)), NONE, NONE, scale=scale))


def given(shape: tuple[int, int], rows: int) -> tuple[Float8Weight, Any]:
    random = np.random.default_rng(sum(shape))
    x: Any = random.normal(size=(rows, shape[1])).astype(np.float32)
    return random_weight(random, *shape), x


@pytest.mark.parametrize("rows", [1, 9, 17])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_in_float32_has_the_bits_of_its_definition(
    call: Call, shape: tuple[int, int], rows: int
) -> None:
    weight, x = given(shape, rows)
    found = linear(call, x, pack(weight), shape[0])
    assert found.tobytes() == product(x, weight).tobytes()


@pytest.mark.parametrize("rows", [1, 9, 17])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_in_bfloat16_folds_the_dense_products_of_its_blocks(
    call: Call, shape: tuple[int, int], rows: int
) -> None:
    weight, wide = given(shape, rows)
    x = wide.astype(BF16)
    expected = np.zeros((rows, shape[0]), np.float32)
    for block in range(weight.scales.shape[1]):
        part = slice(block * FLOAT8_BLOCK, (block + 1) * FLOAT8_BLOCK)
        dense = np.ascontiguousarray(values(weight)[:, part].astype(BF16))
        sums = linear(call, np.ascontiguousarray(x[:, part]), dense, shape[0])
        expected = fma(sums, weight.scales[None, :, block], expected)
    assert linear(call, x, pack(weight), shape[0]).tobytes() == expected.tobytes()


def test_every_code_has_its_value_and_a_nan_makes_its_column_nan(call: Call) -> None:
    codes = np.stack([np.arange(256), np.zeros(256)], axis=1).astype(np.uint8)
    weight = Float8Weight(codes, np.ones((256, 1), np.float32))
    for dtype in (np.float32, BF16):
        found = linear(call, np.ones((1, 2), dtype), pack(weight), 256)[0]
        np.testing.assert_array_equal(found, values(weight)[:, 0] + np.float32(0.0))


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_gated_experts_are_near_those_of_the_cpu(call: Call, dtype: Any) -> None:
    random, experts, hidden, inner = np.random.default_rng(1), 3, 140, 20
    pairs = [[random_weight(random, inner, hidden) for _ in range(2)] for _ in range(experts)]
    packed = np.stack([pack(*pair, is_gated=True) for pair in pairs])
    x = (random.normal(size=(5, hidden)) * 0.01).astype(dtype)
    ids = np.array([[0, 2], [2, 1], [-1, 0], [1, 0], [2, 3]], np.int32)
    out = jax.ShapeDtypeStruct((5, 2, inner), dtype)
    operands = out, x, packed, np.int32(5), NONE, ids
    valid = (ids >= 0) & (ids < experts)
    found, expected = (
        np.asarray(run("grouped_gated_linear", *operands, activation=np.int64(0)))[valid]
        for run in (call, call_on_cpu)
    )
    theirs = expected.astype(np.float64)
    atol = (1e-5 if dtype == np.float32 else 2e-2) * np.abs(theirs).max()
    np.testing.assert_allclose(found.astype(np.float64), theirs, rtol=0, atol=atol)


def test_each_head_has_a_weight_of_its_own(call: Call) -> None:
    random = np.random.default_rng(2)
    weights = [random_weight(random, 33, 40) for _ in range(2)]
    x: Any = random.normal(size=(2, 96)).astype(np.float32)
    out = jax.ShapeDtypeStruct((2, 66), jnp.float32)
    packed = np.stack([pack(each) for each in weights])
    found = np.asarray(call("head_linear", out, x, packed, np.int32(2), width=np.int64(40)))
    parts = x.reshape(2, 2, 48)[:, :, :40]
    expected = np.stack([product(parts[:, h], each) for h, each in enumerate(weights)], axis=1)
    assert found.tobytes() == expected.tobytes()
