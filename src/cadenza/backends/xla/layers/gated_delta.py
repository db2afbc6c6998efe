"""`GatedDelta`: the token mixer with a recurrent state that the delta rule changes."""

from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.layers.residual import StepContext
from cadenza.backends.xla.layers.weight_source import WeightSource
from cadenza.backends.xla.ops.table import (
    DeltaInputs,
    DeltaLayer,
    DeltaWeights,
    LayerPools,
    Linear,
    StepStates,
)
from cadenza.checkpoint.host_math import exp
from cadenza.checkpoint.tensor_spec import DeltaSpec


class GatedDelta(NamedTuple):
    """The weights of one layer's gated delta net."""

    mixed: Linear  # [M, E]
    gate: Linear  # [Hv Dv, E]
    rates: Linear  # [2 Hv, E]
    inner: DeltaWeights

    @classmethod
    def load(cls, source: WeightSource, spec: DeltaSpec) -> "GatedDelta":
        conv, decay = source.scale(spec.conv)[:, 0], source.scale(spec.decay)  # [M, J], [Hv]
        shape = source.spec.model.recurrence
        assert shape is not None, "the layer has a recurrence"
        return cls(
            mixed=source.linear(spec.mixed),
            gate=source.linear(spec.gate),
            rates=source.linear(*spec.rates),
            inner=DeltaWeights(
                conv=np.ascontiguousarray(conv.T),
                decay=decay if shape.has_rates else _rates(decay),
                decay_bias=source.scale(spec.decay_bias),
                norm=source.scale(spec.norm),
            ),
        )

    def mix(
        self, context: StepContext, index: int, normed: jax.Array, pools: LayerPools
    ) -> tuple[jax.Array, LayerPools]:
        """The outputs [T, Hv Dv] of layer `index`, and the pools with the states that tokens
        keep."""
        ops, model, step = context.ops, context.model, context.step
        count, shape = step.num_tokens, model.layer_kinds[index].recurrence
        assert shape is not None, "the layer has a recurrence"
        assert pools.states is not None, "the model has states"
        given = DeltaInputs(
            ops.linear(normed, self.mixed, count),
            ops.linear(normed, self.gate, count),
            ops.project(normed, self.rates, count),
        )
        slots = StepStates(step.rows.state_starts, step.tokens.state_slots)
        layer = DeltaLayer(
            index=model.recurrent_layers.index(index), shape=shape, norm_eps=model.rms_norm_eps
        )
        mixed, states = ops.gated_delta(given, self.inner, pools.states, (step, slots), layer)
        return mixed, pools._replace(states=states)


def _rates(logarithms: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """-exp(ln(-rate)) of each head, with the same bits on every machine."""
    return np.array([-exp(float(each)) for each in logarithms], np.float32)
