"""Attention of a few rows over emulated GPUs, and the same in float64, for the kernels' tests."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.ops.cuda import CudaProgram
from cadenza.backends.xla.ops.cuda_library import CudaLibrary

Array = npt.NDArray[Any]
BF16: Any = ml_dtypes.bfloat16
NONE = np.zeros(0, np.float32)
EPS = 1e-6
LAYERS, LAYER = 2, 1
ROPE_ROWS = 1024


class Caller:
    def __init__(self, library: CudaLibrary) -> None:
        self._library = library
        self._compiled: dict[Any, Any] = {}

    def __call__(
        self, name: str, out: Any, *args: Any, aliases: dict[int, int], **attrs: Any
    ) -> Any:
        shapes = tuple((np.shape(each), str(each.dtype)) for each in args)
        key = name, out, shapes, tuple(attrs.items())
        if key not in self._compiled:

            def compute(*operands: Any) -> Any:
                program = CudaProgram(self._library)
                return program.emit(program.call(name, out, aliases)(*operands, **attrs))

            self._compiled[key] = jax.jit(compute, donate_argnums=tuple(aliases))
        return self._compiled[key](*args)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What attention computes; `kv_parts` as in `AttendTask`."""

    size: int = 64
    heads: int = 4
    kv_heads: int = 2
    rotary: int = 16
    window: int = 0
    soft_cap: float = 0.0
    has_norms: bool = False
    norm_spans_heads: bool = False
    norms_values: bool = False
    kv_parts: int = 2
    has_codes: bool = False
    has_sinks: bool = False
    has_gate: bool = False
    has_query_factors: bool = False
    spans: tuple[tuple[int, int], ...] = ()  # whose tokens see all of theirs
    skipped: tuple[int, int] | None = None  # before a position, so many more tokens of the text
    dtype: Any = BF16

    @property
    def width(self) -> int:
        return (self.heads + self.kv_parts * self.kv_heads) * self.size

    @property
    def rope(self) -> npt.NDArray[np.float32]:
        rates = 1e4 ** (np.arange(0, self.rotary, 2) / max(self.rotary, 1))
        angles = np.arange(ROPE_ROWS)[:, None] / rates
        table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
        if self.has_query_factors:
            table = np.concatenate([table, 1 + np.arange(ROPE_ROWS)[:, None] / 100], axis=1)
        return table.astype(np.float32)

    @property
    def norms(self) -> list[npt.NDArray[np.float32]]:
        if not self.has_norms:
            return [NONE, NONE]
        heads = (self.heads, self.kv_heads) if self.norm_spans_heads else (1, 1)
        random = np.random.default_rng(4)
        return [random.normal(size=self.size * count).astype(np.float32) for count in heads]

    @property
    def sinks(self) -> npt.NDArray[np.float32]:
        drawn = np.random.default_rng(5).normal(size=self.heads).astype(np.float32)
        return drawn if self.has_sinks else NONE

    @property
    def num_pool_bytes(self) -> int:
        return self.size + 4 if self.has_codes else self.size * np.dtype(self.dtype).itemsize

    def reaches(self, length: int) -> npt.NDArray[np.int32]:
        """[length]: the last position of each token's span, or -1."""
        found = np.full(length, -1, np.int32)
        for start, stop in self.spans:
            found[start:stop] = stop - 1
        return found

    def indices(self, length: int) -> npt.NDArray[np.int64]:
        at = np.arange(length)
        return at if self.skipped is None else at + (at >= self.skipped[0]) * self.skipped[1]

    def window_starts(self) -> npt.NDArray[np.int32]:
        """The first position that each sees by its place in the text; -1 before the gap."""
        indices = self.indices(ROPE_ROWS)
        starts = np.searchsorted(indices, indices - self.window + 1)
        return np.where(indices == np.arange(ROPE_ROWS), -1, starts).astype(np.int32)

    def inputs(self, length: int, seed: int) -> Array:
        random = np.random.default_rng(seed)
        width = self.width + (self.heads * self.size if self.has_gate else 0)
        return random.normal(size=(length, width)).astype(self.dtype)


@dataclass(slots=True)
class Row:
    inputs: Array
    pages: list[int]
    length: int = 0


