"""Attention over KV pages in plain jnp: its definition, and that of prompts' scores. KV is [slots,
layers, Hkv, D], in int8 with scales [slots, layers, Hkv]. Legend as in `ops.table`; B positions per
block, G query heads per KV head."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cadenza.backends.xla.ops.encoder_reference import EncoderOps
from cadenza.backends.xla.ops.head_math import latent_heads, norm_heads, rms_norm, rotate, soft_cap
from cadenza.backends.xla.ops.in_range import set_rows
from cadenza.backends.xla.ops.quantised import quantise_groups, scale_groups
from cadenza.backends.xla.ops.table import (
    AttendingLayer,
    HeadFactors,
    HeadInputs,
    KVPool,
    LatentFactors,
    LatentInputs,
    LatentLayer,
    ScoringLayer,
    StepArrays,
)
from cadenza.models.layer_kind import HeadShape
from cadenza.sparse_prefill import POOL
from cadenza.weights.quantised_weight import MOST_CODE

SUB_BLOCK = 16  # tokens whose weights have one scale; sub-blocks start at multiples of it
FINE_PER_COARSE = 254
MOST_WEIGHT_CODE = 254
BLOCK = 128  # KV positions per softmax block; blocks start at multiples of it
LayerSlots = tuple[jax.Array, int]  # KV slots of any shape, and a layer index
_HIGHEST = jax.lax.Precision.HIGHEST


@dataclass(frozen=True, slots=True, kw_only=True)
class RowQueries:
    """The query of each row [R]: its position, and the keys that it scores, 0 if it scores none."""

    positions: jax.Array
    lengths: jax.Array


def normalised(logits: jax.Array, is_key: jax.Array) -> jax.Array:
    """The softmax of logits [R, Hkv, G, N] over the keys [R, N] of each row; 0 elsewhere."""
    mask = is_key[:, None, None, :]
    logits = jnp.where(mask, logits, -jnp.inf)
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.where(mask, weights, 0.0)
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def add_scores(
    scores: jax.Array, weights: jax.Array, rows: RowQueries, layer: ScoringLayer
) -> jax.Array:
    """`scores` [2, R, N] with those of a layer's weights [R, Hkv, G, N]: the largest of a step's
    heads and layers so far, before the division by `POOL`, and the sum over the row's queries so
    far. A row's scores depend on its own weights alone, and NaN stays. Rows that score none keep
    theirs; a query at the last of its keys begins the sum."""
    bits = jnp.max(_bits(_pooled(weights)), axis=(1, 2))  # [R, N]
    if not layer.is_first:
        bits = jnp.maximum(_bits(scores[0]), bits)
    largest = jax.lax.bitcast_convert_type(bits, jnp.float32)
    sums = scores[1]
    if layer.is_last:
        found = largest / np.float32(POOL)
        begins = rows.positions == rows.lengths - 1
        sums = jnp.where(begins[:, None], found, sums + found)
    does = (rows.lengths > 0)[None, :, None]
    return jnp.where(does, jnp.stack([largest, sums]), scores)


def _bits(numbers: jax.Array) -> jax.Array:
    # NaN is the largest of the bits: XLA's own maximum over an axis of a CPU may leave it out.
    return jax.lax.bitcast_convert_type(numbers, jnp.uint32)


def _pooled(weights: jax.Array) -> jax.Array:
    # In ascending order.
    half, length = POOL // 2, weights.shape[-1]
    padded = jnp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(half, half)])
    total = padded[..., :length]
    for start in range(1, POOL):
        total = total + padded[..., start : start + length]
    return total


class CodedHeads(NamedTuple):
    """Keys or values in int8 with a scale each (`csrc/core/kv_codes.h`). The query, and the weights
    of each sub-block, are quantised more finely, so that dots of codes are exact integers."""

    codes: Any  # [..., D] int8
    scales: Any  # [...] float32


def filled_heads(shape: tuple[int, ...], fill: float) -> CodedHeads:
    scales = jnp.full(shape[:-1], fill / MOST_CODE, jnp.float32)
    return CodedHeads(jnp.full(shape, MOST_CODE, jnp.int8), scales)


def encode_heads(heads: jax.Array) -> CodedHeads:
    return CodedHeads(*quantise_groups(heads.astype(jnp.float32)))


def code_scores(query: jax.Array, keys: CodedHeads) -> jax.Array:
    """Products of queries [T, Hkv, G, D] in float32 and keys [T, B, Hkv, D]: [T, Hkv, G, B]."""
    exact, largest = scale_groups(query, MOST_CODE)
    coarse = jnp.round(exact)
    fine = jnp.round((exact - coarse) * np.float32(FINE_PER_COARSE))
    coarse_dots, fine_dots = (
        _integer_einsum("tkgd,tbkd->tkgb", codes, keys.codes).astype(jnp.int32)
        for codes in (coarse, fine)
    )
    dots = (FINE_PER_COARSE * coarse_dots + fine_dots).astype(jnp.float32)
    scales = largest / np.float32(MOST_CODE * FINE_PER_COARSE)
    return dots * scales[..., None] * _by_head(keys.scales)


def sum_code_values(weights: jax.Array, values: CodedHeads) -> jax.Array:
    """Values [T, B, Hkv, D] weighted by [T, Hkv, G, B]; lanes with weight 0 must have finite
    scales."""
    blocks = (weights * _by_head(values.scales)).reshape(*weights.shape[:3], -1, SUB_BLOCK)
    exact, largest = scale_groups(blocks, MOST_WEIGHT_CODE)  # [T, Hkv, G, N, 16], [T, Hkv, G, N]
    codes, scales = jnp.round(exact), largest / np.float32(MOST_WEIGHT_CODE)
    tokens, lanes, heads, size = values.codes.shape
    by_block = values.codes.reshape(tokens, lanes // SUB_BLOCK, SUB_BLOCK, heads, size)
    dots = _integer_einsum("tkgnb,tnbkd->tkgnd", codes, by_block)
    return jnp.sum(dots * scales[..., None], axis=3)


def _by_head(scales: jax.Array) -> jax.Array:
    return jnp.moveaxis(scales, 1, 2)[:, :, None, :]


def _integer_einsum(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Products of codes in float32, exact in any order: all sums are integers below 2^24."""
    wide = left.astype(jnp.float32), right.astype(jnp.float32)
    return jnp.einsum(subscripts, *wide, precision=jax.lax.Precision.HIGHEST)


