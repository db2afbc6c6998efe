"""Sampling: chooses a token for each row of logits without sorting the vocabulary.

Thresholds of top-k and top-p are found by bisection over the bits of an order-preserving integer
form of the logits. A draw is a Gumbel maximum (Gumbel, 1954) whose noise is a hash of the row's key
and the token id, so a row's choice depends only on its own logits, settings and key. The result of
a greedy row, or of one without log probabilities, is the same whether or not other rows use them.

Legend: L logit rows · V vocabulary.
"""

import jax
import jax.numpy as jnp

from cadenza.backends.xla.ops.table import (
    NUM_TOP,
    STATE_CHOSEN,
    STATE_NONE_ALLOWED,
    STATE_NOT_FINITE,
)
from cadenza.core.step_schema import NO_RULES, LogitInputs

_KEY_BITS = 32


def choose_tokens(
    logits: jax.Array, rows: LogitInputs[jax.Array], ruled: jax.Array | None = None
) -> jax.Array:
    """Logits [L, V] float32 to the step's int32 result [L, C] (columns: `ops.table`).

    Tokens are chosen from `ruled` [L, V], the logits after token rules (default: `logits`); log
    probabilities and ranks are computed from `logits`. A row with a target reports that token.
    """
    choices = logits if ruled is None else ruled
    greedy = jnp.argmax(choices, axis=-1).astype(jnp.int32)  # ties: the lowest id
    tokens = jax.lax.cond(
        jnp.any(rows.temperature > 0),
        lambda: jnp.where(rows.temperature > 0, _draw(choices, rows), greedy),
        lambda: greedy,
    )
    tokens = jnp.where(rows.targets >= 0, rows.targets, tokens)
    details = jax.lax.cond(
        jnp.any(rows.num_logprobs >= 0),
        lambda: _describe(logits, tokens),
        lambda: jnp.zeros((len(logits), 2 + 2 * NUM_TOP), jnp.int32),
    )
    state = _state(logits, choices, rows)
    return jnp.concatenate([tokens[:, None], state[:, None], details], axis=1)


def _state(logits: jax.Array, choices: jax.Array, rows: LogitInputs[jax.Array]) -> jax.Array:
    """The rows' states [L]."""
    has_choice = jnp.any(choices > -jnp.inf, axis=-1)
    none_allowed = (rows.rule_record != NO_RULES) & ~has_choice
    state = jnp.where(none_allowed, STATE_NONE_ALLOWED, STATE_CHOSEN)
    is_finite = jnp.all(jnp.isfinite(logits), axis=-1)
    return jnp.where(is_finite, state, STATE_NOT_FINITE).astype(jnp.int32)


def token_noise(keys: jax.Array, vocab_size: int) -> jax.Array:
    """Standard Gumbel noise [L, V]: a pure function of the row's key [L, 2] and the token id.

    The hash is a multiply-xorshift mixer; the key's second word is added midway.
    """
    bits = jnp.arange(vocab_size, dtype=jnp.uint32)[None, :] * jnp.uint32(0x9E3779B9)
    bits = bits ^ keys[:, :1]
    bits = (bits ^ (bits >> 17)) * jnp.uint32(0xED5AD4BB)
    bits = (bits ^ (bits >> 11)) + keys[:, 1:]
    bits = bits * jnp.uint32(0xAC4C1B51)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x31848BAB)
    bits = bits ^ (bits >> 14)
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def _draw(logits: jax.Array, rows: LogitInputs[jax.Array]) -> jax.Array:
    """Draws a token for each row [L]; the token of a row at temperature 0 is arbitrary."""
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    scaled = logits / temperature[:, None]  # [L, V]
    kept = jax.lax.cond(
        jnp.any((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0) | (rows.top_n_sigma > 0)),
        lambda: _kept(scaled, rows),
        lambda: jnp.ones(scaled.shape, jnp.bool_),
    )
    noisy = scaled + token_noise(rows.keys, logits.shape[1])
    return jnp.argmax(jnp.where(kept, noisy, -jnp.inf), axis=-1).astype(jnp.int32)


