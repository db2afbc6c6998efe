"""Sampled frequencies against the exact distribution, and the independence of the noise.

Fixed seeds: a p-value below 1e-4 would be a fault, not bad luck. Each test has a sampler that is
wrong in the way it looks for, which must fail.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np
import pytest
from scipy import stats

from cadenza.backends.xla.ops.rules import CHOICE as device
from cadenza.batch.draw_keys import draw_keys
from cadenza.request import SamplingParams
from cadenza.verification.reference import kept_tokens
from tests.xla.test_sampling import arrays_of

VOCAB_SIZE = 29
BATCH = 2000
NUM_DRAWS = 120_000
SMALLEST_P = 1e-4
LOGITS = np.random.default_rng(1).normal(0, 1.5, VOCAB_SIZE).astype(np.float32)
PARAMS = {
    "plain": SamplingParams(temperature=1.0),
    "cold": SamplingParams(temperature=0.4),
    "hot": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(temperature=1.0, top_k=5),
    "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "min_p": SamplingParams(temperature=1.0, min_p=0.1),
    "top_n_sigma": SamplingParams(temperature=1.0, top_n_sigma=1.2),
    "all": SamplingParams(temperature=1.4, top_k=12, top_p=0.9, min_p=0.05),
}
tokens_of = jax.jit(lambda logits, arrays: device.choose_tokens(logits, arrays)[:, 0])
noise_of = jax.jit(device.token_noise, static_argnums=1)

Streams = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def one_seed(index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draw i is position i of one stream."""
    return np.full(len(index), 12345, np.uint64), index


def many_seeds(index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draw i is position 7 of the stream with seed i."""
    return index.astype(np.uint64), np.full(len(index), 7)


def exact_distribution(params: SamplingParams) -> np.ndarray:
    scaled = LOGITS / np.float32(params.temperature)
    mass = np.exp(scaled.astype(np.float64)) * kept_tokens(scaled, params)
    return mass / mass.sum()


def frequencies(params: SamplingParams, streams: Streams) -> np.ndarray:
    """How often each token came in NUM_DRAWS draws [V]."""
    logits = np.tile(LOGITS, (BATCH, 1))
    counts = np.zeros(VOCAB_SIZE, np.int64)
    arrays = arrays_of([params] * BATCH, np.zeros(BATCH))
    for start in range(0, NUM_DRAWS, BATCH):
        seeds, positions = streams(np.arange(start, start + BATCH))
        keys = draw_keys(seeds, positions.astype(np.int32))
        counts += np.bincount(tokens_of(logits, replace(arrays, keys=keys)), minlength=VOCAB_SIZE)
    return counts


def p_value(counts: np.ndarray, distribution: np.ndarray) -> float:
    """Of the chi-square test, tokens that can hardly come pooled into one cell."""
    assert counts[distribution == 0].sum() == 0, "a dropped token was drawn"
    expected = distribution * counts.sum()
    rare = expected < 10
    observed = np.append(counts[~rare], counts[rare].sum())
    predicted = np.append(expected[~rare], expected[rare].sum())
    if predicted[-1] < 10:
        observed[-2:-1] += observed[-1]
        predicted[-2:-1] += predicted[-1]
        observed, predicted = observed[:-1], predicted[:-1]
    return float(stats.chisquare(observed, predicted).pvalue)


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("streams", [one_seed, many_seeds])
def test_sampled_frequencies_are_the_exact_distribution(name: str, streams: Streams):
    params = PARAMS[name]
    assert p_value(frequencies(params, streams), exact_distribution(params)) > SMALLEST_P


def test_a_slightly_other_temperature_is_told_apart():
    counts = frequencies(SamplingParams(temperature=1.03), one_seed)
    assert p_value(counts, exact_distribution(PARAMS["plain"])) < SMALLEST_P


def uniforms(seeds: np.ndarray, positions: np.ndarray, vocab_size: int) -> np.ndarray:
    """The noise as numbers that should be uniform on 0 to 1: [L, V]."""
    keys = draw_keys(seeds.astype(np.uint64), positions.astype(np.int32))
    return np.exp(-np.exp(-np.asarray(noise_of(keys, vocab_size), np.float64)))


def pair_p_value(first: np.ndarray, second: np.ndarray) -> float:
    """Of the chi-square test that pairs fall evenly into 16 × 16 cells."""
    counts, _, _ = np.histogram2d(first.ravel(), second.ravel(), bins=16, range=[[0, 1], [0, 1]])
    return float(stats.chisquare(counts.ravel()).pvalue)


def are_independent(first: np.ndarray, second: np.ndarray) -> bool:
    bound = 4.5 / np.sqrt(first.size)
    correlation = np.corrcoef(first.ravel(), second.ravel())[0, 1]
    return bool(abs(correlation) < bound and pair_p_value(first, second) > SMALLEST_P)


INDEX = np.arange(500)
NEIGHBOURS = {
    "next_position": (INDEX * 0 + 9, INDEX, INDEX * 0 + 9, INDEX + 1),
    "position_after_next": (INDEX * 0 + 9, INDEX, INDEX * 0 + 9, INDEX + 2),
    "next_seed": (INDEX, INDEX * 0 + 3, INDEX + 1, INDEX * 0 + 3),
    "seed_and_position_swapped": (INDEX, INDEX + 1, INDEX + 1, INDEX),
    "high_bits_of_the_seed": (INDEX, INDEX * 0, INDEX + (1 << 40), INDEX * 0),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_noise_of_neighbouring_draws_is_independent(name: str):
    seeds, positions, other_seeds, other_positions = NEIGHBOURS[name]
    first = uniforms(seeds, positions, 401)
    assert are_independent(first, uniforms(other_seeds, other_positions, 401))


@pytest.mark.parametrize("distance", [1, 2, 64, 128])
def test_noise_of_neighbouring_tokens_is_independent(distance: int):
    noise = uniforms(INDEX, INDEX[::-1], 401)
    assert are_independent(noise[:, :-distance], noise[:, distance:])


def test_the_noise_is_uniform():
    noise = uniforms(INDEX, INDEX * 31, 401)
    counts, _ = np.histogram(noise, bins=1000, range=(0, 1))
    assert stats.chisquare(counts).pvalue > SMALLEST_P


def test_slightly_dependent_noise_is_told_apart():
    first, second = uniforms(INDEX, INDEX, 401), uniforms(INDEX, INDEX + 1, 401)
    assert not are_independent(first, first)
    assert not are_independent(first, np.where(second < 0.05, first, second))


def test_no_two_of_a_million_draws_share_a_key():
    seeds = np.repeat(np.arange(1000, dtype=np.uint64), 1000)
    positions = np.tile(np.arange(1000, dtype=np.int32), 1000)
    keys = draw_keys(seeds, positions).view(np.uint64).ravel()
    assert len(np.unique(keys)) == len(keys)
