"""Rope factors of `ReferenceModel`, one rotary pair at a time in float64, from the definitions;
shares only `RopeConfig` with `checkpoint.rope_factors`. Sources: Su et al., 2021 (rotary
embedding); Peng et al., 2023 (YaRN); Ding et al., 2024 (LongRoPE); for Llama 3.1's and linear
scaling and YaRN's ramp, `modeling_rope_utils` of transformers."""

import math

import numpy as np
import numpy.typing as npt

from cadenza.models.rope_config import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ProportionalRopeScaling,
    RopeConfig,
    YarnRopeScaling,
)


def reference_rope(rope: RopeConfig | None, max_model_len: int) -> npt.NDArray[np.float32]:
    """[max_model_len, rotary_dim]: each position's cosines, then its sines; 0 columns for None."""
    if rope is None:
        return np.empty((max_model_len, 0), np.float32)
    positions = np.arange(max_model_len, dtype=np.float64)
    columns: list[npt.NDArray[np.float64]] = []
    for function in (np.cos, np.sin):
        for pair in range(rope.rotary_dim // 2):
            angles = positions * _radians_per_token(rope, pair, max_model_len)
            columns.append(_magnitude(rope) * function(angles))
    return np.stack(columns, axis=1).astype(np.float32)


def _magnitude(rope: RopeConfig) -> float:
    match rope.scaling:
        case YarnRopeScaling(attention_factor=factor) | LongRopeScaling(attention_factor=factor):
            return factor
        case None | LinearRopeScaling() | Llama3RopeScaling() | ProportionalRopeScaling():
            return 1.0


def _radians_per_token(rope: RopeConfig, pair: int, max_model_len: int) -> float:
    frequency = 1.0 / math.pow(rope.theta, 2 * pair / rope.rotary_dim)
    match rope.scaling:
        case None:
            return frequency
        case LinearRopeScaling():
            return frequency / rope.scaling.factor
        case ProportionalRopeScaling():
            return frequency / rope.scaling.factor if pair < rope.scaling.num_pairs else 0.0
        case Llama3RopeScaling():
            return _llama3(frequency, rope.scaling)
        case YarnRopeScaling():
            return _yarn(frequency, pair, rope, rope.scaling)
        case LongRopeScaling():
            if max_model_len <= rope.scaling.original_max_position_embeddings:
                return frequency / rope.scaling.short_factor[pair]
            return frequency / rope.scaling.long_factor[pair]


def _llama3(frequency: float, scaling: Llama3RopeScaling) -> float:
    # Short wavelengths are kept, long ones divided, blended in between.
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / frequency
    if wavelength < original / scaling.high_freq_factor:
        return frequency
    if wavelength > original / scaling.low_freq_factor:
        return frequency / scaling.factor
    share = original / wavelength - scaling.low_freq_factor
    share /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - share) * frequency / scaling.factor + share * frequency


def _yarn(frequency: float, pair: int, rope: RopeConfig, scaling: YarnRopeScaling) -> float:
    low = _pair_turning(scaling.beta_fast, rope, scaling)
    high = _pair_turning(scaling.beta_slow, rope, scaling)
    if scaling.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, rope.rotary_dim - 1.0)
    if low == high:
        high += 0.001
    ramp = min(1.0, max(0.0, (pair - low) / (high - low)))
    return frequency / scaling.factor * ramp + frequency * (1 - ramp)


def _pair_turning(count: float, rope: RopeConfig, scaling: YarnRopeScaling) -> float:
    radians_per_token = 2 * math.pi * count / scaling.original_max_position_embeddings
    return -math.log(radians_per_token, rope.theta) * rope.rotary_dim / 2
