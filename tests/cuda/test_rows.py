"""Embedding, gather, rounding and gates of the kernels for GPUs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cuda.conftest import Call

pytestmark = [pytest.mark.native, pytest.mark.kernels]

WIDTHS = [24, 21]
"""Rows that vectors of 16 bytes divide, and rows that they do not."""


def like(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_an_embedding_scales_rows_of_the_table_and_gives_zeros_for_strange_ids(
    call: Call, width: int, dtype: Any
) -> None:
    generator = np.random.default_rng(width)
    table = generator.normal(size=(7, width)).astype(dtype)
    ids = np.array([3, 0, 6, 7, -1, 3, 99], np.int32)
    given = (ids, table, np.int32(6))
    found = call("embed", like((7, width), jnp.float32), *given, vocab=7, scale=np.float32(1.5))
    wide = np.vstack([table.astype(np.float32) * np.float32(1.5), np.zeros((1, width))])
    np.testing.assert_array_equal(np.asarray(found)[:6], wide[[3, 0, 6, 7, 7, 3]])


@pytest.mark.parametrize("width", WIDTHS)
def test_rounding_to_bfloat16_is_to_nearest_even(call: Call, width: int) -> None:
    x = np.random.default_rng(width).normal(size=(3, width)).astype(np.float32)
    x[0, :3] = 1 + 2.0**-8, 1 + 3 * 2.0**-8, np.inf
    found = call("convert", like(x.shape, jnp.bfloat16), x, np.int32(3))
    np.testing.assert_array_equal(np.asarray(found), x.astype(jnp.bfloat16))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_gather_keeps_bits_and_gives_zeros_for_rows_outside(
    call: Call, width: int, dtype: Any
) -> None:
    x = np.random.default_rng(width).normal(size=(4, width)).astype(dtype)
    x[2, :2] = np.nan, -0.0
    indices = np.array([2, 2, 4, -1, 0, 1], np.int32)
    found = call("take_rows", like((6, width), dtype), x, np.int32(5), indices)
    wide = np.vstack([x, np.zeros((1, width), dtype)])[[2, 2, 4, 4, 0]]
    assert np.asarray(found)[:5].tobytes() == wide.tobytes()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_gates_multiply_a_layers_part_of_the_inputs(call: Call, width: int, dtype: Any) -> None:
    generator = np.random.default_rng(width)
    x = generator.normal(size=(3, width)).astype(np.float32)
    inputs = generator.normal(size=(3, 3 * width)).astype(np.float32)
    given = (x, inputs, np.int32(3))
    found = call("gate_inputs", like(x.shape, dtype), *given, first=width, activation=0)
    expected = x / (1 + np.exp(-x)) * inputs[:, width : 2 * width]
    tolerance = 2e-6 if dtype == jnp.float32 else 2.0**-8
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=tolerance, atol=1e-7)
