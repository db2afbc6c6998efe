"""Token mixers with a recurrent state in plain jnp: their definition, a token at a time. A row
begins with the state of one slot, or with zeros, and the state after any of its tokens can be kept
in another slot, so a snapshot needs no copy, and each of several drafts keeps its own. Legend as in
`ops.table`."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cadenza.backends.xla.ops.in_range import set_row
from cadenza.backends.xla.ops.table import (
    BaseTable,
    ConvWeights,
    DeltaInputs,
    DeltaWeights,
    RecurrentLayer,
    ScanInputs,
    ScanWeights,
    StatePool,
    StepArrays,
    StepStates,
)
from cadenza.models.layer_kind import ConvShape, DeltaShape, Recurrence, ScanShape

_HIGHEST = jax.lax.Precision.HIGHEST
UNIT_NORM_EPS = np.float32(1e-6)

_Step = tuple[StepArrays, StepStates]


class _RowStates(NamedTuple):
    inputs: jax.Array  # [J - 1, M]
    states: jax.Array | None  # [Hv, Dk, Dv]


# The output of one token, from its inputs and its row's state, and the state after it.
_Advance = Callable[[Any, _RowStates], tuple[jax.Array, _RowStates]]


class RecurrentOps(BaseTable):
    """Layers return activations and the pool, [S, layers, J - 1, M] and [S, layers, Hv, Dk, Dv],
    with what tokens keep, in place. A slot that a row begins with is kept by no other row of the
    step."""

    def new_state_pool(self, num_slots: int, num_layers: int, shape: Recurrence) -> StatePool:
        """Slots whose content nothing reads before it is kept; called under tracing."""
        inputs = (num_slots, num_layers, shape.num_inputs - 1, shape.num_channels)
        matrices, states = shape.matrices, None
        if matrices is not None:
            heads = (matrices.num_heads, matrices.key_size, matrices.value_size)
            states = self.unwritten((num_slots, num_layers, *heads), jnp.float32)
        return StatePool(self.unwritten(inputs, self._spec.dtype), states)

    def gated_delta(
        self,
        given: DeltaInputs,
        weights: DeltaWeights,
        pool: StatePool,
        step: _Step,
        layer: RecurrentLayer[DeltaShape],
    ) -> tuple[jax.Array, StatePool]:
        """A gated delta net (arXiv 2412.06464) between its projections, to [T, Hv Dv]: causal
        depthwise convolution and SiLU over queries, keys and values; L2 norms of queries and keys;
        S = a S; S += k b (v - S k); y = S q; RMS norm of each head's y, times SiLU of the gate."""
        advance = partial(_advance_delta, weights=weights, layer=layer)
        y, pool = _run_rows(advance, given, pool, step, layer.index)
        return y.astype(given.mixed.dtype), pool

    def short_conv(
        self,
        given: jax.Array,
        weights: ConvWeights,
        pool: StatePool,
        step: _Step,
        layer: RecurrentLayer[ConvShape],
    ) -> tuple[jax.Array, StatePool]:
        """C * conv(B * x) of activations B, C and x [T, 3 M], to [T, M]; the pool has the products
        B * x, which are rounded to activations."""
        first, gate, last = jnp.split(given, 3, axis=1)
        product = (first.astype(jnp.float32) * last.astype(jnp.float32)).astype(given.dtype)

        def advance(token: tuple[jax.Array, ...], now: _RowStates) -> tuple[jax.Array, _RowStates]:
            sums, inputs = _convolve(token[0], now.inputs, weights.conv, weights.bias)
            return token[1].astype(jnp.float32) * sums, _RowStates(inputs, None)

        y, pool = _run_rows(advance, (product, gate), pool, step, layer.index)
        return y.astype(given.dtype), pool

    def selective_scan(
        self,
        given: ScanInputs,
        weights: ScanWeights,
        pool: StatePool,
        step: _Step,
        layer: RecurrentLayer[ScanShape],
    ) -> tuple[jax.Array, StatePool]:
        """A selective scan with one decay a head (Mamba-2, arXiv 2405.21060) between its
        projections, to [T, Hv Dv]: causal depthwise convolution and SiLU over values x, keys B and
        queries C; dt is softplus of the rate; S = exp(dt A) S + B dt x; y = S C + D x; y times SiLU
        of the gate; RMS norm of each group."""
        advance = partial(_advance_scan, weights=weights, layer=layer)
        y, pool = _run_rows(advance, given, pool, step, layer.index)
        return y.astype(given.mixed.dtype), pool


