"""The token mixers with a recurrent state: `GatedDelta`, which the delta rule changes,
`SelectiveScan`, which decays at a rate of each token, and `ShortConv`, of the newest inputs."""

from typing import NamedTuple

import jax

from cadenza.backends.xla.layers.residual import StepContext
from cadenza.backends.xla.layers.weight_source import WeightSource
from cadenza.backends.xla.ops.table import (
    ConvWeights,
    DeltaInputs,
    DeltaWeights,
    LayerPools,
    Linear,
    ScanInputs,
    ScanWeights,
)
from cadenza.weights.tensor_spec import ConvSpec, DeltaSpec, ScanSpec


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
        ops, count = context.ops, context.step.num_tokens
        assert pools.states is not None, "the model has states"
        given = DeltaInputs(
            ops.linear(normed, self.mixed, count),
            ops.linear(normed, self.gate, count),
            ops.project(normed, self.rates, count),
        )
        mixed, states = ops.gated_delta(given, self.inner, pools.states, *context.recurrent(index))
        return mixed, pools._replace(states=states)


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


class ShortConv(NamedTuple):
    """The weights of one layer's convolution."""

    mixed: Linear  # [3 M, E]
    inner: ConvWeights

    @classmethod
    def load(cls, source: WeightSource, spec: ConvSpec) -> "ShortConv":
        inner = source.load(ConvWeights, spec, bias=source.leaf(spec.conv_bias))
        return source.load(cls, spec, inner=inner)

    def mix(
        self, context: StepContext, index: int, normed: jax.Array, pools: LayerPools
    ) -> tuple[jax.Array, LayerPools]:
        ops, count = context.ops, context.step.num_tokens
        assert pools.states is not None, "the model has states"
        given = ops.linear(normed, self.mixed, count)
        mixed, states = ops.short_conv(given, self.inner, pools.states, *context.recurrent(index))
        return mixed, pools._replace(states=states)
