"""The residual stream of a step's tokens, and what all layers of the step compute with. Legend as
in `ops.table`; N tokens: all of a step, or those of its logit rows."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import (
    DecoderSpec,
    ImageRows,
    Linear,
    RecurrentLayer,
    StepArrays,
    StepStates,
)
from cadenza.models.model_config import ModelConfig
from cadenza.models.rope_config import RopeConfig


class StepContext(NamedTuple):
    """The operations, the model, the step's arrays, and the rope of its tokens. Where a token's
    rope has several coordinates, `ropes` has a row for each token, gathered for the step, and
    `rope_positions` count them. `is_sparse`: windows begin where the step says."""

    ops: OpTable
    model: ModelConfig
    step: StepArrays
    ropes: tuple[Any, ...]  # [positions, rotary_dim] of each of `ModelConfig.ropes`
    rope_positions: jax.Array  # [T]: the tokens' rows of `ropes`
    images: ImageRows | None = None  # of a runner that encodes images
    is_sparse: bool = False  # of a runner of sparse prompts

    @classmethod
    def of(
        cls,
        ops: OpTable,
        spec: DecoderSpec,
        step: StepArrays,
        ropes: tuple[Any, ...],
        image_rows: jax.Array | None = None,
    ) -> "StepContext":
        """With the ropes of all positions and the rows of all image slots; not within
        `OpTable.compute`."""
        model, rope_positions = spec.model, step.tokens.positions
        if spec.is_sparse:
            given = step.tokens.rope_positions[:, 0]
            rope_positions = jnp.where(given >= 0, given, rope_positions)
        if model.has_rope_axes:
            pairs = zip(model.ropes, ropes, strict=True)
            ropes = tuple(_rotations_of(rope, table, step, rope_positions) for rope, table in pairs)
            rope_positions = jnp.arange(len(step.tokens.ids), dtype=jnp.int32)
        images = None if image_rows is None else ImageRows(image_rows, step.tokens.image_slots)
        return cls(ops, model, step, ropes, rope_positions, images, spec.is_sparse)

    def within(self, ops: OpTable) -> "StepContext":
        return self._replace(ops=ops)

    def recurrent(self, index: int) -> tuple[tuple[StepArrays, StepStates], RecurrentLayer[Any]]:
        model, step = self.model, self.step
        shape = model.layer_kinds[index].recurrence
        assert shape is not None, "the layer has a recurrence"
        state_index = model.recurrent_layers.index(index)
        layer = RecurrentLayer(index=state_index, shape=shape, norm_eps=model.rms_norm_eps)
        return (step, StepStates(step.rows.state_starts, step.tokens.state_slots)), layer


def _rotations_of(
    rope: RopeConfig | None, table: Any, step: StepArrays, rope_positions: jax.Array
) -> jax.Array:
    # Each pair by the coordinate of its axis; by `rope_positions` of a rope without axes.
    positions, given = step.tokens.positions, step.tokens.rope_positions
    if rope is None or not rope.axes:
        return table[rope_positions]
    coordinates = jnp.where(given >= 0, given, positions[:, None])  # [T, 3]
    axes = np.array(rope.axes * 2)  # cosines, then sines
    rotations = table[coordinates[:, 0]]
    for axis in (1, 2):
        rotations = jnp.where(axes == axis, table[coordinates[:, axis]], rotations)
    return rotations


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream, float32; only the first `count` [] rows are defined."""

    x: jax.Array  # [N, E]
    count: jax.Array

    def normed(self, ops: OpTable, norm: Any | None) -> jax.Array:
        if norm is None:
            return ops.to_activations(self.x, self.count)
        return ops.rms_norm(self.x, norm, self.count)

    def plus(self, ops: OpTable, y: jax.Array, weight: Linear, post_norm: Any | None) -> "Residual":
        if post_norm is None:
            x = ops.linear(y, weight, self.count, residual=self.x)
        else:
            x = ops.linear_norm_add(y, weight, post_norm, self.x, self.count)
        return Residual(x, self.count)

    def with_images(self, context: StepContext, part: int) -> "Residual":
        # The first part replaces the tokens' own embeddings, others are added.
        if context.images is None:
            return self
        rows = context.ops.place_rows(self.x, context.images, part, self.count, part > 0)
        return Residual(rows, self.count)

    def logit_rows(self, ops: OpTable, step: StepArrays) -> "Residual":
        return Residual(ops.take_logit_rows(self.x, step), step.num_logits)
