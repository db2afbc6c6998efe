"""The bundled models as functions of their weights, for training only.

Owns the shapes of the networks (`ModelShape`), their initial weights and the forward
pass.  They are of the Qwen3 architecture: grouped-query attention with normed queries
and keys, rotary positions, a gated MLP, RMS norms and a tied head; without the norms of
queries and keys, of Llama's.  Knows no text,
files or optimisers.

Invariant: weights are float32; every matrix product reads bfloat16 and adds up in
float32, forwards and backwards.

Shapes: B rows, T tokens of a row, C queries of a chunk, S keys that a chunk can see,
L layers, E embed, F MLP, Hq/Hkv heads, G queries of a group, D head dim, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    has_head_norms: bool = True
    """Qwen3 norms the heads' queries and keys; Llama does not."""

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def key_size(self) -> int:
        return self.num_key_value_heads * self.head_dim


DRAFT_SHAPE = ModelShape(
    hidden_size=128,
    intermediate_size=320,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)
"""Of the bundled draft model."""


class KeysValues(NamedTuple):
    """What one layer attends to, each `[B, T, Hkv, D]`."""

    keys: jax.Array
    values: jax.Array


class Rows(NamedTuple):
    """Where tokens are: rotary cosines and sines, each `[T, 1, D]`, and segments `[B, T]`."""

    rotation: tuple[jax.Array, jax.Array]
    segments: jax.Array


def rows_of(shape: ModelShape, segments: jax.Array) -> Rows:
    return Rows(_rotation(shape, segments.shape[1]), segments)


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
    if shape.has_head_norms:
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
    hidden = hidden_states(weights, token_ids, segments, shape=shape)
    return logits_of(weights["embed"], hidden)


def hidden_states(
    weights: Weights, token_ids: jax.Array, segments: jax.Array, *, shape: ModelShape
) -> jax.Array:
    """The hidden states `[B, T, E]` after the final norm; arguments as of `forward`."""
    rows = rows_of(shape, segments)
    hidden = weights["embed"][token_ids]  # [B, T, E]
    for index in range(shape.num_hidden_layers):
        hidden, _ = run_layer(hidden, layer_of(weights, index), rows, shape)
    return rms_norm(hidden, weights["norm"], shape.rms_norm_eps)


def logits_of(embed: jax.Array, hidden: jax.Array) -> jax.Array:
    """The tied head: logits `[B, T, V]` of hidden states after a final norm."""
    return matmul(hidden, embed.T)


def layer_of(weights: Weights, index: int) -> Weights:
    return {name: stack[index] for name, stack in weights["layers"].items()}


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


def run_layer(
    hidden: jax.Array,
    weights: Weights,
    rows: Rows,
    shape: ModelShape,
    earlier: Sequence[KeysValues] = (),
) -> tuple[jax.Array, KeysValues]:
    """The residual stream `[B, T, E]` behind a layer, and the layer's own keys and values.

    Without `earlier` a token attends to the keys of this call.  With it, to those of the
    first call, except for its own and its nearest predecessors' places: its own key is of
    this call, that of the token before it of the call before, and so on.
    """
    normed = rms_norm(hidden, weights["input_norm"], shape.rms_norm_eps)
    query, own = _project(normed, weights, rows, shape)
    mixed = _attend(query, (*earlier, own), rows.segments)
    hidden += matmul(mixed.reshape(*hidden.shape[:2], -1), weights["o_proj"])
    normed = rms_norm(hidden, weights["mlp_norm"], shape.rms_norm_eps)
    gate = jax.nn.silu(matmul(normed, weights["gate_proj"]))  # [B, T, F]
    hidden += matmul(gate * matmul(normed, weights["up_proj"]), weights["down_proj"])
    return hidden, own


