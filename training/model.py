"""The bundled model as a function of its weights, for training only.

Owns the shape of the network (`ModelShape`), its initial weights and its forward
pass.  It is the Qwen3 architecture: grouped-query attention with normed queries
and keys, rotary positions, a gated MLP, RMS norms and a tied head.  Knows no text,
files or optimisers.

Invariant: weights are float32; every matrix product reads bfloat16 and adds up in
float32, forwards and backwards.

Shapes: B rows, T tokens of a row, C queries of a chunk, S keys that a chunk can see,
L layers, E embed, F MLP, Hq/Hkv heads, G queries of a group, D head dim, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Weights = dict[str, Any]

SHORTEST_CHUNK = 128
MOST_CHUNKS = 8
MASKED = -1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of the network, under the names that Hugging Face gives them."""

    vocab_size: int = 2560
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 100_000.0
    rms_norm_eps: float = 1e-6

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def key_size(self) -> int:
        return self.num_key_value_heads * self.head_dim


def init_weights(shape: ModelShape, key: jax.Array) -> Weights:
    """Random weights; the layers are stacked along their first axis."""
    embed, mlp = shape.hidden_size, shape.intermediate_size
    sizes = {
        "q_proj": (embed, shape.query_size),
        "k_proj": (embed, shape.key_size),
        "v_proj": (embed, shape.key_size),
        "o_proj": (shape.query_size, embed),
        "gate_proj": (embed, mlp),
        "up_proj": (embed, mlp),
        "down_proj": (mlp, embed),
    }
    depth = shape.num_hidden_layers
    keys = jax.random.split(key, len(sizes) + 1)
    layers = {
        name: jax.random.normal(k, (depth, *size)) * size[0] ** -0.5
        for k, (name, size) in zip(keys[1:], sizes.items(), strict=True)
    }
    for name in ("o_proj", "down_proj"):
        layers[name] *= (2 * depth) ** -0.5
    norms = {"input_norm": embed, "mlp_norm": embed}
    norms |= {"q_norm": shape.head_dim, "k_norm": shape.head_dim}
    layers |= {name: jnp.ones((depth, size)) for name, size in norms.items()}
    return {
        "embed": jax.random.normal(keys[0], (shape.vocab_size, embed)) * 0.02,
        "layers": layers,
        "norm": jnp.ones(embed),
    }


def count_parameters(weights: Weights) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(weights))


def forward(
    weights: Weights, token_ids: jax.Array, segments: jax.Array, *, shape: ModelShape
) -> jax.Array:
    """Logits `[B, T, V]` of packed rows.

    `token_ids` and `segments` are `[B, T]`; a token sees the earlier tokens of its
    own segment, so documents that share a row do not see each other.
    """
    rotation = _rotation(shape, token_ids.shape[1])
    embed = weights["embed"]
    hidden = embed[token_ids]  # [B, T, E]

    for index in range(shape.num_hidden_layers):
        layer = {name: stack[index] for name, stack in weights["layers"].items()}
        hidden = _layer(hidden, layer, rotation, segments, shape)
    hidden = rms_norm(hidden, weights["norm"], shape.rms_norm_eps)
    return matmul(hidden, embed.T)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


