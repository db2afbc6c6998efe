"""Token mixers with a recurrent state in plain jnp: their definition, a token at a time.

A layer's state is held in slots, as pages hold KV. A row begins with the state of one slot, or with
zeros, and the state behind any of its tokens can be kept in another. So a snapshot needs no copy: a
row leaves the slot that it began with as it is, and goes on in the next one; and each of several
drafts keeps its own state. Legend as in `ops.table`.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cadenza.backends.xla.ops.table import (
    DeltaInputs,
    DeltaLayer,
    DeltaWeights,
    StatePool,
    StepArrays,
    StepStates,
)

_HIGHEST = jax.lax.Precision.HIGHEST
UNIT_NORM_EPS = np.float32(1e-6)


class _RowStates(NamedTuple):
    inputs: jax.Array  # [R, J - 1, M]
    states: jax.Array  # [R, Hv, Dk, Dv]


def gated_delta(
    given: DeltaInputs,
    weights: DeltaWeights,
    pool: StatePool,
    step: tuple[StepArrays, StepStates],
    layer: DeltaLayer,
) -> tuple[jax.Array, StatePool]:
    """A gated delta net (arXiv 2412.06464) between its projections: activations [T, Hv Dv], and the
    pool, [S, layers, J - 1, M] and [S, layers, Hv, Dk, Dv], with what the tokens keep.

    A causal depthwise convolution and SiLU over queries, keys and values; L2 norms of queries and
    keys; S = a S; S += k b (v - S k); y = S q; and an RMS norm of each head's y, times SiLU of the
    gate.
    """
    arrays, slots = step
    rows = _RowStates(*(_begin(side, slots.initial, layer.index) for side in pool))
    places = jnp.arange(len(given.mixed))
    is_used = places < arrays.num_tokens
    row_of = jnp.where(is_used, arrays.token_rows, len(slots.initial))
    slot_of = jnp.where(is_used & (slots.kept >= 0), slots.kept, len(pool.states))

    def body(carry: Any, place: jax.Array) -> tuple[Any, jax.Array]:
        rows, pool = carry
        row = jnp.minimum(row_of[place], len(slots.initial) - 1)
        now = _RowStates(rows.inputs[row], rows.states[row])
        y, new = _advance(DeltaInputs(*(each[place] for each in given)), weights, now, layer)
        rows = jax.tree.map(partial(_write, row_of[place]), rows, new)
        pool = jax.tree.map(partial(_write, (slot_of[place], layer.index)), pool, StatePool(*new))
        return (rows, pool), y

    (_, pool), y = jax.lax.scan(body, (rows, pool), places)
    return y.astype(given.mixed.dtype), pool


def _write(place: Any, side: jax.Array, own: jax.Array) -> jax.Array:
    """`side` with `own` at a place, which may be behind its end."""
    return side.at[place].set(own.astype(side.dtype), mode="drop")


def _begin(side: jax.Array, initial: jax.Array, layer: int) -> jax.Array:
    """What rows begin with, [R, ...], float32."""
    held = side[jnp.maximum(initial, 0), layer].astype(jnp.float32)
    is_held = (initial >= 0).reshape(-1, *(1,) * (held.ndim - 1))
    return jnp.where(is_held, held, 0.0)


def _advance(
    token: DeltaInputs, weights: DeltaWeights, now: _RowStates, layer: DeltaLayer
) -> tuple[jax.Array, _RowStates]:
    """The output [Hv Dv] of one token, and its row's state behind it."""
    shape = layer.shape
    inputs = jnp.concatenate([now.inputs, token.mixed[None].astype(jnp.float32)])  # [J, M]
    mixed = jax.nn.silu(jnp.sum(inputs * weights.conv, axis=0))
    query, key, value = jnp.split(mixed, [shape.key_width, 2 * shape.key_width])
    query, key = (_unit(each.reshape(-1, shape.key_size)) for each in (query, key))  # [Hk, Dk]
    query = query / np.sqrt(np.float32(shape.key_size))
    group = shape.num_value_heads // shape.num_key_heads
    spread = partial(jnp.tile, reps=(group, 1)) if shape.is_tiled else partial(_repeat, group)
    query, key = spread(query), spread(key)  # [Hv, Dk]
    value = value.reshape(-1, shape.value_size)  # [Hv, Dv]
    rate, strength = jnp.split(token.rates, 2)
    decay = jnp.exp(weights.decay * jax.nn.softplus(rate + weights.decay_bias))  # [Hv]
    state = now.states * decay[:, None, None]
    read = jnp.einsum("hkv,hk->hv", state, key, precision=_HIGHEST)
    change = (value - read) * jax.nn.sigmoid(strength)[:, None]
    state = state + key[:, :, None] * change[:, None, :]
    y = jnp.einsum("hkv,hk->hv", state, query, precision=_HIGHEST)
    scale = jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + np.float32(layer.norm_eps))
    gate = jax.nn.silu(token.gate.astype(jnp.float32).reshape(y.shape))
    return (y * scale * weights.norm * gate).reshape(-1), _RowStates(inputs[1:], state)


def _repeat(count: int, heads: jax.Array) -> jax.Array:
    return jnp.repeat(heads, count, axis=0)


def _unit(x: jax.Array) -> jax.Array:
    """x / |x| over the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + UNIT_NORM_EPS)
