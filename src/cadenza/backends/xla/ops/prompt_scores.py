"""The scores of prompts' keys in plain jnp (`OpTable.score_keys`). `scores` [2, R, N] has the
largest of a step's heads and layers so far, before the division by `POOL`, and the sum over the
row's queries so far. A row's scores depend on its own weights alone, and NaN stays. Legend as in
`ops.table`; N positions."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from cadenza.models.layer_kind import HeadShape
from cadenza.sparse_prefill import POOL


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringLayer:
    """A layer that scores prompts: its index in the KV pool of its group, its heads, and whether it
    is the first or the last one of a step that does."""

    index: int
    heads: HeadShape
    is_first: bool
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RowQueries:
    """The query of each row [R]: its position, and the keys that it scores, 0 if it scores none."""

    positions: jax.Array
    lengths: jax.Array


def normalised(logits: jax.Array, is_key: jax.Array) -> jax.Array:
    """The softmax of logits [R, Hkv, G, N] over the keys [R, N] of each row; 0 elsewhere."""
    mask = is_key[:, None, None, :]
    logits = jnp.where(mask, logits, -jnp.inf)
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.where(mask, weights, 0.0)
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def add_scores(
    scores: jax.Array, weights: jax.Array, rows: RowQueries, layer: ScoringLayer
) -> jax.Array:
    """The scores with those of a layer's weights [R, Hkv, G, N]. Rows that score none keep theirs;
    a query at the last of its keys begins the sum."""
    bits = jnp.max(_bits(_pooled(weights)), axis=(1, 2))  # [R, N]
    if not layer.is_first:
        bits = jnp.maximum(_bits(scores[0]), bits)
    largest = jax.lax.bitcast_convert_type(bits, jnp.float32)
    sums = scores[1]
    if layer.is_last:
        found = largest / np.float32(POOL)
        begins = rows.positions == rows.lengths - 1
        sums = jnp.where(begins[:, None], found, sums + found)
    does = (rows.lengths > 0)[None, :, None]
    return jnp.where(does, jnp.stack([largest, sums]), scores)


def _bits(numbers: jax.Array) -> jax.Array:
    # NaN is the largest of the bits: XLA's own maximum over an axis of a CPU may leave it out.
    return jax.lax.bitcast_convert_type(numbers, jnp.uint32)


def _pooled(weights: jax.Array) -> jax.Array:
    # In ascending order.
    half, length = POOL // 2, weights.shape[-1]
    padded = jnp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(half, half)])
    total = padded[..., :length]
    for start in range(1, POOL):
        total = total + padded[..., start : start + length]
    return total
