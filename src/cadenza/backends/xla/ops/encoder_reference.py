"""The operations of image towers in plain jnp: their definition. Legend as in `ops.table`.
`count` is ignored, as in `ops.reference`, but for what is written to memory that outlives a
block."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cadenza.backends.xla.ops.head_math import rms_norm, rotate
from cadenza.backends.xla.ops.in_range import set_rows
from cadenza.backends.xla.ops.table import (
    ENCODER_SPAN,
    BaseTable,
    EncoderActivation,
    EncoderBlock,
    EncoderFactors,
    EncoderHeads,
    EncoderShape,
    ImageRows,
)

_HIGHEST = jax.lax.Precision.HIGHEST


class _Softmax(NamedTuple):
    maximum: jax.Array
    total: jax.Array
    out: jax.Array


class EncoderOps(BaseTable):
    """Queries, keys and values are [N, H, D] each, in whole spans."""

    def layer_norm(
        self, x: jax.Array, weight: Any, bias: Any | None, count: jax.Array, eps: float
    ) -> jax.Array:
        """(x - mean) / sqrt(variance + eps) * weight + bias: [B, E] float32 to activations."""
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
        y = centred * jax.lax.rsqrt(variance + np.float32(eps)) * weight
        return (y if bias is None else y + bias).astype(self._spec.dtype)

    def activate(self, x: jax.Array, kind: EncoderActivation, count: jax.Array) -> jax.Array:
        return _activated(x.astype(jnp.float32), kind).astype(self._spec.dtype)

    def new_encoder_heads(
        self, num_rows: int, shape: EncoderShape, fill: float | None = None
    ) -> EncoderHeads:
        """At least `num_rows`, every element `fill` or unwritten; called under tracing."""
        spans = -(-num_rows // ENCODER_SPAN) * ENCODER_SPAN
        own = (spans, shape.num_heads, shape.head_dim)
        sides = (jnp.full(own, fill or 0.0, self._spec.dtype) for _ in range(3))
        return EncoderHeads(*sides)  # each its own memory, since all are donated

    def keep_heads(
        self,
        qkv: jax.Array,
        heads: EncoderHeads,
        factors: EncoderFactors,
        block: EncoderBlock,
        shape: EncoderShape,
    ) -> EncoderHeads:
        """`heads` with the normed and rotated projections of a block, activations [B, 3 H D], in
        place."""
        parts = qkv.astype(jnp.float32).reshape(len(qkv), 3, shape.num_heads, shape.head_dim)
        query, key, value = parts[:, 0], parts[:, 1], parts[:, 2]  # [B, H, D]
        if factors.norms is not None:
            query = rms_norm(query, factors.norms[0], shape.norm_eps)
            key = rms_norm(key, factors.norms[1], shape.norm_eps)
        if factors.norms_values:
            value = rms_norm(value, jnp.ones((), jnp.float32), shape.norm_eps)
        if factors.rotations is not None:
            query, key = rotate(query, factors.rotations), rotate(key, factors.rotations)
        index = jnp.arange(len(qkv))
        are_kept = index < block.num_defined

        def write(side: jax.Array, rows: jax.Array) -> jax.Array:
            return set_rows(side, block.start + index, rows, are_kept)

        return jax.tree.map(write, heads, EncoderHeads(query, key, value))

    def encode_attend(
        self,
        heads: EncoderHeads,
        block: EncoderBlock,
        shape: EncoderShape,
        size: int,
        bounds: jax.Array | None = None,
    ) -> jax.Array:
        """The block's queries over all rows of the image, or over rows [bounds[i, 0], bounds[i, 1])
        of int32 `bounds` [B, 2]: activations [B, H D]; B is `size`."""
        if bounds is None:
            bounds = jnp.broadcast_to(jnp.stack([jnp.int32(0), block.num_rows]), (size, 2))
        index = jnp.minimum(block.start + jnp.arange(size), len(heads.queries) - 1)
        query = heads.queries[index].astype(jnp.float32)  # [B, H, D]

        def add_span(span: jax.Array, state: _Softmax) -> _Softmax:
            first = span * ENCODER_SPAN
            at = first + jnp.arange(ENCODER_SPAN)
            valid = (at >= bounds[:, :1]) & (at < jnp.minimum(bounds[:, 1:], block.num_rows))
            keys, values = (
                jnp.where(
                    (at < block.num_rows)[:, None, None],
                    jax.lax.dynamic_slice_in_dim(side, first, ENCODER_SPAN),
                    0,
                )
                for side in (heads.keys, heads.values)
            )
            scores = _einsum("bhd,khd->bhk", query, keys) * np.float32(shape.scale)
            return _with_span(state, scores, valid[:, None, :], values)

        state = _Softmax(
            jnp.full(query.shape[:2], -jnp.inf, jnp.float32),
            jnp.zeros(query.shape[:2], jnp.float32),
            jnp.zeros(query.shape, jnp.float32),
        )
        num_spans = -(-block.num_rows // ENCODER_SPAN)
        state = jax.lax.fori_loop(0, num_spans, add_span, state)
        total = state.total[..., None]
        out = jnp.where(total > 0, state.out / total, state.out)
        return out.reshape(size, -1).astype(self._spec.dtype)

    def keep_rows(self, x: jax.Array, images: ImageRows, part: int, count: jax.Array) -> jax.Array:
        """`images.rows` with x [B, E] as their part `part` at `slots` [B], negative ones skipped;
        in place."""
        written = (images.slots >= 0) & (jnp.arange(len(x)) < count)
        columns = slice(part * x.shape[1], (part + 1) * x.shape[1])
        return set_rows(images.rows, (images.slots, columns), x, written)

    def place_rows(
        self, x: jax.Array, images: ImageRows, part: int, count: jax.Array, adds: bool = False
    ) -> jax.Array:
        """Float32 x [T, E], with the part of a token's slot in its place, or added to it."""
        columns = slice(part * x.shape[1], (part + 1) * x.shape[1])
        rows = images.rows[jnp.maximum(images.slots, 0), columns].astype(jnp.float32)
        return jnp.where((images.slots >= 0)[:, None], x + rows if adds else rows, x)


def _activated(x: jax.Array, kind: EncoderActivation) -> jax.Array:
    match kind:
        case "gelu":
            return jax.nn.gelu(x, approximate=False)
        case "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)
        case "quick_gelu":
            return x * jax.nn.sigmoid(np.float32(1.702) * x)
        case "silu":
            return jax.nn.silu(x)


def _with_span(state: _Softmax, scores: jax.Array, valid: jax.Array, values: jax.Array) -> _Softmax:
    # Queries that see nothing of a span keep theirs.
    scores = jnp.where(valid, scores, -jnp.inf)  # [B, H, K]
    maximum = jnp.maximum(state.maximum, jnp.max(scores, axis=-1))
    weights = jnp.where(valid, jnp.exp(scores - maximum[..., None]), 0.0)
    shrink = jnp.where(state.maximum == -jnp.inf, 0.0, jnp.exp(state.maximum - maximum))
    total = state.total * shrink + jnp.sum(weights, axis=-1)
    out = state.out * shrink[..., None] + _einsum("bhk,khd->bhd", weights, values)
    sees = jnp.any(valid, axis=-1)
    return _Softmax(
        jnp.where(sees, maximum, state.maximum),
        jnp.where(sees, total, state.total),
        jnp.where(sees[..., None], out, state.out),
    )


def _einsum(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(
        subscripts, left.astype(jnp.float32), right.astype(jnp.float32), precision=_HIGHEST
    )
