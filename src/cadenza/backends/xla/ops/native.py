"""The op table over the native CPU kernels, called through XLA's FFI.

Exact by construction: a kernel's order of reduction follows from the weight's shape, and it is told
the true number of rows, so padding costs nothing and every bucket gives the same bits. Owns which
FFI target serves which operation; what the targets take is `ops.native_library`'s. Legend as in
`ops.table`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.ops.native_library import (
    PackLayout,
    empty_packed,
    load_native_library,
)
from cadenza.backends.xla.ops.table import (
    NUM_COLUMNS,
    DecoderSpec,
    KVPool,
    Linear,
    StepArrays,
)

DECODE_BUCKET = 64
"""Steps of at most this many tokens move smaller arrays; the arithmetic is the same."""

DEFAULT_MAX_TOKENS = 512

_SILU = 0
_NO_WINDOW = 0


class NativeOps:
    """Implements `OpTable`. Weights are packed once, while they are read from the checkpoint."""

    name = "native"

    def __init__(self, spec: DecoderSpec) -> None:
        self._library = load_native_library()
        self._spec = spec
        self._model = spec.model
        self._none = jnp.zeros(0, jnp.float32)

    def token_buckets(self, max_num_batched_tokens: int) -> tuple[int, ...]:
        """A small bucket for decodes and the whole budget."""
        small = min(DECODE_BUCKET, max_num_batched_tokens)
        return tuple(sorted({small, max_num_batched_tokens}))

    def load_linear(self, parts: list[npt.NDArray[Any]], bias: list[npt.NDArray[Any]]) -> Linear:
        num_columns = sum(len(part) for part in parts)
        packed = empty_packed(num_columns, parts[0].shape[1], self._spec.dtype)
        offset = 0
        for part in parts:
            self._library.pack(part, packed, num_columns=num_columns, column_offset=offset)
            offset += len(part)
        return Linear(packed, np.concatenate(bias).astype(np.float32) if bias else None)

    def load_embedding(self, table: npt.NDArray[Any]) -> Linear:
        return self.load_linear([table], [])

    def load_gate_up(
        self, gate: npt.NDArray[Any], up: npt.NDArray[Any], bias: list[npt.NDArray[Any]]
    ) -> Linear:
        packed = empty_packed(len(gate), gate.shape[1], self._spec.dtype, is_gated=True)
        for part, layout in ((gate, PackLayout.GATE), (up, PackLayout.UP)):
            self._library.pack(part, packed, num_columns=len(gate), layout=layout)
        return Linear(packed, np.stack(bias).astype(np.float32) if bias else None)

    def new_kv_pool(self, num_pages: int, fill: float) -> KVPool:
        model = self._model
        shape = (num_pages, model.num_kv_heads, self._spec.page_size, model.head_dim)
        return KVPool(
            jnp.full(shape, fill, self._spec.dtype), jnp.full(shape, fill, self._spec.dtype)
        )

    def embed(self, table: Linear, step: StepArrays) -> jax.Array:
        shape = (len(step.token_ids), self._model.hidden_size)
        return _call("cadenza_embed", _array(shape, jnp.float32))(
            step.token_ids,
            table.weight,
            step.num_tokens,
            vocab=np.int64(self._model.vocab_size),
            scale=np.float32(1.0),
        )

    def rms_norm(self, x: jax.Array, weight: jax.Array, count: jax.Array) -> jax.Array:
        return _call("cadenza_rms_norm", _array(x.shape, self._spec.dtype))(
            x, weight, count, eps=np.float32(self._model.rms_norm_eps), one_plus=False
        )

    def rms_norm_logit_rows(self, x: jax.Array, weight: jax.Array, step: StepArrays) -> jax.Array:
        shape = (len(step.logit_indices), x.shape[1])
        return _call("cadenza_rms_norm_rows", _array(shape, self._spec.dtype))(
            x,
            weight,
            step.num_logits,
            step.logit_indices,
            eps=np.float32(self._model.rms_norm_eps),
            one_plus=False,
        )

    def linear(
        self,
        x: jax.Array,
        weight: Linear,
        num_out: int,
        count: jax.Array,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        bias = self._none if weight.bias is None else weight.bias
        if residual is None:
            call = _call("cadenza_linear", _array((len(x), num_out), self._spec.dtype))
            return call(x, weight.weight, count, bias, self._none)
        call = _call("cadenza_linear", _array(residual.shape, jnp.float32), {4: 0})
        return call(x, weight.weight, count, bias, residual)

    def gated_linear(self, x: jax.Array, weight: Linear, count: jax.Array) -> jax.Array:
        bias = self._none if weight.bias is None else weight.bias
        shape = (len(x), self._model.intermediate_size)
        return _call("cadenza_gated_linear", _array(shape, self._spec.dtype))(
            x, weight.weight, count, bias, activation=np.int64(_SILU)
        )

    def rope_append_attend(
        self,
        qkv: jax.Array,
        pool: KVPool,
        norms: tuple[jax.Array, jax.Array] | None,
        rope: jax.Array,
        step: StepArrays,
    ) -> tuple[jax.Array, KVPool]:
        model = self._model
        results = (
            _array((len(qkv), model.query_size), self._spec.dtype),
            _array(pool.keys.shape, pool.keys.dtype),
            _array(pool.values.shape, pool.values.dtype),
        )
        query_norm, key_norm = norms or (self._none, self._none)
        call = _call("cadenza_rope_append_attend", results, {9: 1, 10: 2})
        out, keys, values = call(
            qkv,
            step.positions,
            step.slot_mapping,
            step.query_starts,
            step.kv_lens,
            step.page_table,
            rope,
            query_norm,
            key_norm,
            pool.keys,
            pool.values,
            heads=np.int64(model.num_heads),
            scale=np.float32(self._spec.attention_scale),
            window=np.int64(_NO_WINDOW),
            soft_cap=np.float32(0.0),
            norm_eps=np.float32(model.rms_norm_eps),
            norm_one_plus=False,
        )
        return out, KVPool(keys, values)

    def next_tokens(self, x: jax.Array, head: Linear, step: StepArrays) -> jax.Array:
        sampling = step.sampling
        return _call("cadenza_next_token", _array((len(x), NUM_COLUMNS), jnp.int32))(
            x,
            head.weight,
            step.num_logits,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.keys,
            sampling.num_logprobs,
            self._none,
            jnp.full(len(x), -1, jnp.int32),
            vocab=np.int64(self._model.vocab_size),
        )


def _array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _call(target: str, results: Any, aliases: dict[int, int] | None = None) -> Any:
    """The FFI call; `aliases` maps operands to the results that take their place."""
    return jax.ffi.ffi_call(target, results, input_output_aliases=aliases or {})
