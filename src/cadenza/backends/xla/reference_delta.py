"""`DeltaNet`: a gated delta net of `ReferenceModel`, in float32 and a token at a time, from the
equations of arXiv 2412.06464; shares nothing with `ops.recurrent`. Legend: C tokens of a chunk · E
embed · J inputs of the convolution · M its channels · Hk/Hv key and value heads · Dk/Dv their
sizes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cadenza.backends.xla.reference_block import BlockTensors, State, silu
from cadenza.checkpoint.layer_kind import DeltaShape


class DeltaNet(NamedTuple):
    """One layer's net."""

    shape: DeltaShape
    block: BlockTensors
    norm_eps: float

    def apply(self, x: jax.Array, state: State, last: jax.Array) -> tuple[jax.Array, State]:
        """The output [C, E] for the chunk x [C, E], and the state after token `last` []."""
        shape, count, block = self.shape, len(x), self.block
        sums, kept = block.convolve("conv1d", block.project("in_proj_qkv", x), state[0], last)
        mixed = silu(sums)
        key_width = shape.key_width
        queries = self._keys(mixed[:, :key_width]) * shape.key_size**-0.5
        keys = self._keys(mixed[:, key_width : 2 * key_width])
        values = mixed[:, 2 * key_width :].reshape(count, shape.num_value_heads, -1)
        rates = jnp.log1p(jnp.exp(block.project("in_proj_a", x) + block.tensor("dt_bias")))
        decays = jnp.exp(block.rates(are_stored=shape.has_rates) * rates)  # [C, Hv]
        strengths = 1.0 / (1.0 + jnp.exp(-block.project("in_proj_b", x)))  # [C, Hv]

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
        scale = jnp.sqrt(jnp.mean(jnp.square(reads), axis=-1, keepdims=True) + self.norm_eps)
        gate = block.project("in_proj_z", x).reshape(reads.shape)
        gated = reads / scale * block.tensor("norm.weight") * silu(gate)
        return block.project("out_proj", gated.reshape(count, -1)), (kept, matrices[last])

    def _keys(self, flat: jax.Array) -> jax.Array:
        """Keys or queries [C, Hv, Dk] of length 1, from [C, Hk Dk]."""
        heads = flat.reshape(len(flat), self.shape.num_key_heads, -1)
        heads = heads / jnp.sqrt(jnp.sum(jnp.square(heads), axis=-1, keepdims=True) + 1e-6)
        indices = jnp.arange(self.shape.num_value_heads)
        if self.shape.is_tiled:
            return heads[:, indices % self.shape.num_key_heads]
        return heads[:, indices * self.shape.num_key_heads // self.shape.num_value_heads]
