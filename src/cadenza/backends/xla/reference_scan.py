"""`ConvNet` and `ScanNet`: the other recurrences of `ReferenceModel`, in float32, from the
equations of LFM2 and Mamba-2 (arXiv 2405.21060, as a masked product within a chunk); they share
nothing with `ops.recurrent`. Legend as in `reference_block`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cadenza.backends.xla.reference_block import BlockTensors, State, silu
from cadenza.backends.xla.reference_delta import DeltaNet
from cadenza.checkpoint.layer_kind import ConvShape, DeltaShape, Recurrence, ScanShape


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
        """What groups [C, G Dk] share, for each head [C, Hv, Dk]."""
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
