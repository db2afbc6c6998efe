"""`rope_factors`: the cosines and sines of all positions, for all backends, in float64 on the host,
rounded once to float32; fixed by `max_model_len` for an engine's lifetime. They have the same bits
on every machine, so elementary functions are `host_math`'s, and complex products, which numpy fuses
on some CPUs, are written out. `reference_rope`, the oracle, must not import this."""

import math

import numpy as np
import numpy.typing as npt

from cadenza.models.host_math import Floats, log, power, rotations
from cadenza.models.rope_config import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ProportionalRopeScaling,
    RopeConfig,
    YarnRopeScaling,
)

# Positions per block. A position's rotation is the product of its block's and of the one within the
# block, so that cosines and sines are computed once per block and once per position of a block:
# much faster for long contexts
ROPE_BLOCK_LEN = 512


def rope_factors(rope: RopeConfig | None, max_model_len: int) -> npt.NDArray[np.float32]:
    """[max_model_len, rotary_dim]: each position's cosines, then its sines; 0 columns for None.
    With `RopeConfig.has_query_factors` a last column has the factor of the queries."""
    if rope is None:
        return np.empty((max_model_len, 0), np.float32)
    frequencies = _frequencies(rope, max_model_len)
    num_pairs = len(frequencies)
    firsts = range(0, max_model_len, ROPE_BLOCK_LEN)
    cosines, sines = _rotations(range(min(ROPE_BLOCK_LEN, max_model_len)), frequencies)
    factors = np.empty((max_model_len, 2 * num_pairs + rope.has_query_factors), np.float32)
    if isinstance(rope.scaling, YarnRopeScaling) and rope.has_query_factors:
        factors[:, -1] = _query_factors(rope.scaling, max_model_len)
    for first, *rotation in zip(firsts, *_rotations(firsts, frequencies), strict=True):
        count = min(ROPE_BLOCK_LEN, max_model_len - first)
        c, s = (each * rope.attention_factor for each in rotation)
        block = factors[first : first + count]
        block[:, :num_pairs] = cosines[:count] * c - sines[:count] * s
        block[:, num_pairs : 2 * num_pairs] = sines[:count] * c + cosines[:count] * s
    return factors


def _query_factors(scaling: YarnRopeScaling, max_model_len: int) -> Floats:
    """The factor of the queries at each position: [max_model_len]."""
    lengths = np.arange(max_model_len) // scaling.original_max_position_embeddings
    by_length = [1.0 + scaling.query_beta * log(1.0 + n) for n in range(int(lengths[-1]) + 1)]
    return np.array(by_length)[lengths]


def _rotations(positions: range, frequencies: Floats) -> tuple[Floats, Floats]:
    """The cosines and sines of position * frequency, each [positions, rotary_dim / 2]."""
    return rotations(np.asarray(positions, np.float64)[:, None] * frequencies[None, :])


def _frequencies(rope: RopeConfig, max_model_len: int) -> Floats:
    """[rotary_dim / 2], in radians per token."""
    exponents = [index / rope.rotary_dim for index in range(0, rope.rotary_dim, 2)]
    plain = np.array([power(rope.theta, -exponent) for exponent in exponents])
    match rope.scaling:
        case None:
            return plain
        case LinearRopeScaling(factor=factor):
            return plain / factor
        case ProportionalRopeScaling(num_pairs=num_pairs, factor=factor):
            return np.where(np.arange(len(plain)) < num_pairs, plain / factor, 0.0)
        case Llama3RopeScaling():
            return _llama3_frequencies(plain, rope.scaling)
        case YarnRopeScaling():
            return _yarn_frequencies(plain, rope, rope.scaling)
        case LongRopeScaling() as scaling:
            is_long = max_model_len > scaling.original_max_position_embeddings
            return plain / np.array(scaling.long_factor if is_long else scaling.short_factor)


def _llama3_frequencies(plain: Floats, scaling: Llama3RopeScaling) -> Floats:
    wavelengths = 2 * math.pi / plain
    turns = scaling.original_max_position_embeddings / wavelengths
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return plain * kept + plain / scaling.factor * (1.0 - kept)


def _yarn_frequencies(plain: Floats, rope: RopeConfig, scaling: YarnRopeScaling) -> Floats:
    """A linear ramp over the pairs, from kept frequencies to those divided by the factor."""

    def pair_that_turns(count: float) -> float:
        length = scaling.original_max_position_embeddings
        turns = log(length / (count * 2 * math.pi))
        return rope.rotary_dim * turns / (2 * log(rope.theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    width = 0.001 if first == last else last - first
    divided = np.clip((np.arange(len(plain)) - first) / width, 0.0, 1.0)
    return plain * (1.0 - divided) + plain / scaling.factor * divided
