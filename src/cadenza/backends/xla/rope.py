"""Rope factors, fixed for an engine's life by `max_model_len` (host arithmetic, float64).

Sources: Su et al., 2021 (rotary embedding); Llama 3.1's wavelength-dependent scaling.
"""

import math

import numpy as np
import numpy.typing as npt

from cadenza.checkpoint.model_config import LinearRopeScaling, Llama3RopeScaling, RopeConfig


def rope_factors(rope: RopeConfig, max_model_len: int) -> npt.NDArray[np.float32]:
    """[max_model_len, rotary_dim]: each position's cosines, then its sines."""
    angles = np.arange(max_model_len)[:, None] * _frequencies(rope)[None, :]
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def _frequencies(rope: RopeConfig) -> npt.NDArray[np.float64]:
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


def _llama3_frequencies(
    plain: npt.NDArray[np.float64], scaling: Llama3RopeScaling
) -> npt.NDArray[np.float64]:
    wavelengths = 2 * math.pi / plain
    turns = scaling.original_max_position_embeddings / wavelengths
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return plain * kept + plain / scaling.factor * (1.0 - kept)
