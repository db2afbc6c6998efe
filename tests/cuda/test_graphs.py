"""On a card, what a program launches is replayed for arrays at the same places only if their shapes
and types are the same, too. The allocator gives arrays of about the same size the same places."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.cuda.conftest import Call

pytestmark = [pytest.mark.native, pytest.mark.kernels]

COLUMNS = 3
NONE = np.zeros(0, np.float32)


@pytest.mark.parametrize(
    "programs",
    [
        [(64, np.float32), (63, np.float32)],
        [(61, np.float32), (62, np.float32)],
        [(128, ml_dtypes.bfloat16), (64, np.float32)],
    ],
    ids=["aligned", "unaligned", "types"],
)
def test_arrays_of_another_shape_or_type_at_the_same_places_are_read_as_such(
    call: Call, programs: list[tuple[int, Any]]
) -> None:
    for reduction, dtype in programs:
        random = np.random.default_rng(reduction)
        x, w = (random.normal(size=(n, reduction)).astype(dtype) for n in (1, COLUMNS))
        expected = x.astype(np.float64) @ w.astype(np.float64).T
        out = jax.ShapeDtypeStruct((1, COLUMNS), jnp.float32)
        for _ in range(4):
            found = call("linear", out, x, w, np.int32(1), NONE, NONE, scale=np.float32(1.0))
            np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-4, atol=1e-4)
            del found
