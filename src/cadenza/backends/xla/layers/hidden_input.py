"""`HiddenInput`: the input of an MTP layer, of hidden states and embeddings."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cadenza.backends.xla.layers.residual import StepContext
from cadenza.backends.xla.layers.weight_source import WeightSource
from cadenza.backends.xla.ops.table import Linear
from cadenza.models.declaration import EMBEDDING_NORM, HIDDEN_NORM, declare_input_proj


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
