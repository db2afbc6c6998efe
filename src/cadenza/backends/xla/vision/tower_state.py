"""`TowerState`: the memory on the device in which a tower computes. Donated to every program that
changes it. A step takes it and gives it back unchanged, so that encoding and steps run in the order
in which they were launched."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cadenza.backends.base import RunnerSetup
from cadenza.backends.xla.ops.encoder_table import EncoderHeads, EncoderShape
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec
from cadenza.vision.quanta import Workspace
from cadenza.vision.tower_config import TowerConfig


class TowerState(NamedTuple):
    """N rows for the patches of the largest part, M for its tokens."""

    stream: Any  # [N, E], float32
    heads: EncoderHeads  # of N rows
    rows: Any  # [M, parts E'], activations: those of the part that is being encoded


def encoder_shape(tower: TowerConfig) -> EncoderShape:
    return EncoderShape(
        num_heads=tower.num_heads,
        head_dim=tower.head_dim,
        scale=tower.scale,
        norm_eps=tower.norm_eps,
    )


def tower_state(ops: OpTable, spec: DecoderSpec, setup: RunnerSetup) -> TowerState | None:
    """A new state, every element `RunnerSetup.fill` or unwritten; None for a runner that encodes no
    images. Called under tracing."""
    vision = spec.model.vision
    if vision is None or not setup.num_image_slots:
        return None
    space, fill = Workspace.of(vision), setup.fill

    def array(count: int, columns: int, dtype: Any) -> jax.Array:
        if fill is not None:
            return jnp.full((count, columns), fill, dtype)
        return ops.unwritten((count, columns), dtype)

    return TowerState(
        stream=array(space.patches, vision.tower.hidden_size, jnp.float32),
        heads=ops.new_encoder_heads(space.patches, encoder_shape(vision.tower), fill),
        rows=array(space.tokens, vision.num_parts * spec.model.hidden_size, spec.dtype),
    )
