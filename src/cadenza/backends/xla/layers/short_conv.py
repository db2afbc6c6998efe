"""`ShortConv`: the token mixer of a gated short convolution, whose state is its newest inputs."""

from typing import NamedTuple

import jax

from cadenza.backends.xla.layers.residual import StepContext
from cadenza.backends.xla.layers.weight_source import WeightSource
from cadenza.backends.xla.ops.table import (
    ConvWeights,
    LayerPools,
    Linear,
)
from cadenza.checkpoint.tensor_spec import ConvSpec


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
        """The outputs [T, M] of layer `index`, and the pools with the inputs that tokens keep."""
        ops, count = context.ops, context.step.num_tokens
        assert pools.states is not None, "the model has states"
        given = ops.linear(normed, self.mixed, count)
        mixed, states = ops.short_conv(given, self.inner, pools.states, *context.recurrent(index))
        return mixed, pools._replace(states=states)
