"""Copies of pages, and of slots of states, to the host and back. A copied item, a page or a slot,
is its part of each of several arrays along their first axis; its bytes are those parts, one after
another. Items are copied `ITEMS_PER_CALL` at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cadenza.batch.step_schema import Int32Array
from cadenza.errors import RunnerError

ITEMS_PER_CALL = 16  # pages or slots per call of the programs

TakeArrays = Callable[[Any], Any]  # the arrays that the items of a state consist of

PutArrays = Callable[[Any, Any], Any]  # a state with those arrays replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPrograms:
    """Copies items to the host and back; `parts` has the shapes and types of what is copied."""

    read: Callable[..., Any]
    write: Callable[..., Any]
    parts: Any


def read_function(take: TakeArrays, num_items: int) -> Callable[..., Any]:
    """The program (state, items [ITEMS_PER_CALL]) to their parts [ITEMS_PER_CALL, elements] of each
    array. The state is not donated."""

    def read_items(state: Any, items: jax.Array) -> Any:
        def parts(array: jax.Array) -> jax.Array:
            by_item = array.reshape(num_items, -1)
            indices = range(ITEMS_PER_CALL)
            return jnp.concatenate(
                [jax.lax.dynamic_index_in_dim(by_item, items[k]) for k in indices]
            )

        return jax.tree.map(parts, take(state))

    return read_items


def write_function(take: TakeArrays, put: PutArrays, num_items: int) -> Callable[..., Any]:
    """The program (state, items [ITEMS_PER_CALL], parts as `read_function` gives them, count []) to
    the state with the first `count` items overwritten."""

    def write_items(state: Any, items: jax.Array, parts: Any, count: jax.Array) -> Any:
        def write_item(index: jax.Array, state: Any) -> Any:
            def write(array: jax.Array, new: jax.Array) -> jax.Array:
                by_item = array.reshape(num_items, -1)
                part = jax.lax.dynamic_index_in_dim(new, index)
                changed = jax.lax.dynamic_update_slice_in_dim(by_item, part, items[index], 0)
                return changed.reshape(array.shape)

            return put(state, jax.tree.map(write, take(state), parts))

        return jax.lax.fori_loop(0, count, write_item, state)

    return write_items


def padded_items(items: Sequence[int]) -> Int32Array:
    padded = np.full(ITEMS_PER_CALL, items[-1], np.int32)
    padded[: len(items)] = items
    return padded


def bytes_of_items(arrays: Any, count: int) -> list[bytes]:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(arrays)]  # [ITEMS_PER_CALL, ·]
    return [b"".join([leaf[k].tobytes() for leaf in leaves]) for k in range(count)]


def parts_of_items(shapes: Any, contents: Sequence[bytes]) -> Any:
    """The parts [ITEMS_PER_CALL, elements] of each array, as the tree `shapes`, from the bytes of
    at most ITEMS_PER_CALL items. Raises RunnerError if one has another size."""
    each_shape, tree = jax.tree.flatten(shapes)
    sizes = [each.shape[1] * each.dtype.itemsize for each in each_shape]
    leaves = [np.zeros(each.shape, each.dtype) for each in each_shape]
    for index, content in enumerate(contents):
        if len(content) != sum(sizes):
            raise RunnerError(f"an item has {sum(sizes)} bytes, not {len(content)}")
        start = 0
        for leaf, size in zip(leaves, sizes, strict=True):
            leaf[index] = np.frombuffer(content[start : start + size], leaf.dtype)
            start += size
    return jax.tree.unflatten(tree, leaves)
