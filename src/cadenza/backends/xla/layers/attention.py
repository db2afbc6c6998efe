"""`Attention`: the token mixer that attends to the keys and values in the KV pages."""

from typing import Any, NamedTuple

import jax

from cadenza.backends.xla.layers.residual import Residual, StepContext
from cadenza.backends.xla.layers.weight_source import WeightSource
from cadenza.backends.xla.ops.table import AttendingLayer, HeadFactors, KVPool, Linear, OpTable
from cadenza.checkpoint.declaration import LayerSpec


class Attention(NamedTuple):
    """The weights of one layer's attention; a norm that the model family does not have is None."""

    norm: Any | None  # [E]
    qkv: Linear  # [(Hq + 2 Hkv) D, E]
    qk_norms: tuple[Any, ...] | None  # [D] each, or [Hq D] and [Hkv D]
    out: Linear  # [E, Hq D]
    post_norm: Any | None  # [E]

    @classmethod
    def load(cls, source: WeightSource, layer: LayerSpec) -> "Attention":
        norms = layer.qk_norms
        return cls(
            norm=source.optional_norm(layer.attention_norm),
            qkv=source.linear(*layer.qkv),
            qk_norms=norms and tuple(source.norm(norm.name) for norm in norms),
            out=source.linear(layer.attention_out),
            post_norm=source.optional_norm(layer.attention_post_norm),
        )

    def mix(
        self, context: StepContext, index: int, stream: Residual, pool: KVPool
    ) -> tuple[jax.Array, KVPool]:
        """What layer `index` attends to, as activations [T, Hq D], and the pool with its KV."""
        ops, model = context.ops, context.model
        kind = model.layer_kinds[index]
        rope = context.ropes[model.ropes.index(model.rope_of(kind))]
        qkv = ops.linear(stream.normed(ops, self.norm), self.qkv, stream.count)
        factors, place = HeadFactors(self.qk_norms, rope), AttendingLayer(index, kind.window)
        return ops.rope_append_attend(qkv, pool, factors, context.step, place)

    def add(self, ops: OpTable, mixed: jax.Array, stream: Residual) -> Residual:
        """The stream [N, E] with the output of `mixed` [N, Hq D]."""
        return stream.plus(ops, mixed, self.out, self.post_norm)