@dataclass(slots=True, kw_only=True)
class Rows:
    call: Caller
    variant: Variant
    num_pages: int = 8
    page_size: int = 16
    pages_per_row: int = 8
    pools: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        variant = self.variant
        shape = (self.num_pages, LAYERS, variant.kv_heads, self.page_size, variant.size)
        bits = np.uint16 if variant.dtype == BF16 else variant.dtype
        fill = np.full(shape, np.nan, variant.dtype).view(bits)
        if variant.has_codes:
            fill = np.full((*shape[:-1], variant.size + 4), 255, np.uint8)
        self.pools = [jnp.asarray(fill), jnp.asarray(fill)]

    def step(
        self,
        parts: Sequence[tuple[Row, int]],
        *,
        bucket: int = 0,
        rows: int = 0,
        writes: bool = True,
    ) -> list[Array]:
        variant = self.variant
        counts = [count for _, count in parts]
        bucket, rows = max(bucket, sum(counts)), max(rows, len(parts))
        given = np.full((bucket, parts[0][0].inputs.shape[1]), np.nan, variant.dtype)
        positions, slots = np.zeros(bucket, np.int32), np.full(bucket, -1, np.int32)
        starts = np.full(rows + 1, sum(counts), np.int32)
        lens, table = np.zeros(rows, np.int32), np.full((rows, self.pages_per_row), -1, np.int32)
        at = 0
        for index, (row, count) in enumerate(parts):
            own = np.arange(row.length, row.length + count)
            given[at : at + count] = row.inputs[own]
            positions[at : at + count] = own
            if writes:
                pages = np.asarray(row.pages)[own // self.page_size]
                slots[at : at + count] = pages * self.page_size + own % self.page_size
            table[index, : len(row.pages)] = row.pages
            starts[index], lens[index] = at, row.length + count
            row.length += count
            at += count
        gate = given[:, variant.width :] if variant.has_gate else np.zeros(0, np.float32)
        reaches = np.zeros(0, np.int32)
        if variant.spans:
            reaches = variant.reaches(ROPE_ROWS)[positions]
        out_shape = jax.ShapeDtypeStruct((bucket, variant.heads * variant.size), variant.dtype)
        out, *self.pools = self.call(
            "rope_append_attend",
            (out_shape, *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in self.pools)),
            *(given[:, : variant.width], positions, slots, starts, lens, table),
            *(variant.rope, *variant.norms, *self.pools, variant.sinks, gate),
            variant.indices(ROPE_ROWS)[positions].astype(np.int32),
            reaches,
            variant.window_starts()[positions] if variant.skipped else np.zeros(0, np.int32),
            aliases={9: 1, 10: 2},
            layer=LAYER,
            heads=variant.heads,
            scale=np.float32(variant.size**-0.5),
            window=variant.window,
            soft_cap=np.float32(variant.soft_cap),
            norm_eps=np.float32(EPS),
            norms_values=variant.norms_values,
        )
        return np.split(np.asarray(out)[: sum(counts)], np.cumsum(counts)[:-1])

    def pool_bytes(self, side: int, slot: int) -> Array:
        """The bytes [layers, Hkv, bytes] of a slot's token, of pools that are not codes."""
        page, offset = divmod(slot, self.page_size)
        token = np.asarray(self.pools[side])[page, :, :, offset]
        return np.ascontiguousarray(token).view(np.uint8)


def whole(call: Caller, variant: Variant, inputs: Array, **sizes: Any) -> Array:
    rows = Rows(call=call, variant=variant, **sizes)
    (out,) = rows.step([(Row(inputs, list(range(rows.num_pages))), len(inputs))])
    return out


def in_chunks(
    call: Caller, variant: Variant, inputs: Array, chunks: Sequence[int], **sizes: Any
) -> Array:
    """The outputs of a row, a chunk a step, in pages in another order; single tokens without
    padding."""
    rows = Rows(call=call, variant=variant, **sizes)
    row = Row(inputs, list(range(rows.num_pages))[::-1])
    buckets = [1 if count == 1 else max(chunks) for count in chunks]
    steps = zip(chunks, buckets, strict=True)
    return np.concatenate([rows.step([(row, count)], bucket=size)[0] for count, size in steps])


def _turned(part: Array, weight: Array, variant: Variant, *, is_query: bool) -> Array:
    if len(weight):
        axes = (-2, -1) if variant.norm_spans_heads else -1
        part = part / np.sqrt(np.mean(part**2, axis=axes, keepdims=True) + EPS)
        part = part * weight.reshape(-1, variant.size)
    half, rope = (
        variant.rotary // 2,
        variant.rope[variant.indices(len(part)), None, :].astype(np.float64),
    )
    cos, sin = rope[..., :half], rope[..., half : 2 * half]
    a, b, rest = part[..., :half], part[..., half : 2 * half], part[..., 2 * half :]
    turned = np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
    return turned * rope[..., -1:] if is_query and variant.has_query_factors else turned


def in_float64(variant: Variant, inputs: Array) -> Array:
    exact = inputs.astype(np.float64)
    heads = exact[:, : variant.width].reshape(len(inputs), -1, variant.size)
    first, second = variant.heads, variant.heads + variant.kv_heads
    query, key, value = heads[:, :first], heads[:, first:second], heads[:, second:]
    if variant.kv_parts == 1:
        value = key
    if variant.norms_values:
        value = value / np.sqrt(np.mean(value**2, axis=-1, keepdims=True) + EPS)
    query = _turned(query, variant.norms[0], variant, is_query=True)
    key = _turned(key, variant.norms[1], variant, is_query=False)
    weights = softmax_weights(variant, query, np.repeat(key, first // variant.kv_heads, axis=1))
    value = np.repeat(value, first // variant.kv_heads, axis=1)
    out = np.einsum("hqk,khd->qhd", weights, value).reshape(len(inputs), -1)
    return out / (1 + np.exp(-exact[:, variant.width :])) if variant.has_gate else out


def softmax_weights(variant: Variant, query: Array, key: Array) -> Array:
    scores = np.einsum("qhd,khd->hqk", query, key) * variant.size**-0.5
    if variant.soft_cap:
        scores = variant.soft_cap * np.tanh(scores / variant.soft_cap)
    distance = variant.indices(len(query))[:, None] - variant.indices(len(key))[None, :]
    last = np.maximum(np.arange(len(query)), variant.reaches(len(query)))
    hidden = (np.arange(len(key)) > last[:, None]) | (
        (distance >= variant.window) if variant.window else False
    )
    scores = np.where(hidden, -np.inf, scores)
    if variant.has_sinks:
        sink = np.broadcast_to(variant.sinks[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, sink], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True))[..., : len(key)]
