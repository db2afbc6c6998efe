"""Rope factors: every position's own cosines and sines, however they are put together."""

import numpy as np
import pytest

from cadenza.backends.xla.rope import BLOCK, rope_factors
from cadenza.checkpoint.rope_config import RopeConfig, YarnRopeScaling

ROPE = RopeConfig(theta=10_000.0, rotary_dim=64)
SCALED = RopeConfig(
    theta=500_000.0,
    rotary_dim=64,
    scaling=YarnRopeScaling(
        factor=4.0,
        original_max_position_embeddings=64,
        beta_fast=32.0,
        beta_slow=1.0,
        attention_factor=1.25,
        truncate=True,
    ),
)


def direct(rope: RopeConfig, position: int) -> np.ndarray:
    """Of one position, from its own angles."""
    angles = position * rope.theta ** (-np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim)
    return np.concatenate([np.cos(angles), np.sin(angles)])


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 131_072])
def test_each_position_has_its_own_turn(length: int):
    factors = rope_factors(ROPE, length)
    assert (factors.shape, factors.dtype) == ((length, 64), np.float32)
    positions = sorted(
        {0, 1, length // 3, length // 2, length - 2, length - 1} & set(range(length))
    )
    expected = np.stack([direct(ROPE, position) for position in positions])
    # Half a unit in the last place of float32, and what rounding differently in float64 may add.
    assert np.abs(factors[positions] - expected).max() < 3.01e-8


@pytest.mark.parametrize("rope", [ROPE, SCALED], ids=["plain", "scaled"])
def test_a_position_does_not_depend_on_how_many_there_are(rope: RopeConfig):
    whole = rope_factors(rope, 3 * BLOCK + 7)
    for length in (1, 100, BLOCK, BLOCK + 5, 3 * BLOCK):
        assert rope_factors(rope, length).tobytes() == whole[:length].tobytes()


def test_an_attention_factor_stretches_every_turn():
    factors = rope_factors(SCALED, BLOCK + 9)
    lengths = np.hypot(factors[:, :32], factors[:, 32:])
    np.testing.assert_allclose(lengths, 1.25, rtol=1e-6)
