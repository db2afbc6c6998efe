"""Our rope factors against those of transformers' own functions, for every scaling and field.

Both implementations are compared: the engine's and the independent witness's.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cadenza.backends.xla.reference_mixers import reference_rope
from cadenza.models.config_json import parse_model_config
from cadenza.models.rope_config import RopeConfig
from cadenza.models.rope_factors import rope_factors

pytestmark = pytest.mark.oracle

Compute = Callable[[RopeConfig | None, int], np.ndarray]

IMPLEMENTATIONS = [rope_factors, reference_rope]
HEAD_DIM, MAX_POSITIONS = 64, 256
SHAPE: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 2 * HEAD_DIM,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
}
YARNS = [
    {"rope_type": "yarn", "factor": factor, **betas, **magnitude, **ends}
    for factor, betas, magnitude, ends in itertools.product(
        [1.0, 4.0, 32.0],
        [{}, {"beta_fast": 16.0, "beta_slow": 0.3}],
        [{}, {"attention_factor": 1.3}, {"mscale": 1.2, "mscale_all_dim": 0.4}],
        [{}, {"truncate": False}, {"original_max_position_embeddings": 48}],
    )
]
LONG = {"rope_type": "longrope", "short_factor": [1.1] * 32, "long_factor": [2.0, 3.5] * 16}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 8.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    *YARNS,
    {**LONG, "original_max_position_embeddings": 64},
    {**LONG, "original_max_position_embeddings": 512},
    {**LONG, "original_max_position_embeddings": 64, "factor": 16.0},
    {**LONG, "original_max_position_embeddings": 64, "attention_factor": 1.7},
]


def theirs(rope: dict[str, Any], theta: float, num_positions: int) -> np.ndarray:
    """Cosines and sines [num_positions, HEAD_DIM] of transformers' Llama for one long stream."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(**SHAPE, rope_parameters={**rope, "rope_theta": theta})
    positions = torch.arange(num_positions)[None, :]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), positions)
    half = HEAD_DIM // 2
    return np.concatenate([cos[0, :, :half].numpy(), sin[0, :, :half].numpy()], axis=1)


def ours(
    rope: dict[str, Any], theta: float, num_positions: int, compute: Compute = rope_factors
) -> np.ndarray:
    values = {**SHAPE, "model_type": "llama", "rope_parameters": {**rope, "rope_theta": theta}}
    return compute(parse_model_config(values).rope, num_positions)


@pytest.mark.parametrize("compute", IMPLEMENTATIONS)
@pytest.mark.parametrize("theta", [500.0, 1e6])
@pytest.mark.parametrize("rope", ROPES, ids=[str(index) for index in range(len(ROPES))])
def test_factors_are_those_of_transformers(rope: dict[str, Any], theta: float, compute: Compute):
    """Within what float32 angles cost them: 2^-24 of an angle of up to 256."""
    expected = theirs(rope, theta, MAX_POSITIONS)
    error = np.abs(ours(rope, theta, MAX_POSITIONS, compute) - expected).max()
    assert error < 1e-4


@pytest.mark.parametrize("compute", IMPLEMENTATIONS)
def test_longrope_is_short_up_to_the_original_length_and_long_beyond(compute: Compute):
    rope = {**LONG, "original_max_position_embeddings": 64}
    short, long = (ours(rope, 1e4, length, compute) for length in (64, 65))
    assert np.abs(short - theirs(rope, 1e4, 64)).max() < 1e-4
    assert np.abs(long - theirs(rope, 1e4, 65)).max() < 1e-4
    assert np.abs(short - long[:64]).max() > 0.1


@pytest.mark.parametrize("field", ["beta_fast", "beta_slow", "truncate", "factor"])
def test_a_field_that_is_ignored_would_be_noticed(field: str):
    """The negative control: each field of a YaRN moves the factors by more than the tolerance."""
    rope = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 0.3}
    changed = {"beta_fast": 8.0, "beta_slow": 0.9, "truncate": False, "factor": 6.0}
    moved = ours({**rope, field: changed[field]}, 500.0, MAX_POSITIONS)
    assert np.abs(moved - ours(rope, 500.0, MAX_POSITIONS)).max() > 1e-2
