"""Writes of some rows in which every index is in range. XLA leaves out an update whose index is out
of range; other compilers of StableHLO do not (IREE writes past the array): what is not to be
written repeats a row that is, or writes what is there."""

from typing import Any

import jax
import jax.numpy as jnp


def set_rows(array: jax.Array, indices: Any, rows: jax.Array, are_kept: jax.Array) -> jax.Array:
    """`array` [S, ...] with those of `rows` [T, ...] that `are_kept` [T] marks at `indices` [T],
    which are otherwise of any value and may be a tuple, with further indices after the first."""
    first, *others = indices if isinstance(indices, tuple) else (indices,)
    source = jnp.where(are_kept, jnp.arange(len(are_kept)), jnp.argmax(are_kept))
    is_any = jnp.any(are_kept)
    index = jnp.where(is_any, first[source], 0)
    kept = jnp.where(is_any, rows.astype(array.dtype)[source], array[(0, *others)])
    return array.at[(index, *others)].set(kept, mode="promise_in_bounds")


def set_first_rows(
    array: jax.Array, indices: jax.Array, rows: jax.Array, count: jax.Array
) -> jax.Array:
    """`set_rows` of the first `count` [] of `rows` [T, ...], without a search."""
    index = jnp.arange(len(indices))
    source = jnp.where(index < count, index, 0)
    at = jnp.where(count > 0, indices[source], 0)
    kept = jnp.where(count > 0, rows.astype(array.dtype)[source], array[0])
    return array.at[at].set(kept, mode="promise_in_bounds")


def set_row(array: jax.Array, index: Any, row: jax.Array, is_kept: jax.Array) -> jax.Array:
    """`array` with `row` at `index`, an index or a tuple, if `is_kept` []."""
    first, *others = index if isinstance(index, tuple) else (index,)
    at = (jnp.where(is_kept, first, 0), *others)
    kept = jnp.where(is_kept, row.astype(array.dtype), array[at])
    return array.at[at].set(kept, mode="promise_in_bounds")
