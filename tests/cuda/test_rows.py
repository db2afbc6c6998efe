"""Embedding, gather, rounding, gates, norms, and image towers, of the kernels for GPUs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.backends.xla.ops.cuda import CudaOps
from cadenza.backends.xla.ops.cuda_library import CudaLibrary
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec, EncoderShape
from tests.cuda.conftest import Call
from tests.xla.encoder_parity import check_attention, check_elements, check_image_rows
from tests.xla.harness import HOSTILE

pytestmark = [pytest.mark.native, pytest.mark.kernels]

WIDTHS = [24, 21]  # rows that vectors of 16 bytes divide, and rows that they do not


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


EPS = np.float32(1e-5)


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + EPS) * weight


@pytest.mark.parametrize("width", [64, 300, 1024])
def test_a_norm_is_that_of_its_definition_and_of_each_row_alone(call: Call, width: int) -> None:
    generator = np.random.default_rng(width)
    x = generator.normal(size=(5, width)).astype(np.float32)
    weight = generator.normal(size=width).astype(np.float32)

    def run(rows: np.ndarray) -> np.ndarray:
        out = jax.ShapeDtypeStruct(rows.shape, jnp.float32)
        return np.asarray(call("rms_norm", out, rows, weight, jnp.int32(len(rows)), eps=EPS))

    together = run(x)
    np.testing.assert_allclose(together, normed(x, weight), rtol=2e-6, atol=1e-6)
    for row in range(len(x)):
        np.testing.assert_array_equal(run(x[row : row + 1])[0], together[row])


def test_a_norm_adds_its_residual_in_place_and_takes_a_factor(call: Call) -> None:
    generator = np.random.default_rng(1)
    x, residual = generator.normal(size=(2, 3, 128)).astype(np.float32)
    weight, factor = np.ones(64, np.float32), np.array([0.5], np.float32)
    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    found = call(
        *("rms_norm_add", out, x, weight, jnp.int32(3), jnp.asarray(residual), factor),
        aliases={3: 0},
        eps=EPS,
    )
    parts = normed(x.reshape(3, 2, 64), weight).reshape(3, 128)
    np.testing.assert_allclose(np.asarray(found), (residual + parts) * 0.5, rtol=2e-6, atol=1e-6)


DTYPES = ("float32", "bfloat16")


def tables(library: CudaLibrary, dtype: str) -> tuple[CudaOps, OpTable]:
    spec = DecoderSpec(model=HOSTILE, dtype=jnp.dtype(dtype).type, page_size=16)
    return CudaOps(spec, library), OpTable(spec)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_an_image_is_the_references_in_any_blocks(
    library: CudaLibrary, dtype: str
) -> None:
    shape = EncoderShape(num_heads=1, head_dim=24, scale=0.2)
    check_attention(*tables(library, dtype), shape, 40)


def test_attention_keeps_to_bounds_as_the_reference_does(library: CudaLibrary) -> None:
    first = np.arange(36) // 20 * 20
    bounds = np.stack([first, np.minimum(first + 20, 36)], axis=1).astype(np.int32)
    shape = EncoderShape(num_heads=2, head_dim=8, scale=0.3)
    check_attention(*tables(library, "float32"), shape, 36, bounds)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_activations_are_the_references(library: CudaLibrary, dtype: str) -> None:
    check_elements(*tables(library, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_images_have_the_references_bits(library: CudaLibrary, dtype: str) -> None:
    check_image_rows(*tables(library, dtype))
