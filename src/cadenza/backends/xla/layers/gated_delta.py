"""`GatedDelta`: the token mixer with a recurrent state that the delta rule changes."""

from typing import NamedTuple

import jax

from cadenza.backends.xla.layers.residual import StepContext
from cadenza.backends.xla.layers.weight_source import WeightSource
from cadenza.backends.xla.ops.table import (
    DeltaInputs,
    DeltaWeights,
    LayerPools,
    Linear,
)
from cadenza.checkpoint.tensor_spec import DeltaSpec


class GatedDelta(NamedTuple):
    """The weights of one layer's gated delta net."""

    mixed: Linear  # [M, E]
    gate: Linear  # [Hv Dv, E]
    rates: Linear  # [2 Hv, E]
    inner: DeltaWeights

    @classmethod
    def load(cls, source: WeightSource, spec: DeltaSpec) -> "GatedDelta":
        return source.load(cls, spec, inner=source.load(DeltaWeights, spec))

    def mix(
        self, context: StepContext, index: int, normed: jax.Array, pools: LayerPools
    ) -> tuple[jax.Array, LayerPools]:
        """The outputs [T, Hv Dv] of layer `index`, and the pools with the states that tokens
        keep."""
        ops, count = context.ops, context.step.num_tokens
        assert pools.states is not None, "the model has states"
        given = DeltaInputs(
            ops.linear(normed, self.mixed, count),
            ops.linear(normed, self.gate, count),
            ops.project(normed, self.rates, count),
        )
        mixed, states = ops.gated_delta(given, self.inner, pools.states, *context.recurrent(index))
        return mixed, pools._replace(states=states)
