"""What the recurrences of `ReferenceModel` share: a layer's tensors, its convolution and its state.
Legend: C tokens of a chunk · E embed · J inputs of the convolution · M its channels · Hv heads ·
Dk/Dv sizes of keys and values."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cadenza.checkpoint.layer_kind import Recurrence

State = tuple[jax.Array, jax.Array]
"""The inputs [J - 1, M] of the convolution, oldest first, and a matrix [Hv, Dv, Dk] a head."""


def new_state(shape: Recurrence) -> State:
    inputs = jnp.zeros((shape.num_inputs - 1, shape.num_channels), jnp.float32)
    sizes = shape.matrices
    if sizes is None:
        return inputs, jnp.zeros((0, 0, 0), jnp.float32)
    matrices = (sizes.num_heads, sizes.value_size, sizes.key_size)
    return inputs, jnp.zeros(matrices, jnp.float32)


class BlockTensors(NamedTuple):
    """The tensors of a layer's block, of all those of the layer by their names in it."""

    layer: Mapping[str, jax.Array]
    name: str

    def tensor(self, name: str) -> jax.Array:
        return self.layer[f"{self.name}.{name}"]

    def rates(self, *, are_stored: bool) -> jax.Array:
        """The rates of decay, which are negative; stored as they are or as ln(-rate)."""
        stored = self.tensor("A_log")
        return stored if are_stored else -jnp.exp(stored)

    def project(self, name: str, x: jax.Array) -> jax.Array:
        y = jnp.matmul(x, self.tensor(f"{name}.weight").T, precision="highest")
        return y + self.layer.get(f"{self.name}.{name}.bias", 0.0)

    def convolve(
        self, name: str, x: jax.Array, before: jax.Array, last: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The causal depthwise convolution of x [C, M] after the inputs `before` [J - 1, M], and
        the newest inputs after token `last` []."""
        taps = self.tensor(f"{name}.weight")[:, 0]  # [M, J]
        inputs = jnp.concatenate([before, x])  # [J - 1 + C, M]
        lags = range(taps.shape[1])
        sums = sum(inputs[lag : lag + len(x)] * taps[:, lag] for lag in lags)
        sums = jnp.asarray(sums) + self.layer.get(f"{self.name}.{name}.bias", 0.0)
        return sums, jax.lax.dynamic_slice_in_dim(inputs, last + 1, len(before))


def silu(x: jax.Array) -> jax.Array:
    return x / (1.0 + jnp.exp(-x))
