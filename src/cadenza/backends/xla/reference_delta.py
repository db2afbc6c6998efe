"""`DeltaNet`: a gated delta net of `ReferenceModel`, in float32 and a token at a time.

Written from the equations of arXiv 2412.06464, with matrices that map keys to values; it shares
nothing with `ops.recurrent`.

Legend: C tokens of a chunk · E embed · J inputs of the convolution · M its channels · Hk/Hv key and
value heads · Dk/Dv their sizes.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cadenza.checkpoint.layer_kind import DeltaShape

State = tuple[jax.Array, jax.Array]
"""The inputs [J - 1, M] of the convolution, oldest first, and a matrix [Hv, Dv, Dk] a head."""


def new_delta_state(shape: DeltaShape) -> State:
    """The state before the first token."""
    matrices = (shape.num_value_heads, shape.value_size, shape.key_size)
    inputs = (shape.num_inputs - 1, shape.num_channels)
    return jnp.zeros(inputs, jnp.float32), jnp.zeros(matrices, jnp.float32)


class DeltaNet(NamedTuple):
    """One layer's net; `layer` has its tensors by their names within the layer."""

    shape: DeltaShape
    layer: Mapping[str, jax.Array]
    norm_eps: float

    def apply(self, x: jax.Array, state: State, last: jax.Array) -> tuple[jax.Array, State]:
        """The output [C, E] for the chunk x [C, E], and the state behind token `last` []."""
        shape, count = self.shape, len(x)
        inputs = jnp.concatenate([state[0], self._project("in_proj_qkv", x)])  # [J - 1 + C, M]
        taps = self._tensor("conv1d.weight")[:, 0]  # [M, J]
        mixed = sum(inputs[lag : lag + count] * taps[:, lag] for lag in range(shape.num_inputs))
        mixed = _silu(jnp.asarray(mixed))
        key_width = shape.key_width
        queries = self._keys(mixed[:, :key_width]) * shape.key_size**-0.5
        keys = self._keys(mixed[:, key_width : 2 * key_width])
        values = mixed[:, 2 * key_width :].reshape(count, shape.num_value_heads, -1)
        rates = jnp.log1p(jnp.exp(self._project("in_proj_a", x) + self._tensor("dt_bias")))
        decay = self._tensor("A_log")
        decays = jnp.exp((decay if shape.has_rates else -jnp.exp(decay)) * rates)  # [C, Hv]
        strengths = 1.0 / (1.0 + jnp.exp(-self._project("in_proj_b", x)))  # [C, Hv]

        def advance(
            matrix: jax.Array, token: tuple[jax.Array, ...]
        ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            query, key, value, decay, strength = token
            eye = jnp.eye(shape.key_size, dtype=jnp.float32)
            erase = eye - strength[:, None, None] * key[:, :, None] * key[:, None, :]
            kept = decay[:, None, None] * jnp.matmul(matrix, erase, precision="highest")
            matrix = kept + strength[:, None, None] * value[:, :, None] * key[:, None, :]
            read = jnp.einsum("hvk,hk->hv", matrix, query, precision="highest")
            return matrix, (read, matrix)

        tokens = (queries, keys, values, decays, strengths)
        _, (reads, matrices) = jax.lax.scan(advance, state[1], tokens)
        kept = jax.lax.dynamic_slice_in_dim(inputs, last + 1, shape.num_inputs - 1)
        scale = jnp.sqrt(jnp.mean(jnp.square(reads), axis=-1, keepdims=True) + self.norm_eps)
        gate = self._project("in_proj_z", x).reshape(reads.shape)
        gated = reads / scale * self._tensor("norm.weight") * _silu(gate)
        return self._project("out_proj", gated.reshape(count, -1)), (kept, matrices[last])

    def _keys(self, flat: jax.Array) -> jax.Array:
        """Keys or queries [C, Hv, Dk] of length 1, from [C, Hk Dk]."""
        heads = flat.reshape(len(flat), self.shape.num_key_heads, -1)
        heads = heads / jnp.sqrt(jnp.sum(jnp.square(heads), axis=-1, keepdims=True) + 1e-6)
        places = jnp.arange(self.shape.num_value_heads)
        if self.shape.is_tiled:
            return heads[:, places % self.shape.num_key_heads]
        return heads[:, places * self.shape.num_key_heads // self.shape.num_value_heads]

    def _tensor(self, name: str) -> jax.Array:
        return self.layer[f"linear_attn.{name}"]

    def _project(self, name: str, x: jax.Array) -> jax.Array:
        return jnp.matmul(x, self._tensor(f"{name}.weight").T, precision="highest")


def _silu(x: jax.Array) -> jax.Array:
    return x / (1.0 + jnp.exp(-x))
