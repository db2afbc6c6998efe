"""`SplitOps`: the operations of a model whose heads and MLPs are divided among devices.

A device computes some outputs of the linears that read the stream. Of those that write to it, it
has some inputs: their products are summed in `NUM_SPANS` spans of inputs, which follow from the
weight, and the sums of spans are added in a balanced tree. A device adds the subtree of its own
spans; what devices then exchange are whole sums in float32, by an all-gather, which adds nothing.
So no bit depends on the number of devices.

Products are computed in tiles of outputs that every number of devices has whole, since a compiler
may order the sums of a product by its shape.
"""

from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec, Linear, StepArrays
from cadenza.checkpoint.split import NUM_SPANS

AXIS = "devices"
"""The name of the mesh's axis."""

TILE = 64
"""Outputs of a tile, at most."""


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

    def next_tokens(self, x: jax.Array, head: Linear, step: StepArrays) -> jax.Array:
        return self._choose(self._logits(x, head), step)

    def _logits(self, x: jax.Array, head: Linear) -> jax.Array:
        """[L, V]: every device has them all."""
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
        """x W in float32, of the outputs that the device has."""
        y = _tiled_product(x, weight.weight, self._num_devices)
        return y if weight.bias is None else y + weight.bias

    def _spans(self, x: jax.Array, weight: Linear) -> jax.Array:
        """The sum of all devices' products, in float32."""
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
    """The sum of neighbours, then of neighbouring sums, to the last."""
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def _tiled_product(x: jax.Array, weight: Any, num_devices: int) -> jax.Array:
    """x [T, K] times the transposed weight [N, K], which is a part of one of N * `num_devices`
    outputs: float32 [T, N]."""
    num_out, num_in = weight.shape
    tile = gcd(TILE, max(1, num_out * num_devices // NUM_SPANS))
    tiles = weight.reshape(num_out // tile, tile, num_in)

    def product(tile: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            x,
            tile,
            (((1,), (1,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    return jnp.moveaxis(jax.lax.map(product, tiles), 0, 1).reshape(len(x), num_out)