def _kept(scaled: jax.Array, rows: LogitInputs[jax.Array]) -> jax.Array:
    """The tokens kept by min-p and top-n-sigma, then top-k, then top-p: [L, V].

    Tokens with equal logits are all kept or all dropped.
    """
    order = _ordered(scaled)
    vocab_size = scaled.shape[1]
    maximum = jnp.max(scaled, axis=-1, keepdims=True)
    kept = scaled >= maximum + jnp.log(rows.min_p)[:, None]
    n = rows.top_n_sigma[:, None]
    kept &= (scaled >= maximum - n * _deviation(scaled, maximum)) | (n <= 0)
    top_k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab_size), vocab_size)
    floor_k = _highest_floor(order, kept.astype(jnp.float32), top_k.astype(jnp.float32))
    kept &= order >= floor_k[:, None]
    mass = jnp.where(kept, jnp.exp(scaled - maximum), 0.0)
    floor_p = _highest_floor(order, mass, rows.top_p * jnp.sum(mass, axis=-1))
    return kept & ((order >= floor_p[:, None]) | (rows.top_p >= 1)[:, None])


def _deviation(scaled: jax.Array, maximum: jax.Array) -> jax.Array:
    """The standard deviation of each row's logits that are not banned: [L, 1].

    Distances from the maximum are scaled by the largest one, so that squares do not overflow.
    """
    is_allowed = scaled > -jnp.inf
    distance = jnp.where(is_allowed, maximum - scaled, 0.0)
    largest = jnp.max(distance, axis=-1, keepdims=True)
    units = distance / jnp.where(largest > 0, largest, 1.0)
    count = jnp.maximum(jnp.sum(is_allowed, axis=-1, keepdims=True), 1)
    mean = jnp.sum(units, axis=-1, keepdims=True) / count
    squares = jnp.where(is_allowed, (units - mean) ** 2, 0.0)
    variance = jnp.sum(squares, axis=-1, keepdims=True) / count
    return jnp.where(jnp.isfinite(largest), largest * jnp.sqrt(variance), jnp.inf)


def _ordered(values: jax.Array) -> jax.Array:
    """uint32 keys in the order of the float32 values; 0.0 and -0.0 have the same key."""
    one_zero = jnp.where(values == 0, 0.0, values)
    bits = jax.lax.bitcast_convert_type(one_zero, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _highest_floor(order: jax.Array, mass: jax.Array, wanted: jax.Array) -> jax.Array:
    """The highest floor [L] such that the mass [L, V] at or above it reaches `wanted` [L]."""

    def try_bit(index: jax.Array, floor: jax.Array) -> jax.Array:
        candidate = floor | (jnp.uint32(1 << (_KEY_BITS - 1)) >> index.astype(jnp.uint32))
        above = jnp.sum(jnp.where(order >= candidate[:, None], mass, 0.0), axis=-1)
        return jnp.where(above >= wanted, candidate, floor)

    return jax.lax.fori_loop(0, _KEY_BITS, try_bit, jnp.zeros(len(order), jnp.uint32))


def _describe(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Logprob bits and rank of the chosen tokens, then ids and logprob bits of the top tokens."""
    maximum = jnp.max(logits, axis=-1, keepdims=True)
    log_total = jnp.log(jnp.sum(jnp.exp(logits - maximum), axis=-1, keepdims=True)) + maximum
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)  # [L, 1]
    rank = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32)
    top_ids, top_logits = _top(logits)
    columns = [_bits(chosen - log_total), rank[:, None], top_ids, _bits(top_logits - log_total)]
    return jnp.concatenate(columns, axis=1)


def _top(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Ids and logits of the largest logits, descending, ties by id: [L, NUM_TOP] each."""
    rows = jnp.arange(len(logits))

    def take(
        index: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        rest, ids, values = state
        best = jnp.argmax(rest, axis=-1).astype(jnp.int32)
        ids = ids.at[:, index].set(best)
        values = values.at[:, index].set(rest[rows, best])
        return rest.at[rows, best].set(-jnp.inf), ids, values

    ids = jnp.zeros((len(logits), NUM_TOP), jnp.int32)
    values = jnp.zeros((len(logits), NUM_TOP), jnp.float32)
    _, ids, values = jax.lax.fori_loop(0, NUM_TOP, take, (logits, ids, values))
    return ids, values


def _bits(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values, jnp.int32)
