"""`rope_factors`: the cosines and sines of all positions, shared by the runners of all backends.

Owns the arithmetic of a `RopeConfig`, in float64 on the host, rounded once to float32. The factors
depend on `max_model_len` and are fixed for an engine's lifetime. Knows no layers and no device. The
witness computes its own factors (`reference_rope`) and must not import this module.

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

ROPE_BLOCK_LEN = 512
"""Positions per block. A position's rotation is the product of its block's and of the one within
the block, so that `exp` is computed once per block and once per position of a block: much faster
for long contexts.
"""


def rope_factors(rope: RopeConfig | None, max_model_len: int) -> npt.NDArray[np.float32]:
    """[max_model_len, rotary_dim]: each position's cosines, then its sines; 0 columns for None."""
    if rope is None:
        return np.empty((max_model_len, 0), np.float32)
    frequencies = _frequencies(rope, max_model_len)
    num_pairs = len(frequencies)
    firsts = range(0, max_model_len, ROPE_BLOCK_LEN)
    within = _rotations(range(min(ROPE_BLOCK_LEN, max_model_len)), frequencies)
    factors = np.empty((max_model_len, 2 * num_pairs), np.float32)
    for first, rotation in zip(firsts, _rotations(firsts, frequencies), strict=True):
        rotations = within[: max_model_len - first] * (rotation * rope.attention_factor)
        factors[first : first + ROPE_BLOCK_LEN, :num_pairs] = rotations.real
        factors[first : first + ROPE_BLOCK_LEN, num_pairs:] = rotations.imag
    return factors


def _rotations(
    positions: range, frequencies: npt.NDArray[np.float64]
) -> npt.NDArray[np.complex128]:
    """[positions, rotary_dim / 2]: exp(i * position * frequency)."""
    return np.exp(1j * np.asarray(positions)[:, None] * frequencies[None, :])


def _frequencies(rope: RopeConfig, max_model_len: int) -> npt.NDArray[np.float64]:
    """[rotary_dim / 2], in radians per token."""
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
    """A linear ramp over the pairs, from kept frequencies to those divided by the factor."""

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
