"""`ReferenceModel`: an independent, simple implementation of the supported models in float32.

One sequence with contiguous KV and an unblocked softmax; no pages, batches or op table. `cadenza
verify` compares the engine with it. It shares only the loading of the checkpoint with the engine;
rope factors are computed by `reference_rope`.

Legend: C tokens of a chunk · N positions of the context · E embed · Hq/Hkv heads · D head size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.reference_rope import reference_rope
from cadenza.checkpoint.model_config import Activation, LayerKind, ModelConfig
from cadenza.checkpoint.rope_config import RopeConfig
from cadenza.checkpoint.weights import Weights

CHUNK = 64
"""Prompt tokens per forward pass; the last chunk is padded."""

_Cache = tuple[jax.Array, jax.Array]


class ReferenceModel:
    """Logits of one sequence at a time, over a context of `max_model_len` positions."""

    def __init__(self, model: ModelConfig, weights: Weights, max_model_len: int) -> None:
        self._model = model
        self._context = -(-max_model_len // CHUNK) * CHUNK
        self._tensors: dict[str, jax.Array] = {
            name: jnp.asarray(np.asarray(weights[name]).astype(np.float32)) for name in weights
        }
        self._ropes = [jnp.asarray(self._padded_rope(max_model_len, kind)) for kind in model.ropes]
        self._forward: Callable[..., Any] = jax.jit(self._chunk_logits, donate_argnums=1)
        self._caches: tuple[_Cache, ...] = ()
        self._length = 0

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    def _padded_rope(self, max_model_len: int, rope: RopeConfig | None) -> npt.NDArray[np.float32]:
        """[N, rotary_dim]: the factors of `max_model_len` positions, then zeros up to N."""
        factors = reference_rope(rope, max_model_len)
        return np.pad(factors, ((0, self._context - len(factors)), (0, 0)))

    def start(self) -> None:
        """Resets to an empty sequence; the next token is at position 0."""
        model = self._model
        shape = (self._context, model.num_kv_heads, model.head_dim)
        self._caches = tuple(
            (jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))
            for _ in range(model.num_layers)
        )
        self._length = 0

    def append(self, token_ids: list[int]) -> npt.NDArray[np.float32]:
        """Appends tokens to the sequence; returns the logits [V] after the last one."""
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
        model, table = self._model, tensors["model.embed_tokens.weight"]
        x = table[token_ids] * model.embedding_scale  # [C, E]
        new_caches: list[_Cache] = []
        for index, cache in enumerate(caches):
            prefix = f"model.layers.{index}."
            layer = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            names = _norm_names(model)
            hidden = self._norm(x, layer.get(names.before_attention))
            kind = model.layer_kinds[index]
            attended, new_cache = self._attention(layer, hidden, cache, start, kind)
            new_caches.append(new_cache)
            x = x + model.residual_scale * self._norm(attended, layer.get(names.after_attention))
            hidden = self._norm(x, layer.get(names.before_mlp))
            mlp = self._mixture if kind.has_experts else self._mlp
            projected = mlp(layer, hidden)
            x = x + model.residual_scale * self._norm(projected, layer.get(names.after_mlp))
        final = self._norm(x[last], tensors["model.norm.weight"])
        head = table if model.tie_word_embeddings else tensors["lm_head.weight"]
        logits = jnp.matmul(head, final, precision="highest") / model.logit_divisor
        return _capped(logits, model.logit_soft_cap), tuple(new_caches)

    def _mlp(self, layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        if self._model.has_fused_tensors:
            gate, up = jnp.split(_project(layer, "mlp.gate_up_proj", x), 2, axis=-1)
        else:
            gate, up = _project(layer, "mlp.gate_proj", x), _project(layer, "mlp.up_proj", x)
        return _project(layer, "mlp.down_proj", _activated(gate, self._model.activation) * up)

    def _mixture(self, layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        """The weighted sum of all experts; those that are not chosen have weight 0."""
        experts = self._model.experts
        assert experts is not None, "the model has no experts"
        names, activation = experts.names, self._model.activation
        chances = jax.nn.softmax(_project(layer, f"{names.block}.gate", x), axis=-1)  # [C, X]
        ranks = jnp.argsort(jnp.argsort(-chances, axis=-1), axis=-1)
        chosen = jnp.where(ranks < experts.num_chosen, chances, 0.0)
        if experts.over_chosen:
            chosen = chosen / jnp.sum(chosen, axis=-1, keepdims=True)
        total = jnp.zeros_like(x)
        for index in range(experts.num_experts):
            prefix = f"{names.block}.experts.{index}"
            gate = _activated(_project(layer, f"{prefix}.{names.gate}", x), activation)
            inner = gate * _project(layer, f"{prefix}.{names.up}", x)
            total += chosen[:, index, None] * _project(layer, f"{prefix}.{names.down}", inner)
        return total

    def _attention(
        self,
        layer: dict[str, jax.Array],
        x: jax.Array,
        cache: _Cache,
        start: jax.Array,
        kind: LayerKind,
    ) -> tuple[jax.Array, _Cache]:
        model, count = self._model, len(x)
        query, key, value = self._query_key_value(layer, x)
        rope = self._ropes[model.ropes.index(model.rope_of(kind))]
        factors = jax.lax.dynamic_slice_in_dim(rope, start, count)
        query, key = _turn(query, factors), _turn(key, factors)
        keys = jax.lax.dynamic_update_slice(cache[0], key, (start, 0, 0))  # [N, Hkv, D]
        values = jax.lax.dynamic_update_slice(cache[1], value, (start, 0, 0))
        groups = model.num_heads // model.num_kv_heads
        wide_keys, wide_values = (jnp.repeat(side, groups, axis=1) for side in (keys, values))
        scores = jnp.einsum("chd,nhd->hcn", query, wide_keys, precision="highest")
        scale = model.attention_scale or 1.0 / np.sqrt(model.head_dim)
        scores = _capped(scores * scale, model.attention_soft_cap)
        ages = start + jnp.arange(count)[:, None] - jnp.arange(self._context)[None, :]  # [C, N]
        visible = (ages >= 0) & (ages < (kind.window or self._context))
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        mixed = jnp.einsum("hcn,nhd->chd", weights, wide_values, precision="highest")
        return _project(layer, "self_attn.o_proj", mixed.reshape(count, -1)), (keys, values)

    def _query_key_value(
        self, layer: dict[str, jax.Array], x: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query, key and value heads [C, H, D], with the model's query and key norms applied."""
        model = self._model
        if model.has_fused_tensors:
            fused = _project(layer, "self_attn.qkv_proj", x)
            sizes = [model.query_size, model.query_size + model.kv_size]
            query, key, value = jnp.split(fused, sizes, axis=-1)
        else:
            query, key, value = (_project(layer, f"self_attn.{n}_proj", x) for n in "qkv")
        norms = [layer.get(f"self_attn.{n}_norm.weight") for n in "qk"]
        if model.qk_norm == "all_heads":
            query, key = self._norm(query, norms[0]), self._norm(key, norms[1])
        query, key, value = (
            part.reshape(len(x), -1, model.head_dim) for part in (query, key, value)
        )
        if model.qk_norm == "head":
            query, key = self._norm(query, norms[0]), self._norm(key, norms[1])
        return query, key, value

    def _norm(self, x: jax.Array, weight: jax.Array | None) -> jax.Array:
        """The RMS norm of x; x itself if `weight` is None."""
        if weight is None:
            return x
        factor = 1.0 + weight if self._model.norm_adds_one else weight
        mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x / jnp.sqrt(mean_square + self._model.rms_norm_eps) * factor


class _NormNames(NamedTuple):
    """The tensor names of a layer's norms.

    `post_attention_layernorm` is the norm after attention if the model has post-norms, and
    otherwise the norm before the MLP.
    """

    before_attention: str
    after_attention: str
    before_mlp: str
    after_mlp: str


def _norm_names(model: ModelConfig) -> _NormNames:
    second = "post_attention_layernorm.weight"
    return _NormNames(
        before_attention="input_layernorm.weight",
        after_attention=second if model.has_post_norms else "",
        before_mlp="pre_feedforward_layernorm.weight" if model.has_post_norms else second,
        after_mlp="post_feedforward_layernorm.weight",
    )


def _activated(x: jax.Array, activation: Activation) -> jax.Array:
    if activation == "silu":
        return x / (1.0 + jnp.exp(-x))
    if activation == "gelu_tanh":
        return 0.5 * x * (1.0 + jnp.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1.0 + jax.lax.erf(x / np.sqrt(2.0)))


def _capped(values: jax.Array, cap: float | None) -> jax.Array:
    return values if cap is None else cap * jnp.tanh(values / cap)


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
