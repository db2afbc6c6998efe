"""Token mixers as words of a program: attention over KV pages and latents, recurrences, and their
pools in the layouts of the kernels. Legend as in `ops.table`."""

import jax
import jax.numpy as jnp
import numpy as np

from cadenza.backends.xla.ops.native_program import array_of, like
from cadenza.backends.xla.ops.program_encoder import ProgramEncoderOps
from cadenza.backends.xla.ops.table import (
    AttendingLayer,
    ConvWeights,
    DeltaInputs,
    DeltaWeights,
    HeadFactors,
    HeadInputs,
    KVPool,
    LatentFactors,
    LatentInputs,
    LatentLayer,
    RecurrentLayer,
    ScanInputs,
    ScanWeights,
    ScoringLayer,
    StatePool,
    StepArrays,
    StepStates,
)
from cadenza.config import PAGE_SIZE_UNIT
from cadenza.models.layer_kind import ConvShape, DeltaShape, KVGroup, Recurrence, ScanShape
from cadenza.weights.quantised_weight import MOST_CODE

# Of the scale of a key or value of one head, after its int8 codes.
_SCALE_BYTES = np.dtype(np.float32).itemsize
_LANES = 16  # columns of a state side by side
_NO_WINDOW = 0
_NO_CAP = 0.0