@jax.custom_vjp
def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`[..., K] @ [K, N]`, bfloat16 in and float32 out, as are its gradients."""
    return _bf16_dot(x, weight, 1, 0)


def _matmul_forward(
    x: jax.Array, weight: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    x, weight = x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
    return _bf16_dot(x, weight, 1, 0), (x, weight)


def _matmul_backward(
    saved: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    flat_x = x.reshape(-1, x.shape[-1])
    flat_grad = grad.reshape(-1, grad.shape[-1])
    return _bf16_dot(grad, weight, 1, 1), _bf16_dot(flat_x, flat_grad, 0, 0)


matmul.defvjp(_matmul_forward, _matmul_backward)


def _bf16_dot(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int) -> jax.Array:
    """Contracts an axis of `x` (leading axes flattened) with an axis of the matrix `y`."""
    lead = x.shape[:-1]
    product = jax.lax.dot_general(
        x.reshape(-1, x.shape[-1]).astype(jnp.bfloat16),
        y.astype(jnp.bfloat16),
        (((x_axis,), (y_axis,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return product.reshape(*lead, -1) if x_axis == 1 else product


def _layer(
    hidden: jax.Array,
    weights: Weights,
    rotation: tuple[jax.Array, jax.Array],
    segments: jax.Array,
    shape: ModelShape,
) -> jax.Array:
    normed = rms_norm(hidden, weights["input_norm"], shape.rms_norm_eps)
    hidden += _attention(normed, weights, rotation, segments, shape)
    normed = rms_norm(hidden, weights["mlp_norm"], shape.rms_norm_eps)
    gate = jax.nn.silu(matmul(normed, weights["gate_proj"]))  # [B, T, F]
    return hidden + matmul(gate * matmul(normed, weights["up_proj"]), weights["down_proj"])


def _attention(
    normed: jax.Array,
    weights: Weights,
    rotation: tuple[jax.Array, jax.Array],
    segments: jax.Array,
    shape: ModelShape,
) -> jax.Array:
    rows, length, _ = normed.shape
    head = (rows, length, -1, shape.head_dim)
    query = matmul(normed, weights["q_proj"]).reshape(head)  # [B, T, Hq, D]
    key = matmul(normed, weights["k_proj"]).reshape(head)  # [B, T, Hkv, D]
    value = matmul(normed, weights["v_proj"]).reshape(head)  # [B, T, Hkv, D]
    query = _rotate(rms_norm(query, weights["q_norm"], shape.rms_norm_eps), rotation)
    key = _rotate(rms_norm(key, weights["k_norm"], shape.rms_norm_eps), rotation)
    mixed = _attend(query, key, value, segments)
    return matmul(mixed.reshape(rows, length, -1), weights["o_proj"])


def _attend(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array) -> jax.Array:
    """Causal attention within segments, `[B, T, Hq, D]`, a chunk of queries at a time.

    A chunk reads only the keys up to its own end, which halves the work on long rows
    and bounds the memory of the scores.
    """
    length = query.shape[1]
    size = max(SHORTEST_CHUNK, -(-length // MOST_CHUNKS))
    chunks = []
    for start in range(0, length, size):
        end = min(start + size, length)
        visible = segments[:, start:end, None] == segments[:, None, :end]  # [B, C, S]
        visible &= jnp.arange(start, end)[:, None] >= jnp.arange(end)
        chunks.append(_attend_chunk(query[:, start:end], key[:, :end], value[:, :end], visible))
    return jnp.concatenate(chunks, axis=1)


def _attend_chunk(
    query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array
) -> jax.Array:
    rows, count, num_heads, head_dim = query.shape
    grouped = (query * head_dim**-0.5).reshape(rows, count, key.shape[2], -1, head_dim)
    scores = jnp.einsum("bckgd,bskd->bkgcs", grouped, key)  # [B, Hkv, G, C, S]
    scores = jnp.where(visible[:, None, None], scores, MASKED)
    mixed = jnp.einsum("bkgcs,bskd->bckgd", jax.nn.softmax(scores, axis=-1), value)
    return mixed.reshape(rows, count, num_heads, head_dim)


def _rotation(shape: ModelShape, length: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotary angles, each `[T, 1, D]`."""
    exponents = jnp.arange(0, shape.head_dim, 2) / shape.head_dim
    angles = jnp.arange(length)[:, None] * shape.rope_theta**-exponents  # [T, D/2]
    angles = jnp.concatenate([angles, angles], axis=-1)[:, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    cos, sin = rotation
    low, high = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-high, low], axis=-1) * sin
