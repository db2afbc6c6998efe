"""Token rules of a step, in JAX. A row's context is in the token history on the device, one token
per KV slot, read through the page table, and shared, copied and recomputed with the KV. Legend: L
logit rows · V vocabulary · N positions of a context · W words · P pages per row."""

from typing import Any

import jax
import jax.numpy as jnp

from cadenza.backends.token_choice import Arrays, TokenChoice, TokenRules
from cadenza.backends.xla.ops.table import StepArrays
from cadenza.batch.step_schema import NO_RULES
from cadenza.batch.token_rules import NONE


def _rows_of(shape: tuple[int, int]) -> jax.Array:
    return jnp.arange(shape[0])[:, None]


def _with_spare(shape: tuple[int, int], dtype: Any) -> jax.Array:
    return jnp.zeros((shape[0], shape[1] + 1), dtype)


def _spread(shape: tuple[int, int], dtype: Any, ids: jax.Array, values: Any) -> jax.Array:
    return _with_spare(shape, dtype).at[_rows_of(shape), ids].set(values)[:, :-1]


def _spread_sum(shape: tuple[int, int], dtype: Any, ids: jax.Array, values: Any) -> jax.Array:
    return _with_spare(shape, dtype).at[_rows_of(shape), ids].add(values)[:, :-1]


JAX = Arrays(
    xp=jnp,
    on_device=lambda values: values,
    either=jax.lax.cond,
    repeat=lambda count, body, state: jax.lax.fori_loop(0, count, body, state),
    repeat_while=jax.lax.while_loop,
    set_at=lambda array, indices, values: array.at[indices].set(values),
    spread=_spread,
    spread_sum=_spread_sum,
)
CHOICE = TokenChoice(JAX)
RULES = TokenRules(JAX)


def apply_rules(logits: jax.Array, step: StepArrays, page_size: int) -> jax.Array:
    """Applies each row's rules to logits [L, V]; rows without rules are bitwise unchanged."""
    if step.rules is None:
        return logits

    def ruled() -> jax.Array:
        assert step.rules is not None
        records = step.rules.records[step.logits.rule_record]  # [L, W]
        lengths = step.logits.positions  # [L], tokens before the one to choose
        context = _contexts(step, lengths, page_size)  # [L, N]
        changed = RULES.apply(logits, records, context, lengths)
        return jnp.where(has_rules[:, None], changed, logits)

    has_rules = step.logits.rule_record != NO_RULES
    return jax.lax.cond(jnp.any(has_rules), ruled, lambda: logits)


def _contexts(step: StepArrays, lengths: jax.Array, page_size: int) -> jax.Array:
    assert step.rules is not None
    tables = step.page_table[step.logits.rows]  # [L, P]
    positions = jnp.arange(tables.shape[1] * page_size)  # [N]
    is_inside = positions < lengths[:, None]
    pages = jnp.where(is_inside, tables[:, positions // page_size], 0)
    tokens = step.rules.history[pages * page_size + positions % page_size]
    return jnp.where(is_inside, tokens, NONE)
