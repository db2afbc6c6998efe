"""Token mixers over the KV pages: `Attention` to keys and values, `LatentAttention` to latents."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from cadenza.backends.xla.layers.residual import StepContext
from cadenza.backends.xla.layers.weight_source import WeightSource, rows_of
from cadenza.backends.xla.ops.table import (
    AttendingLayer,
    HeadFactors,
    HeadInputs,
    LatentFactors,
    LatentInputs,
    LatentLayer,
    LayerPools,
    Linear,
    ScoringLayer,
)
from cadenza.models.layer_kind import LATENT_NORM_EPS
from cadenza.models.model_config import scoring_layers
from cadenza.weights.tensor_spec import AttentionSpec, LatentSpec


class Attention(NamedTuple):
    """The weights of one layer's attention; what the model family does not have is None."""

    qkv: Linear  # [(Hq + 2 Hkv) D, E]
    gate: Linear | None  # [Hq D, E]
    norms: tuple[Any, ...] | None  # [D] each, or [Hq D] and [Hkv D]
    sinks: Any | None  # [Hq]

    @classmethod
    def load(cls, source: WeightSource, spec: AttentionSpec) -> "Attention":
        if not source.spec.model.has_attention_gate:
            return source.load(cls, spec, gate=None)
        qkv, gate = _load_gated(source, spec)
        return source.load(cls, spec, qkv=qkv, gate=gate)

    def mix(
        self, context: StepContext, index: int, normed: jax.Array, pools: LayerPools
    ) -> tuple[jax.Array, LayerPools]:
        """The attention of layer `index`, as activations [T, Hq D], and the pools with its KV."""
        ops, count = context.ops, context.step.num_tokens
        given = HeadInputs(
            ops.linear(normed, self.qkv, count),
            None if self.gate is None else ops.linear(normed, self.gate, count),
        )
        group, layer = _layer_of(context, index)
        factors = self._factors(context, index)
        mixed, pool = ops.rope_append_attend(given, pools.kv[group], factors, context.step, layer)
        pools = pools.with_kv(group, pool)
        scoring = _scoring_layer(context, index, layer)
        if pools.scores is None or scoring is None:
            return mixed, pools
        scores = ops.score_keys(given, (pool, pools.scores), factors, context.step, scoring)
        return mixed, pools._replace(scores=scores)

    def append(
        self, context: StepContext, index: int, normed: jax.Array, pools: LayerPools
    ) -> LayerPools:
        ops, step = context.ops, context.step
        group, layer = _layer_of(context, index)
        if self.qkv.num_out == layer.heads.query_size:
            return pools  # it reads the KV of another layer
        given = HeadInputs(ops.linear(normed, self.qkv, step.num_tokens))
        factors = self._factors(context, index)
        # The same call attends. Each token sees one key there, and nothing reads the result.
        alone = replace(layer, window=1, sees_spans=False)
        _, pool = ops.rope_append_attend(given, pools.kv[group], factors, step, alone)
        return pools.with_kv(group, pool)

    def _factors(self, context: StepContext, index: int) -> HeadFactors:
        model = context.model
        rope = context.ropes[model.ropes.index(model.rope_of(model.layer_kinds[index]))]
        return HeadFactors(self.norms, rope, context.rope_positions, self.sinks)


def _scoring_layer(context: StepContext, index: int, layer: AttendingLayer) -> ScoringLayer | None:
    scoring = scoring_layers(context.model)
    if index not in scoring:
        return None
    return ScoringLayer(
        index=layer.index,
        heads=layer.heads,
        is_first=index == scoring[0],
        is_last=index == scoring[-1],
    )


def _layer_of(context: StepContext, index: int) -> tuple[int, AttendingLayer]:
    model = context.model
    kind, (group, group_index) = model.layer_kinds[index], model.kv_index(index)
    layer = AttendingLayer(
        *(group_index, model.heads_of(kind), kind.window),
        sees_spans=model.sees_spans(kind),
        has_starts=context.is_sparse and kind.window is not None,
    )
    return group, layer


