"""Op tables with one fault each, for `cadenza verify --self-test`: every fault makes a row's bits
depend on its neighbours or on how its prompt was cut, and the gate must catch every one.

They change the reference table and share its programs; nothing else ever uses them.
"""

import jax
import jax.numpy as jnp

from cadenza.backends.xla.ops.reference import BLOCK, Places, ReferenceOps
from cadenza.backends.xla.ops.table import DecoderSpec as Spec
from cadenza.backends.xla.ops.table import KVPool, Linear, OpTable, StepArrays


class RelativeBlocks(ReferenceOps):
    """Attention blocks start where this step's tokens of the row start, not at absolute places."""

    def _block_start(self, block: jax.Array, step: StepArrays) -> jax.Array:
        first = step.query_starts[step.token_rows]  # [T]
        start = step.positions[jnp.minimum(first, len(step.positions) - 1)] % BLOCK
        return (block - 1) * BLOCK + start

    def _num_blocks(self, limits: jax.Array) -> jax.Array:
        return super()._num_blocks(limits) + 1


class RowKeys(ReferenceOps):
    """Draws are keyed by the row they happen to sit in."""

    def next_tokens(self, x: jax.Array, head: Linear, step: StepArrays) -> jax.Array:
        keys = step.sampling.keys.at[:, 0].set(step.logit_rows.astype(jnp.uint32))
        changed = step._replace(sampling=step.sampling._replace(keys=keys))
        return super().next_tokens(x, head, changed)


class MultipliedPadding(ReferenceOps):
    """Lanes outside a row's context are multiplied by zero instead of loaded as zero."""

    def _load(self, pool: KVPool, places: Places, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        lanes = valid[:, :, None, None].astype(pool.keys.dtype)
        slots, layer = places
        beyond = (jnp.where(valid, slots, slots.shape[1] - 1), layer)
        return pool.keys[beyond] * lanes, pool.values[beyond] * lanes


MUTANTS: dict[str, type[ReferenceOps]] = {
    "blocks relative instead of absolute": RelativeBlocks,
    "key taken from the row index": RowKeys,
    "padding multiplied instead of skipped": MultipliedPadding,
}


def sound_table(spec: Spec) -> OpTable:
    """The table that the mutants change, unchanged."""
    return ReferenceOps(spec)
