"""The residual stream of a step's tokens, and what all layers of the step compute with.

Legend as in `ops.table`; N tokens: all of a step, or those of its logit rows.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from cadenza.backends.xla.ops.table import Linear, OpTable, StepArrays
from cadenza.checkpoint.model_config import ModelConfig


class StepContext(NamedTuple):
    """The operations, the model, the step's arrays, and its distinct ropes."""

    ops: OpTable
    model: ModelConfig
    step: StepArrays
    ropes: tuple[Any, ...]  # [positions, rotary_dim] of each of `ModelConfig.ropes`


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
