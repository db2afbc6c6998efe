"""Hidden states folded to an embedding: the same bits however they come, and of unit length."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from cadenza.batch.prompt import Pool

STATES = np.random.default_rng(3).normal(size=(150, 24)).astype(np.float32)
STATES[::7] *= np.float32(1e6)
"""Of magnitudes so different that a sum in another order has other bits."""


def pooled(parts: Sequence[np.ndarray], dimensions: int | None = None) -> bytes:
    pool = Pool(dimensions=dimensions)
    for part in parts:
        pool.add(part)
    assert pool.finish()
    assert pool.embedding is not None
    return pool.embedding


def test_a_state_that_is_not_scaled_is_as_it_was() -> None:
    pool = Pool(dimensions=None, normalize=False)
    pool.add(STATES[-1:])
    assert pool.finish()
    assert pool.embedding == STATES[-1].astype("<f4").tobytes()
    assert pooled([STATES[-1:]]) != pool.embedding


def values_of(embedding: bytes) -> np.ndarray:
    return np.frombuffer(embedding, "<f4")


@pytest.mark.parametrize("cuts", [[1], [149], [10, 20, 30], list(range(1, 150))])
def test_the_bits_do_not_depend_on_the_cuts(cuts: list[int]) -> None:
    assert pooled(np.split(STATES, cuts)) == pooled([STATES])


class SumsEachPart(Pool):
    def add(self, states: np.ndarray) -> None:
        super().add(states.sum(axis=0, dtype=np.float32)[None])


def test_a_sum_of_sums_is_caught() -> None:
    found = []
    for cuts in ([], [10, 20, 30]):
        pool = SumsEachPart(dimensions=None)
        for part in np.split(STATES, cuts):
            pool.add(part)
        pool.finish()
        found.append(pool.embedding)
    assert found[0] != found[1]


def test_it_is_the_mean_at_unit_length() -> None:
    mean = STATES.astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(
        values_of(pooled([STATES])), mean / np.linalg.norm(mean), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("dimensions", [1, 5, 24])
def test_what_is_kept_has_unit_length(dimensions: int) -> None:
    values = values_of(pooled([STATES[:1]], dimensions))
    assert len(values) == dimensions
    assert math.isclose(float(np.linalg.norm(values)), 1.0, rel_tol=1e-6)
    assert (np.sign(values) == np.sign(STATES[0, :dimensions])).all()


def test_a_mean_of_zeros_stays_as_it_is() -> None:
    assert not values_of(pooled([np.zeros((2, 4), np.float32)])).any()


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_states_that_are_not_finite_have_no_embedding(odd: float) -> None:
    pool = Pool(dimensions=None)
    pool.add(np.array([[1.0, odd], [2.0, 3.0]], np.float32))
    assert not pool.finish()
    assert pool.embedding is None
