"""The recurrences of `ReferenceModel` in float32, from the equations of arXiv 2412.06464
(`DeltaNet`), LFM2 (`ConvNet`) and Mamba-2, arXiv 2405.21060 (`ScanNet`, a masked product within a
chunk); nothing is shared with `ops.recurrent`. Legend: C tokens of a chunk · E embed · J inputs of
the convolution · M its channels · Hk/Hv key and value heads · Dk/Dv their sizes."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cadenza.models.layer_kind import ConvShape, DeltaShape, Recurrence, ScanShape

# The inputs [J - 1, M] of the convolution, oldest first, and a matrix [Hv, Dv, Dk] a head.
State = tuple[jax.Array, jax.Array]


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
        heads = flat.reshape(len(flat), self.shape.num_key_heads, -1)
        heads = heads / jnp.sqrt(jnp.sum(jnp.square(heads), axis=-1, keepdims=True) + 1e-6)
        indices = jnp.arange(self.shape.num_value_heads)
        if self.shape.is_tiled:
            return heads[:, indices % self.shape.num_key_heads]
        return heads[:, indices * self.shape.num_key_heads // self.shape.num_value_heads]


class ConvNet(NamedTuple):
    """One layer's gated short convolution."""

    block: BlockTensors

    def apply(self, x: jax.Array, state: State, last: jax.Array) -> tuple[jax.Array, State]:
        """The output [C, E] for the chunk x [C, E], and the state after token `last` []."""
        first, gate, third = jnp.split(self.block.project("in_proj", x), 3, axis=-1)
        sums, kept = self.block.convolve("conv", first * third, state[0], last)
        return self.block.project("out_proj", gate * sums), (kept, state[1])


class ScanNet(NamedTuple):
    """One layer's selective scan."""

    shape: ScanShape
    block: BlockTensors
    norm_eps: float

    def apply(self, x: jax.Array, state: State, last: jax.Array) -> tuple[jax.Array, State]:
        """As `ConvNet.apply`: each token reads what earlier ones of the chunk wrote, and the state
        before it, both decayed."""
        shape, block, count = self.shape, self.block, len(x)
        ends = [shape.value_width, shape.value_width + shape.num_channels]
        gate, mixed, rates = jnp.split(block.project("in_proj", x), ends, axis=-1)
        sums, kept = block.convolve("conv1d", mixed, state[0], last)
        ends = [shape.value_width, shape.value_width + shape.group_width]
        flat, keys, queries = jnp.split(silu(sums), ends, axis=-1)
        values = flat.reshape(count, shape.num_heads, -1)  # [C, Hv, Dv]
        keys, queries = self._of_heads(keys), self._of_heads(queries)  # [C, Hv, Dk]
        rates = jnp.log1p(jnp.exp(rates + block.tensor("dt_bias")))  # [C, Hv]
        ages = jnp.cumsum(
            block.rates(are_stored=shape.has_rates) * rates, axis=0
        )  # [C, Hv]: ln(decay)
        written = values * rates[:, :, None]
        between = ages[:, None] - ages[None]  # [C, C, Hv]: of each token, from each earlier one
        is_earlier = jnp.tril(jnp.ones((count, count), bool))[:, :, None]
        shares = jnp.exp(jnp.where(is_earlier, between, -jnp.inf))
        scores = jnp.einsum("thk,shk->tsh", queries, keys, precision="highest") * shares
        reads = jnp.einsum("tsh,shv->thv", scores, written, precision="highest")
        old = jnp.einsum("hvk,thk->thv", state[1], queries, precision="highest")
        reads += old * jnp.exp(ages)[:, :, None] + block.tensor("D")[:, None] * values
        left = jnp.where(jnp.arange(count)[:, None] <= last, jnp.exp(ages[last] - ages), 0.0)
        new = jnp.einsum("shv,shk->hvk", written * left[:, :, None], keys, precision="highest")
        matrix = state[1] * jnp.exp(ages[last])[:, None, None] + new
        gated = (reads.reshape(count, -1) * silu(gate)).reshape(count, shape.num_groups, -1)
        scale = jnp.sqrt(jnp.mean(jnp.square(gated), axis=-1, keepdims=True) + self.norm_eps)
        normed = (gated / scale).reshape(count, -1) * block.tensor("norm.weight")
        return block.project("out_proj", normed), (kept, matrix)

    def _of_heads(self, flat: jax.Array) -> jax.Array:
        groups = flat.reshape(len(flat), self.shape.num_groups, -1)
        return jnp.repeat(groups, self.shape.num_heads // self.shape.num_groups, axis=1)


def net_of(shape: Recurrence, block: BlockTensors, norm_eps: float) -> DeltaNet | ConvNet | ScanNet:
    match shape:
        case DeltaShape():
            return DeltaNet(shape, block, norm_eps)
        case ConvShape():
            return ConvNet(block)
        case ScanShape():
            return ScanNet(shape, block, norm_eps)
