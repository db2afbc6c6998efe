"""Functions of the host have recorded bits, and the values of the definition."""

import hashlib
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest

from cadenza.models.host_math import log, power, rotations
from cadenza.models.rope_config import LongRopeScaling, RopeConfig, RopeScaling, YarnRopeScaling
from cadenza.models.rope_factors import rope_factors

ROTATIONS = ["35a1c15895820456", "0859c7ca319d475a"]
ANGLES = np.concatenate(
    [np.arange(4096) / 7.0, np.arange(2048) * 8191.0 + 0.3, -np.arange(64) / 3.0, [math.pi / 4, 0]]
)
YARN = YarnRopeScaling(
    factor=7.0,
    original_max_position_embeddings=600,
    beta_fast=32.0,
    beta_slow=1.0,
    attention_factor=1.2,
    truncate=False,
)
LONG = LongRopeScaling(
    short_factor=(1.1,) * 24,
    long_factor=tuple(1 + index / 3 for index in range(24)),
    original_max_position_embeddings=256,
    attention_factor=1.19,
)


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def test_rotations_are_cosines_and_sines():
    cosines, sines = rotations(ANGLES)
    np.testing.assert_allclose(cosines, np.cos(ANGLES), rtol=0, atol=4e-16)
    np.testing.assert_allclose(sines, np.sin(ANGLES), rtol=0, atol=4e-16)


def test_rotations_have_recorded_bits():
    assert [digest(each) for each in rotations(ANGLES)] == ROTATIONS


@pytest.mark.parametrize("base", [10_000.0, 500_000.0, 1e6, 2.5])
def test_powers_are_those_of_higher_precision(base: float):
    for index in range(64):
        exponent = -index / 64
        with localcontext(prec=60):
            exact = Decimal(base) ** Decimal(exponent)
        assert power(base, exponent) == float(exact)


def test_logarithms_are_rounded_correctly():
    with localcontext(prec=60):
        assert all(log(x) == float(Decimal(x).ln()) for x in (0.1, 1.0, 3.0, 1e5, 131_072 / 8192))


@pytest.mark.parametrize(
    ("scaling", "recorded"),
    [(None, "0f4d41800c573109"), (YARN, "7395e9983e6e7ebc"), (LONG, "d8ff8949bf8fc2cc")],
)
def test_rope_factors_have_recorded_bits(scaling: RopeScaling | None, recorded: str):
    rope = RopeConfig(theta=10_000.0, rotary_dim=48, scaling=scaling)
    assert digest(rope_factors(rope, 1500)) == recorded
