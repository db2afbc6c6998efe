"""Attention over KV in int8, in plain jnp: the definition of its arithmetic
(`csrc/core/kv_codes.h`). Each key and value of a head is codes with one scale; the query and the
weights of each sub-block of `SUB_BLOCK` tokens are quantised more finely, so that dots of codes are
exact integers. Legend as in `ops.reference`; N sub-blocks."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cadenza.backends.xla.ops.quantised import quantise_groups, scale_groups
from cadenza.weights.quantised_weight import MOST_CODE

SUB_BLOCK = 16  # tokens whose weights have one scale; sub-blocks start at multiples of it

FINE_PER_COARSE = 254
MOST_WEIGHT_CODE = 254


class CodedHeads(NamedTuple):
    """Keys or values of any number of tokens."""

    codes: Any  # [..., D] int8
    scales: Any  # [...] float32


def filled_heads(shape: tuple[int, ...], fill: float) -> CodedHeads:
    scales = jnp.full(shape[:-1], fill / MOST_CODE, jnp.float32)
    return CodedHeads(jnp.full(shape, MOST_CODE, jnp.int8), scales)


def encode_heads(heads: jax.Array) -> CodedHeads:
    return CodedHeads(*quantise_groups(heads.astype(jnp.float32)))


def code_scores(query: jax.Array, keys: CodedHeads) -> jax.Array:
    """Products of queries [T, Hkv, G, D] in float32 and keys [T, B, Hkv, D]: [T, Hkv, G, B]."""
    exact, largest = scale_groups(query, MOST_CODE)
    coarse = jnp.round(exact)
    fine = jnp.round((exact - coarse) * np.float32(FINE_PER_COARSE))
    coarse_dots, fine_dots = (
        _integer_einsum("tkgd,tbkd->tkgb", codes, keys.codes).astype(jnp.int32)
        for codes in (coarse, fine)
    )
    dots = (FINE_PER_COARSE * coarse_dots + fine_dots).astype(jnp.float32)
    scales = largest / np.float32(MOST_CODE * FINE_PER_COARSE)
    return dots * scales[..., None] * _by_head(keys.scales)


def sum_code_values(weights: jax.Array, values: CodedHeads) -> jax.Array:
    """Values [T, B, Hkv, D] weighted by [T, Hkv, G, B]; lanes with weight 0 must have finite
    scales."""
    blocks = (weights * _by_head(values.scales)).reshape(*weights.shape[:3], -1, SUB_BLOCK)
    exact, largest = scale_groups(blocks, MOST_WEIGHT_CODE)  # [T, Hkv, G, N, 16], [T, Hkv, G, N]
    codes, scales = jnp.round(exact), largest / np.float32(MOST_WEIGHT_CODE)
    tokens, lanes, heads, size = values.codes.shape
    by_block = values.codes.reshape(tokens, lanes // SUB_BLOCK, SUB_BLOCK, heads, size)
    dots = _integer_einsum("tkgnb,tnbkd->tkgnd", codes, by_block)
    return jnp.sum(dots * scales[..., None], axis=3)


def _by_head(scales: jax.Array) -> jax.Array:
    return jnp.moveaxis(scales, 1, 2)[:, :, None, :]


def _integer_einsum(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Products of codes in float32, exact in any order: all sums are integers below 2^24."""
    wide = left.astype(jnp.float32), right.astype(jnp.float32)
    return jnp.einsum(subscripts, *wide, precision=jax.lax.Precision.HIGHEST)
