"""`LatentAttention`: attention to latents in the KV pages, in the absorbed form: the keys' linears
are applied to the queries, and the values' to what the heads attended to, never to the context's
tokens. One form for prompts and decodes, so that a token's bits do not depend on how it came."""

from typing import Any, NamedTuple

import jax
import numpy as np

from cadenza.backends.xla.layers.residual import StepContext
from cadenza.backends.xla.layers.weight_source import WeightSource
from cadenza.backends.xla.ops.table import (
    LatentFactors,
    LatentInputs,
    LatentLayer,
    LayerPools,
    Linear,
)
from cadenza.models.layer_kind import LATENT_NORM_EPS
from cadenza.weights.tensor_spec import LatentSpec


class _QueryLatent(NamedTuple):
    down: Linear  # [rank, E]
    norm: Any  # [rank]


class LatentAttention(NamedTuple):
    """The weights of one layer's attention over latents."""

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