class KeyBlock(NamedTuple):
    """A block of positions: their slots and layer, the lanes [T, B] attended to, and the scores'
    factor."""

    layer_slots: LayerSlots
    valid: jax.Array
    scale: float


class Span(NamedTuple):
    """What queries attend to: a layer's window, if any, and its scores; of keys alone, the first
    `value_size` are the values. The rest as in `AttendingLayer`."""

    layer: int
    scale: float
    value_size: int
    window: int | None = None
    sinks: Any | None = None
    sees_spans: bool = False
    has_starts: bool = False


class AttentionOps(EncoderOps):
    """Every token attends by itself, over the blocks of its row."""

    def rope_append_attend(
        self,
        given: HeadInputs,
        pool: KVPool,
        factors: HeadFactors,
        step: StepArrays,
        layer: AttendingLayer,
    ) -> tuple[jax.Array, KVPool]:
        """Norms and rotates q and k (and norms values if the model says so), writes k and v to
        their slots unless `given` has no keys, and computes attention: activations [T, Hq D] and
        the pool, in place."""
        qkv, shape = given.qkv, layer.heads
        heads = qkv.astype(jnp.float32).reshape(len(qkv), -1, shape.head_dim)  # [T, H, D]
        first, second = shape.num_heads, shape.num_heads + shape.num_kv_heads
        key, value = heads[:, first:second], heads[:, second:]
        rotations = factors.rope[factors.rope_positions]  # [T, rotary_dim]
        if key.shape[1]:
            rotary = rotations[:, : rotations.shape[1] // 2 * 2]
            key, value = self._keys_and_values(key, value, factors, rotary)
            pool = _append(pool, key, value, (step.tokens.slots, layer.index))
        grouped = self._queries(qkv, factors, rotations, shape)
        scale = self._model.scale_of(shape)
        span = Span(
            *(layer.index, scale, shape.head_dim, layer.window, factors.sinks),
            sees_spans=layer.sees_spans,
            has_starts=layer.has_starts,
        )
        out = self._attend(grouped, pool, step, span).reshape(len(qkv), -1)
        if given.gate is not None:
            out = out * jax.nn.sigmoid(given.gate.astype(jnp.float32))
        return out.astype(self._spec.dtype), pool

    def _keys_and_values(
        self, key: jax.Array, value: jax.Array, factors: HeadFactors, rotations: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        eps, dtype = self._model.rms_norm_eps, self._spec.dtype
        if not value.shape[1]:
            value = key
        if factors.norms is not None:
            key = norm_heads(key, factors.norms[1], eps)
        if self._model.has_value_norm:
            value = rms_norm(value, jnp.ones((), jnp.float32), eps)
        return rotate(key, rotations).astype(dtype), value.astype(dtype)

    def latent_attend(
        self,
        given: LatentInputs,
        pool: KVPool,
        factors: LatentFactors,
        step: StepArrays,
        layer: LatentLayer,
    ) -> tuple[jax.Array, KVPool]:
        """Norms latents, rotates parts of queries and keys, writes keys to their slots, and attends
        with the absorbed queries: activations [T, Hq rank] and the pool, in place."""
        shape, rotations = layer.shape, factors.rope[factors.rope_positions]  # [T, rotary_size]
        query, key = latent_heads(given, rotations, factors.norm, layer)
        key, query = key.astype(self._spec.dtype), query.astype(self._spec.dtype)
        pool = _append(pool, key, None, (step.tokens.slots, layer.index))
        span = Span(layer.index, self._model.scale_of(shape.heads), shape.rank)
        out = self._attend(query, pool, step, span)
        return out.reshape(len(query), -1).astype(self._spec.dtype), pool

    def score_keys(
        self,
        given: HeadInputs,
        pools: tuple[KVPool, jax.Array],
        factors: HeadFactors,
        step: StepArrays,
        layer: ScoringLayer,
    ) -> jax.Array:
        """Adds the layer's scores to `pools` (`add_scores`), in place, of keys that the step
        appended; sinks take no part."""
        pool, scores = pools
        starts, ends = step.rows.query_starts[:-1], step.rows.query_starts[1:]
        lengths = jnp.where(ends > starts, step.rows.score_lens, 0)  # [R]
        last = jnp.maximum(ends - 1, 0)  # [R], the tokens that score
        queries = RowQueries(positions=step.tokens.positions[last], lengths=lengths)

        def add(scores: jax.Array) -> jax.Array:
            rotations = factors.rope[factors.rope_positions[last]]
            query = self._queries(given.qkv[last], factors, rotations, layer.heads)
            own = step._replace(token_rows=jnp.arange(len(last), dtype=jnp.int32))
            logits = self._key_logits(query, pool, own, (lengths, scores.shape[-1]), layer)
            is_key = jnp.arange(scores.shape[-1]) < lengths[:, None]
            return add_scores(scores, normalised(logits, is_key), queries, layer)

        return jax.lax.cond(jnp.any(lengths > 0), add, lambda scores: scores, scores)

    def _queries(
        self, qkv: jax.Array, factors: HeadFactors, rotations: jax.Array, shape: HeadShape
    ) -> jax.Array:
        query_scale = None
        if rotations.shape[1] % 2:
            rotations, query_scale = rotations[:, :-1], rotations[:, -1]
        query = qkv[:, : shape.query_size].astype(jnp.float32)
        query = query.reshape(len(qkv), -1, shape.head_dim)
        if factors.norms is not None:
            query = norm_heads(query, factors.norms[0], self._model.rms_norm_eps)
        if query_scale is not None:
            query = query * query_scale[:, None, None]
        query = rotate(query, rotations)
        if not self._spec.has_kv_codes:
            query = query.astype(self._spec.dtype)
        return query.reshape(len(qkv), shape.num_kv_heads, -1, shape.head_dim)

    def _key_logits(
        self,
        query: jax.Array,
        pool: KVPool,
        step: StepArrays,
        keys: tuple[jax.Array, int],
        layer: ScoringLayer,
    ) -> jax.Array:
        """Of queries [R, Hkv, G, D] of rows with given numbers of keys: [R, Hkv, G, N], undefined
        after a row's keys."""
        lengths, most = keys
        padded = -(-most // BLOCK) * BLOCK
        found = jnp.zeros((*query.shape[:3], padded), jnp.float32)

        def body(block: jax.Array, found: jax.Array) -> jax.Array:
            positions = block * BLOCK + jnp.arange(BLOCK)[None, :]
            valid = positions < lengths[:, None]  # [R, B]
            layer_slots = self._slots(positions, valid, step), layer.index
            logits = self._scaled_scores(query, self._load(pool, layer_slots, valid), layer.heads)
            return jax.lax.dynamic_update_slice_in_dim(found, logits, block * BLOCK, 3)

        return jax.lax.fori_loop(0, self._num_blocks(lengths), body, found)[..., :most]

    def _scaled_scores(self, query: jax.Array, loaded: KVPool, shape: HeadShape) -> jax.Array:
        scores = self._scores(query, loaded) * self._model.scale_of(shape)
        cap = self._model.attention_soft_cap
        return scores if cap is None else soft_cap(scores, cap)

    def _attend(self, query: jax.Array, pool: KVPool, step: StepArrays, span: Span) -> jax.Array:
        # Online softmax over blocks at absolute positions.
        own = step.tokens.positions + 1
        ends = jnp.maximum(own, step.tokens.reaches + 1) if span.sees_spans else own
        limits = jnp.where(step.tokens.slots >= 0, ends, 0)  # [T]
        shape = query.shape[:3]
        state = (
            _first_maximum(shape, span.sinks),  # running maximum
            jnp.full(shape, 0.0 if span.sinks is None else 1.0, jnp.float32),  # running sum
            jnp.zeros((*shape, span.value_size), jnp.float32),  # running output
        )

        def body(block: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            starts = self._block_start(block, step)  # [T]
            positions = starts[:, None] + jnp.arange(BLOCK)  # [T, B]
            valid = (positions >= 0) & (positions < limits[:, None])
            if span.window is not None:
                valid &= positions >= _window_starts(step, span.window, span.has_starts)[:, None]
            layer_slots = self._slots(positions, valid, step), span.layer
            lanes = KeyBlock(layer_slots, valid, span.scale)
            return self._attend_block(query, pool, lanes, state)

        _, total, out = jax.lax.fori_loop(0, self._num_blocks(limits), body, state)
        return jnp.where(limits[:, None, None, None] > 0, out / total[..., None], 0.0)

    def _num_blocks(self, limits: jax.Array) -> jax.Array:
        return (jnp.max(limits) + BLOCK - 1) // BLOCK

    def _block_start(self, block: jax.Array, step: StepArrays) -> jax.Array:
        return jnp.broadcast_to(block * BLOCK, step.tokens.positions.shape)

    def _slots(self, positions: jax.Array, valid: jax.Array, step: StepArrays) -> jax.Array:
        size = self._spec.page_size
        index = jnp.where(valid, positions // size, 0)
        pages = step.page_table[step.token_rows[:, None], index]  # [T, B]
        return jnp.where(valid, pages * size + positions % size, 0)

    def _load(self, pool: KVPool, layer_slots: LayerSlots, valid: jax.Array) -> KVPool:
        # 0 for lanes that are not valid.
        def load(side: jax.Array) -> jax.Array:
            lanes = valid.reshape(*valid.shape, *(1,) * (side.ndim - 2))
            return jnp.where(lanes, side[layer_slots], jnp.zeros((), side.dtype))

        return jax.tree.map(load, pool)

    def _attend_block(
        self, query: jax.Array, pool: KVPool, block: KeyBlock, state: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        loaded = self._load(pool, block.layer_slots, block.valid)
        return self._attend_loaded(query, loaded, block, state)

    def _attend_loaded(
        self, query: jax.Array, loaded: KVPool, block: KeyBlock, state: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        maximum, total, out = state
        valid = block.valid
        scores = self._scores(query, loaded) * block.scale
        if self._model.attention_soft_cap is not None:
            scores = soft_cap(scores, self._model.attention_soft_cap)
        mask = valid[:, None, None, :]
        scores = jnp.where(mask, scores, -jnp.inf)
        new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1))
        weights = jnp.where(mask, jnp.exp(scores - new_maximum[..., None]), 0.0)  # [T, Hkv, G, B]
        shrink = jnp.where(maximum == -jnp.inf, 0.0, jnp.exp(maximum - new_maximum))
        new_total = total * shrink + jnp.sum(weights, axis=-1)
        if loaded.values is None:
            loaded = KVPool(loaded.keys, loaded.keys[..., : out.shape[-1]])
        new_out = out * shrink[..., None] + self._weighted_values(weights, loaded)
        touched = jnp.any(valid, axis=1)[:, None, None]
        return (
            jnp.where(touched, new_maximum, maximum),
            jnp.where(touched, new_total, total),
            jnp.where(touched[..., None], new_out, out),
        )

    def _scores(self, query: jax.Array, loaded: KVPool) -> jax.Array:
        if self._spec.has_kv_codes:
            return code_scores(query, loaded.keys)
        return _einsum("tkgd,tbkd->tkgb", query, loaded.keys)

    def _weighted_values(self, weights: jax.Array, loaded: KVPool) -> jax.Array:
        if self._spec.has_kv_codes:
            return sum_code_values(weights, loaded.values)
        return _einsum("tkgb,tbkd->tkgd", weights, loaded.values)


def _window_starts(step: StepArrays, window: int, has_starts: bool) -> jax.Array:
    starts = step.tokens.positions + 1 - window
    if not has_starts:
        return starts
    given = step.tokens.window_starts
    return jnp.where(given >= 0, given, starts)


def _einsum(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(
        subscripts, left.astype(jnp.float32), right.astype(jnp.float32), precision=_HIGHEST
    )


def _first_maximum(shape: tuple[int, ...], sinks: Any | None) -> jax.Array:
    if sinks is None:
        return jnp.full(shape, -jnp.inf, jnp.float32)
    return jnp.broadcast_to(jnp.asarray(sinks, jnp.float32).reshape(shape[1:]), shape)


def _append(
    pool: KVPool, key: jax.Array, value: jax.Array | None, layer_slots: LayerSlots
) -> KVPool:
    # Padding (slot -1) is skipped.
    slots, layer = layer_slots
    new = KVPool(key, value)
    if isinstance(pool.keys, CodedHeads):
        assert value is not None, "latents have no codes"
        new = KVPool(encode_heads(key), encode_heads(value))

    def write(side: jax.Array, rows: jax.Array) -> jax.Array:
        return set_rows(side, (slots, layer), rows, slots >= 0)

    return jax.tree.map(write, pool, new)
