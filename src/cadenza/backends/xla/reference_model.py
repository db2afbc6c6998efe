"""`ReferenceModel`: an independent, simple implementation of the supported models in float32: one
sequence, contiguous KV, unblocked softmax, no pages, batches or op table. `cadenza verify` compares
the engine with it; they share only the loading of the checkpoint. Legend: C tokens of a chunk · N
positions of the context · E embed · Hq/Hkv heads · D head size."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.reference_mixers import (
    BlockTensors,
    LatentHeads,
    net_of,
    new_latent_cache,
    new_state,
    reference_rope,
)
from cadenza.backends.xla.reference_tower import ReferenceTower, SeenImages
from cadenza.models.layer_kind import HeadShape, LayerKind
from cadenza.models.model_config import (
    CLAMPED_ALPHA,
    CLAMPED_LIMIT,
    Activation,
    ModelConfig,
    SigmoidChoice,
)
from cadenza.models.rope_config import RopeConfig, YarnRopeScaling
from cadenza.request import Attachment
from cadenza.weights.weights import Weights

CHUNK = 64  # prompt tokens per forward pass; the last chunk is padded
EMBEDDING = "model.embed_tokens.weight"

_Cache = tuple[jax.Array, jax.Array]
_Tensors = dict[str, jax.Array]
_LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(.+)")
Tensors = Mapping[str, jax.Array]
Activate = Callable[[jax.Array], jax.Array]


class _Chunk(NamedTuple):
    """The index of its first token in the sequence, that of its last one in the chunk that is not
    padding, and the rotary positions of all [C, 3], of models whose ropes have axes."""

    start: Any
    last: Any
    positions: Any


class ReferenceModel:
    """Logits of one sequence at a time, over a context of `max_model_len` positions."""

    def __init__(self, model: ModelConfig, weights: Weights, max_model_len: int) -> None:
        self._model = model
        self._context = -(-max_model_len // CHUNK) * CHUNK
        self._layers: list[_Tensors] = [{} for _ in range(model.num_layers)]
        self._outer: _Tensors = {}
        for name in weights:
            tensor = jnp.asarray(np.asarray(weights[name]).astype(np.float32))
            if (inner := _LAYER_TENSOR.fullmatch(name)) is None:
                self._outer[name] = tensor
            elif int(inner[1]) < model.num_layers:
                self._layers[int(inner[1])][inner[2]] = tensor
        self._ropes = [jnp.asarray(self._padded_rope(max_model_len, kind)) for kind in model.ropes]
        self._embed, self._logits = jax.jit(self._embedded), jax.jit(self._head)
        self._apply_layer = jax.jit(self._layer, static_argnames="kind", donate_argnames="cache")
        self._caches: list[_Cache] = []
        self._length = 0
        self._tower = None if model.vision is None else ReferenceTower(model.vision, weights)
        self._images: SeenImages | None = None

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    def _padded_rope(self, max_model_len: int, rope: RopeConfig | None) -> npt.NDArray[np.float32]:
        factors = reference_rope(rope, max_model_len)
        return np.pad(factors, ((0, self._context - len(factors)), (0, 0)))

    def start(self) -> None:
        self._caches = [self._new_cache(kind) for kind in self._model.layer_kinds]
        self._length = 0
        self.see(())

    def see(self, attachments: Sequence[Attachment]) -> None:
        if self._tower is not None:
            self._images = SeenImages(self._tower, self._model.hidden_size, attachments)

    def _new_cache(self, kind: LayerKind) -> _Cache:
        if kind.recurrence is not None:
            return new_state(kind.recurrence)
        if kind.latent is not None:
            return new_latent_cache(kind.latent, self._context)
        heads = self._model.heads_of(kind)
        shape = (self._context, heads.num_kv_heads, heads.head_dim)
        return jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32)

    def append(self, token_ids: list[int]) -> npt.NDArray[np.float32]:
        logits = np.empty(0, np.float32)
        for begin in range(0, len(token_ids), CHUNK):
            part = token_ids[begin : begin + CHUNK]
            width = 1 if len(part) == 1 else CHUNK
            padded = np.zeros(width, np.int32)
            padded[: len(part)] = part
            start = self._length
            positions = None
            if self._images is not None and self._model.has_rope_axes:
                positions = self._images.positions(start, start + width)
            chunk = _Chunk(np.int32(start), np.int32(len(part) - 1), positions)
            logits = np.asarray(self._forward(padded, chunk))
            self._length += len(part)
        return logits

    def _forward(self, token_ids: npt.NDArray[np.int32], chunk: _Chunk) -> jax.Array:
        is_image, rows = None, np.zeros((len(token_ids), 0, self._model.hidden_size), np.float32)
        if self._images is not None:
            token_ids, is_image, rows = self._images.take(token_ids)
        x = self._embed(self._outer, token_ids)
        if is_image is not None and is_image.any():
            x = jnp.where(is_image[:, None], rows[:, 0], x)
        values = None
        if self._model.layer_inputs is not None:
            values = layer_inputs(self._model, self._outer, jnp.asarray(token_ids), x)
        for index, kind in enumerate(self._model.layer_kinds):
            source = index if kind.kv_source is None else kind.kv_source
            own = None if values is None else values[:, index]
            x, self._caches[source] = self._apply_layer(
                self._layers[index], (x, own), self._caches[source], chunk, kind=kind
            )
            if index + 1 < rows.shape[1]:
                x = x + rows[:, index + 1]
        return self._logits(self._outer, x, chunk.last)

    def _embedded(self, outer: _Tensors, token_ids: jax.Array) -> jax.Array:
        return outer[EMBEDDING][token_ids] * self._model.embedding_scale  # [C, E]

    def _layer(
        self,
        layer: _Tensors,
        given: tuple[jax.Array, jax.Array | None],
        cache: _Cache,
        chunk: _Chunk,
        *,
        kind: LayerKind,
    ) -> tuple[jax.Array, _Cache]:
        model, names, (x, values) = self._model, _norm_names(self._model), given
        hidden = self._norm(x, layer.get(names.before_mixer))
        if kind.recurrence is None:
            mixed, new_cache = self._attention(layer, hidden, cache, chunk, kind)
        else:
            block = BlockTensors(layer, model.names.recurrence)
            net = net_of(kind.recurrence, block, model.rms_norm_eps)
            mixed, new_cache = net.apply(hidden, cache, chunk.last)
        x = x + model.residual_scale * self._norm(mixed, layer.get(names.after_mixer))
        hidden = self._norm(x, layer.get(names.before_mlp))
        projected = self._feed_forward(layer, x, hidden, kind)
        x = x + model.residual_scale * self._norm(projected, layer.get(names.after_mlp))
        if values is not None:
            x = add_layer_input(model, layer, x, values, self._activate)
        return x * layer.get("layer_scalar", 1.0), new_cache

    def _feed_forward(
        self, layer: _Tensors, x: jax.Array, hidden: jax.Array, kind: LayerKind
    ) -> jax.Array:
        experts = self._model.experts
        if experts is None or not kind.has_experts:
            return self._mlp(layer, hidden)
        if experts.are_beside_mlp:
            dense = self._mlp(layer, hidden)
            return parallel_mixture(self._model, layer, x, dense, self._activate)
        return self._mixture(layer, hidden)

    def _activate(self, x: jax.Array) -> jax.Array:
        return _activated(x, self._model.activation)

    def _head(self, outer: _Tensors, x: jax.Array, last: jax.Array) -> jax.Array:
        model = self._model
        final = self._norm(x[last], outer[f"{model.names.final_norm}.weight"])
        head = outer[EMBEDDING if model.tie_word_embeddings else "lm_head.weight"]
        logits = jnp.matmul(head, final, precision="highest") / model.logit_divisor
        return _capped(logits, model.logit_soft_cap)

    def _mlp(self, layer: _Tensors, x: jax.Array) -> jax.Array:
        return self._gated_mlp(layer, self._model.names.mlp, x)

    def _gated_mlp(self, layer: _Tensors, prefix: str, x: jax.Array) -> jax.Array:
        names = self._model.names
        fused = "gate_up_proj" if self._model.has_fused_tensors else names.gate_up
        if fused is not None:
            gate, up = jnp.split(_project(layer, f"{prefix}.{fused}", x), 2, axis=-1)
        else:
            gate, up = (_project(layer, f"{prefix}.{n}", x) for n in (names.gate, names.up))
        inner = _gated(gate, up, self._model.activation)
        return _project(layer, f"{prefix}.{names.down}", inner)

    def _mixture(self, layer: _Tensors, x: jax.Array) -> jax.Array:
        experts = self._model.experts
        assert experts is not None, "the model has no experts"
        names, activation = experts.names, self._model.activation
        router = f"{names.block}.{names.router}"
        logits = _project(layer, router, x)  # [C, X]
        if experts.sigmoid_choice is None:
            chances = scores = jax.nn.softmax(logits, axis=-1)
        else:
            chances = 1.0 / (1.0 + jnp.exp(-logits))
            scores = chances + layer.get(f"{names.block}.{names.choice_bias}", 0.0)
            scores = _without_other_groups(scores, experts.sigmoid_choice)
        ranks = jnp.argsort(jnp.argsort(-scores, axis=-1), axis=-1)
        chosen = jnp.where(ranks < experts.num_chosen, chances, 0.0)
        if experts.over_chosen:
            choice = experts.sigmoid_choice
            smallest = 0.0 if choice is None else choice.least_sum
            chosen = chosen / (jnp.sum(chosen, axis=-1, keepdims=True) + smallest)
        chosen = chosen * experts.weight_scale
        total = jnp.zeros_like(x)
        for index in range(experts.num_experts):
            prefix = f"{names.block}.experts.{index}"
            gate, up = (_project(layer, f"{prefix}.{n}", x) for n in (names.gate, names.up))
            inner = _gated(gate, up, activation)
            total += chosen[:, index, None] * _project(layer, f"{prefix}.{names.down}", inner)
        return total + self._shared(layer, x) if experts.shared_size else total

    def _shared(self, layer: _Tensors, x: jax.Array) -> jax.Array:
        experts = self._model.experts
        assert experts is not None, "the model has no experts"
        prefix = experts.names.shared
        y = self._gated_mlp(layer, prefix, x)
        if experts.has_shared_gate:
            y = y / (1.0 + jnp.exp(-_project(layer, f"{prefix}_gate", x)))
        return y

    def _attention(
        self, layer: _Tensors, x: jax.Array, cache: _Cache, chunk: _Chunk, kind: LayerKind
    ) -> tuple[jax.Array, _Cache]:
        model, count, start = self._model, len(x), chunk.start
        heads = model.heads_of(kind)
        rope = self._ropes[model.ropes.index(model.rope_of(kind))]
        factors = jax.lax.dynamic_slice_in_dim(rope, start, count)
        own_rope = model.rope_of(kind)
        if chunk.positions is not None and own_rope is not None:
            factors = _by_axes(rope, chunk.positions, own_rope)
        if kind.latent is not None:
            latent = LatentHeads(kind.latent, layer, model.scale_of(heads))
            return latent.apply(x, cache, start, factors)
        keys, values, gate = *cache, None
        if kind.kv_source is None:
            query, key, value, gate = self._query_key_value(layer, x, heads)
            keys = jax.lax.dynamic_update_slice(keys, _rotate(key, factors), (start, 0, 0))
            values = jax.lax.dynamic_update_slice(values, value, (start, 0, 0))  # [N, Hkv, D]
        else:
            query = _project(layer, "self_attn.q_proj", x).reshape(count, -1, heads.head_dim)
            query = self._norm(query, layer["self_attn.q_norm.weight"])
        query = _rotate(query, factors)
        query = _by_position(query, model.rope_of(kind), start + jnp.arange(count))
        groups = heads.num_heads // heads.num_kv_heads
        wide_keys, wide_values = (jnp.repeat(side, groups, axis=1) for side in (keys, values))
        scores = jnp.einsum("chd,nhd->hcn", query, wide_keys, precision="highest")
        scale = model.attention_scale or 1.0 / np.sqrt(heads.head_dim)
        scores = _capped(scores * scale, model.attention_soft_cap)
        ages = start + jnp.arange(count)[:, None] - jnp.arange(self._context)[None, :]  # [C, N]
        visible = (ages >= 0) & (ages < (kind.window or self._context))
        scores = jnp.where(visible, scores, -jnp.inf)
        sinks = layer.get("self_attn.sinks")
        if sinks is not None:  # one more position, whose value is 0
            own = jnp.broadcast_to(sinks[:, None, None], (len(sinks), count, 1))
            scores = jnp.concatenate([scores, own], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., : self._context]
        mixed = jnp.einsum("hcn,nhd->chd", weights, wide_values, precision="highest")
        if gate is not None:
            mixed = mixed / (1.0 + jnp.exp(-gate))
        out = f"self_attn.{model.names.attention_out}"
        return _project(layer, out, mixed.reshape(count, -1)), (keys, values)

    def _query_key_value(
        self, layer: _Tensors, x: jax.Array, heads: HeadShape
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        model = self._model
        if model.has_fused_tensors:
            fused = _project(layer, "self_attn.qkv_proj", x)
            sizes = [heads.query_size, heads.query_size + heads.kv_size]
            query, key, value = jnp.split(fused, sizes, axis=-1)
        else:
            query, key = (_project(layer, f"self_attn.{n}_proj", x) for n in "qk")
            value = key
            if "self_attn.v_proj.weight" in layer:
                value = _project(layer, "self_attn.v_proj", x)
        gate = None
        if model.has_attention_gate:
            query, gate = jnp.split(query.reshape(len(x), heads.num_heads, -1), 2, axis=-1)
        names = (model.names.query_norm, model.names.key_norm)
        norms = [layer.get(f"self_attn.{name}.weight") for name in names]
        if model.qk_norm == "all_heads":
            query, key = self._norm(query, norms[0]), self._norm(key, norms[1])
        query, key, value = (
            part.reshape(len(x), -1, heads.head_dim) for part in (query, key, value)
        )
        if model.qk_norm == "head":
            query, key = self._norm(query, norms[0]), self._norm(key, norms[1])
        if model.has_value_norm:
            value = self._norm(value, jnp.ones(heads.head_dim))
        return query, key, value, gate

    def _norm(self, x: jax.Array, weight: jax.Array | None) -> jax.Array:
        if weight is None:
            return x
        factor = 1.0 + weight if self._model.norm_adds_one else weight
        mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x / jnp.sqrt(mean_square + self._model.rms_norm_eps) * factor


class _NormNames(NamedTuple):
    """The tensor names of a layer's norms. `post_attention_layernorm` is the norm after attention
    if the model has post-norms, and otherwise the norm before the MLP."""

    before_mixer: str
    after_mixer: str
    before_mlp: str
    after_mlp: str


def _norm_names(model: ModelConfig) -> _NormNames:
    first, second = f"{model.names.mixer_norm}.weight", f"{model.names.mlp_norm}.weight"
    return _NormNames(
        before_mixer=first,
        after_mixer=second if model.has_post_norms else "",
        before_mlp="pre_feedforward_layernorm.weight" if model.has_post_norms else second,
        after_mlp="post_feedforward_layernorm.weight",
    )


def _gated(gate: jax.Array, up: jax.Array, activation: Activation) -> jax.Array:
    if activation != "clamped_swiglu":
        return _activated(gate, activation) * up
    gate = jnp.where(gate > CLAMPED_LIMIT, CLAMPED_LIMIT, gate)
    up = jnp.where(jnp.abs(up) > CLAMPED_LIMIT, CLAMPED_LIMIT * jnp.sign(up), up)
    return gate / (1.0 + jnp.exp(-CLAMPED_ALPHA * gate)) * (1.0 + up)


def _activated(x: jax.Array, activation: Activation) -> jax.Array:
    if activation == "silu":
        return x / (1.0 + jnp.exp(-x))
    if activation == "gelu_tanh":
        return 0.5 * x * (1.0 + jnp.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1.0 + jax.lax.erf(x / np.sqrt(2.0)))


def _without_other_groups(scores: jax.Array, choice: SigmoidChoice) -> jax.Array:
    parts = jnp.stack(jnp.split(scores, choice.num_groups, axis=-1), axis=1)  # [C, groups, ·]
    sums = jnp.sum(jnp.sort(parts, axis=-1)[..., -2:], axis=-1)
    ranks = jnp.argsort(jnp.argsort(-sums, axis=-1), axis=-1)
    kept = jnp.where((ranks < choice.num_chosen_groups)[..., None], parts, -jnp.inf)
    return kept.reshape(scores.shape)


def _capped(values: jax.Array, cap: float | None) -> jax.Array:
    return values if cap is None else cap * jnp.tanh(values / cap)


def _project(layer: _Tensors, name: str, x: jax.Array) -> jax.Array:
    y = jnp.matmul(x, layer[f"{name}.weight"].T, precision="highest")
    bias = layer.get(f"{name}.bias")
    return y if bias is None else y + bias


def _by_position(query: jax.Array, rope: RopeConfig | None, positions: jax.Array) -> jax.Array:
    # Some models make queries longer at late positions.
    if rope is None or not isinstance(rope.scaling, YarnRopeScaling):
        return query
    lengths = positions // rope.scaling.original_max_position_embeddings
    growth = rope.scaling.query_beta * jnp.log1p(lengths.astype(jnp.float32))
    return query + query * growth[:, None, None]


def _by_axes(factors: jax.Array, positions: jax.Array, rope: RopeConfig) -> jax.Array:
    half = len(rope.axes)
    own, pairs = positions[:, np.array(rope.axes)], np.arange(half)  # [C, half]
    return jnp.concatenate([factors[own, pairs], factors[own, half + pairs]], axis=1)


def _rotate(heads: jax.Array, factors: jax.Array) -> jax.Array:
    half = factors.shape[-1] // 2
    factor = jax.lax.complex(factors[:, :half], factors[:, half:])[:, None, :]
    rotated = jax.lax.complex(heads[..., :half], heads[..., half : 2 * half]) * factor
    parts = [jnp.real(rotated), jnp.imag(rotated), heads[..., 2 * half :]]
    return jnp.concatenate(parts, axis=-1)


def layer_inputs(
    model: ModelConfig, outer: Tensors, token_ids: jax.Array, x: jax.Array
) -> jax.Array:
    """The per-layer embeddings [C, layers, P] of tokens whose first stream is x [C, E]."""
    inputs = model.layer_inputs
    assert inputs is not None, "the model has no per-layer embeddings"
    shape = (len(x), model.num_layers, inputs.size)
    rows = outer["model.embed_tokens_per_layer.weight"][token_ids] * np.sqrt(inputs.size)
    projected = _product(outer["model.per_layer_model_projection.weight"], x)
    projected = (projected / np.sqrt(model.hidden_size)).reshape(shape)
    weight = outer["model.per_layer_projection_norm.weight"]
    return (_normed(projected, model) * weight + rows.reshape(shape)) / np.sqrt(2.0)


def add_layer_input(
    model: ModelConfig, layer: Tensors, x: jax.Array, values: jax.Array, activate: Activate
) -> jax.Array:
    """The stream x [C, E] with a layer's `values` [C, P]."""
    gate = activate(_product(layer["per_layer_input_gate.weight"], x))
    out = _product(layer["per_layer_projection.weight"], gate * values)
    return x + _normed(out, model) * layer["post_per_layer_input_norm.weight"]