def _load_gated(source: WeightSource, spec: AttentionSpec) -> tuple[Linear, Linear]:
    # The gates are stored after the queries of each head.
    heads = source.spec.model.heads
    query, key, value = spec.qkv.linears

    def halves(part: Any, first: int) -> list[Any]:
        starts = (
            (2 * head + first) * heads.head_dim for head in range(heads.num_heads)
        )  # query, gate, query, ...
        return [rows_of(part, start, start + heads.head_dim) for start in starts]

    (both,) = source.operand((query,))
    biases = source.biases((query,))
    of_query, of_gate = ([half for each in biases for half in halves(each, n)] for n in (0, 1))
    format = source.format_of((query,))
    qkv = source.ops.load_linear(
        [*halves(both, 0), *source.operand((key, value))],
        [*of_query, *source.biases((key, value))],
        format,
    )
    return qkv, source.ops.load_linear(halves(both, 1), of_gate, format)


class _QueryLatent(NamedTuple):
    down: Linear  # [rank, E]
    norm: Any  # [rank]


class LatentAttention(NamedTuple):
    """In the absorbed form: the keys' linears are applied to the queries, and the values' to what
    the heads attended to, never to the context's tokens. One form for prompts and decodes, so that
    a token's bits do not depend on how it came."""

    query_latent: _QueryLatent | None
    query: Linear  # [Hq D, E or rank of queries]
    latent: Linear  # [rank + rotary_size, E]
    latent_norm: Any  # [rank]
    keys: Linear  # [Hq, rank, plain_size]
    values: Linear  # [Hq, value_size, rank]

    @classmethod
    def load(cls, source: WeightSource, spec: LatentSpec) -> "LatentAttention":
        *down, query = spec.query
        latent = None
        if spec.query_norm is not None:
            latent = _QueryLatent(source.linear(*down), source.leaf(spec.query_norm))
        keys, values = _load_absorbed(source, spec)
        own = source.linear(query)
        return source.load(cls, spec, query_latent=latent, query=own, keys=keys, values=values)

    def mix(
        self, context: StepContext, index: int, normed: jax.Array, pools: LayerPools
    ) -> tuple[jax.Array, LayerPools]:
        """The attention of layer `index`, as activations [T, Hq value_size], and the pools with its
        latents."""
        ops, model, count = context.ops, context.model, context.step.num_tokens
        kind = model.layer_kinds[index]
        shape, rope = kind.latent, context.ropes[model.ropes.index(model.rope_of(kind))]
        assert shape is not None, "the layer has latents"
        source = normed
        if self.query_latent is not None:
            down = ops.project(normed, self.query_latent.down, count)
            source = ops.rms_norm(down, self.query_latent.norm, count, LATENT_NORM_EPS)
        queries = ops.linear(source, self.query, count)
        given = LatentInputs(
            absorbed=ops.head_linear(queries, self.keys, count, shape.plain_size),
            queries=queries,
            keys=ops.project(normed, self.latent, count),
        )
        group, group_index = model.kv_index(index)
        layer = LatentLayer(index=group_index, shape=shape, norm_eps=LATENT_NORM_EPS)
        factors = LatentFactors(self.latent_norm, rope, context.rope_positions)
        mixed, pool = ops.latent_attend(given, pools.kv[group], factors, context.step, layer)
        values = ops.head_linear(mixed, self.values, count, shape.rank)
        return values, pools.with_kv(group, pool)


def _load_absorbed(source: WeightSource, spec: LatentSpec) -> tuple[Linear, Linear]:
    # Stored codes become floats in the activations' type: a transpose has other groups.
    shape = source.spec.model.latent
    assert shape is not None, "the model has latents"
    (linear,) = spec.keys_values.linears
    stored = source.weights[linear.weight]
    is_coded = not isinstance(stored, np.ndarray)
    format = source.spec.weight_format if is_coded else source.format_of((linear,))
    both = np.asarray(stored).reshape(shape.num_heads, -1, shape.rank)
    keys, values = both[:, : shape.plain_size], both[:, shape.plain_size :]
    transposed = [[np.ascontiguousarray(each.T)] for each in keys]
    ops = source.ops
    return ops.load_experts(transposed, format), ops.load_experts([[v] for v in values], format)