def _project(
    normed: jax.Array, weights: Weights, rows: Rows, shape: ModelShape
) -> tuple[jax.Array, KeysValues]:
    """Queries `[B, T, Hq, D]`, keys and values, normed and rotated."""
    head = (*normed.shape[:2], -1, shape.head_dim)
    query = matmul(normed, weights["q_proj"]).reshape(head)  # [B, T, Hq, D]
    key = matmul(normed, weights["k_proj"]).reshape(head)  # [B, T, Hkv, D]
    value = matmul(normed, weights["v_proj"]).reshape(head)  # [B, T, Hkv, D]
    if shape.has_head_norms:
        query = rms_norm(query, weights["q_norm"], shape.rms_norm_eps)
        key = rms_norm(key, weights["k_norm"], shape.rms_norm_eps)
    return _rotate(query, rows.rotation), KeysValues(_rotate(key, rows.rotation), value)


def _attend(query: jax.Array, calls: Sequence[KeysValues], segments: jax.Array) -> jax.Array:
    """Causal attention within segments, `[B, T, Hq, D]`, a chunk of queries at a time.

    A chunk reads only the keys up to its own end, which halves the work on long rows
    and bounds the memory of the scores.  `calls` are those of `run_layer`, oldest first.
    """
    length = query.shape[1]
    first, *later = calls
    size = max(SHORTEST_CHUNK, -(-length // MOST_CHUNKS))
    chunks = []
    for start in range(0, length, size):
        end = min(start + size, length)
        visible = segments[:, start:end, None] == segments[:, None, :end]  # [B, C, S]
        visible &= jnp.arange(start, end)[:, None] >= jnp.arange(end)
        nearest = [_at(each, start, end, back) for back, each in enumerate(reversed(later))]
        known = KeysValues(first.keys[:, :end], first.values[:, :end])
        if nearest:
            chunks.append(_attend_chunk(query[:, start:end], known, visible, nearest))
        else:
            chunks.append(_attend_known(query[:, start:end], known, visible))
    return jnp.concatenate(chunks, axis=1)


def _at(call: KeysValues, start: int, end: int, back: int) -> KeysValues:
    """Keys and values `[B, C, Hkv, D]` of the places `back` before those of a chunk."""
    keys, values = (jnp.roll(each, back, axis=1)[:, start:end] for each in call)
    return KeysValues(keys, values)


def _attend_known(query: jax.Array, known: KeysValues, visible: jax.Array) -> jax.Array:
    """As `_attend_chunk` without `nearest`; faster, as each product has one batch axis a head."""
    group = query.shape[2] // known.keys.shape[2]
    keys, values = (jnp.repeat(each, group, axis=2) for each in known)  # [B, S, Hq, D]
    scores = jnp.einsum("bchd,bshd->bhcs", query * query.shape[-1] ** -0.5, keys)
    shares = jax.nn.softmax(jnp.where(visible[:, None], scores, MASKED), axis=-1)
    return jnp.einsum("bhcs,bshd->bchd", shares, values)


def _attend_chunk(
    query: jax.Array, known: KeysValues, visible: jax.Array, nearest: Sequence[KeysValues]
) -> jax.Array:
    """`nearest[i]` replaces the keys and values of the places `i` before the queries."""
    rows, count, num_heads, head_dim = query.shape
    num_keys = known.keys.shape[1]
    grouped = (query * head_dim**-0.5).reshape(rows, count, known.keys.shape[2], -1, head_dim)
    scores = jnp.einsum("bckgd,bskd->bkgcs", grouped, known.keys)  # [B, Hkv, G, C, S]
    places = [
        jnp.eye(count, num_keys, num_keys - count - back, bool) for back in range(len(nearest))
    ]
    for place, near in zip(places, nearest, strict=True):
        own = jnp.einsum("bckgd,bckd->bkgc", grouped, near.keys)
        scores = jnp.where(place, own[..., None], scores)
    scores = jnp.where(visible[:, None, None], scores, MASKED)
    shares = jax.nn.softmax(scores, axis=-1)
    replaced = jnp.zeros((count, num_keys), bool) | sum(places, start=jnp.zeros((), bool))
    mixed = jnp.einsum("bkgcs,bskd->bckgd", jnp.where(replaced, 0.0, shares), known.values)
    for place, near in zip(places, nearest, strict=True):
        share = jnp.sum(jnp.where(place, shares, 0.0), axis=-1)  # [B, Hkv, G, C]
        mixed += jnp.einsum("bkgc,bckd->bckgd", share, near.values)
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
