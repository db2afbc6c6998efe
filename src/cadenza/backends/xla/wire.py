"""Unpacks a step's input buffer inside the compiled program: one buffer, because one upload costs
less than one per array. `core.step_schema` defines the layout."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from cadenza.backends.xla.ops.table import StepArrays
from cadenza.batch.step_schema import LAST_SAMPLED, StepLayout


def unpack(
    layout: StepLayout, words: jax.Array, last_sampled: jax.Array, page_table: jax.Array
) -> StepArrays:
    """The step's arrays, with each token's row, and LAST_SAMPLED replaced by `last_sampled`."""
    groups = layout.split(words, _bits_as)
    starts = groups.rows.query_starts
    indices = jnp.arange(layout.num_tokens)
    token_rows = jnp.searchsorted(starts[1:], indices, side="right", method="scan_unrolled")
    token_rows = jnp.minimum(token_rows, layout.num_rows - 1).astype(jnp.int32)
    ids = groups.tokens.ids
    ids = jnp.where(ids == LAST_SAMPLED, last_sampled[token_rows], ids)
    return StepArrays(
        num_tokens=groups.counts.num_tokens[0],
        num_logits=groups.counts.num_logits[0],
        tokens=replace(groups.tokens, ids=ids),
        token_rows=token_rows,
        rows=groups.rows,
        logits=groups.logits,
        page_table=page_table,
    )


def are_last_sampled(layout: StepLayout, words: jax.Array) -> jax.Array:
    return layout.split(words, _bits_as).tokens.ids == LAST_SAMPLED


def _bits_as(words: jax.Array, dtype: np.dtype) -> jax.Array:
    return jax.lax.bitcast_convert_type(words, dtype)
