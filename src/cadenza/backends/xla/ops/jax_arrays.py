"""JAX as the arrays in which tokens are chosen."""

from typing import Any

import jax
import jax.numpy as jnp

from cadenza.backends.arrays import Arrays
from cadenza.backends.token_choice import TokenChoice
from cadenza.backends.token_rules import TokenRules


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
