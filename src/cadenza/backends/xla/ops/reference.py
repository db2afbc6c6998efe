"""The op table in plain jnp: the definition of each operation.

Exact because every step has the same shape (T tokens, at most 64), so the compiled order of
reduction is the same for every batch. Legend as in `ops.table`; B positions per attention block,
G query heads per KV head.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.ops.encoder_reference import ReferenceEncoderOps
from cadenza.backends.xla.ops.experts import (
    Gate,
    Routing,
    choose_experts,
    clamped_swiglu,
    grouped_gated_linear,
    grouped_linear,
    grouped_product,
    num_experts,
    silu_gate,
)
from cadenza.backends.xla.ops.float8 import (
    are_float8,
    float8_product,
    join_float8,
    stack_float8,
)
from cadenza.backends.xla.ops.head_math import (
    latent_heads,
    norm_heads,
    rms_norm,
    rotate,
    soft_cap,
)
from cadenza.backends.xla.ops.in_range import set_rows
from cadenza.backends.xla.ops.jax_arrays import CHOICE
from cadenza.backends.xla.ops.kv_codes import (
    CodedHeads,
    code_scores,
    encode_heads,
    filled_heads,
    sum_code_values,
)
from cadenza.backends.xla.ops.quantised import (
    are_codes,
    as_floats,
    as_operand,
    dequantised_rows,
    formats_of,
    orders_of,
    quantise_parts,
    quantised_product,
    stack_codes,
)
from cadenza.backends.xla.ops.recurrent import gated_delta, selective_scan, short_conv
from cadenza.backends.xla.ops.rules import apply_rules
from cadenza.backends.xla.ops.table import (
    AttendingLayer,
    ConvWeights,
    DeltaInputs,
    DeltaWeights,
    ExpertChoice,
    HeadFactors,
    HeadInputs,
    KVPool,
    LatentFactors,
    LatentInputs,
    LatentLayer,
    Linear,
    RecurrentLayer,
    ScaledNorm,
    ScanInputs,
    ScanWeights,
    StatePool,
    StepArrays,
    StepStates,
    expert_biases,
)
from cadenza.checkpoint.layer_kind import (
    ConvShape,
    DeltaShape,
    KVGroup,
    Recurrence,
    ScanShape,
)
from cadenza.checkpoint.model_config import Activation
from cadenza.checkpoint.quantised_weight import HostWeight
from cadenza.checkpoint.weight_format import FLOAT8, WeightFormat, joined
from cadenza.errors import ConfigError

MAX_TOKENS = 64
BLOCK = 128
"""KV positions per softmax block; blocks start at multiples of it."""

Places = tuple[jax.Array, int]
"""KV slots of any shape, and a layer index."""

_HIGHEST = jax.lax.Precision.HIGHEST

_GATES: dict[Activation, Gate] = {
    "silu": silu_gate,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    "gelu": lambda gate, up: jax.nn.gelu(gate, approximate=False) * up,
    "clamped_swiglu": clamped_swiglu,
}


class _Block(NamedTuple):
    """Of a block of positions: their slots and the layer, the lanes [T, B] that are attended to,
    and the factor of the scores."""

    places: Places
    valid: jax.Array
    scale: float


class _Span(NamedTuple):
    """What queries attend to: a layer's window, if any, and its scores; of keys alone, the first
    `value_size` are the values. The rest as in `AttendingLayer`."""

    layer: int
    scale: float
    value_size: int
    window: int | None = None
    sinks: Any | None = None
    sees_spans: bool = False
    has_starts: bool = False


class ReferenceOps(ReferenceEncoderOps):
    """Computes every row and ignores `count`. Weights have the checkpoint's layout; KV is
    [slots, layers, Hkv, D], in int8 with scales [slots, layers, Hkv].
    """

    name = "reference"
    is_opaque = False  # XLA may fuse an operation with those around it, and round elsewhere

    def token_buckets(self, max_num_batched_tokens: int) -> tuple[int, ...]:
        """A single bucket, so every step has one shape. Raises ConfigError above `MAX_TOKENS`."""
        if max_num_batched_tokens > MAX_TOKENS:
            raise ConfigError(
                f"--max-num-batched-tokens {max_num_batched_tokens} is above {MAX_TOKENS}, the "
                f"most that stays exact without native kernels; lower it and --max-num-seqs"
            )
        return (max_num_batched_tokens,)

    def load_linear(
        self,
        parts: Sequence[HostWeight],
        bias: Sequence[npt.NDArray[Any]] = (),
        format: WeightFormat | None = None,
    ) -> Linear:
        format = format or self._spec.weight_format
        all_biases = np.concatenate(bias).astype(np.float32) if len(bias) else None
        num_out = sum(map(len, parts))
        if are_float8(parts):
            return Linear(join_float8(parts), all_biases, FLOAT8, num_out)
        held = as_operand(parts, format)
        if are_codes(held, format):
            codes = quantise_parts(format, held)
            return Linear(codes, all_biases, formats_of(held, format)[0], num_out)
        floats = np.concatenate([as_floats(part) for part in held])
        return Linear(floats.astype(jnp.dtype(format.name)), all_biases, format, num_out)

    def load_experts(
        self,
        experts: Sequence[Sequence[HostWeight]],
        format: WeightFormat | None = None,
        biases: Sequence[Sequence[npt.NDArray[Any]]] = (),
    ) -> Linear:
        num_out, bias = sum(map(len, experts[0])), expert_biases(biases)
        if all(are_float8(parts) for parts in experts):
            weight = stack_float8([join_float8(parts) for parts in experts])
            return Linear(weight, bias, FLOAT8, num_out)
        own = format or self._spec.weight_format
        held = as_operand([part for parts in experts for part in parts], own)
        if not are_codes(held, own):
            loaded = [self.load_linear(parts, (), own).weight for parts in experts]
            return Linear(np.stack(loaded), bias, own, num_out)
        coded = [part if isinstance(part, np.ndarray) else part.as_codes() for part in held]
        common, width = joined(formats_of(coded, own)), len(experts[0])
        each = [part if isinstance(part, np.ndarray) else part.in_format(common) for part in coded]
        operands = [each[at : at + width] for at in range(0, len(each), width)]
        codes = [quantise_parts(own, operand) for operand in operands]
        return Linear(stack_codes(codes, orders_of(operands)), bias, common, num_out)

    def new_kv_pool(self, group: KVGroup, num_pages: int, fill: float | None) -> KVPool:
        fill = fill or 0.0
        slots = num_pages * self._spec.page_size
        shape = (slots, len(group.layers), group.num_kv_heads, group.head_dim)
        if self._spec.has_kv_codes:
            return KVPool(filled_heads(shape, fill), filled_heads(shape, fill))
        pool = jnp.full(shape, fill, self._spec.dtype)
        values = jnp.full(shape, fill, self._spec.dtype) if group.has_values else None
        return KVPool(pool, values)

    def copy_slots(
        self, pool: KVPool, source: jax.Array, destination: jax.Array, count: int
    ) -> KVPool:
        def copy(side: jax.Array) -> jax.Array:
            slots = jax.lax.dynamic_slice_in_dim(side, source, count)
            return jax.lax.dynamic_update_slice_in_dim(side, slots, destination, 0)

        return jax.tree.map(copy, pool)

    def embed(self, table: Linear, step: StepArrays) -> jax.Array:
        if table.format.is_quantised:
            rows = dequantised_rows(table.weight, step.tokens.ids, self._model.hidden_size)
        else:
            rows = table.weight[step.tokens.ids].astype(jnp.float32)  # [T, E]
        return rows * np.float32(self._model.embedding_scale)

    def embed_for_layers(self, table: Linear, step: StepArrays) -> jax.Array:
        inputs = self._model.layer_inputs
        assert inputs is not None, "the model has no per-layer embeddings"
        if table.format.is_quantised:
            width = inputs.size * self._model.num_layers
            rows = dequantised_rows(table.weight, step.tokens.ids, width)
        else:
            rows = table.weight[step.tokens.ids].astype(jnp.float32)
        return rows * np.float32(inputs.embedding_scale)

    def gate_inputs(
        self, x: jax.Array, inputs: jax.Array, layer: int, count: jax.Array
    ) -> jax.Array:
        first, size = layer * x.shape[1], x.shape[1]
        gated = _GATES[self._model.activation](x, inputs[:, first : first + size])
        return gated.astype(self._spec.dtype)

    def to_activations(self, x: jax.Array, count: jax.Array) -> jax.Array:
        return x.astype(self._spec.dtype)

    def rms_norm(
        self, x: jax.Array, weight: jax.Array, count: jax.Array, eps: float | None = None
    ) -> jax.Array:
        return rms_norm(x, weight, eps or self._model.rms_norm_eps).astype(self._spec.dtype)

    def take_rows(self, x: jax.Array, indices: jax.Array, count: jax.Array) -> jax.Array:
        return jnp.where(indices[:, None] >= 0, x[jnp.maximum(indices, 0)], 0)

    def linear(
        self, x: jax.Array, weight: Linear, count: jax.Array, residual: jax.Array | None = None
    ) -> jax.Array:
        y = _matmul(x, weight)
        if residual is None:
            return y.astype(self._spec.dtype)
        return residual + y * np.float32(self._model.residual_scale)

    def project(
        self, x: jax.Array, weight: Linear, count: jax.Array, scale: float = 1.0
    ) -> jax.Array:
        y = _matmul(x, weight)
        return y if scale == 1.0 else y * np.float32(scale)

    def norm_add(
        self, x: jax.Array, norm: Any, residual: jax.Array | None, count: jax.Array
    ) -> jax.Array:
        weight, factor = norm if isinstance(norm, ScaledNorm) else (norm, None)
        parts = x if len(weight) == x.shape[1] else x.reshape(len(x), -1, len(weight))
        y = rms_norm(parts, weight, self._model.rms_norm_eps).reshape(x.shape)
        total = y if residual is None else residual + y
        return total if factor is None else total * factor

    def gated_linear(self, x: jax.Array, weight: Linear, count: jax.Array) -> jax.Array:
        gate, up = jnp.split(_matmul(x, weight), 2, axis=-1)  # [T, F] each
        return self._gate(gate, up)

    def _gate(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Activations [T, F]."""
        return _GATES[self._model.activation](gate, up).astype(self._spec.dtype)

    def route_experts(
        self,
        x: jax.Array,
        router: Linear,
        count: jax.Array,
        factors: Any | None = None,
        bias: Any | None = None,
    ) -> ExpertChoice:
        choice = choose_experts(_matmul(x, router), Routing.of(self._model), bias)
        if factors is None:
            return choice
        return choice._replace(weights=choice.weights * jnp.asarray(factors)[choice.ids])

    def gate_expert(self, x: jax.Array, gate: Linear, count: jax.Array) -> ExpertChoice:
        weights = jax.nn.sigmoid(_matmul(x, gate)) * np.float32(self._model.residual_scale)
        return ExpertChoice(jnp.zeros(weights.shape, jnp.int32), weights)

    def grouped_gated_linear(
        self, x: jax.Array, weight: Linear, choice: ExpertChoice, count: jax.Array
    ) -> jax.Array:
        gate = _GATES[self._model.activation]
        return grouped_gated_linear(x, weight, choice.ids, gate)

    def grouped_linear(
        self,
        x: jax.Array,
        weight: Linear,
        choice: ExpertChoice,
        residual: jax.Array | None,
        count: jax.Array,
    ) -> jax.Array:
        if residual is None:
            residual = jnp.zeros((len(x), weight.num_out), jnp.float32)
        return grouped_linear(x, weight, choice, residual)

    def rope_append_attend(
        self,
        given: HeadInputs,
        pool: KVPool,
        factors: HeadFactors,
        step: StepArrays,
        layer: AttendingLayer,
    ) -> tuple[jax.Array, KVPool]:
        qkv, shape, eps = given.qkv, layer.heads, self._model.rms_norm_eps
        heads = qkv.astype(jnp.float32).reshape(len(qkv), -1, shape.head_dim)  # [T, H, D]
        first, second = shape.num_heads, shape.num_heads + shape.num_kv_heads
        query, key, value = heads[:, :first], heads[:, first:second], heads[:, second:]
        turns = factors.rope[factors.rope_positions]  # [T, rotary_dim]
        query_scale = None
        if turns.shape[1] % 2:
            turns, query_scale = turns[:, :-1], turns[:, -1]
        if key.shape[1]:
            key, value = self._keys_and_values(key, value, factors, turns)
            pool = _append(pool, key, value, (step.tokens.slots, layer.index))
        if factors.norms is not None:
            query = norm_heads(query, factors.norms[0], eps)
        if query_scale is not None:
            query = query * query_scale[:, None, None]
        query = rotate(query, turns)
        if not self._spec.has_kv_codes:
            query = query.astype(self._spec.dtype)
        grouped = query.reshape(len(qkv), shape.num_kv_heads, -1, shape.head_dim)
        scale = self._model.scale_of(shape)
        span = _Span(
            *(layer.index, scale, shape.head_dim, layer.window, factors.sinks),
            sees_spans=layer.sees_spans,
            has_starts=layer.has_starts,
        )
        out = self._attend(grouped, pool, step, span).reshape(len(qkv), -1)
        if given.gate is not None:
            out = out * jax.nn.sigmoid(given.gate.astype(jnp.float32))
        return out.astype(self._spec.dtype), pool

    def _keys_and_values(
        self, key: jax.Array, value: jax.Array, factors: HeadFactors, turns: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Keys and values [T, Hkv, D] as they are kept; without values these are made of keys."""
        eps, dtype = self._model.rms_norm_eps, self._spec.dtype
        if not value.shape[1]:
            value = key
        if factors.norms is not None:
            key = norm_heads(key, factors.norms[1], eps)
        if self._model.has_value_norm:
            value = rms_norm(value, jnp.ones((), jnp.float32), eps)
        return rotate(key, turns).astype(dtype), value.astype(dtype)

    def head_linear(self, x: jax.Array, weight: Linear, count: jax.Array, width: int) -> jax.Array:
        heads = num_experts(weight)
        parts = x.reshape(len(x), heads, -1)[..., :width]
        ids = jnp.broadcast_to(jnp.arange(heads), (len(x), heads))
        y = grouped_product(parts, weight, ids)  # [T, Hq, N]
        return y.reshape(len(x), -1).astype(self._spec.dtype)

    def latent_attend(
        self,
        given: LatentInputs,
        pool: KVPool,
        factors: LatentFactors,
        step: StepArrays,
        layer: LatentLayer,
    ) -> tuple[jax.Array, KVPool]:
        shape, turns = layer.shape, factors.rope[factors.rope_positions]  # [T, rotary_size]
        query, key = latent_heads(given, turns, factors.norm, layer)
        key, query = key.astype(self._spec.dtype), query.astype(self._spec.dtype)
        pool = _append(pool, key, None, (step.tokens.slots, layer.index))
        span = _Span(layer.index, self._model.scale_of(shape.heads), shape.rank)
        out = self._attend(query, pool, step, span)
        return out.reshape(len(query), -1).astype(self._spec.dtype), pool

    def new_state_pool(self, num_slots: int, num_layers: int, shape: Recurrence) -> StatePool:
        inputs = (num_slots, num_layers, shape.num_inputs - 1, shape.num_channels)
        matrices, states = shape.matrices, None
        if matrices is not None:
            heads = (matrices.num_heads, matrices.key_size, matrices.value_size)
            states = self.unwritten((num_slots, num_layers, *heads), jnp.float32)
        return StatePool(self.unwritten(inputs, self._spec.dtype), states)

    def gated_delta(
        self,
        given: DeltaInputs,
        weights: DeltaWeights,
        pool: StatePool,
        step: tuple[StepArrays, StepStates],
        layer: RecurrentLayer[DeltaShape],
    ) -> tuple[jax.Array, StatePool]:
        return gated_delta(given, weights, pool, step, layer)

    def short_conv(
        self,
        given: jax.Array,
        weights: ConvWeights,
        pool: StatePool,
        step: tuple[StepArrays, StepStates],
        layer: RecurrentLayer[ConvShape],
    ) -> tuple[jax.Array, StatePool]:
        return short_conv(given, weights, pool, step, layer)

    def selective_scan(
        self,
        given: ScanInputs,
        weights: ScanWeights,
        pool: StatePool,
        step: tuple[StepArrays, StepStates],
        layer: RecurrentLayer[ScanShape],
    ) -> tuple[jax.Array, StatePool]:
        return selective_scan(given, weights, pool, step, layer)

    def next_tokens(self, x: jax.Array, head: Linear, step: StepArrays) -> jax.Array:
        return self._choose(_matmul(x, head), step)

    def _choose(self, logits: jax.Array, step: StepArrays) -> jax.Array:
        """The row results of logits [L, V]."""
        logits = self._shape_logits(logits)
        ruled = apply_rules(logits, step, self._spec.page_size)
        if self._model.placeholder is not None:
            is_placeholder = np.arange(logits.shape[1]) == self._model.placeholder
            ruled = jnp.where(is_placeholder, -np.inf, ruled)
        return CHOICE.choose_tokens(logits, step.logits, ruled)

    def _shape_logits(self, logits: jax.Array) -> jax.Array:
        """Divides, then caps the logits; those that are not finite are kept for the row state."""
        model = self._model
        if model.logit_divisor != 1.0:
            logits = logits / np.float32(model.logit_divisor)
        if model.logit_soft_cap is None:
            return logits
        return jnp.where(jnp.isfinite(logits), soft_cap(logits, model.logit_soft_cap), logits)

    def _attend(self, query: jax.Array, pool: KVPool, step: StepArrays, span: _Span) -> jax.Array:
        """Online softmax over blocks at absolute positions; query [T, Hkv, G, D], result
        [T, Hkv, G, value size]."""
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
            places = self._slots(positions, valid, step), span.layer
            lanes = _Block(places, valid, span.scale)
            return self._attend_block(query, pool, lanes, state)

        _, total, out = jax.lax.fori_loop(0, self._num_blocks(limits), body, state)
        return jnp.where(limits[:, None, None, None] > 0, out / total[..., None], 0.0)

    def _num_blocks(self, limits: jax.Array) -> jax.Array:
        """The number of blocks that cover the longest context; `limits` [T] are their lengths."""
        return (jnp.max(limits) + BLOCK - 1) // BLOCK

    def _block_start(self, block: jax.Array, step: StepArrays) -> jax.Array:
        """A block's first position for each token [T]; the same for all tokens."""
        return jnp.broadcast_to(block * BLOCK, step.tokens.positions.shape)

    def _slots(self, positions: jax.Array, valid: jax.Array, step: StepArrays) -> jax.Array:
        """The slots of `positions` [T, B] in each token's row; 0 for lanes that are not valid."""
        size = self._spec.page_size
        index = jnp.where(valid, positions // size, 0)
        pages = step.page_table[step.token_rows[:, None], index]  # [T, B]
        return jnp.where(valid, pages * size + positions % size, 0)

    def _load(self, pool: KVPool, places: Places, valid: jax.Array) -> KVPool:
        """Keys and values [T, B, Hkv, D], or codes, at slots [T, B]; 0 for lanes that are not
        valid.
        """

        def load(side: jax.Array) -> jax.Array:
            lanes = valid.reshape(*valid.shape, *(1,) * (side.ndim - 2))
            return jnp.where(lanes, side[places], jnp.zeros((), side.dtype))

        return jax.tree.map(load, pool)

    def _attend_block(
        self,
        query: jax.Array,
        pool: KVPool,
        block: "_Block",
        state: tuple[jax.Array, ...],
    ) -> tuple[jax.Array, ...]:
        """One block of the online softmax; leaves tokens without a valid lane unchanged."""
        maximum, total, out = state
        valid = block.valid
        loaded = self._load(pool, block.places, valid)
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
        """Products of queries and keys: [T, Hkv, G, B]."""
        if self._spec.has_kv_codes:
            return code_scores(query, loaded.keys)
        return _einsum("tkgd,tbkd->tkgb", query, loaded.keys)

    def _weighted_values(self, weights: jax.Array, loaded: KVPool) -> jax.Array:
        """Sums of values: [T, Hkv, G, D]."""
        if self._spec.has_kv_codes:
            return sum_code_values(weights, loaded.values)
        return _einsum("tkgb,tbkd->tkgd", weights, loaded.values)


def _window_starts(step: StepArrays, window: int, has_starts: bool) -> jax.Array:
    """The first position [T] that each token sees, or one before the first of all."""
    starts = step.tokens.positions + 1 - window
    if not has_starts:
        return starts
    given = step.tokens.window_starts
    return jnp.where(given >= 0, given, starts)


def _append(pool: KVPool, key: jax.Array, value: jax.Array | None, places: Places) -> KVPool:
    """Writes key and value [T, Hkv, D] to their slots [T]; padding (slot -1) is skipped."""
    slots, layer = places
    new = KVPool(key, value)
    if isinstance(pool.keys, CodedHeads):
        assert value is not None, "latents have no codes"
        new = KVPool(encode_heads(key), encode_heads(value))

    def write(side: jax.Array, rows: jax.Array) -> jax.Array:
        return set_rows(side, (slots, layer), rows, slots >= 0)

    return jax.tree.map(write, pool, new)


def _matmul(x: jax.Array, weight: Linear) -> jax.Array:
    """x [·, K] times the transposed weight [N, K], in float32."""
    if weight.format.is_quantised or weight.format == FLOAT8:
        product = quantised_product if weight.format.is_quantised else float8_product
        y = product(x, weight.weight)
        return y if weight.bias is None else y + weight.bias
    y = jax.lax.dot_general(
        x,
        weight.weight,
        (((1,), (1,)), ((), ())),
        precision=_HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return y if weight.bias is None else y + weight.bias


def _einsum(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(
        subscripts,
        left.astype(jnp.float32),
        right.astype(jnp.float32),
        precision=_HIGHEST,
    )


def _first_maximum(shape: tuple[int, ...], sinks: Any | None) -> jax.Array:
    """[T, Hkv, G]: the score of each head's sink [Hq], or none."""
    if sinks is None:
        return jnp.full(shape, -jnp.inf, jnp.float32)
    return jnp.broadcast_to(jnp.asarray(sinks, jnp.float32).reshape(shape[1:]), shape)
