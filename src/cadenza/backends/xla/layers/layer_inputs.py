"""What layers take beside the stream: per-layer embeddings (`LayerEmbedding`, `LayerInput`), and an
MTP layer's input of hidden states and embeddings (`HiddenInput`). Legend as in `ops.table`; P
values of a token for a layer."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cadenza.backends.xla.layers.residual import Residual, StepContext
from cadenza.backends.xla.layers.weight_source import WeightSource
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import Linear
from cadenza.models.declaration import (
    EMBEDDING_NORM,
    HIDDEN_NORM,
    declare_input_proj,
    declare_layer_inputs,
    declare_layer_proj,
)
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


class HiddenInput(NamedTuple):
    """The weights of of_hidden(norm(hidden state)) + of_embedding(norm(embedding))."""

    hidden_norm: Any  # [E]
    embedding_norm: Any  # [E]
    of_hidden: Linear  # [E, E]
    of_embedding: Linear  # [E, E]

    @classmethod
    def load(cls, source: WeightSource) -> "HiddenInput":
        # The two halves of the checkpoint's linear, each of which has a norm of its own.
        model = source.spec.model
        linear, embed, layout = declare_input_proj(model), model.hidden_size, model.mtp_layout
        assert layout is not None, "a model that reads hidden states is an MTP layer"
        both, format = source.weights[linear.weight], source.format_of([linear])

        def half(start: int) -> Linear:
            part = np.ascontiguousarray(both[:, start : start + embed])
            return source.ops.load_linear([part], [], format)

        of_hidden, of_embedding = (0, embed) if layout.puts_hidden_first else (embed, 0)
        return cls(
            hidden_norm=source.norm(HIDDEN_NORM),
            embedding_norm=source.norm(EMBEDDING_NORM),
            of_hidden=half(of_hidden),
            of_embedding=half(of_embedding),
        )

    def enter(self, context: StepContext, embedding: Linear, hidden: jax.Array) -> jax.Array:
        """The residual stream [T, E] from float32 hidden states [T, E] and the tokens."""
        ops, step, layout = context.ops, context.step, context.model.mtp_layout
        count = step.num_tokens
        embedded = ops.rms_norm(ops.embed(embedding, step), self.embedding_norm, count)
        if layout is not None and layout.zeroes_first:
            positions = step.tokens.positions
            rows = jnp.where(positions > 0, jnp.arange(len(positions), dtype=jnp.int32), -1)
            embedded = ops.take_rows(embedded, rows, count)
        x = ops.project(ops.rms_norm(hidden, self.hidden_norm, count), self.of_hidden, count)
        return ops.linear(embedded, self.of_embedding, count, residual=x)
