"""Dense products of the kernels for GPUs: their values, and that a row's bits are those that it has
alone, in every number of rows, by every kernel."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cuda.conftest import Call

pytestmark = [pytest.mark.native, pytest.mark.kernels]

# Numbers of rows that differ in the tiles which compute them.
ALL_KERNELS = (1, 3, 8, 9, 17, 33, 65)


@dataclass(frozen=True)
class Product:
    call: Call
    dtype: Any
    n: int
    k: int

    def draw(self, *shape: int, seed: int = 0) -> jax.Array:
        values = np.random.default_rng([*shape, seed]).normal(size=shape)
        return jnp.asarray(values, self.dtype)

    @property
    def weight(self) -> jax.Array:
        return self.draw(self.n, self.k, seed=1)

    def rows(self, num: int) -> jax.Array:
        return self.draw(80, self.k)[:num]

    def linear(self, x: jax.Array, bias: Any = None, residual: Any = None) -> np.ndarray:
        out = jax.ShapeDtypeStruct((len(x), self.n), jnp.float32)
        operands = (x, self.weight, jnp.int32(len(x)), bias, residual)
        return np.asarray(self.call("linear", out, *operands, scale=np.float32(0.5)))

    def gated(self, x: jax.Array, bias: Any = None, activation: int = 0) -> np.ndarray:
        out = jax.ShapeDtypeStruct((len(x), self.n // 2), self.dtype)
        operands = (x, self.weight, jnp.int32(len(x)), bias)
        found = self.call("gated_linear", out, *operands, activation=activation)
        return np.asarray(found.astype(jnp.float32))


def wide(values: jax.Array) -> np.ndarray:
    return np.asarray(values.astype(jnp.float32)).astype(np.float64)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("k", [136, 37])
def test_a_linear_product_is_that_of_its_definition(call: Call, dtype: Any, k: int) -> None:
    product = Product(call, dtype, n=40, k=k)
    x = product.rows(5)
    bias = np.linspace(-3, 3, 40, dtype=np.float32)
    residual = np.linspace(-9, 9, 200, dtype=np.float32).reshape(5, 40)
    expected = wide(x) @ wide(product.weight).T
    np.testing.assert_allclose(product.linear(x), 0.5 * expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        product.linear(x, bias, residual), residual + 0.5 * (expected + bias), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("k", [64, 35])
def test_a_gated_product_is_that_of_its_definition(call: Call, dtype: Any, k: int) -> None:
    product = Product(call, dtype, n=84, k=k)
    x = product.rows(4)
    bias = np.linspace(-2, 2, 84, dtype=np.float32).reshape(2, 42)
    gate, up = np.split(wide(x) @ wide(product.weight).T, 2, axis=1)
    silu = (gate + bias[0]) / (1 + np.exp(-gate - bias[0])) * (up + bias[1])
    tolerance = 1e-2 if dtype == jnp.bfloat16 else 1e-4
    np.testing.assert_allclose(product.gated(x, bias), silu, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("k", [136, 20])
def test_a_row_of_a_product_has_the_bits_that_it_has_alone(call: Call, dtype: Any, k: int) -> None:
    product = Product(call, dtype, n=40, k=k)
    alone = product.linear(product.rows(1))[0]
    gated = product.gated(product.rows(1))[0]
    last = product.linear(product.rows(65)[64:])[0]
    for num in ALL_KERNELS:
        np.testing.assert_array_equal(product.linear(product.rows(num))[0], alone)
        np.testing.assert_array_equal(product.gated(product.rows(num))[0], gated)
    np.testing.assert_array_equal(product.linear(product.rows(65))[64], last)


@pytest.mark.parametrize("num", [2, 40])
def test_wide_and_narrow_weights_give_a_column_the_same_bits(call: Call, num: int) -> None:
    narrow = Product(call, jnp.bfloat16, n=16, k=16)
    weight = jnp.tile(narrow.weight, (513, 1))  # more columns than a block of few weight rows takes
    x = narrow.rows(num)
    out = jax.ShapeDtypeStruct((num, len(weight)), jnp.float32)
    found = call("linear", out, x, weight, jnp.int32(num), None, None, scale=np.float32(0.5))
    np.testing.assert_array_equal(np.asarray(found), np.tile(narrow.linear(x), 513))


def test_padding_rows_do_not_reach_others_whatever_they_hold(call: Call) -> None:
    product = Product(call, jnp.bfloat16, n=24, k=80)
    x = product.rows(12)
    padded = jnp.concatenate([x[:3], jnp.full((9, 80), jnp.nan, jnp.bfloat16)])
    out = jax.ShapeDtypeStruct((12, 24), jnp.float32)
    found = call(
        *("linear", out, padded, product.weight, jnp.int32(3), None, None), scale=np.float32(0.5)
    )
    np.testing.assert_array_equal(np.asarray(found)[:3], product.linear(x)[:3])


def test_threads_in_the_other_order_compute_the_same(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for order in ("forward", "backward"):
        monkeypatch.setenv("CADENZA_GPU_ORDER", order)
        found[order] = [
            compute(product.rows(num))
            for dtype in (jnp.bfloat16, jnp.float32)
            for product in [Product(call, dtype, n=40, k=520)]
            for num in (2, 20)
            for compute in (product.linear, product.gated)
        ]
    for forward, backward in zip(*found.values(), strict=True):
        np.testing.assert_array_equal(forward, backward)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("width", [24, 13])
def test_each_head_multiplies_its_part_by_its_weight(call: Call, dtype: Any, width: int) -> None:
    generator = np.random.default_rng(width)
    x = jnp.asarray(generator.normal(size=(3, 4, 32)), dtype)
    weight = jnp.asarray(generator.normal(size=(4, 10, width)), dtype)
    out = jax.ShapeDtypeStruct((3, 40), dtype)
    found = call("head_linear", out, x.reshape(3, -1), weight, jnp.int32(3), width=width)
    expected = np.einsum("thk,hnk->thn", wide(x[..., :width]), wide(weight)).reshape(3, 40)
    tolerance = 1e-2 if dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(wide(found), expected, rtol=tolerance, atol=tolerance)


def test_a_product_adds_to_its_residual_in_place(call: Call) -> None:
    product = Product(call, jnp.bfloat16, n=24, k=48)
    x, residual = product.rows(3), np.ones((3, 24), np.float32)
    out = jax.ShapeDtypeStruct(residual.shape, jnp.float32)
    found = call(
        *("linear", out, x, product.weight, jnp.int32(3), None, jnp.asarray(residual)),
        aliases={4: 0},
        scale=np.float32(0.5),
    )
    np.testing.assert_array_equal(np.asarray(found), product.linear(x, None, residual))


def test_a_weight_of_another_shape_is_refused(call: Call) -> None:
    product = Product(call, jnp.float32, n=24, k=48)
    with pytest.raises(Exception, match="does not fit"):
        product.linear(product.rows(2)[:, :40])
