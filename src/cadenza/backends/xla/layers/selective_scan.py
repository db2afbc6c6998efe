"""`SelectiveScan`: the token mixer with a recurrent state that decays at a rate of each token."""

from typing import NamedTuple

import jax

from cadenza.backends.xla.layers.residual import StepContext
from cadenza.backends.xla.layers.weight_source import WeightSource
from cadenza.backends.xla.ops.table import (
    LayerPools,
    Linear,
    ScanInputs,
    ScanWeights,
)
from cadenza.checkpoint.tensor_spec import ScanSpec


class SelectiveScan(NamedTuple):
    """The weights of one layer's scan."""

    gate: Linear  # [Hv Dv, E]
    mixed: Linear  # [M, E]
    rates: Linear  # [Hv, E]
    inner: ScanWeights

    @classmethod
    def load(cls, source: WeightSource, spec: ScanSpec) -> "SelectiveScan":
        width, (heads,), channels = spec.norm.shape[0], spec.decay.shape, spec.conv.shape[0]
        gate, mixed, rates = source.row_parts(spec.mixed, (width, channels, heads))
        return cls(gate, mixed, rates, source.load(ScanWeights, spec))

    def mix(
        self, context: StepContext, index: int, normed: jax.Array, pools: LayerPools
    ) -> tuple[jax.Array, LayerPools]:
        """The outputs [T, Hv Dv] of layer `index`, and the pools with the states that tokens
        keep."""
        ops, count = context.ops, context.step.num_tokens
        assert pools.states is not None, "the model has states"
        given = ScanInputs(
            ops.linear(normed, self.mixed, count),
            ops.linear(normed, self.gate, count),
            ops.project(normed, self.rates, count),
        )
        mixed, states = ops.selective_scan(
            given, self.inner, pools.states, *context.recurrent(index)
        )
        return mixed, pools._replace(states=states)
