"""RMSNorm of the kernels for GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cuda.conftest import Call

pytestmark = [pytest.mark.native, pytest.mark.kernels]

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
