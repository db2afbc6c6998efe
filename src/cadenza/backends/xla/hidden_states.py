"""Hidden states between steps, [slots, E] in the activations' type, one for each KV slot. An MTP
head computes a token at p from that of the token before it, at p - 1 in the head's own sequence;
for a token that it drew and that is still on the device, from its own newest output of the row, [R,
E]. bfloat16 is stored as uint16, since XLA updates it through float32 on a CPU."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from cadenza.backends.xla.ops.in_range import set_rows
from cadenza.backends.xla.ops.table import StepArrays
from cadenza.batch.step_schema import LogitInputs


def new_states(count: int, width: int, dtype: Any) -> jax.Array:
    """Zeros [count, width], as stored for activations of `dtype`."""
    stored = jnp.uint16 if dtype == jnp.bfloat16 else dtype
    return jnp.zeros((count, width), stored)


def keep_states(stored: jax.Array, hidden: jax.Array, slots: jax.Array, dtype: Any) -> jax.Array:
    """`stored` with hidden states [T, E] written to the slots [T]; negative ones are ignored."""
    return set_rows(stored, slots, _to_stored(hidden, dtype), slots >= 0)


def read_states(
    stored: jax.Array, own: jax.Array, step: StepArrays, is_drawn: jax.Array, dtype: Any
) -> jax.Array:
    """Float32 [T, E]: those stored for the tokens' slots, or `own` [R, E] of their rows where
    `is_drawn` [T]."""
    of_target = stored[jnp.maximum(step.tokens.slots, 0)]
    chosen = jnp.where(is_drawn[:, None], own[step.token_rows], of_target)
    if dtype == jnp.bfloat16:
        chosen = jax.lax.bitcast_convert_type(chosen, jnp.bfloat16)
    return chosen.astype(jnp.float32)


def keep_newest(
    own: jax.Array, hidden: jax.Array, logits: LogitInputs[jax.Array], dtype: Any
) -> jax.Array:
    """`own` [R, E] with the last hidden states [L, E] of the logit rows, at most one a row."""
    return set_rows(own, logits.rows, _to_stored(hidden, dtype), logits.token_indices >= 0)


def as_head_step(step: StepArrays, page_size: int) -> StepArrays:
    """The step with its tokens at the positions and slots that they have in a head's sequence."""
    positions = jnp.maximum(step.tokens.positions - 1, 0)
    pages = step.page_table[step.token_rows, positions // page_size]
    slots = jnp.where(step.tokens.slots >= 0, pages * page_size + positions % page_size, -1)
    lengths = step.rows.kv_lens
    turned, windows = (
        jnp.where(each > 0, each - 1, each)
        for each in (step.tokens.rope_positions, step.tokens.window_starts)
    )
    return step._replace(
        tokens=replace(
            step.tokens,
            positions=positions,
            slots=slots,
            rope_positions=turned,
            window_starts=windows,
        ),
        rows=replace(step.rows, kv_lens=jnp.maximum(lengths - 1, jnp.minimum(lengths, 1))),
    )


def _to_stored(states: jax.Array, dtype: Any) -> jax.Array:
    cast = states.astype(dtype)
    return jax.lax.bitcast_convert_type(cast, jnp.uint16) if dtype == jnp.bfloat16 else cast
