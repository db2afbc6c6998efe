"""`Arrays`: the array library in which tokens are chosen, JAX or MLX. `sampling` and `token_rules`
use the functions that both libraries have by the same name, and these for the rest."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Body = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """An array library."""

    xp: Any  # `jax.numpy` or `mlx.core`
    # a setting of the rows, which may be a host array, as an array of `xp`
    on_device: Callable[[Any], Any]
    # `either(condition, then, otherwise)` calls one of the two functions
    either: Callable[[Any, Callable[[], Any], Callable[[], Any]], Any]
    # `repeat(count, body, state)` is the state after `body(index, state)` for each index
    repeat: Callable[[int, Body, Any], Any]
    # `repeat_while(condition, body, state)` likewise, while `condition(state)`. It may call `body`
    # further times: this must then leave the state as it is.
    repeat_while: Callable[[Callable[[Any], Any], Callable[[Any], Any], Any], Any]
    # `set_at(array, indices, values)` is the array with elements set
    set_at: Callable[[Any, Any, Any], Any]
    # `spread(shape, dtype, ids, values)` is zeros [L, V] with the values at ids [L, ·] of each row;
    # ids of V are ignored
    spread: Callable[[tuple[int, int], Any, Any, Any], Any]
    # the same with the sum of the values of equal ids
    spread_sum: Callable[[tuple[int, int], Any, Any, Any], Any]

    def word(self, value: int) -> Any:
        return self.xp.array(value, self.xp.uint32)
