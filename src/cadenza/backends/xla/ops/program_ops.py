"""The operations of a step as words of a program: operands and attributes as `csrc/ffi/` defines
them; pools have the layouts of the kernels. Legend as in `ops.table`."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from cadenza.backends.step_result import NUM_COLUMNS
from cadenza.backends.xla.ops.experts import Routing, expert_biases
from cadenza.backends.xla.ops.program_encoder import ProgramEncoderOps
from cadenza.backends.xla.ops.program_recorder import array_of, like
from cadenza.backends.xla.ops.prompt_scores import ScoringLayer
from cadenza.backends.xla.ops.table import (
    AttendingLayer,
    ConvWeights,
    DecoderSpec,
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
)
from cadenza.batch.step_schema import LogitInputs, specs_of
from cadenza.config import PAGE_SIZE_UNIT
from cadenza.kernel_proof import ProvenProduct
from cadenza.models.layer_kind import ConvShape, DeltaShape, KVGroup, Recurrence, ScanShape
from cadenza.models.model_config import Activation
from cadenza.weights.quantised_weight import MOST_CODE, HostWeight
from cadenza.weights.weight_format import WeightFormat

_CODE_OF_ACTIVATION: dict[Activation, int] = {
    "silu": 0,
    "gelu_tanh": 1,
    "gelu": 2,
    "clamped_swiglu": 3,
}
# Of the scale of a key or value of one head, after its int8 codes.
_SCALE_BYTES = np.dtype(np.float32).itemsize

_LANES = 16  # columns of a state side by side

_NO_WINDOW = 0
_NO_CAP = 0.0
_NO_TOKEN = -1


class _TableRows(NamedTuple):
    vocab: int
    width: int
    scale: float


class Product(NamedTuple):
    """A product of activations of type `x_dtype`, [·, k], with a weight on the device; `n` columns,
    or half of them each for gate and up."""

    weight: jax.Array
    n: int
    k: int
    is_gated: bool
    x_dtype: np.dtype[Any]


class ProgramOps(ProgramEncoderOps):
    """Records operations; tables differ in their library and in the layouts of weights. Exact by
    construction: a kernel's order of reduction does not depend on the batch, and padding is not
    read, so every bucket gives the same bits."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__(spec)
        self._activation = _CODE_OF_ACTIVATION[spec.model.activation]

    def prove_products(
        self,
        products: Sequence[Product],  # noqa: ARG002 (nothing chooses among kernels)
        rows: Sequence[int],  # noqa: ARG002
    ) -> tuple[ProvenProduct, ...]:
        """Decides which kernel computes each product in steps of so many rows. Raises ConfigError
        with the shape of a product that has other bits in some step."""
        return ()

    @abstractmethod
    def _hold(
        self,
        experts: Sequence[Sequence[HostWeight]],
        format: WeightFormat | None,
        *,
        is_gated: bool = False,
    ) -> Linear:
        """The weights [X, ...] of experts with equal parts, in the table's layout; no biases."""

    def _placed(self, weight: npt.NDArray[Any]) -> Any:
        # Where a held weight stays until the runner takes all of them.
        return weight

    def load_linear(
        self,
        parts: Sequence[HostWeight],
        bias: Sequence[npt.NDArray[Any]] = (),
        format: WeightFormat | None = None,
    ) -> Linear:
        held = self._hold([parts], format)
        all_biases = np.concatenate(bias).astype(np.float32) if len(bias) else None
        return replace(held, weight=self._placed(held.weight[0]), bias=all_biases)

    def load_gate_up(
        self,
        parts: Sequence[HostWeight],
        bias: Sequence[npt.NDArray[Any]] = (),
        format: WeightFormat | None = None,
    ) -> Linear:
        held = self._hold([parts], format, is_gated=True)
        both = np.stack(bias).astype(np.float32) if len(bias) else None
        return replace(held, weight=self._placed(held.weight[0]), bias=both)

    def load_experts(
        self,
        experts: Sequence[Sequence[HostWeight]],
        format: WeightFormat | None = None,
        biases: Sequence[Sequence[npt.NDArray[Any]]] = (),
    ) -> Linear:
        held = self._hold(experts, format, is_gated=len(experts[0]) == 2)
        return replace(held, weight=self._placed(held.weight), bias=expert_biases(biases))

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

    def embed(self, table: Linear, step: StepArrays) -> jax.Array:
        model = self._model
        rows = _TableRows(model.vocab_size, model.hidden_size, model.embedding_scale)
        return self._embed(table, step, rows)

    def embed_for_layers(self, table: Linear, step: StepArrays) -> jax.Array:
        inputs = self._model.layer_inputs
        assert inputs is not None, "the model has no per-layer embeddings"
        width = self._model.num_layers * inputs.size
        return self._embed(
            table, step, _TableRows(inputs.vocab_size, width, inputs.embedding_scale)
        )

    def _embed(self, table: Linear, step: StepArrays, rows: "_TableRows") -> jax.Array:
        shape = (len(step.tokens.ids), rows.width)
        return self._call("embed", array_of(shape, jnp.float32))(
            *(step.tokens.ids, table.weight, step.num_tokens),
            vocab=rows.vocab,
            scale=np.float32(rows.scale),
        )

    def gate_inputs(
        self, x: jax.Array, inputs: jax.Array, layer: int, count: jax.Array
    ) -> jax.Array:
        return self._call("gate_inputs", array_of(x.shape, self._spec.dtype))(
            *(x, inputs, count), first=layer * x.shape[1], activation=self._activation
        )

    def to_activations(self, x: jax.Array, count: jax.Array) -> jax.Array:
        if self._spec.dtype == jnp.float32:
            return x
        return self._call("convert", array_of(x.shape, self._spec.dtype))(x, count)

    def rms_norm(
        self, x: jax.Array, weight: jax.Array, count: jax.Array, eps: float | None = None
    ) -> jax.Array:
        return self._call("rms_norm", array_of(x.shape, self._spec.dtype))(
            x, weight, count, eps=np.float32(eps or self._model.rms_norm_eps)
        )

    def take_rows(self, x: jax.Array, indices: jax.Array, count: jax.Array) -> jax.Array:
        result = array_of((len(indices), x.shape[1]), x.dtype)
        return self._call("take_rows", result)(x, count, indices)

    def linear(
        self, x: jax.Array, weight: Linear, count: jax.Array, residual: jax.Array | None = None
    ) -> jax.Array:
        if residual is None:
            return self._product(x, weight, count, (self._spec.dtype, 1.0))
        call = self._call("linear", array_of(residual.shape, jnp.float32), {4: 0})
        scale = np.float32(self._model.residual_scale)
        return call(x, weight.weight, count, weight.bias, residual, scale=scale)

    def project(
        self, x: jax.Array, weight: Linear, count: jax.Array, scale: float = 1.0
    ) -> jax.Array:
        return self._product(x, weight, count, (jnp.float32, scale))

    def _product(
        self, x: jax.Array, weight: Linear, count: jax.Array, result: tuple[Any, float]
    ) -> jax.Array:
        dtype, scale = result
        call = self._call("linear", array_of((len(x), weight.num_out), dtype))
        return call(x, weight.weight, count, weight.bias, None, scale=np.float32(scale))

    def norm_add(
        self, x: jax.Array, norm: Any, residual: jax.Array | None, count: jax.Array
    ) -> jax.Array:
        weight, factor = norm if isinstance(norm, ScaledNorm) else (norm, None)
        reused = None if residual is None else {3: 0}
        call = self._call("rms_norm_add", array_of(x.shape, jnp.float32), reused)
        eps = np.float32(self._model.rms_norm_eps)
        return call(x, weight, count, residual, factor, eps=eps)

    def gated_linear(self, x: jax.Array, weight: Linear, count: jax.Array) -> jax.Array:
        call = self._call("gated_linear", array_of((len(x), weight.num_out // 2), self._spec.dtype))
        return call(x, weight.weight, count, weight.bias, activation=self._activation)

    def route_experts(
        self,
        x: jax.Array,
        router: Linear,
        count: jax.Array,
        factors: Any | None = None,
        bias: Any | None = None,
    ) -> ExpertChoice:
        routing = Routing.of(self._model)
        choice = routing.sigmoid_choice
        shape = (len(x), routing.num_chosen)
        call = self._call(
            "route_experts", (array_of(shape, jnp.int32), array_of(shape, jnp.float32))
        )
        ids, weights = call(
            *(x, router.weight, count, router.bias, factors, bias),
            experts=routing.num_experts,
            over_chosen=routing.over_chosen,
            sigmoid=choice is not None,
            groups=1 if choice is None else choice.num_groups,
            chosen_groups=1 if choice is None else choice.num_chosen_groups,
            scale=np.float32(routing.scale),
            least_sum=np.float32(0.0 if choice is None else choice.least_sum),
        )
        return ExpertChoice(ids, weights)

    def gate_expert(self, x: jax.Array, gate: Linear, count: jax.Array) -> ExpertChoice:
        shape = (len(x), 1)
        call = self._call(
            "route_experts", (array_of(shape, jnp.int32), array_of(shape, jnp.float32))
        )
        ids, weights = call(
            *(x, gate.weight, count, None, None, None),
            experts=1,
            over_chosen=False,
            sigmoid=True,
            groups=1,
            chosen_groups=1,
            scale=np.float32(self._model.residual_scale),
            least_sum=np.float32(0.0),
        )
        return ExpertChoice(ids, weights)

    def grouped_gated_linear(
        self, x: jax.Array, weight: Linear, choice: ExpertChoice, count: jax.Array
    ) -> jax.Array:
        shape = (*choice.ids.shape, weight.num_out // 2)
        call = self._call("grouped_gated_linear", array_of(shape, self._spec.dtype))
        return call(x, weight.weight, count, weight.bias, choice.ids, activation=self._activation)

    def grouped_linear(
        self,
        x: jax.Array,
        weight: Linear,
        choice: ExpertChoice,
        residual: jax.Array | None,
        count: jax.Array,
    ) -> jax.Array:
        result = array_of((len(x), weight.num_out), jnp.float32)
        call = self._call("grouped_linear", result, None if residual is None else {4: 0})
        return call(x, weight.weight, count, weight.bias, residual, *choice)

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

    def head_linear(self, x: jax.Array, weight: Linear, count: jax.Array, width: int) -> jax.Array:
        shape = (len(x), weight.weight.shape[0] * weight.num_out)
        return self._call("head_linear", array_of(shape, self._spec.dtype))(
            x, weight.weight, count, width=width
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

    def next_tokens(self, x: jax.Array, head: Linear, step: StepArrays) -> jax.Array:
        return self._call("next_token", array_of((len(x), NUM_COLUMNS), jnp.int32))(
            *(x, head.weight, step.num_logits, _columns(step.logits), *_memory(step)),
            vocab=self._model.vocab_size,
            divisor=np.float32(self._model.logit_divisor),
            soft_cap=np.float32(self._model.logit_soft_cap or _NO_CAP),
            page_size=self._spec.page_size,
            banned=_NO_TOKEN if self._model.placeholder is None else self._model.placeholder,
        )


def _filled_codes(shape: tuple[int, ...], code: int, fill: float) -> jax.Array:
    """A pool of KV in int8 [..., page_size, D + 4] (`csrc/core/kv_codes.h`), each element `fill`:
    the largest code, stored as `code`, with a scale."""
    *pages, page_size, head_dim = shape
    scales = np.full(PAGE_SIZE_UNIT, fill / MOST_CODE, np.float32).view(np.uint8)
    block = np.concatenate([np.full(PAGE_SIZE_UNIT * head_dim, code, np.uint8), scales])
    blocks = jnp.broadcast_to(block, (*pages, page_size // PAGE_SIZE_UNIT, len(block)))
    return blocks.reshape(*pages, page_size, head_dim + _SCALE_BYTES)


def _columns(logits: LogitInputs[jax.Array]) -> jax.Array:
    parts = [
        jax.lax.bitcast_convert_type(getattr(logits, spec.name), jnp.int32)
        .reshape(-1, spec.columns)
        .T
        for spec in specs_of(LogitInputs)
    ]
    return jnp.concatenate(parts)


def _rows_of(step: tuple[StepArrays, StepStates]) -> tuple[jax.Array, ...]:
    arrays, slots = step
    return arrays.rows.query_starts, slots.initial, slots.kept


def _memory(step: StepArrays) -> tuple[jax.Array | None, ...]:
    if step.rules is None:
        return (None,) * 3
    return step.rules.records, step.page_table, step.rules.history
