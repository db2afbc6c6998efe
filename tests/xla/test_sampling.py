"""The device's sampler against the reference engine's: what is kept, drawn and reported.

The reference sorts where the device bisects. Where a sum of float32 masses lies within rounding of
top-p's bound both answers are right; such rows are counted and must be rare.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import log_softmax

from cadenza.backends.token_choice import (
    COLUMN_LOGPROB,
    COLUMN_RANK,
    COLUMN_STATE,
    COLUMN_TOKEN,
    COLUMN_TOP,
    NUM_TOP,
)
from cadenza.backends.xla.ops.reference import CHOICE as device
from cadenza.batch.draw_keys import draw_keys
from cadenza.batch.step_schema import LogitInputs
from cadenza.request import SamplingParams
from cadenza.verification.reference import choose_token, gumbel_noise, kept_tokens
from tests.contract.steps import logit_rows

ROWS = 64
VOCAB_SIZES = (23, 331)
choose_tokens = jax.jit(device.choose_tokens)
kept_on_device = jax.jit(device._kept)
noise_on_device = jax.jit(device.token_noise, static_argnums=1)


def random_logits(rng: np.random.Generator, vocab_size: int) -> np.ndarray:
    """[ROWS, V]: smooth, tied in steps, flat, one peak, huge, tiny and signed zeros."""
    logits = rng.normal(0, rng.choice([0.1, 1.0, 4.0, 30.0], (ROWS, 1)), (ROWS, vocab_size))
    logits[::7] = np.round(logits[::7])
    logits[1::7] = np.round(logits[1::7] * 4) / 4
    logits[2::14] = 1.25
    logits[9::14] = np.where(rng.random(logits[9::14].shape) < 0.5, 0.0, -0.0)
    logits[3::14, vocab_size // 2] += 60.0
    logits[10::14] *= 1e-30
    logits[4::14] *= 1e4
    return logits.astype(np.float32)


def random_params(rng: np.random.Generator, vocab_size: int) -> list[SamplingParams]:
    """Each filter off in half of the rows, so that every combination occurs."""
    return [
        SamplingParams(
            temperature=float(rng.choice([0.0, 0.05, 0.7, 1.0, 1.0, 5.0, 100.0])),
            top_k=int(rng.choice([0, 0, 0, -1, 1, 2, 7, vocab_size, vocab_size + 1, 1 << 30])),
            top_p=float(rng.choice([1.0, 1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.999])),
            min_p=float(rng.choice([0.0, 0.0, 0.0, 1e-6, 0.01, 0.3, 1.0])),
            top_n_sigma=float(rng.choice([0.0, 0.0, 0.0, -1.0, 0.01, 0.7, 2.0, 100.0])),
            seed=int(rng.integers(0, 1 << 62)),
            logprobs=[None, 0, 20][rng.integers(3)],
        )
        for _ in range(ROWS)
    ]


def arrays_of(params: list[SamplingParams], positions: np.ndarray) -> LogitInputs[Any]:
    seeds = np.array([p.seed or 0 for p in params], np.uint64)
    return logit_rows(
        len(params),
        positions=positions,
        temperature=jnp.array([0.0 if p.is_greedy else p.temperature for p in params], jnp.float32),
        top_k=jnp.array([max(p.top_k, 0) for p in params], jnp.int32),
        top_p=jnp.array([p.top_p for p in params], jnp.float32),
        min_p=jnp.array([p.min_p for p in params], jnp.float32),
        top_n_sigma=jnp.array([max(p.top_n_sigma, 0.0) for p in params], jnp.float32),
        keys=jnp.asarray(draw_keys(seeds, positions.astype(np.int32))),
        num_logprobs=jnp.array(
            [-1 if p.logprobs is None else p.logprobs for p in params], jnp.int32
        ),
    )


def batches(count: int, vocab_size: int):
    for seed in range(count):
        rng = np.random.default_rng([vocab_size, seed])
        logits, params = random_logits(rng, vocab_size), random_params(rng, vocab_size)
        yield logits, params, rng.integers(0, 1 << 20, ROWS)


def scaled_by(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    return logits / np.float32(params.temperature)


def is_on_the_edge(scaled: np.ndarray, params: SamplingParams) -> bool:
    """Whether rounding alone decides what a threshold leaves, by float64 deviations and masses."""
    falling = np.sort(scaled.astype(np.float64))[::-1]
    lowest = falling[0] + np.log(params.min_p) if params.min_p > 0 else -np.inf
    near_sigma = False
    if params.top_n_sigma > 0:
        floor = falling[0] - params.top_n_sigma * np.std(falling)
        near_sigma = bool((np.abs(falling - floor) <= 1e-5 * np.ptp(falling)).any())
        lowest = max(lowest, floor)
    left = falling[falling >= lowest]
    top_k = params.top_k if 0 < params.top_k <= len(left) else len(left)
    mass = np.exp(falling - falling[0]) * (falling >= left[top_k - 1])
    reached = np.cumsum(mass) / mass.sum()
    near_top_p = params.top_p < 1 and bool((np.abs(reached - params.top_p) < 1e-5).any())
    near_min_p = params.min_p > 0 and bool(
        (np.abs(falling - falling[0] - np.log(params.min_p)) < 1e-4).any()
    )
    return near_top_p or near_min_p or near_sigma


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_the_kept_tokens_are_the_references(vocab_size: int):
    num_rows = num_on_the_edge = 0
    for logits, params, positions in batches(40, vocab_size):
        sampled = [i for i, p in enumerate(params) if not p.is_greedy]
        scaled = np.stack(
            [
                scaled_by(logits[i], p) if not p.is_greedy else logits[i]
                for i, p in enumerate(params)
            ]
        )
        kept = np.asarray(kept_on_device(scaled, arrays_of(params, positions)))
        for row in sampled:
            num_rows += 1
            if not np.array_equal(kept[row], kept_tokens(scaled[row], params[row])):
                num_on_the_edge += 1
                assert is_on_the_edge(scaled[row], params[row]), f"{params[row]}"
    assert num_rows > 1500
    assert num_on_the_edge <= num_rows // 200


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_the_chosen_tokens_are_the_references(vocab_size: int):
    num_other = num_rows = 0
    for logits, params, positions in batches(40, vocab_size):
        result = np.asarray(choose_tokens(logits, arrays_of(params, positions)))
        for row, chosen in enumerate(result[:, COLUMN_TOKEN].tolist()):
            seed, position = params[row].seed or 0, int(positions[row])
            expected = choose_token(logits[row], params[row], seed=seed, position=position)
            num_rows += 1
            if chosen != expected:
                num_other += 1
                assert not params[row].is_greedy
                assert is_on_the_edge(scaled_by(logits[row], params[row]), params[row])
    assert num_other <= num_rows // 500, f"{num_other} of {num_rows} rows differ"


def test_the_noise_is_the_references_to_the_last_digits():
    for seed in range(20):
        position = seed * 977
        keys = draw_keys(np.array([seed], np.uint64), np.array([position], np.int32))
        theirs = gumbel_noise(seed, position, 5003)
        ours = np.asarray(noise_on_device(keys, 5003))[0]
        assert np.isfinite(ours).all()
        assert np.abs(ours - theirs).max() < 1e-5
        wrong = gumbel_noise(seed, position + 1, 5003)
        assert np.abs(ours - wrong).max() > 1.0, "the comparison could not fail"


def test_the_noise_of_a_token_does_not_depend_on_the_vocabulary_or_the_row():
    keys = draw_keys(np.arange(4, dtype=np.uint64), np.arange(4, dtype=np.int32))
    wide = np.asarray(noise_on_device(keys, 331))
    assert np.array_equal(np.asarray(noise_on_device(keys, 23)), wide[:, :23])
    assert np.array_equal(np.asarray(noise_on_device(keys[::-1], 331))[::-1], wide)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_ties_go_to_the_lowest_id(vocab_size: int):
    logits = np.zeros((ROWS, vocab_size), np.float32)
    first = np.arange(ROWS) % (vocab_size - 1)
    for row, token in enumerate(first):
        logits[row, token:] = 2.0
    params = [SamplingParams(temperature=0.0, logprobs=20)] * ROWS
    result = np.asarray(choose_tokens(logits, arrays_of(params, np.zeros(ROWS))))
    assert np.array_equal(result[:, COLUMN_TOKEN], first)
    num_tied = np.minimum(vocab_size - first, NUM_TOP)
    for row in range(ROWS):
        top = result[row, COLUMN_TOP : COLUMN_TOP + num_tied[row]]
        assert top.tolist() == list(range(first[row], first[row] + num_tied[row]))
    assert (result[:, COLUMN_RANK] == 1).all()


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_log_probabilities_and_ranks_equal_log_softmax(vocab_size: int):
    for logits, params, positions in batches(6, vocab_size):
        loud = [SamplingParams(**{**_fields(p), "logprobs": 20}) for p in params]
        result = np.asarray(choose_tokens(logits, arrays_of(loud, positions)))
        exact = log_softmax(logits.astype(np.float64), axis=1)
        rows, tokens = np.arange(ROWS), result[:, COLUMN_TOKEN]
        chosen = result[:, COLUMN_LOGPROB].view(np.float32)
        scale = np.maximum(1.0, np.abs(logits).max(axis=1))
        assert (np.abs(chosen - exact[rows, tokens]) <= 1e-5 * scale).all()
        ranks = 1 + (logits > logits[rows, tokens][:, None]).sum(axis=1)
        assert np.array_equal(result[:, COLUMN_RANK], ranks)
        top_ids = result[:, COLUMN_TOP : COLUMN_TOP + NUM_TOP]
        falling = np.argsort(-logits, axis=1, kind="stable")[:, :NUM_TOP]
        assert np.array_equal(top_ids, falling)
        top = result[:, COLUMN_TOP + NUM_TOP :].view(np.float32)
        assert (np.abs(top - exact[rows[:, None], top_ids]) <= 1e-5 * scale[:, None]).all()


def _fields(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}


def test_the_log_probabilities_of_a_small_vocabulary_sum_to_one():
    logits = np.random.default_rng(3).normal(0, 3, (ROWS, NUM_TOP)).astype(np.float32)
    params = [SamplingParams(temperature=0.0, logprobs=20)] * ROWS
    result = np.asarray(choose_tokens(logits, arrays_of(params, np.zeros(ROWS))))
    top = result[:, COLUMN_TOP + NUM_TOP :].view(np.float32).astype(np.float64)
    assert np.abs(np.exp(top).sum(axis=1) - 1).max() < 1e-5


def test_a_greedy_row_has_the_same_bits_whatever_its_neighbours_ask_for():
    logits = random_logits(np.random.default_rng(4), 331)
    quiet = [SamplingParams(temperature=0.0)] * ROWS
    alone = np.asarray(choose_tokens(logits, arrays_of(quiet, np.zeros(ROWS))))
    neighbours = random_params(np.random.default_rng(5), 331)
    neighbours[0] = SamplingParams(temperature=1.0, top_p=0.5, logprobs=20)
    greedy_rows = list(range(1, ROWS, 2))
    for row in greedy_rows:
        neighbours[row] = quiet[row]
    beside = np.asarray(choose_tokens(logits, arrays_of(neighbours, np.zeros(ROWS))))
    columns = [COLUMN_TOKEN, COLUMN_STATE]
    assert np.array_equal(alone[greedy_rows][:, columns], beside[greedy_rows][:, columns])
    assert not np.array_equal(alone[:, COLUMN_TOKEN], beside[:, COLUMN_TOKEN])


def test_a_sampled_row_has_the_same_bits_in_every_place_and_company():
    vocab_size = 331
    for logits, params, positions in batches(4, vocab_size):
        order = np.random.default_rng(6).permutation(ROWS)
        first = np.asarray(choose_tokens(logits, arrays_of(params, positions)))
        shuffled = [params[i] for i in order]
        again = np.asarray(choose_tokens(logits[order], arrays_of(shuffled, positions[order])))
        assert np.array_equal(first[order], again)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_non_finite_logit_raises_its_own_rows_flag_alone(value: float):
    logits = random_logits(np.random.default_rng(7), 331)
    params = random_params(np.random.default_rng(8), 331)
    arrays = arrays_of(params, np.zeros(ROWS))
    healthy = np.asarray(choose_tokens(logits, arrays))
    assert (healthy[:, COLUMN_STATE] == 1).all()
    spoilt = logits.copy()
    spoilt[[5, 40], [0, 330]] = value
    result = np.asarray(choose_tokens(spoilt, arrays))
    assert np.flatnonzero(result[:, COLUMN_STATE] == 0).tolist() == [5, 40]
    others = np.setdiff1d(np.arange(ROWS), [5, 40])
    assert np.array_equal(result[others], healthy[others])
    assert ((result[:, COLUMN_TOKEN] >= 0) & (result[:, COLUMN_TOKEN] < 331)).all()


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
    return np.full(len(index), 12345, np.uint64), index


def many_seeds(index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return index.astype(np.uint64), np.full(len(index), 7)


def exact_distribution(params: SamplingParams) -> np.ndarray:
    scaled = LOGITS / np.float32(params.temperature)
    mass = np.exp(scaled.astype(np.float64)) * kept_tokens(scaled, params)
    return mass / mass.sum()


def frequencies(params: SamplingParams, streams: Streams) -> np.ndarray:
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
