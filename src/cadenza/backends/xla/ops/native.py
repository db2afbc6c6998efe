"""The op table over the native CPU kernels, called through XLA's FFI: one call for a whole step.

Exact by construction: a kernel's order of reduction does not depend on the batch, and it receives
the true number of rows, so padding is not computed and every bucket gives the same bits. Gives each
operation its operands and attributes, which `csrc/ffi/` defines. Legend as in
`ops.table`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.ops.experts import Routing
from cadenza.backends.xla.ops.native_library import (
    NativeLibrary,
    load_native_library,
    packed_shape,
    quantised_shape,
)
from cadenza.backends.xla.ops.native_program import NativeProgram
from cadenza.backends.xla.ops.packed_memory import PackedMemory
from cadenza.backends.xla.ops.table import (
    NUM_COLUMNS,
    AttendingLayer,
    DecoderSpec,
    ExpertChoice,
    HeadFactors,
    KVPool,
    Linear,
    OpTable,
    StepArrays,
)
from cadenza.checkpoint.model_config import Activation
from cadenza.checkpoint.weight_format import WeightFormat
from cadenza.core.step_schema import LogitInputs, specs_of

DECODE_BUCKET = 64
"""Steps of at most this many tokens use smaller arrays; the arithmetic is the same."""

DEFAULT_MAX_TOKENS = 256
"""Enough rows for matrix products to reach full speed. 512 would double the inter-token latency of
running streams while a prompt is computed, for 3 % more prompt tokens per second."""

_CODE_OF_ACTIVATION: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
_NO_WINDOW = 0
_NO_CAP = 0.0


class NativeOps:
    """Implements `OpTable`. Weights are packed once, when the checkpoint is loaded."""

    name = "native"

    def __init__(self, spec: DecoderSpec, library: NativeLibrary | None = None) -> None:
        self._library = library or load_native_library()
        self._spec = spec
        self._model = spec.model
        self._memory = PackedMemory()
        self._program: NativeProgram | None = None

    def token_buckets(self, max_num_batched_tokens: int) -> tuple[int, ...]:
        """A small bucket for decode steps, and the full token budget."""
        small = min(DECODE_BUCKET, max_num_batched_tokens)
        return tuple(sorted({small, max_num_batched_tokens}))

    def load_linear(
        self,
        parts: list[npt.NDArray[Any]],
        bias: list[npt.NDArray[Any]],
        format: WeightFormat | None = None,
    ) -> Linear:
        format = format or self._spec.weight_format
        num_columns = sum(len(part) for part in parts)
        packed = self._empty(format, (num_columns, parts[0].shape[1]))
        self._pack(parts, packed, format)
        return Linear(packed, np.concatenate(bias).astype(np.float32) if bias else None, format)

    def load_embedding(self, table: npt.NDArray[Any], format: WeightFormat | None = None) -> Linear:
        return self.load_linear([table], [], format)

    def load_gate_up(
        self,
        gate: npt.NDArray[Any],
        up: npt.NDArray[Any],
        bias: list[npt.NDArray[Any]],
        format: WeightFormat | None = None,
    ) -> Linear:
        format = format or self._spec.weight_format
        packed = self._empty(format, gate.shape, is_gated=True)
        self._pack((gate, up), packed, format, is_gated=True)
        return Linear(packed, np.stack(bias).astype(np.float32) if bias else None, format)

    def load_experts_gate_up(
        self,
        experts: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]],
        format: WeightFormat | None = None,
    ) -> Linear:
        format = format or self._spec.weight_format
        shape = (len(experts), *experts[0][0].shape)
        packed = self._empty(format, shape, is_gated=True)
        for place, pair in zip(packed, experts, strict=True):
            self._pack(pair, place, format, is_gated=True)
        return Linear(packed, None, format)

    def load_experts_down(
        self, experts: Sequence[npt.NDArray[Any]], format: WeightFormat | None = None
    ) -> Linear:
        format = format or self._spec.weight_format
        packed = self._empty(format, (len(experts), *experts[0].shape))
        for place, weight in zip(packed, experts, strict=True):
            self._pack([weight], place, format)
        return Linear(packed, None, format)

    def _empty(
        self, format: WeightFormat, shape: tuple[int, ...], *, is_gated: bool = False
    ) -> npt.NDArray[Any]:
        """Memory for a packed weight [..., N, K], or for gate and up of [..., N, K] each."""
        *experts, num_columns, reduction = shape
        if format.is_quantised:
            packed = quantised_shape(format, num_columns, reduction, is_gated=is_gated)
            return self._memory.empty((*experts, *packed), np.uint8)
        dtype = jnp.dtype(format.name)
        packed = packed_shape(num_columns, reduction, dtype, is_gated=is_gated)
        return self._memory.empty((*experts, *packed), dtype)

    def _pack(
        self,
        parts: Sequence[npt.NDArray[Any]],
        packed: npt.NDArray[Any],
        format: WeightFormat,
        *,
        is_gated: bool = False,
    ) -> None:
        if format.is_quantised:
            self._library.pack_quantised(format, parts, packed, is_gated=is_gated)
        else:
            self._library.pack(parts, packed, is_gated=is_gated)

    def new_kv_pool(self, num_pages: int, fill: float) -> KVPool:
        model = self._model
        head = (model.num_kv_heads, self._spec.page_size, model.head_dim)
        shape = (num_pages, model.num_layers, *head)
        return KVPool(
            jnp.full(shape, fill, self._spec.kv_dtype), jnp.full(shape, fill, self._spec.kv_dtype)
        )

    def copy_slots(
        self, pool: KVPool, source: jax.Array, destination: jax.Array, count: int
    ) -> KVPool:
        page_size, zero = self._spec.page_size, jnp.int32(0)

        def place(slot: jax.Array) -> tuple[jax.Array, ...]:
            return slot // page_size, zero, zero, slot % page_size, zero

        def copy(side: jax.Array) -> jax.Array:  # [pages, layers, Hkv, page_size, D]
            _, layers, heads, _, head_dim = side.shape
            shape = (1, layers, heads, count, head_dim)
            slots = jax.lax.dynamic_slice(side, place(source), shape)
            return jax.lax.dynamic_update_slice(side, slots, place(destination))

        return KVPool(copy(pool.keys), copy(pool.values))

    def embed(self, table: Linear, step: StepArrays) -> jax.Array:
        shape = (len(step.tokens.ids), self._model.hidden_size)
        return self._call("embed", _array(shape, jnp.float32))(
            step.tokens.ids,
            table.weight,
            step.num_tokens,
            vocab=np.int64(self._model.vocab_size),
            scale=np.float32(self._model.embedding_scale),
        )

    def to_activations(self, x: jax.Array, count: jax.Array) -> jax.Array:
        if self._spec.dtype == jnp.float32:
            return x
        return self._call("convert", _array(x.shape, self._spec.dtype))(x, count)

    def rms_norm(self, x: jax.Array, weight: jax.Array, count: jax.Array) -> jax.Array:
        return self._call("rms_norm", _array(x.shape, self._spec.dtype))(
            x, weight, count, eps=np.float32(self._model.rms_norm_eps)
        )

    def take_logit_rows(self, x: jax.Array, step: StepArrays) -> jax.Array:
        result = _array((len(step.logits.token_indices), x.shape[1]), x.dtype)
        return self._call("take_rows", result)(x, step.num_logits, step.logits.token_indices)

    def linear(
        self,
        x: jax.Array,
        weight: Linear,
        num_out: int,
        count: jax.Array,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        if residual is None:
            call = self._call("linear", _array((len(x), num_out), self._spec.dtype))
            return call(x, weight.weight, count, weight.bias, None, scale=np.float32(1.0))
        call = self._call("linear", _array(residual.shape, jnp.float32), {4: 0})
        scale = np.float32(self._model.residual_scale)
        return call(x, weight.weight, count, weight.bias, residual, scale=scale)

    def linear_norm_add(
        self, x: jax.Array, weight: Linear, norm: jax.Array, residual: jax.Array, count: jax.Array
    ) -> jax.Array:
        product = self._call("linear", _array(residual.shape, jnp.float32))
        y = product(x, weight.weight, count, weight.bias, None, scale=np.float32(1.0))
        call = self._call("rms_norm_add", _array(residual.shape, jnp.float32), {3: 0})
        eps = np.float32(self._model.rms_norm_eps)
        return call(y, norm, count, residual, eps=eps)

    def gated_linear(self, x: jax.Array, weight: Linear, count: jax.Array) -> jax.Array:
        shape = (len(x), self._model.intermediate_size)
        return self._call("gated_linear", _array(shape, self._spec.dtype))(
            x,
            weight.weight,
            count,
            weight.bias,
            activation=np.int64(_CODE_OF_ACTIVATION[self._model.activation]),
        )

    def route_experts(self, x: jax.Array, router: Linear, count: jax.Array) -> ExpertChoice:
        routing = Routing.of(self._model)
        shape = (len(x), routing.num_chosen)
        results = (_array(shape, jnp.int32), _array(shape, jnp.float32))
        ids, weights = self._call("route_experts", results)(
            x,
            router.weight,
            count,
            None,
            experts=np.int64(routing.num_experts),
            over_chosen=routing.over_chosen,
            scale=np.float32(routing.scale),
        )
        return ExpertChoice(ids, weights)

    def grouped_gated_linear(
        self, x: jax.Array, weight: Linear, choice: ExpertChoice, count: jax.Array
    ) -> jax.Array:
        assert self._model.experts is not None, "the model has no experts"
        shape = (*choice.ids.shape, self._model.experts.intermediate_size)
        return self._call("grouped_gated_linear", _array(shape, self._spec.dtype))(
            x,
            weight.weight,
            count,
            None,
            choice.ids,
            activation=np.int64(_CODE_OF_ACTIVATION[self._model.activation]),
        )

    def grouped_linear(
        self,
        x: jax.Array,
        weight: Linear,
        choice: ExpertChoice,
        residual: jax.Array,
        count: jax.Array,
    ) -> jax.Array:
        call = self._call("grouped_linear", _array(residual.shape, jnp.float32), {4: 0})
        return call(x, weight.weight, count, None, residual, *choice)

    def rope_append_attend(
        self,
        qkv: jax.Array,
        pool: KVPool,
        factors: HeadFactors,
        step: StepArrays,
        layer: AttendingLayer,
    ) -> tuple[jax.Array, KVPool]:
        model = self._model
        results = (
            _array((len(qkv), model.query_size), self._spec.dtype),
            _array(pool.keys.shape, pool.keys.dtype),
            _array(pool.values.shape, pool.values.dtype),
        )
        query_norm, key_norm = factors.norms or (None, None)
        call = self._call("rope_append_attend", results, {9: 1, 10: 2})
        out, keys, values = call(
            qkv,
            step.tokens.positions,
            step.tokens.slots,
            step.rows.query_starts,
            step.rows.kv_lens,
            step.page_table,
            factors.rope,
            query_norm,
            key_norm,
            pool.keys,
            pool.values,
            layer=np.int64(layer.index),
            heads=np.int64(model.num_heads),
            scale=np.float32(self._spec.attention_scale),
            window=np.int64(layer.window or _NO_WINDOW),
            soft_cap=np.float32(model.attention_soft_cap or _NO_CAP),
            norm_eps=np.float32(model.rms_norm_eps),
        )
        return out, KVPool(keys, values)

    def next_tokens(self, x: jax.Array, head: Linear, step: StepArrays) -> jax.Array:
        return self._call("next_token", _array((len(x), NUM_COLUMNS), jnp.int32))(
            x,
            head.weight,
            step.num_logits,
            _columns(step.logits),
            *_memory(step),
            vocab=np.int64(self._model.vocab_size),
            divisor=np.float32(self._model.logit_divisor),
            soft_cap=np.float32(self._model.logit_soft_cap or _NO_CAP),
            page_size=np.int64(self._spec.page_size),
        )

    def compute(self, decode: Callable[[OpTable], Any]) -> Any:
        assert self._program is None, "a program cannot be within another"
        self._program = program = NativeProgram(self._library)
        try:
            return program.emit(decode(self))
        finally:
            self._program = None

    def _call(self, name: str, results: Any, aliases: dict[int, int] | None = None) -> Any:
        """A function that calls an operation, or records it within `compute`.

        `aliases` maps operand indices to the results that reuse their buffers.
        """
        if self._program is not None:
            return self._program.call(name, results, aliases)
        program = NativeProgram(self._library)
        record = program.call(name, results, aliases)
        return lambda *operands, **attributes: program.emit(record(*operands, **attributes))


def _columns(logits: LogitInputs[jax.Array]) -> jax.Array:
    """The fields of the logit rows as 32-bit words, in declaration order: [columns, L]."""
    parts = [
        jax.lax.bitcast_convert_type(getattr(logits, spec.name), jnp.int32)
        .reshape(-1, spec.columns)
        .T
        for spec in specs_of(LogitInputs)
    ]
    return jnp.concatenate(parts)


def _memory(step: StepArrays) -> tuple[jax.Array | None, ...]:
    """Rules [R, W], page table [R, P] and history [slots]; absent if no row has rules."""
    if step.rules is None:
        return (None,) * 3
    return step.rules.records, step.page_table, step.rules.history


def _array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
