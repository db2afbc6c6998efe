"""The op table over the native CPU kernels, called through XLA's FFI: one call for a whole step.

Exact by construction: a kernel's order of reduction does not depend on the batch, and it receives
the true number of rows, so padding is not computed and every bucket gives the same bits. Gives each
operation its operands and attributes, which `csrc/ffi/` defines. Legend as in
`ops.table`.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.ops.experts import Routing
from cadenza.backends.xla.ops.float8 import are_float8
from cadenza.backends.xla.ops.native_library import (
    CodedOperand,
    NativeLibrary,
    float8_shape,
    load_native_library,
    packed_bytes,
    packed_shape,
)
from cadenza.backends.xla.ops.native_program import NativeProgram
from cadenza.backends.xla.ops.packed_file import PackedFile
from cadenza.backends.xla.ops.packed_memory import PackedMemory
from cadenza.backends.xla.ops.quantised import (
    are_codes,
    as_floats,
    as_operand,
    formats_of,
    orders_of,
)
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
from cadenza.checkpoint.quantised_weight import MOST_CODE, HostWeight
from cadenza.checkpoint.weight_format import FLOAT8, WeightFormat, joined, panel_formats
from cadenza.config import PAGE_SIZE_UNIT
from cadenza.core.step_schema import LogitInputs, specs_of

DECODE_BUCKET = 64
"""Steps of at most this many tokens use smaller arrays; the arithmetic is the same."""

DEFAULT_MAX_TOKENS = 256
"""Enough rows for matrix products to reach full speed. 512 would double the inter-token latency of
running streams while a prompt is computed, for 3 % more prompt tokens per second."""

_CODE_OF_ACTIVATION: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
_SCALE_BYTES = np.dtype(np.float32).itemsize
"""Of the scale of a key or value of one head, behind its int8 codes."""

_NO_WINDOW = 0
_NO_CAP = 0.0


class NativeOps:
    """Implements `OpTable`. Weights are packed once, when the checkpoint is loaded."""

    name = "native"
    is_opaque = True

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

    @contextmanager
    def loading(self, packed: Path | None) -> Generator[None]:
        self._memory = PackedMemory(None if packed is None else PackedFile(packed))
        yield
        self._memory.keep()

    def load_linear(
        self,
        parts: Sequence[HostWeight],
        bias: list[npt.NDArray[Any]],
        format: WeightFormat | None = None,
    ) -> Linear:
        packed, own = self._pack_all([parts], format)
        return Linear(packed[0], np.concatenate(bias).astype(np.float32) if bias else None, own)

    def load_embedding(self, table: HostWeight, format: WeightFormat | None = None) -> Linear:
        return self.load_linear([table], [], format)

    def load_gate_up(
        self,
        gate: HostWeight,
        up: HostWeight,
        bias: list[npt.NDArray[Any]],
        format: WeightFormat | None = None,
    ) -> Linear:
        packed, own = self._pack_all([(gate, up)], format, is_gated=True)
        return Linear(packed[0], np.stack(bias).astype(np.float32) if bias else None, own)

    def load_experts_gate_up(
        self,
        experts: Sequence[tuple[HostWeight, HostWeight]],
        format: WeightFormat | None = None,
    ) -> Linear:
        packed, own = self._pack_all(experts, format, is_gated=True)
        return Linear(packed, None, own)

    def load_experts_down(
        self, experts: Sequence[HostWeight], format: WeightFormat | None = None
    ) -> Linear:
        packed, own = self._pack_all([(each,) for each in experts], format)
        return Linear(packed, None, own)

    def _pack_all(
        self,
        experts: Sequence[Sequence[HostWeight]],
        format: WeightFormat | None,
        *,
        is_gated: bool = False,
    ) -> tuple[npt.NDArray[Any], WeightFormat]:
        """The packed weights [X, ...] of experts with equal parts, and the format of the first."""
        if all(are_float8(parts) for parts in experts):
            return self._pack_float8(experts, is_gated=is_gated), FLOAT8
        format = format or self._spec.weight_format
        held = [as_operand(parts, format) for parts in experts]
        if not all(are_codes(parts, format) for parts in held):
            floats = [[as_floats(part) for part in parts] for parts in held]
            return self._pack_floats(floats, format, is_gated=is_gated), format
        formats = [each for parts in held for each in formats_of(parts, format)]
        rows = [len(part) for part in held[0]]
        if is_gated or len(held) > 1:
            targets = [joined(formats)] * len(rows)
        else:
            targets = panel_formats(formats, rows)
        columns, orders = [rows[0]] if is_gated else rows, orders_of(held)
        size = packed_bytes(
            [*zip(targets[: len(columns)], columns, strict=True)],
            held[0][0].shape[1],
            is_gated=is_gated,
            is_ordered=orders[0] is not None,
        )

        def pack(packed: npt.NDArray[Any]) -> None:
            for place, parts, order in zip(packed, held, orders, strict=True):
                codes = CodedOperand(targets=targets, parts=parts, order=order)
                self._library.pack_quantised(codes, place, is_gated=is_gated)

        return self._memory.hold((len(held), size), np.uint8, pack), targets[0]

    def _pack_floats(
        self,
        experts: Sequence[Sequence[npt.NDArray[Any]]],
        format: WeightFormat,
        *,
        is_gated: bool,
    ) -> npt.NDArray[Any]:
        parts = experts[0]
        num_columns = len(parts[0]) if is_gated else sum(map(len, parts))
        dtype = jnp.dtype(format.name)
        shape = packed_shape(num_columns, parts[0].shape[1], dtype, is_gated=is_gated)

        def pack(packed: npt.NDArray[Any]) -> None:
            for place, each in zip(packed, experts, strict=True):
                self._library.pack(each, place, is_gated=is_gated)

        return self._memory.hold((len(experts), *shape), dtype, pack)

    def _pack_float8(self, experts: Sequence[Sequence[Any]], *, is_gated: bool) -> npt.NDArray[Any]:
        parts = experts[0]
        num_columns = len(parts[0]) if is_gated else sum(map(len, parts))
        shape = float8_shape(num_columns, parts[0].shape[1], is_gated=is_gated)

        def pack(packed: npt.NDArray[Any]) -> None:
            for place, each in zip(packed, experts, strict=True):
                self._library.pack_float8(each, place, is_gated=is_gated)

        return self._memory.hold((len(experts), *shape), jnp.float8_e4m3fn, pack)

    def unwritten(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        program = self._new_program()
        return program.emit(program.unwritten(_array(shape, dtype)))

    def new_kv_pool(self, num_pages: int, fill: float | None) -> KVPool:
        model = self._model
        head = (model.num_kv_heads, self._spec.page_size, model.head_dim)
        shape = (num_pages, model.num_layers, *head)
        if fill is None:
            return KVPool(self._unwritten_side(shape), self._unwritten_side(shape))
        if self._spec.has_kv_codes:
            return KVPool(_filled_codes(shape, 255, fill), _filled_codes(shape, 127, fill))
        element = np.full((), fill, self._spec.dtype)
        if self._spec.dtype == jnp.bfloat16:  # XLA copies bfloat16 by way of float32 on a CPU
            element = element.view(np.uint16)
        return KVPool(jnp.full(shape, element), jnp.full(shape, element))

    def _unwritten_side(self, shape: tuple[int, ...]) -> jax.Array:
        if self._spec.has_kv_codes:
            return self.unwritten((*shape[:-1], shape[-1] + _SCALE_BYTES), np.uint8)
        is_stored_as_words = self._spec.dtype == jnp.bfloat16
        return self.unwritten(shape, np.uint16 if is_stored_as_words else self._spec.dtype)

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

    def take_rows(self, x: jax.Array, indices: jax.Array, count: jax.Array) -> jax.Array:
        result = _array((len(indices), x.shape[1]), x.dtype)
        return self._call("take_rows", result)(x, count, indices)

    def take_logit_rows(self, x: jax.Array, step: StepArrays) -> jax.Array:
        return self.take_rows(x, step.logits.token_indices, step.num_logits)

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

    def project(self, x: jax.Array, weight: Linear, num_out: int, count: jax.Array) -> jax.Array:
        call = self._call("linear", _array((len(x), num_out), jnp.float32))
        return call(x, weight.weight, count, weight.bias, None, scale=np.float32(1.0))

    def linear_norm_add(
        self, x: jax.Array, weight: Linear, norm: jax.Array, residual: jax.Array, count: jax.Array
    ) -> jax.Array:
        y = self.project(x, weight, residual.shape[1], count)
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
        self._program = program = self._new_program()
        try:
            return program.emit(decode(self))
        finally:
            self._program = None

    def _new_program(self) -> NativeProgram:
        return NativeProgram(self._library, is_portable=self._spec.is_portable)

    def _call(self, name: str, results: Any, aliases: dict[int, int] | None = None) -> Any:
        """A function that calls an operation, or records it within `compute`.

        `aliases` maps operand indices to the results that reuse their buffers.
        """
        if self._program is not None:
            return self._program.call(name, results, aliases)
        program = self._new_program()
        record = program.call(name, results, aliases)
        return lambda *operands, **attributes: program.emit(record(*operands, **attributes))


def _filled_codes(shape: tuple[int, ...], code: int, fill: float) -> jax.Array:
    """A pool of KV in int8 [..., page_size, D + 4], in the layout of `csrc/core/kv_codes.h`.

    Each element is `fill`: the largest code, stored as `code`, with a scale.
    """
    *pages, page_size, head_dim = shape
    scales = np.full(PAGE_SIZE_UNIT, fill / MOST_CODE, np.float32).view(np.uint8)
    block = np.concatenate([np.full(PAGE_SIZE_UNIT * head_dim, code, np.uint8), scales])
    blocks = jnp.broadcast_to(block, (*pages, page_size // PAGE_SIZE_UNIT, len(block)))
    return blocks.reshape(*pages, page_size, head_dim + _SCALE_BYTES)


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
    """Rules [L, W], page table [R, P] and history [slots]; absent if no row has rules."""
    if step.rules is None:
        return (None,) * 3
    return step.rules.records, step.page_table, step.rules.history


def _array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
