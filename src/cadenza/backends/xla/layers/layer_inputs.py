"""Per-layer embeddings: `LayerEmbedding`, of a step, and `LayerInput`, how a layer adds its part.
Legend as in `ops.table`; P values of a token for a layer."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from cadenza.backends.xla.layers.residual import Residual, StepContext
from cadenza.backends.xla.layers.weight_source import WeightSource
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import Linear
from cadenza.models.declaration import declare_layer_inputs, declare_layer_proj
from cadenza.weights.tensor_spec import LayerSpec


class LayerEmbedding(NamedTuple):
    """The values of all layers: the mean, times sqrt(2), of a table's and of the stream's."""

    table: Linear  # [V, layers P]
    proj: Linear  # [layers P, E]
    norm: Any  # [P], times sqrt(1/2)

    @classmethod
    def load(cls, source: WeightSource) -> "LayerEmbedding":
        table, _, norm = declare_layer_inputs(source.spec.model)
        return cls(
            table=source.table(table),
            proj=source.linear(declare_layer_proj(source.spec.model)),
            norm=source.leaf(norm) * np.float32(math.sqrt(0.5)),
        )

    def enter(self, context: StepContext, stream: Residual) -> jax.Array:
        """The values [T, layers P], float32, from the stream before the first layer."""
        ops, count = context.ops, stream.count
        rows = ops.embed_for_layers(self.table, context.step)
        scale = context.model.hidden_size**-0.5
        projected = ops.project(ops.to_activations(stream.x, count), self.proj, count, scale)
        return ops.norm_add(projected, self.norm, rows, count)


class LayerInput(NamedTuple):
    """The weights with which a layer adds its values, gated by the stream."""

    gate: Linear  # [P, E]
    out: Linear  # [E, P]
    post_norm: Any  # [E]

    @classmethod
    def load(cls, source: WeightSource, layer: LayerSpec) -> "LayerInput | None":
        spec = layer.inputs
        if spec is None:
            return None
        post_norm = source.closing_norm(spec.post_norm, layer.scale)
        return source.load(cls, spec, post_norm=post_norm)

    def add(self, ops: OpTable, stream: Residual, inputs: jax.Array, index: int) -> Residual:
        """The stream [N, E] with the output for layer `index` of `inputs` [N, layers P]."""
        count = stream.count
        gate = ops.project(ops.to_activations(stream.x, count), self.gate, count)
        return stream.plus(
            ops, ops.gate_inputs(gate, inputs, index, count), self.out, self.post_norm
        )