def parallel_mixture(
    model: ModelConfig, layer: Tensors, x: jax.Array, dense: jax.Array, activate: Activate
) -> jax.Array:
    """The sum of the normed MLP output `dense` and of the experts' for the stream x [C, E]. All
    experts are computed; those that are not chosen have weight 0."""
    experts = model.experts
    assert experts is not None, "the model has no experts"
    routed = _normed(x, model) * layer["router.scale"] / np.sqrt(model.hidden_size)
    chances = jax.nn.softmax(_product(layer["router.proj.weight"], routed), axis=-1)  # [C, X]
    ranks = jnp.argsort(jnp.argsort(-chances, axis=-1), axis=-1)
    chosen = jnp.where(ranks < experts.num_chosen, chances, 0.0)
    chosen = chosen / jnp.sum(chosen, axis=-1, keepdims=True) * layer["router.per_expert_scale"]
    hidden = _normed(x, model) * layer["pre_feedforward_layernorm_2.weight"]
    total = jnp.zeros_like(x)
    for index in range(experts.num_experts):
        gate, up, down = (
            layer[f"experts.{index}.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        inner = activate(_product(gate, hidden)) * _product(up, hidden)
        total += chosen[:, index, None] * _product(down, inner)
    first = _normed(dense, model) * layer["post_feedforward_layernorm_1.weight"]
    return first + _normed(total, model) * layer["post_feedforward_layernorm_2.weight"]


def _normed(x: jax.Array, model: ModelConfig) -> jax.Array:
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x / jnp.sqrt(mean_square + model.rms_norm_eps)


def _product(weight: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.matmul(x, weight.T, precision="highest")