def _run_rows(
    advance: _Advance, given: Any, pool: StatePool, step: _Step, layer: int
) -> tuple[jax.Array, StatePool]:
    arrays, slots = step
    held = jax.tree.map(lambda side: _begin(side, slots.initial, layer), pool)
    rows = _RowStates(held.inputs, held.states)
    num_tokens = len(jax.tree.leaves(given)[0])
    indices = jnp.arange(num_tokens)
    is_used = indices < arrays.num_tokens
    are_kept = is_used & (slots.kept >= 0)

    def body(carry: Any, index: jax.Array) -> tuple[Any, jax.Array]:
        rows, pool = carry
        row, slot = arrays.token_rows[index], (slots.kept[index], layer)
        now = jax.tree.map(lambda side: side[row], rows)
        y, new = advance(jax.tree.map(lambda side: side[index], given), now)
        rows = jax.tree.map(lambda side, own: set_row(side, row, own, is_used[index]), rows, new)
        kept = are_kept[index]
        pool = jax.tree.map(lambda side, own: set_row(side, slot, own, kept), pool, StatePool(*new))
        return (rows, pool), y

    (_, pool), y = jax.lax.scan(body, (rows, pool), indices)
    return y, pool


def _begin(side: jax.Array, initial: jax.Array, layer: int) -> jax.Array:
    held = side[jnp.maximum(initial, 0), layer].astype(jnp.float32)
    is_held = (initial >= 0).reshape(-1, *(1,) * (held.ndim - 1))
    return jnp.where(is_held, held, 0.0)


def _convolve(
    own: jax.Array, inputs: jax.Array, weights: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    window = jnp.concatenate([inputs, own[None].astype(jnp.float32)])  # [J, M]
    sums = jnp.sum(window * weights, axis=0)
    return sums if bias is None else sums + bias, window[1:]


def _advance_delta(
    token: DeltaInputs, now: _RowStates, *, weights: DeltaWeights, layer: RecurrentLayer[DeltaShape]
) -> tuple[jax.Array, _RowStates]:
    shape = layer.shape
    sums, inputs = _convolve(token.mixed, now.inputs, weights.conv, None)
    mixed = jax.nn.silu(sums)
    query, key, value = jnp.split(mixed, [shape.key_width, 2 * shape.key_width])
    query, key = (_unit(each.reshape(-1, shape.key_size)) for each in (query, key))  # [Hk, Dk]
    query = query / np.sqrt(np.float32(shape.key_size))
    group = shape.num_value_heads // shape.num_key_heads
    spread = partial(jnp.tile, reps=(group, 1)) if shape.is_tiled else partial(_repeat, group)
    query, key = spread(query), spread(key)  # [Hv, Dk]
    value = value.reshape(-1, shape.value_size)  # [Hv, Dv]
    rate, strength = jnp.split(token.rates, 2)
    decay = jnp.exp(weights.decay * jax.nn.softplus(rate + weights.decay_bias))  # [Hv]
    assert now.states is not None, "the layer has matrices"
    state = now.states * decay[:, None, None]
    read = jnp.einsum("hkv,hk->hv", state, key, precision=_HIGHEST)
    change = (value - read) * jax.nn.sigmoid(strength)[:, None]
    state = state + key[:, :, None] * change[:, None, :]
    y = jnp.einsum("hkv,hk->hv", state, query, precision=_HIGHEST)
    scale = jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + np.float32(layer.norm_eps))
    gate = jax.nn.silu(token.gate.astype(jnp.float32).reshape(y.shape))
    return (y * scale * weights.norm * gate).reshape(-1), _RowStates(inputs, state)


def _repeat(count: int, heads: jax.Array) -> jax.Array:
    return jnp.repeat(heads, count, axis=0)


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + UNIT_NORM_EPS)


def _advance_scan(
    token: ScanInputs, now: _RowStates, *, weights: ScanWeights, layer: RecurrentLayer[ScanShape]
) -> tuple[jax.Array, _RowStates]:
    shape = layer.shape
    sums, inputs = _convolve(token.mixed, now.inputs, weights.conv, weights.conv_bias)
    parts = [shape.value_width, shape.value_width + shape.group_width]
    value, key, query = jnp.split(jax.nn.silu(sums), parts)
    value = value.reshape(-1, shape.value_size)  # [Hv, Dv]
    group = shape.num_heads // shape.num_groups
    key, query = (
        jnp.repeat(each.reshape(-1, shape.key_size), group, axis=0) for each in (key, query)
    )  # [Hv, Dk]
    rate = jax.nn.softplus(token.rates + weights.rate_bias)  # [Hv]
    assert now.states is not None, "the layer has matrices"
    kept = now.states * jnp.exp(rate * weights.decay)[:, None, None]
    state = kept + key[:, :, None] * (rate[:, None] * value)[:, None, :]
    y = jnp.einsum("hkv,hk->hv", state, query, precision=_HIGHEST)
    y = y + weights.skip[:, None] * value
    y = y.reshape(-1) * jax.nn.silu(token.gate.astype(jnp.float32))
    groups = y.reshape(shape.num_groups, -1)
    mean_square = jnp.mean(groups * groups, axis=-1, keepdims=True)
    groups = groups * jax.lax.rsqrt(mean_square + np.float32(layer.norm_eps))
    return groups.reshape(-1) * weights.norm, _RowStates(inputs, state)
