"""The decoder: token ids to next tokens, using only the operations of the op table.

Owns the order of the operations; independent of layouts, devices and batch policy. One definition
covers every model family: families differ in `ModelConfig` and in which weights are present. Legend
as in `ops.table`.
"""

from typing import Any, NamedTuple

import jax

from cadenza.backends.xla.ops.table import (
    AttendingLayer,
    HeadFactors,
    KVPool,
    Linear,
    OpTable,
    StepArrays,
)
from cadenza.checkpoint.model_config import ModelConfig


class GatedMLPWeights(NamedTuple):
    """down(activation(gate(x)) * up(x))."""

    gate_up: Linear  # [2 F, E]
    down: Linear  # [E, F]


class ExpertMLPWeights(NamedTuple):
    """The weighted sum of the outputs of the experts that the router chooses."""

    router: Linear  # [X, E]
    gate_up: Linear  # [X, 2 F, E]
    down: Linear  # [X, E, F]


class LayerWeights(NamedTuple):
    """One layer; a norm that the model family does not have is None."""

    attention_norm: Any | None  # [E]
    qkv: Linear  # [(Hq + 2 Hkv) D, E]
    qk_norms: tuple[Any, ...] | None  # [D] each, or [Hq D] and [Hkv D]
    attention_out: Linear  # [E, Hq D]
    attention_post_norm: Any | None  # [E]
    mlp_norm: Any | None  # [E]
    mlp: GatedMLPWeights | ExpertMLPWeights
    mlp_post_norm: Any | None  # [E]


class DecoderWeights(NamedTuple):
    """`head` is None if it is tied to the embedding."""

    embedding: Linear  # [V, E]
    layers: tuple[LayerWeights, ...]
    final_norm: Any  # [E]
    head: Linear | None  # [V, E]
    ropes: tuple[Any, ...]  # [positions, rotary_dim] of each of `ModelConfig.ropes`


def run_decoder(
    ops: OpTable,
    model: ModelConfig,
    weights: DecoderWeights,
    pool: KVPool,
    step: StepArrays,
) -> tuple[jax.Array, jax.Array, KVPool]:
    """One step: the int32 result [L, C] of the logit rows, their last hidden states [L, E] as
    activations, and the pool with this step's KV."""
    hidden, pool = run_layers(ops, model, weights, pool, step)
    return run_head(ops, weights, hidden, step), hidden, pool


def run_head(
    ops: OpTable, weights: DecoderWeights, hidden: jax.Array, step: StepArrays
) -> jax.Array:
    """The int32 result [L, C] of the logit rows, from their last hidden states [L, E]."""
    head = weights.embedding if weights.head is None else weights.head
    return ops.next_tokens(hidden, head, step)


def run_layers(
    ops: OpTable,
    model: ModelConfig,
    weights: DecoderWeights,
    pool: KVPool,
    step: StepArrays,
) -> tuple[jax.Array, KVPool]:
    """The last hidden states [L, E] of the logit rows, as activations, and the pool with this
    step's KV."""
    count = step.num_tokens
    qkv_size = model.query_size + 2 * model.kv_size
    x = ops.embed(weights.embedding, step)  # [T, E]
    kinds = zip(weights.layers, model.layer_kinds, strict=True)
    for index, (layer, kind) in enumerate(kinds):
        rope = weights.ropes[model.ropes.index(model.rope_of(kind))]
        normed = _norm_input(ops, x, layer.attention_norm, count)
        qkv = ops.linear(normed, layer.qkv, qkv_size, count)
        factors = HeadFactors(layer.qk_norms, rope)
        place = AttendingLayer(index, kind.window)
        attended, pool = ops.rope_append_attend(qkv, pool, factors, step, place)
        if index + 1 == model.num_layers:
            # The last layer's KV is written; after it only the logit rows are needed.
            attended, x = (ops.take_logit_rows(each, step) for each in (attended, x))
            count = step.num_logits
        x = _add_output(ops, attended, layer.attention_out, layer.attention_post_norm, (x, count))
        x = _add_mlp(ops, layer, x, count)
    return ops.rms_norm(x, weights.final_norm, count), pool


def _add_mlp(ops: OpTable, layer: LayerWeights, x: jax.Array, count: jax.Array) -> jax.Array:
    """Adds a layer's MLP to the residual stream [T, E]; only the first `count` rows are defined."""
    normed = _norm_input(ops, x, layer.mlp_norm, count)
    if isinstance(layer.mlp, GatedMLPWeights):
        gated = ops.gated_linear(normed, layer.mlp.gate_up, count)
        return _add_output(ops, gated, layer.mlp.down, layer.mlp_post_norm, (x, count))
    assert layer.mlp_post_norm is None, "a norm after the experts is not supported"
    choice = ops.route_experts(normed, layer.mlp.router, count)
    gated = ops.grouped_gated_linear(normed, layer.mlp.gate_up, choice, count)
    return ops.grouped_linear(gated, layer.mlp.down, choice, x, count)


def _norm_input(ops: OpTable, x: jax.Array, norm: Any | None, count: jax.Array) -> jax.Array:
    """The residual stream [T, E] as activations, normed if the layer has a norm here."""
    return ops.to_activations(x, count) if norm is None else ops.rms_norm(x, norm, count)


def _add_output(
    ops: OpTable,
    y: jax.Array,
    weight: Linear,
    post_norm: Any | None,
    stream: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """Adds an output projection to the residual stream [T, E]; `stream` is (x, count)."""
    x, count = stream
    if post_norm is None:
        return ops.linear(y, weight, x.shape[1], count, residual=x)
    return ops.linear_norm_add(y, weight, post_norm, x, count)
