"""Rope factors: every position's own cosines and sines, however they are put together.

The engine's and the witness's implementation are compared over every scaling. Negative controls: a
fault in one of them exceeds the tolerance of that comparison, and changes the tokens that the gate
compares.
"""

import math
from dataclasses import replace

import numpy as np
import pytest

from cadenza.backends.xla.reference_mixers import reference_rope
from cadenza.backends.xla.reference_model import ReferenceModel
from cadenza.models.rope_config import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    YarnRopeScaling,
)
from cadenza.models.rope_factors import ROPE_BLOCK_LEN, rope_factors
from cadenza.request import Request, SamplingParams
from cadenza.verification.reference import ReferenceEngine
from tests.xla.harness import BASE, HOSTILE, Lab, Mode, serve

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
    angles = position * rope.theta ** (-np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim)
    return np.concatenate([np.cos(angles), np.sin(angles)])


@pytest.mark.parametrize(
    "length", [1, ROPE_BLOCK_LEN - 1, ROPE_BLOCK_LEN, ROPE_BLOCK_LEN + 1, 131_072]
)
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
    whole = rope_factors(rope, 3 * ROPE_BLOCK_LEN + 7)
    for length in (1, 100, ROPE_BLOCK_LEN, ROPE_BLOCK_LEN + 5, 3 * ROPE_BLOCK_LEN):
        assert rope_factors(rope, length).tobytes() == whole[:length].tobytes()


def test_an_attention_factor_stretches_every_turn():
    factors = rope_factors(SCALED, ROPE_BLOCK_LEN + 9)
    lengths = np.hypot(factors[:, :32], factors[:, 32:])
    np.testing.assert_allclose(lengths, 1.25, rtol=1e-6)


LLAMA3 = Llama3RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
YARN = YarnRopeScaling(
    factor=4.0,
    original_max_position_embeddings=64,
    attention_factor=0.1 * math.log(4.0) + 1.0,
    beta_fast=16.0,
    beta_slow=0.3,
    truncate=True,
)
LONGROPE = LongRopeScaling(
    short_factor=tuple(1.0 + i / 8 for i in range(16)),
    long_factor=tuple(2.0 + i / 4 for i in range(16)),
    original_max_position_embeddings=700,
    attention_factor=1.19,
)
SCALINGS: dict[str, RopeScaling | None] = {
    "default": None,
    "linear": LinearRopeScaling(factor=8.0),
    "llama3": LLAMA3,
    "llama3, narrow": replace(LLAMA3, low_freq_factor=2.0, high_freq_factor=2.5),
    "yarn": YARN,
    "yarn, not truncated": replace(YARN, truncate=False),
    "yarn, an empty ramp": replace(YARN, beta_fast=1e-3, beta_slow=1e-3),
    "longrope, short": LONGROPE,
    "longrope, long": replace(LONGROPE, original_max_position_embeddings=32),
}
FAULTS: dict[str, tuple[RopeScaling, RopeScaling]] = {
    "yarn without its attention factor": (YARN, replace(YARN, attention_factor=1.0)),
    "longrope without its attention factor": (LONGROPE, replace(LONGROPE, attention_factor=1.0)),
    "llama3 with a wrong low_freq_factor": (LLAMA3, replace(LLAMA3, low_freq_factor=2.0)),
    "llama3 with a wrong high_freq_factor": (LLAMA3, replace(LLAMA3, high_freq_factor=6.0)),
    "yarn with a wrong beta_slow": (YARN, replace(YARN, beta_slow=0.9)),
}
NUM_POSITIONS = 677  # beyond one block of shared turns, and within `LONGROPE`'s original length


def distance(rope: RopeConfig, other: RopeConfig) -> float:
    ours, theirs = rope_factors(rope, NUM_POSITIONS), reference_rope(other, NUM_POSITIONS)
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    return float(np.abs(ours.astype(np.float64) - theirs).max())


TOLERANCE = 1.2e-7  # one unit in the last place of float32 below 2


@pytest.mark.parametrize("theta", [500.0, 1e6])
@pytest.mark.parametrize("name", SCALINGS)
def test_the_witness_and_the_engine_agree_on_every_scaling(name: str, theta: float):
    rope = RopeConfig(theta=theta, rotary_dim=32, scaling=SCALINGS[name])
    assert distance(rope, rope) <= TOLERANCE


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_one_of_the_two_exceeds_the_tolerance(name: str):
    """The negative control: whichever of the two has the fault."""
    sound, faulty = (RopeConfig(theta=500.0, rotary_dim=32, scaling=s) for s in FAULTS[name])
    assert distance(faulty, sound) > 1e4 * TOLERANCE
    assert distance(sound, faulty) > 1e4 * TOLERANCE


def test_a_model_without_rotary_positions_has_no_columns():
    assert reference_rope(None, 7).shape == rope_factors(None, 7).shape == (7, 0)


REQUESTS = [
    Request(
        prompt_token_ids=tuple(np.random.default_rng(seed).integers(3, 211, 200).tolist()),
        params=SamplingParams(max_tokens=24, temperature=1.0, seed=seed, ignore_eos=True),
    )
    for seed in range(4)
]


def differs_from_witness(lab: Lab, engine_rope: RopeConfig, witness_rope: RopeConfig) -> bool:
    """What the gate asks: are the tokens of an engine with one rope the witness's with another?"""
    runner = lab.runner_with(lab.weights("hostile"), replace(HOSTILE, rope=engine_rope))
    streams = serve(runner, BASE, REQUESTS, Mode(caching=False)).streams
    witness = ReferenceEngine(
        ReferenceModel(
            replace(HOSTILE, rope=witness_rope), lab.weights("hostile"), BASE.max_model_len
        ),
        max_model_len=BASE.max_model_len,
        eos_token_ids=HOSTILE.eos_token_ids,
    )
    return any(
        witness.run(request).token_ids != stream.token_ids
        for request, stream in zip(REQUESTS, streams, strict=True)
    )


@pytest.mark.parametrize("name", ["yarn without its attention factor", *list(FAULTS)[2:4]])
def test_a_fault_of_the_engines_rope_changes_the_tokens_that_the_gate_compares(lab: Lab, name: str):
    sound, faulty = (RopeConfig(theta=1e4, rotary_dim=16, scaling=s) for s in FAULTS[name])
    assert not differs_from_witness(lab, sound, sound)
    assert differs_from_witness(lab, faulty, sound)


def test_queries_of_late_positions_are_multiplied_by_a_factor():
    """As in Ministral 3: 1 + beta * ln(1 + floor(position / original length))."""
    scaling = YarnRopeScaling(
        factor=4.0,
        original_max_position_embeddings=100,
        attention_factor=1.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=True,
    )
    plain = RopeConfig(theta=1e6, rotary_dim=8, scaling=scaling)
    scaled = RopeConfig(theta=1e6, rotary_dim=8, scaling=replace(scaling, query_beta=0.3))
    factors = rope_factors(scaled, 350)
    assert factors.shape == (350, 9)
    assert np.array_equal(factors[:, :8], rope_factors(plain, 350))
    expected = [1.0 + 0.3 * math.log(1 + position // 100) for position in range(350)]
    assert np.allclose(factors[:, 8], expected, rtol=1e-7, atol=0)
    assert factors[99, 8] == 1.0 < factors[100, 8]
