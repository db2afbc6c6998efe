"""MLX as the arrays in which tokens are chosen. Which parts of a choice are computed is decided on
the host, where the rows' settings are."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from cadenza.backends.token_choice import Arrays, Body


def to_device(values: Any) -> mx.array:
    return values if isinstance(values, mx.array) else mx.array(np.ascontiguousarray(values))


def mlx_arrays(max_rounds: int = 0) -> Arrays:
    """`max_rounds`: how often `repeat_while` calls its body; its condition is ignored."""

    def repeat_while(_: Any, body: Callable[[Any], Any], state: Any) -> Any:
        for _ in range(max_rounds):
            state = body(state)
        return state

    return Arrays(
        xp=mx,
        on_device=to_device,
        either=lambda condition, then, otherwise: then() if condition else otherwise(),
        repeat=_repeat,
        repeat_while=repeat_while,
        set_at=_set_at,
        spread=_spread,
        spread_sum=_spread_sum,
    )


def _repeat(count: int, body: Body, state: Any) -> Any:
    for index in range(count):
        state = body(mx.array(index), state)
    return state


def _set_at(array: mx.array, indices: Any, values: Any) -> mx.array:
    changed = mx.array(array)
    changed[indices] = values
    return changed


def _spread(shape: tuple[int, int], dtype: mx.Dtype, ids: mx.array, values: Any) -> mx.array:
    wide = mx.zeros((shape[0], shape[1] + 1), dtype)  # the last column takes what is ignored
    wide[mx.arange(shape[0])[:, None], ids] = values
    return wide[:, : shape[1]]


def _spread_sum(shape: tuple[int, int], dtype: mx.Dtype, ids: mx.array, values: Any) -> mx.array:
    wide = mx.zeros((shape[0], shape[1] + 1), dtype)
    return wide.at[mx.arange(shape[0])[:, None], ids].add(values)[:, : shape[1]]
