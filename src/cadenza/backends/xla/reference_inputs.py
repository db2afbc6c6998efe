"""What Gemma 4's layers have beside attention and MLP, in float32, from the definition in
transformers; shares nothing with the op table or its layers. Legend: C tokens of a chunk · E embed
· P values of a token for a layer · X experts."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from cadenza.models.model_config import ModelConfig

Tensors = Mapping[str, jax.Array]

Activate = Callable[[jax.Array], jax.Array]


def layer_inputs(
    model: ModelConfig, outer: Tensors, token_ids: jax.Array, x: jax.Array
) -> jax.Array:
    """The per-layer embeddings [C, layers, P] of tokens whose first stream is x [C, E]."""
    inputs = model.layer_inputs
    assert inputs is not None, "the model has no per-layer embeddings"
    shape = (len(x), model.num_layers, inputs.size)
    rows = outer["model.embed_tokens_per_layer.weight"][token_ids] * np.sqrt(inputs.size)
    projected = _project(outer["model.per_layer_model_projection.weight"], x)
    projected = (projected / np.sqrt(model.hidden_size)).reshape(shape)
    weight = outer["model.per_layer_projection_norm.weight"]
    return (_normed(projected, model) * weight + rows.reshape(shape)) / np.sqrt(2.0)


def add_layer_input(
    model: ModelConfig, layer: Tensors, x: jax.Array, values: jax.Array, activate: Activate
) -> jax.Array:
    """The stream x [C, E] with a layer's `values` [C, P]."""
    gate = activate(_project(layer["per_layer_input_gate.weight"], x))
    out = _project(layer["per_layer_projection.weight"], gate * values)
    return x + _normed(out, model) * layer["post_per_layer_input_norm.weight"]


def parallel_mixture(
    model: ModelConfig, layer: Tensors, x: jax.Array, dense: jax.Array, activate: Activate
) -> jax.Array:
    """The sum of the normed MLP output `dense` and of the experts' for the stream x [C, E]. All
    experts are computed; those that are not chosen have weight 0."""
    experts = model.experts
    assert experts is not None, "the model has no experts"
    routed = _normed(x, model) * layer["router.scale"] / np.sqrt(model.hidden_size)
    chances = jax.nn.softmax(_project(layer["router.proj.weight"], routed), axis=-1)  # [C, X]
    ranks = jnp.argsort(jnp.argsort(-chances, axis=-1), axis=-1)
    chosen = jnp.where(ranks < experts.num_chosen, chances, 0.0)
    chosen = chosen / jnp.sum(chosen, axis=-1, keepdims=True) * layer["router.per_expert_scale"]
    hidden = _normed(x, model) * layer["pre_feedforward_layernorm_2.weight"]
    total = jnp.zeros_like(x)
    for index in range(experts.num_experts):
        gate, up, down = (
            layer[f"experts.{index}.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        inner = activate(_project(gate, hidden)) * _project(up, hidden)
        total += chosen[:, index, None] * _project(down, inner)
    first = _normed(dense, model) * layer["post_feedforward_layernorm_1.weight"]
    return first + _normed(total, model) * layer["post_feedforward_layernorm_2.weight"]


def _normed(x: jax.Array, model: ModelConfig) -> jax.Array:
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x / jnp.sqrt(mean_square + model.rms_norm_eps)


def _project(weight: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.matmul(x, weight.T, precision="highest")
