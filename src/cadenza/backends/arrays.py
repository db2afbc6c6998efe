"""`Arrays`: the array library in which tokens are chosen, JAX or MLX. `sampling` and `token_rules`
use the functions that both libraries have by the same name, and these for the rest."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Body = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """An array library.

    Args:
        xp: `jax.numpy` or `mlx.core`.
        on_device: a setting of the rows, which may be a host array, as an array of `xp`.
        either: `either(condition, then, otherwise)` calls one of the two functions.
        repeat: `repeat(count, body, state)` is the state after `body(index, state)` for each index.
        repeat_while: `repeat_while(condition, body, state)` likewise, while `condition(state)`. It
            may call `body` further times: this must then leave the state as it is.
        set_at: `set_at(array, indices, values)` is the array with elements set.
        spread: `spread(shape, dtype, ids, values)` is zeros [L, V] with the values at ids [L, ·] of
            each row; ids of V are ignored.
        spread_sum: the same with the sum of the values of equal ids.
    """

    xp: Any
    on_device: Callable[[Any], Any]
    either: Callable[[Any, Callable[[], Any], Callable[[], Any]], Any]
    repeat: Callable[[int, Body, Any], Any]
    repeat_while: Callable[[Callable[[Any], Any], Callable[[Any], Any], Any], Any]
    set_at: Callable[[Any, Any, Any], Any]
    spread: Callable[[tuple[int, int], Any, Any, Any], Any]
    spread_sum: Callable[[tuple[int, int], Any, Any, Any], Any]

    def word(self, value: int) -> Any:
        return self.xp.array(value, self.xp.uint32)
