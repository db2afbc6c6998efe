"""`ReferenceModel`: the same models, written a second time and as plainly as possible.

One sequence, contiguous KV, whole-softmax attention, no pages, no batch, no op table, no cache: the
independent witness that the gate compares with. It shares with the engine only the reading of the
checkpoint. float32 throughout.

Legend: C tokens of a chunk · N positions of the context · E embed · Hq/Hkv heads · D head size.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.rope import rope_factors
from cadenza.checkpoint.model_config import ModelConfig
from cadenza.checkpoint.weights import Weights

CHUNK = 64
"""Prompt tokens computed at once; the last chunk is padded."""

_Cache = tuple[jax.Array, jax.Array]


class ReferenceModel:
    """Logits of one sequence at a time, over a context of `max_model_len` positions."""

    def __init__(self, model: ModelConfig, weights: Weights, max_model_len: int) -> None:
        self._model = model
        self._context = -(-max_model_len // CHUNK) * CHUNK
        self._tensors: dict[str, jax.Array] = {
            name: jnp.asarray(np.asarray(weights[name]).astype(np.float32)) for name in weights
        }
        self._rope = jnp.asarray(rope_factors(model.rope, self._context))
        self._forward: Callable[..., Any] = jax.jit(self._chunk_logits, donate_argnums=1)
        self._caches: tuple[_Cache, ...] = ()
        self._length = 0

    def start(self) -> None:
        """Forgets the sequence; the next token is at position 0."""
        model = self._model
        shape = (self._context, model.num_kv_heads, model.head_dim)
        self._caches = tuple(
            (jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))
            for _ in range(model.num_layers)
        )
        self._length = 0

    def append(self, token_ids: list[int]) -> npt.NDArray[np.float32]:
        """Computes tokens that follow the sequence so far; the last one's logits [V]."""
        logits = np.empty(0, np.float32)
        for begin in range(0, len(token_ids), CHUNK):
            part = token_ids[begin : begin + CHUNK]
            width = 1 if len(part) == 1 else CHUNK
            padded = np.zeros(width, np.int32)
            padded[: len(part)] = part
            start, last = np.int32(self._length), np.int32(len(part) - 1)
            row, self._caches = self._forward(self._tensors, self._caches, padded, start, last)
            self._length += len(part)
            logits = np.asarray(row)
        return logits

    def _chunk_logits(
        self,
        tensors: dict[str, jax.Array],
        caches: tuple[_Cache, ...],
        token_ids: jax.Array,
        start: jax.Array,
        last: jax.Array,
    ) -> tuple[jax.Array, tuple[_Cache, ...]]:
        embedding = tensors["model.embed_tokens.weight"]
        x = embedding[token_ids]  # [C, E]
        new_caches: list[_Cache] = []
        for index, cache in enumerate(caches):
            prefix = f"model.layers.{index}."
            layer = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            hidden = self._norm(x, layer["input_layernorm.weight"])
            attended, new_cache = self._attention(layer, hidden, cache, start)
            new_caches.append(new_cache)
            x = x + attended
            hidden = self._norm(x, layer["post_attention_layernorm.weight"])
            gate = _project(layer, "mlp.gate_proj", hidden)
            activated = gate / (1.0 + jnp.exp(-gate)) * _project(layer, "mlp.up_proj", hidden)
            x = x + _project(layer, "mlp.down_proj", activated)
        final = self._norm(x[last], tensors["model.norm.weight"])
        head = embedding if self._model.tie_word_embeddings else tensors["lm_head.weight"]
        return jnp.matmul(head, final, precision="highest"), tuple(new_caches)

    def _attention(
        self, layer: dict[str, jax.Array], x: jax.Array, cache: _Cache, start: jax.Array
    ) -> tuple[jax.Array, _Cache]:
        model = self._model
        count = len(x)
        query = _project(layer, "self_attn.q_proj", x).reshape(count, -1, model.head_dim)
        key = _project(layer, "self_attn.k_proj", x).reshape(count, -1, model.head_dim)
        value = _project(layer, "self_attn.v_proj", x).reshape(count, -1, model.head_dim)
        if model.has_qk_norm:
            query = self._norm(query, layer["self_attn.q_norm.weight"])
            key = self._norm(key, layer["self_attn.k_norm.weight"])
        factors = jax.lax.dynamic_slice_in_dim(self._rope, start, count)
        query, key = _turn(query, factors), _turn(key, factors)
        keys = jax.lax.dynamic_update_slice(cache[0], key, (start, 0, 0))  # [N, Hkv, D]
        values = jax.lax.dynamic_update_slice(cache[1], value, (start, 0, 0))
        groups = model.num_heads // model.num_kv_heads
        wide_keys, wide_values = (jnp.repeat(side, groups, axis=1) for side in (keys, values))
        scores = jnp.einsum("chd,nhd->hcn", query, wide_keys, precision="highest")
        visible = jnp.arange(self._context)[None, :] <= start + jnp.arange(count)[:, None]
        scores = jnp.where(visible, scores / np.sqrt(model.head_dim), -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        mixed = jnp.einsum("hcn,nhd->chd", weights, wide_values, precision="highest")
        return _project(layer, "self_attn.o_proj", mixed.reshape(count, -1)), (keys, values)

    def _norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x / jnp.sqrt(mean_square + self._model.rms_norm_eps) * weight


def _project(layer: dict[str, jax.Array], name: str, x: jax.Array) -> jax.Array:
    y = jnp.matmul(x, layer[f"{name}.weight"].T, precision="highest")
    bias = layer.get(f"{name}.bias")
    return y if bias is None else y + bias


def _turn(heads: jax.Array, factors: jax.Array) -> jax.Array:
    """Rotates pairs (i, i + half) of heads [C, H, D] as complex numbers."""
    half = factors.shape[-1] // 2
    turn = jax.lax.complex(factors[:, :half], factors[:, half:])[:, None, :]
    turned = jax.lax.complex(heads[..., :half], heads[..., half : 2 * half]) * turn
    parts = [jnp.real(turned), jnp.imag(turned), heads[..., 2 * half :]]
    return jnp.concatenate(parts, axis=-1)
