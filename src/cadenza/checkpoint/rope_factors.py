"""`rope_factors`: the cosines and sines of each position, as every backend's engine uses them.

Owns the arithmetic behind a `RopeConfig`: host arithmetic in float64, rounded once to float32. The
factors are fixed for an engine's life by `max_model_len`. Knows no layers and no device. The
witness computes its own (`reference_rope`) and must not import this module.

Sources: Su et al., 2021 (rotary embedding); Llama 3.1's wavelength-dependent scaling; Peng et al.,
2023 (YaRN); Ding et al., 2024 (LongRoPE).
"""

import math

import numpy as np
import numpy.typing as npt

from cadenza.checkpoint.rope_config import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    RopeConfig,
    YarnRopeScaling,
)

BLOCK = 512
"""Positions that share a cosine and a sine: the turns within are the same in every block, and two
turns are one product, where each position's own would keep a long context's start waiting.
"""


def rope_factors(rope: RopeConfig | None, max_model_len: int) -> npt.NDArray[np.float32]:
    """[max_model_len, rotary_dim]: each position's cosines, then its sines; no columns for None."""
    if rope is None:
        return np.empty((max_model_len, 0), np.float32)
    frequencies = _frequencies(rope, max_model_len)
    num_pairs = len(frequencies)
    firsts = range(0, max_model_len, BLOCK)
    within = _turns(range(min(BLOCK, max_model_len)), frequencies)
    factors = np.empty((max_model_len, 2 * num_pairs), np.float32)
    for first, turn in zip(firsts, _turns(firsts, frequencies), strict=True):
        turns = within[: max_model_len - first] * (turn * rope.attention_factor)
        factors[first : first + BLOCK, :num_pairs] = turns.real
        factors[first : first + BLOCK, num_pairs:] = turns.imag
    return factors


def _turns(positions: range, frequencies: npt.NDArray[np.float64]) -> npt.NDArray[np.complex128]:
    """[positions, rotary_dim / 2]: where the unit has been turned to."""
    return np.exp(1j * np.asarray(positions)[:, None] * frequencies[None, :])


def _frequencies(rope: RopeConfig, max_model_len: int) -> npt.NDArray[np.float64]:
    """[rotary_dim / 2], radians a token."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    plain = rope.theta**-exponents
    match rope.scaling:
        case None:
            return plain
        case LinearRopeScaling(factor=factor):
            return plain / factor
        case Llama3RopeScaling():
            return _llama3_frequencies(plain, rope.scaling)
        case YarnRopeScaling():
            return _yarn_frequencies(plain, rope, rope.scaling)
        case LongRopeScaling() as scaling:
            is_long = max_model_len > scaling.original_max_position_embeddings
            return plain / np.array(scaling.long_factor if is_long else scaling.short_factor)


def _llama3_frequencies(
    plain: npt.NDArray[np.float64], scaling: Llama3RopeScaling
) -> npt.NDArray[np.float64]:
    wavelengths = 2 * math.pi / plain
    turns = scaling.original_max_position_embeddings / wavelengths
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return plain * kept + plain / scaling.factor * (1.0 - kept)


def _yarn_frequencies(
    plain: npt.NDArray[np.float64], rope: RopeConfig, scaling: YarnRopeScaling
) -> npt.NDArray[np.float64]:
    """A ramp over the pairs, from those kept to those divided by the factor."""

    def pair_that_turns(count: float) -> float:
        length = scaling.original_max_position_embeddings
        turns = math.log(length / (count * 2 * math.pi))
        return rope.rotary_dim * turns / (2 * math.log(rope.theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    width = 0.001 if first == last else last - first
    divided = np.clip((np.arange(len(plain)) - first) / width, 0.0, 1.0)
    return plain * (1.0 - divided) + plain / scaling.factor * divided
