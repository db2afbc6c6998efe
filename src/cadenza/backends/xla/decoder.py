"""The decoder: token ids to next tokens, using only the operations of the op table.

Owns the order of the operations; independent of layouts, devices and batch policy. One definition
covers every model family: families differ in `ModelConfig` and in which weights are present. Legend
as in `ops.table`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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


class HiddenInputWeights(NamedTuple):
    """of_hidden(norm(hidden state)) + of_embedding(norm(embedding)): a head's first input."""

    hidden_norm: Any  # [E]
    embedding_norm: Any  # [E]
    of_hidden: Linear  # [E, E]
    of_embedding: Linear  # [E, E]


class DecoderWeights(NamedTuple):
    """`head` is None if it is tied to the embedding; `inputs` are there if the model reads hidden
    states."""

    embedding: Linear  # [V, E]
    layers: tuple[LayerWeights, ...]
    final_norm: Any  # [E]
    head: Linear | None  # [V, E]
    ropes: tuple[Any, ...]  # [positions, rotary_dim] of each of `ModelConfig.ropes`
    inputs: HiddenInputWeights | None = None


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
    return run_head(ops, head_of(weights), hidden, step), hidden, pool


def head_of(weights: DecoderWeights) -> Linear:
    return weights.embedding if weights.head is None else weights.head


def run_head(ops: OpTable, head: Linear, hidden: jax.Array, step: StepArrays) -> jax.Array:
    """The int32 result [L, C] of the logit rows, from their last hidden states [L, E]."""
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
    x = ops.embed(weights.embedding, step)  # [T, E]
    return _run_stream(ops, model, weights, (x, pool), step)


def run_reading_layers(
    ops: OpTable,
    model: ModelConfig,
    weights: DecoderWeights,
    inputs: tuple[jax.Array, KVPool],
    step: StepArrays,
) -> tuple[jax.Array, KVPool]:
    """As `run_layers`, of a model that reads hidden states (`ModelConfig.reads_hidden`).

    `inputs` are a hidden state [T, E], float32, for each token, and the pool.
    """
    own, count = weights.inputs, step.num_tokens
    assert own is not None, "the model reads no hidden states"
    hidden, pool = inputs
    embedded = ops.rms_norm(ops.embed(weights.embedding, step), own.embedding_norm, count)
    if model.mtp_layout is not None and model.mtp_layout.zeroes_first:
        embedded = ops.take_rows(embedded, _rows_behind_first(step), count)
    x = ops.project(
        ops.rms_norm(hidden, own.hidden_norm, count), own.of_hidden, model.hidden_size, count
    )
    x = ops.linear(embedded, own.of_embedding, model.hidden_size, count, residual=x)
    return _run_stream(ops, model, weights, (x, pool), step)


def _rows_behind_first(step: StepArrays) -> jax.Array:
    """The index [T] of each token; -1 for the first of its sequence."""
    positions = step.tokens.positions
    return jnp.where(positions > 0, jnp.arange(len(positions), dtype=jnp.int32), -1)


def run_keeping_layers(
    ops: OpTable,
    model: ModelConfig,
    weights: DecoderWeights,
    pool: KVPool,
    step: StepArrays,
) -> tuple[jax.Array, KVPool, jax.Array]:
    """As `run_layers`, with the last layer computed for all tokens, which changes no bit of a row;
    and the hidden states of all tokens [T, E] that the model's MTP layers take: those before the
    final norm, float32, or those after it, as activations (`MTPLayout.takes_normed`)."""
    x = ops.embed(weights.embedding, step)
    attended, x, pool = _run_to_last(ops, model, weights, (x, pool), step)
    x = _add_outputs(ops, weights.layers[-1], attended, (x, step.num_tokens))
    if model.mtp_layout is not None and model.mtp_layout.takes_normed:
        normed = ops.rms_norm(x, weights.final_norm, step.num_tokens)
        return ops.take_logit_rows(normed, step), pool, normed
    rows = ops.take_logit_rows(x, step)
    return ops.rms_norm(rows, weights.final_norm, step.num_logits), pool, x


def _run_stream(
    ops: OpTable,
    model: ModelConfig,
    weights: DecoderWeights,
    inputs: tuple[jax.Array, KVPool],
    step: StepArrays,
) -> tuple[jax.Array, KVPool]:
    """From the residual stream [T, E] and the pool to what `run_layers` gives."""
    attended, x, pool = _run_to_last(ops, model, weights, inputs, step)
    # The last layer's KV is written; after it only the logit rows are needed.
    attended, x = (ops.take_logit_rows(each, step) for each in (attended, x))
    x = _add_outputs(ops, weights.layers[-1], attended, (x, step.num_logits))
    return ops.rms_norm(x, weights.final_norm, step.num_logits), pool


def _run_to_last(
    ops: OpTable,
    model: ModelConfig,
    weights: DecoderWeights,
    inputs: tuple[jax.Array, KVPool],
    step: StepArrays,
) -> tuple[jax.Array, jax.Array, KVPool]:
    """What the last layer's attention gives, [T, Hq D], the stream before it [T, E], and the pool
    with this step's KV."""
    x, pool = inputs
    count = step.num_tokens
    qkv_size = model.query_size + 2 * model.kv_size
    attended = None
    kinds = zip(weights.layers, model.layer_kinds, strict=True)
    for index, (layer, kind) in enumerate(kinds):
        if attended is not None:
            x = _add_outputs(ops, weights.layers[index - 1], attended, (x, count))
        rope = weights.ropes[model.ropes.index(model.rope_of(kind))]
        normed = _norm_input(ops, x, layer.attention_norm, count)
        qkv = ops.linear(normed, layer.qkv, qkv_size, count)
        factors = HeadFactors(layer.qk_norms, rope)
        place = AttendingLayer(index, kind.window)
        attended, pool = ops.rope_append_attend(qkv, pool, factors, step, place)
    assert attended is not None, "a decoder has layers"
    return attended, x, pool


def _add_outputs(
    ops: OpTable, layer: LayerWeights, attended: jax.Array, stream: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """Adds a layer's attention and its MLP to the stream; `stream` is (x, count)."""
    count = stream[1]
    x = _add_output(ops, attended, layer.attention_out, layer.attention_post_norm, stream)
    return _add_mlp(ops, layer, x, count)


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
