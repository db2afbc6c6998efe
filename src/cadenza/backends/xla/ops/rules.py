"""Token rules of a step (`backends.token_rules`). A row's context is in the token history on the
device, one token per KV slot, read through the page table, and shared, copied and recomputed with
the KV. Legend: L logit rows · V vocabulary · N positions of a context · W words · P pages per
row."""

import jax
import jax.numpy as jnp

from cadenza.backends.xla.ops.jax_arrays import RULES
from cadenza.backends.xla.ops.table import StepArrays
from cadenza.batch.step_schema import NO_RULES
from cadenza.batch.token_rules import NONE


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
