"""The residual stream of a step's tokens, and what all layers of the step compute with.

Legend as in `ops.table`; N tokens: all of a step, or those of its logit rows.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from cadenza.backends.xla.ops.table import (
    Linear,
    OpTable,
    RecurrentLayer,
    StepArrays,
    StepStates,
)
from cadenza.checkpoint.model_config import ModelConfig


class StepContext(NamedTuple):
    """The operations, the model, the step's arrays, and its distinct ropes."""

    ops: OpTable
    model: ModelConfig
    step: StepArrays
    ropes: tuple[Any, ...]  # [positions, rotary_dim] of each of `ModelConfig.ropes`

    def recurrent(self, index: int) -> tuple[tuple[StepArrays, StepStates], RecurrentLayer[Any]]:
        """The rows of the step with their slots, and layer `index`, which has a state."""
        model, step = self.model, self.step
        shape = model.layer_kinds[index].recurrence
        assert shape is not None, "the layer has a recurrence"
        place = model.recurrent_layers.index(index)
        layer = RecurrentLayer(index=place, shape=shape, norm_eps=model.rms_norm_eps)
        return (step, StepStates(step.rows.state_starts, step.tokens.state_slots)), layer


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream, float32; only the first `count` [] rows are defined."""

    x: jax.Array  # [N, E]
    count: jax.Array

    def normed(self, ops: OpTable, norm: Any | None) -> jax.Array:
        """The stream as activations [N, E], normed if the layer has a norm here."""
        if norm is None:
            return ops.to_activations(self.x, self.count)
        return ops.rms_norm(self.x, norm, self.count)

    def plus(self, ops: OpTable, y: jax.Array, weight: Linear, post_norm: Any | None) -> "Residual":
        """The stream with the output projection of y [N, K] added, normed if there is a norm."""
        if post_norm is None:
            x = ops.linear(y, weight, self.count, residual=self.x)
        else:
            x = ops.linear_norm_add(y, weight, post_norm, self.x, self.count)
        return Residual(x, self.count)

    def logit_rows(self, ops: OpTable, step: StepArrays) -> "Residual":
        """The stream of the logit rows [L, E]."""
        return Residual(ops.take_logit_rows(self.x, step), step.num_logits)