class ProgramMixerOps(ProgramEncoderOps):
    """Of a table of programs."""

    def new_kv_pool(self, group: KVGroup, num_pages: int, fill: float | None) -> KVPool:
        head = (group.num_kv_heads, self._spec.page_size, group.head_dim)
        shape = (num_pages, len(group.layers), *head)
        if not group.has_values:
            return self._new_latent_pool(shape, fill)
        if fill is None:
            return KVPool(self._unwritten_side(shape), self._unwritten_side(shape))
        if self._spec.has_kv_codes:
            return KVPool(_filled_codes(shape, 255, fill), _filled_codes(shape, 127, fill))
        return KVPool(self._filled(shape, fill), self._filled(shape, fill))

    def _new_latent_pool(self, shape: tuple[int, ...], fill: float | None) -> KVPool:
        keys = self._unwritten_side(shape) if fill is None else self._filled(shape, fill)
        return KVPool(keys, None)

    def _unwritten_side(self, shape: tuple[int, ...]) -> jax.Array:
        if self._spec.has_kv_codes:
            return self.unwritten((*shape[:-1], shape[-1] + _SCALE_BYTES), np.uint8)
        return self.unwritten(shape, self._stored_dtype)

    def copy_slots(
        self, pool: KVPool, source: jax.Array, destination: jax.Array, count: int
    ) -> KVPool:
        page_size, zero = self._spec.page_size, jnp.int32(0)

        def place(slot: jax.Array) -> tuple[jax.Array, ...]:
            return slot // page_size, zero, zero, slot % page_size, zero

        def copy(side: jax.Array) -> jax.Array:  # [pages, layers, Hkv, page_size, ·]
            _, layers, heads, _, width = side.shape
            shape = (1, layers, heads, count, width)
            slots = jax.lax.dynamic_slice(side, place(source), shape)
            return jax.lax.dynamic_update_slice(side, slots, place(destination))

        return jax.tree.map(copy, pool)

    def rope_append_attend(
        self,
        given: HeadInputs,
        pool: KVPool,
        factors: HeadFactors,
        step: StepArrays,
        layer: AttendingLayer,
    ) -> tuple[jax.Array, KVPool]:
        model, heads, qkv = self._model, layer.heads, given.qkv
        results = (
            array_of((len(qkv), heads.query_size), self._spec.dtype),
            array_of(pool.keys.shape, pool.keys.dtype),
            array_of(pool.values.shape, pool.values.dtype),
        )
        query_norm, key_norm = (*(factors.norms or ()), None, None)[:2]
        call = self._call("rope_append_attend", results, {9: 1, 10: 2})
        out, keys, values = call(
            *(qkv, step.tokens.positions, step.tokens.slots),
            *(step.rows.query_starts, step.rows.kv_lens, step.page_table),
            *(factors.rope, query_norm, key_norm, pool.keys, pool.values),
            *(factors.sinks, given.gate, factors.rope_positions),
            step.tokens.reaches if layer.sees_spans else None,
            step.tokens.window_starts if layer.has_starts else None,
            layer=layer.index,
            heads=heads.num_heads,
            scale=np.float32(model.scale_of(heads)),
            window=layer.window or _NO_WINDOW,
            soft_cap=np.float32(model.attention_soft_cap or _NO_CAP),
            norm_eps=np.float32(model.rms_norm_eps),
            norms_values=model.has_value_norm,
        )
        return out, KVPool(keys, values)

    def score_keys(
        self,
        given: HeadInputs,
        pools: tuple[KVPool, jax.Array],
        factors: HeadFactors,
        step: StepArrays,
        layer: ScoringLayer,
    ) -> jax.Array:
        model, heads, (pool, scores) = self._model, layer.heads, pools
        query_norm = None if factors.norms is None else factors.norms[0]
        return self._call("score_keys", like(scores), {9: 0})(
            *(given.qkv, step.tokens.positions, step.rows.query_starts, step.rows.score_lens),
            *(step.page_table, factors.rope, query_norm, pool.keys),
            *(factors.rope_positions, scores),
            layer=layer.index,
            heads=heads.num_heads,
            scale=np.float32(model.scale_of(heads)),
            soft_cap=np.float32(model.attention_soft_cap or _NO_CAP),
            norm_eps=np.float32(model.rms_norm_eps),
            is_first=layer.is_first,
            is_last=layer.is_last,
        )

    def latent_attend(
        self,
        given: LatentInputs,
        pool: KVPool,
        factors: LatentFactors,
        step: StepArrays,
        layer: LatentLayer,
    ) -> tuple[jax.Array, KVPool]:
        shape, keys = layer.shape, pool.keys
        results = (
            array_of(given.absorbed.shape, self._spec.dtype),
            array_of(keys.shape, keys.dtype),
        )
        out, keys = self._call("latent_attend", results, {10: 1})(
            *given,
            *(step.tokens.positions, step.tokens.slots),
            *(step.rows.query_starts, step.rows.kv_lens, step.page_table),
            *(factors.rope, factors.norm, keys, factors.rope_positions),
            layer=layer.index,
            heads=shape.num_heads,
            scale=np.float32(self._model.scale_of(shape.heads)),
            norm_eps=np.float32(layer.norm_eps),
            pairs_neighbours=shape.pairs_neighbours,
        )
        return out, KVPool(keys, None)

    def new_state_pool(self, num_slots: int, num_layers: int, shape: Recurrence) -> StatePool:
        inputs = (num_slots, num_layers, shape.num_inputs - 1, shape.num_channels)
        matrices, states = shape.matrices, None
        if matrices is not None:
            blocks = matrices.value_size // _LANES, matrices.key_size, _LANES
            states = self.unwritten(
                (num_slots, num_layers, matrices.num_heads, *blocks), jnp.float32
            )
        return StatePool(self.unwritten(inputs, self._stored_dtype), states)

    def gated_delta(
        self,
        given: DeltaInputs,
        weights: DeltaWeights,
        pool: StatePool,
        step: tuple[StepArrays, StepStates],
        layer: RecurrentLayer[DeltaShape],
    ) -> tuple[jax.Array, StatePool]:
        results = (array_of(given.gate.shape, self._spec.dtype), *map(like, pool))
        out, inputs, states = self._call("gated_delta", results, {10: 1, 11: 2})(
            *(*given, *_rows_of(step), *weights, *pool),
            layer=layer.index,
            key_heads=layer.shape.num_key_heads,
            tiled=layer.shape.is_tiled,
            norm_eps=np.float32(layer.norm_eps),
        )
        return out, StatePool(inputs, states)

    def short_conv(
        self,
        given: jax.Array,
        weights: ConvWeights,
        pool: StatePool,
        step: tuple[StepArrays, StepStates],
        layer: RecurrentLayer[ConvShape],
    ) -> tuple[jax.Array, StatePool]:
        shape = (len(given), layer.shape.num_channels)
        results = (array_of(shape, self._spec.dtype), like(pool.inputs))
        out, inputs = self._call("short_conv", results, {6: 1})(
            *(given, *_rows_of(step), *weights, pool.inputs), layer=layer.index
        )
        return out, StatePool(inputs, None)

    def selective_scan(
        self,
        given: ScanInputs,
        weights: ScanWeights,
        pool: StatePool,
        step: tuple[StepArrays, StepStates],
        layer: RecurrentLayer[ScanShape],
    ) -> tuple[jax.Array, StatePool]:
        results = (array_of(given.gate.shape, self._spec.dtype), *map(like, pool))
        out, inputs, states = self._call("selective_scan", results, {12: 1, 13: 2})(
            *(*given, *_rows_of(step), *weights, *pool),
            layer=layer.index,
            groups=layer.shape.num_groups,
            norm_eps=np.float32(layer.norm_eps),
        )
        return out, StatePool(inputs, states)


def _filled_codes(shape: tuple[int, ...], code: int, fill: float) -> jax.Array:
    """A pool of KV in int8 [..., page_size, D + 4] (`csrc/core/kv_codes.h`), each element `fill`:
    the largest code, stored as `code`, with a scale."""
    *pages, page_size, head_dim = shape
    scales = np.full(PAGE_SIZE_UNIT, fill / MOST_CODE, np.float32).view(np.uint8)
    block = np.concatenate([np.full(PAGE_SIZE_UNIT * head_dim, code, np.uint8), scales])
    blocks = jnp.broadcast_to(block, (*pages, page_size // PAGE_SIZE_UNIT, len(block)))
    return blocks.reshape(*pages, page_size, head_dim + _SCALE_BYTES)


def _rows_of(step: tuple[StepArrays, StepStates]) -> tuple[jax.Array, ...]:
    arrays, slots = step
    return arrays.rows.query_starts, slots.initial, slots.kept
