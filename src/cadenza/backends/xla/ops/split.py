"""`SplitOps`: the operations of a model whose heads and MLPs are divided among devices. Products
that write to the stream are summed in `NUM_SPANS` spans of inputs, then in a balanced tree; devices
exchange whole float32 sums by an all-gather, so no bit depends on their number. Other parts are
computed one KV head or tile at a time (`_each`), since a compiler orders sums by shape."""

from collections.abc import Callable
from dataclasses import replace
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cadenza.backends.xla.ops.attention_reference import KeyBlock
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec, HeadFactors, KVPool, Linear, StepArrays
from cadenza.models.layer_kind import HeadShape
from cadenza.models.split import NUM_SPANS

AXIS = "devices"  # the name of the mesh's axis
TILE = 64  # outputs of a tile, at most


class SplitOps(OpTable):
    """Of one of `DecoderSpec.num_devices`, within `shard_map` over `AXIS`."""

    name = "split"

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__(spec)
        self._num_devices = spec.num_devices

    def linear(
        self, x: jax.Array, weight: Linear, count: jax.Array, residual: jax.Array | None = None
    ) -> jax.Array:
        if residual is None:
            return self._columns(x, weight).astype(self._spec.dtype)
        y = self._spans(x, weight)
        return residual + y * np.float32(self._model.residual_scale)

    def project(
        self, x: jax.Array, weight: Linear, count: jax.Array, scale: float = 1.0
    ) -> jax.Array:
        y = self._spans(x, weight)
        return y if scale == 1.0 else y * np.float32(scale)

    def gated_linear(self, x: jax.Array, weight: Linear, count: jax.Array) -> jax.Array:
        gate, up = jnp.split(self._columns(x, weight), 2, axis=-1)
        return self._gate(gate, up)

    def _gate(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        whole, size = super()._gate, gate.shape[1]
        tile = _tile_of(size, self._num_devices)

        def tiles(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(x.reshape(len(x), size // tile, tile), 1, 0)

        gated = _each(lambda part: whole(*part), (tiles(gate), tiles(up)))
        return jnp.moveaxis(gated, 0, 1).reshape(gate.shape)

    def _queries(
        self, qkv: jax.Array, factors: HeadFactors, rotations: jax.Array, shape: HeadShape
    ) -> jax.Array:
        groups = qkv[:, : shape.query_size].reshape(len(qkv), shape.num_kv_heads, -1)
        own = replace(shape, num_heads=shape.num_heads // shape.num_kv_heads, num_kv_heads=1)
        whole = super()._queries

        def query(part: jax.Array) -> jax.Array:
            return whole(part, factors, rotations, own)[:, 0]

        return jnp.moveaxis(_each(query, jnp.moveaxis(groups, 1, 0)), 0, 1)

    def _keys_and_values(
        self, key: jax.Array, value: jax.Array, factors: HeadFactors, rotations: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        whole = super()._keys_and_values

        def kept(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return whole(part[0][:, None], part[1][:, None], factors, rotations)

        heads = jnp.moveaxis(key, 1, 0), jnp.moveaxis(value, 1, 0)
        keys, values = _each(kept, heads)
        return jnp.moveaxis(keys[:, :, 0], 0, 1), jnp.moveaxis(values[:, :, 0], 0, 1)

    def _attend_loaded(
        self, query: jax.Array, loaded: KVPool, block: KeyBlock, state: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        whole = super()._attend_loaded

        def head(axis: int) -> Callable[[jax.Array], jax.Array]:
            return lambda side: jnp.moveaxis(side, axis, 0)

        def attend(part: Any) -> tuple[jax.Array, ...]:
            query, kept, state = part
            own = jax.tree.map(lambda side: side[:, :, None], kept)
            return whole(query[:, None], own, block, tuple(each[:, None] for each in state))

        parts = head(1)(query), jax.tree.map(head(2), loaded), jax.tree.map(head(1), state)
        return jax.tree.map(lambda side: jnp.moveaxis(side[:, :, 0], 0, 1), _each(attend, parts))

    def next_tokens(self, x: jax.Array, head: Linear, step: StepArrays) -> jax.Array:
        return self._choose(self._logits(x, head), step)

    def _logits(self, x: jax.Array, head: Linear) -> jax.Array:
        size = self._model.vocab_size
        if size % NUM_SPANS:
            return _tiled_product(x, head.weight, NUM_SPANS)
        weight = head.weight
        if len(weight) == size:  # a tied one is whole
            each = size // self._num_devices
            start = jax.lax.axis_index(AXIS) * each
            weight = jax.lax.dynamic_slice_in_dim(weight, start, each)
        own = _tiled_product(x, weight, self._num_devices)
        return jax.lax.all_gather(own, AXIS, axis=1, tiled=True)

    def _columns(self, x: jax.Array, weight: Linear) -> jax.Array:
        y = _tiled_product(x, weight.weight, self._num_devices)
        return y if weight.bias is None else y + weight.bias

    def _spans(self, x: jax.Array, weight: Linear) -> jax.Array:
        num_spans = NUM_SPANS // self._num_devices
        inputs = jnp.split(x, num_spans, axis=1)
        parts = jnp.split(weight.weight, num_spans, axis=1)
        # The outputs are whole on each device.
        sums = [_tiled_product(a, b, NUM_SPANS) for a, b in zip(inputs, parts, strict=True)]
        own = _tree(sums)
        if self._num_devices > 1:
            gathered = jax.lax.all_gather(own, AXIS)
            own = _tree([gathered[index] for index in range(self._num_devices)])
        return own if weight.bias is None else own + weight.bias


def _tree(sums: list[jax.Array]) -> jax.Array:
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def _tile_of(num_out: int, num_devices: int) -> int:
    # A size of which every number of devices has whole tiles.
    return gcd(TILE, max(1, num_out * num_devices // NUM_SPANS))


def _tiled_product(x: jax.Array, weight: Any, num_devices: int) -> jax.Array:
    num_out, num_in = weight.shape
    tile = _tile_of(num_out, num_devices)

    def product(tile: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            x,
            tile,
            (((1,), (1,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    products = _each(product, weight.reshape(num_out // tile, tile, num_in))
    return jnp.moveaxis(products, 0, 1).reshape(len(x), num_out)


def _each(compute: Callable[[Any], Any], parts: Any) -> Any:
    """What `compute` makes of each part: arrays with a leading axis of parts. A loop whose length
    the compiler does not know, so that it neither unrolls it nor fuses a part with anything
    outside."""
    count = len(jax.tree.leaves(parts)[0])

    def part_of(index: Any) -> Any:
        own = jax.tree.map(lambda side: jax.lax.dynamic_index_in_dim(side, index, 0, False), parts)
        return jax.lax.optimization_barrier(own)

    def add(index: jax.Array, made: Any) -> Any:
        own = jax.lax.optimization_barrier(compute(part_of(index)))
        return jax.tree.map(
            lambda side, new: jax.lax.dynamic_update_index_in_dim(side, new, index, 0), made, own
        )

    shapes = jax.eval_shape(lambda: compute(part_of(0)))
    empty = jax.tree.map(lambda each: jnp.zeros((count, *each.shape), each.dtype), shapes)
    return jax.lax.fori_loop(0, jax.lax.optimization_barrier(jnp.int32(count)), add, empty)
