"""rope_append_attend through XLA: values, chunks, pages, pools in place."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

pytestmark = pytest.mark.native

HEADS, KV_HEADS, SIZE, LENGTH = 6, 2, 64, 75
ROPE_ROWS = 1024
WIDTH = (HEADS + 2 * KV_HEADS) * SIZE
NONE = np.zeros(0, np.float32)
DTYPES = [ml_dtypes.bfloat16, np.float32]


LAYERS = 3  # of the pools; the last one attends


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    rotary: int = SIZE
    window: int = 0
    soft_cap: float = 0.0
    has_norms: bool = False
    norm_spans_heads: bool = False
    has_codes: bool = False  # KV in int8
    spans: tuple[tuple[int, int], ...] = ()  # whose tokens see all of theirs
    skipped: tuple[tuple[int, int], ...] = ()  # before each position, so many more tokens

    def indices(self, length: int) -> npt.NDArray[np.int64]:
        at = np.arange(length)
        return at + sum((at >= position) * count for position, count in self.skipped)


SPANS = ((10, 33), (40, 60))
OF_SPANS = [
    Variant(spans=SPANS),
    Variant(spans=SPANS, window=16, has_norms=True),
    Variant(spans=SPANS, window=40, has_codes=True),
]

VARIANTS = [
    Variant(),
    Variant(rotary=16),
    Variant(window=20),
    Variant(soft_cap=3.0),
    Variant(has_norms=True, window=40, soft_cap=10.0),
    Variant(rotary=0),
    Variant(has_norms=True, norm_spans_heads=True),
    Variant(has_codes=True),
    Variant(has_codes=True, has_norms=True, window=40, soft_cap=10.0),
    *OF_SPANS,
    Variant(skipped=((20, 16), (48, 200)), window=30),
    Variant(skipped=((32, 8),), window=16, has_codes=True),
    Variant(skipped=((32, 64),), has_norms=True),
]


def rope_table(rotary: int) -> npt.NDArray[np.float32]:
    angles = np.arange(ROPE_ROWS)[:, None] / 1e4 ** (np.arange(0, rotary, 2) / rotary)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def norm_weights(variant: Variant) -> list[npt.NDArray[np.float32]]:
    if not variant.has_norms:
        return [NONE, NONE]
    random = np.random.default_rng(4)
    heads = (HEADS, KV_HEADS) if variant.norm_spans_heads else (1, 1)
    return [random.normal(size=SIZE * count).astype(np.float32) for count in heads]


class Row:
    """One sequence in pages of its own, played in chunks. Slots it does not own hold NaN."""

    def __init__(self, call: Any, variant: Variant, dtype: Any, page_size: int) -> None:
        self._call, self._variant, self._page_size = call, variant, page_size
        longest = max([LENGTH, *(stop + 40 for _, stop in variant.spans)])
        num_pages = longest // page_size + 3
        shape = (num_pages, LAYERS, KV_HEADS, page_size, SIZE)
        bits = np.uint16 if dtype == ml_dtypes.bfloat16 else dtype  # as the runner keeps them
        self.pools = [jnp.asarray(np.full(shape, np.nan, dtype).view(bits)) for _ in range(2)]
        if variant.has_codes:
            self.pools = [jnp.full((*shape[:-1], SIZE + 4), 255, jnp.uint8) for _ in range(2)]
        self._pages = np.random.default_rng(page_size).permutation(num_pages).astype(np.int32)
        self._length = 0

    def play(self, qkv: npt.NDArray[Any], bucket: int) -> npt.NDArray[Any]:
        """Appends and attends `qkv` [n, WIDTH], padded to `bucket` tokens of NaN."""
        count = len(qkv)
        padded = np.full((bucket, WIDTH), np.nan, qkv.dtype)
        padded[:count] = qkv
        positions = np.zeros(bucket, np.int32)
        positions[:count] = np.arange(self._length, self._length + count)
        slots = self._pages[positions // self._page_size] * self._page_size
        slots = np.where(np.arange(bucket) < count, slots + positions % self._page_size, -1)
        self._length += count
        variant = self._variant
        reaches = (
            reaches_of(variant, ROPE_ROWS)[positions] if variant.spans else np.zeros(0, np.int32)
        )
        out, *self.pools = self._call(
            "rope_append_attend",
            (
                jax.ShapeDtypeStruct((bucket, HEADS * SIZE), qkv.dtype),
                *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in self.pools),
            ),
            padded,
            positions,
            slots.astype(np.int32),
            np.array([0, count, count], np.int32),
            np.array([self._length, 0], np.int32),
            np.stack([self._pages, np.full_like(self._pages, -1)]),
            rope_table(variant.rotary),
            *norm_weights(variant),
            *self.pools,
            NONE,
            NONE,
            variant.indices(ROPE_ROWS)[positions].astype(np.int32),
            reaches,
            window_starts_of(variant)[positions] if variant.skipped else np.zeros(0, np.int32),
            aliases={9: 1, 10: 2},
            layer=np.int64(LAYERS - 1),
            heads=np.int64(HEADS),
            scale=np.float32(SIZE**-0.5),
            window=np.int64(variant.window),
            soft_cap=np.float32(variant.soft_cap),
            norm_eps=np.float32(1e-6),
            norms_values=False,
        )
        return np.asarray(out)[:count]

    def go_back(self, length: int) -> None:
        """The next tokens are those behind the first `length`, whose KV stays."""
        self._length = length


def reaches_of(variant: Variant, length: int) -> npt.NDArray[np.int32]:
    """[length]: the last position of each token's span, or -1."""
    reaches = np.full(length, -1, np.int32)
    for start, stop in variant.spans:
        reaches[start:stop] = stop - 1
    return reaches


def window_starts_of(variant: Variant) -> npt.NDArray[np.int32]:
    """The first position that each sees by its place in the text; -1 before the first gap."""
    indices = variant.indices(ROPE_ROWS)
    starts = np.searchsorted(indices, indices - variant.window + 1)
    return np.where(indices == np.arange(ROPE_ROWS), -1, starts).astype(np.int32)


def turned(
    part: npt.NDArray[np.float64], weight: npt.NDArray[np.float32], variant: Variant
) -> npt.NDArray[np.float64]:
    if variant.has_norms:
        axes = (-2, -1) if variant.norm_spans_heads else -1
        part = part / np.sqrt(np.mean(part**2, axis=axes, keepdims=True) + 1e-6)
        part = part * weight.reshape(-1, SIZE)
    half = variant.rotary // 2
    turns = rope_table(variant.rotary)[variant.indices(len(part)), None, :]
    cos, sin = np.split(turns, 2, axis=-1)
    a, b, rest = part[..., :half], part[..., half : 2 * half], part[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def rounded_to_codes(vectors: npt.NDArray[np.float64], most: int) -> npt.NDArray[np.float64]:
    scales = np.abs(vectors).max(axis=-1, keepdims=True) / most
    return np.round(np.divide(vectors, scales, where=scales > 0, out=vectors * 0)) * scales


def rounded_weights(
    weights: npt.NDArray[np.float64], value: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Weights [H, Q, K] of values [K, H, SIZE], which are rounded in sub-blocks of 16 tokens."""
    scales = np.abs(value).max(axis=-1).T[:, None, :]
    length = len(value)
    padded = np.pad(weights * scales, ((0, 0), (0, 0), (0, -length % 16)))
    blocks = padded.reshape(*weights.shape[:2], -1, 16)
    return rounded_to_codes(blocks, 254).reshape(padded.shape)[..., :length] / scales


def reference(qkv: npt.NDArray[Any], variant: Variant) -> npt.NDArray[np.float64]:
    length = len(qkv)
    heads = qkv.astype(np.float64).reshape(length, -1, SIZE)
    query, key, value = np.split(heads, [HEADS, HEADS + KV_HEADS], axis=1)
    weights = norm_weights(variant)
    query, key = turned(query, weights[0], variant), turned(key, weights[1], variant)
    query, key = (part.astype(qkv.dtype).astype(np.float64) for part in (query, key))
    if variant.has_codes:
        query = rounded_to_codes(query, 127 * 254)
        key, value = rounded_to_codes(key, 127), rounded_to_codes(value, 127)
    key, value = (np.repeat(part, HEADS // KV_HEADS, axis=1) for part in (key, value))
    scores = np.einsum("qhd,khd->hqk", query, key) * SIZE**-0.5
    if variant.soft_cap:
        scores = variant.soft_cap * np.tanh(scores / variant.soft_cap)
    at, indices = np.arange(length), variant.indices(length)
    distance = indices[:, None] - indices[None, :]
    hidden = (at > np.maximum(at, reaches_of(variant, length))[:, None]) | (
        (distance >= variant.window) if variant.window else False
    )
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    if variant.has_codes:
        weights = rounded_weights(weights, value)
    return np.einsum("hqk,khd->qhd", weights, value).reshape(length, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_agrees_with_float64_in_every_variant(call, random, dtype, variant):
    qkv = random.normal(size=(LENGTH, WIDTH)).astype(dtype)
    out = Row(call, variant, dtype, 16).play(qkv, 80)
    atol = 3e-2 if dtype == ml_dtypes.bfloat16 else 1e-4
    if variant.has_codes and dtype == np.float32:
        atol = 1e-2  # a code at the middle of two may be rounded to the other
    np.testing.assert_allclose(np.asarray(out, np.float64), reference(qkv, variant), atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", [each for each in VARIANTS if not each.spans])
def test_attention_has_the_same_bits_however_the_row_is_cut_and_paged(call, random, dtype, variant):
    qkv = random.normal(size=(LENGTH, WIDTH)).astype(dtype)
    whole = Row(call, variant, dtype, 16).play(qkv, 80)
    for page_size, chunk, bucket in ((16, 1, 1), (32, 7, 8), (48, 40, 64)):
        row = Row(call, variant, dtype, page_size)
        parts = [row.play(qkv[i : i + chunk], bucket) for i in range(0, LENGTH, chunk)]
        assert np.concatenate(parts).tobytes() == whole.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", OF_SPANS)
def test_spans_have_the_same_bits_however_a_row_is_cut_around_them(call, random, dtype, variant):
    qkv = random.normal(size=(LENGTH, WIDTH)).astype(dtype)
    whole = Row(call, variant, dtype, 16).play(qkv, 80)
    row = Row(call, variant, dtype, 32)
    parts, ends = [], (3, 10, 33, 40, 60, 61, LENGTH)
    for start, stop in zip((0, *ends), ends, strict=False):
        parts.append(row.play(qkv[start:stop], 1 if stop - start == 1 else 32))
    assert np.concatenate(parts).tobytes() == whole.tobytes()


@pytest.mark.parametrize(
    "variant", [Variant(spans=((470, 560),)), Variant(spans=((470, 560),), window=64)]
)
def test_a_span_goes_on_behind_the_end_of_a_part_of_the_softmax(call, random, variant):
    qkv = random.normal(size=(600, WIDTH)).astype(np.float32)
    row, parts = Row(call, variant, np.float32, 16), []
    for start, stop in ((0, 300), (300, 470), (470, 560), (560, 600)):
        parts.append(row.play(qkv[start:stop], 300))
    np.testing.assert_allclose(np.concatenate(parts), reference(qkv, variant), atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", OF_SPANS)
@pytest.mark.parametrize("start", [11, 32, 47])
def test_the_end_of_a_span_has_the_same_bits_over_the_kv_of_its_beginning(
    call, random, dtype, variant, start
):
    qkv = random.normal(size=(LENGTH, WIDTH)).astype(dtype)
    row = Row(call, variant, dtype, 16)
    whole = row.play(qkv, 80)
    row.go_back(start)
    assert row.play(qkv[start:60], 64).tobytes() == whole[start:60].tobytes()


def test_attention_refuses_pools_of_codes_whose_width_is_no_head_with_its_scale(call, random):
    row = Row(call, Variant(has_codes=True), np.float32, 16)
    row.pools = [pool[..., :-1] for pool in row.pools]
    with pytest.raises(jax.errors.JaxRuntimeError, match="head size must be a multiple of 16"):
        row.play(random.normal(size=(1, WIDTH)).astype(np.float32), 1)


def test_attention_refuses_pools_that_are_not_aliased(call, random):
    qkv = random.normal(size=(1, WIDTH)).astype(np.float32)
    pool = jnp.zeros((2, LAYERS, KV_HEADS, 16, SIZE))
    shapes = [jax.ShapeDtypeStruct(pool.shape, pool.dtype)] * 2
    one = np.zeros(1, np.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="donated and aliased"):
        jax.block_until_ready(
            call(
                "rope_append_attend",
                (jax.ShapeDtypeStruct((1, HEADS * SIZE), jnp.float32), *shapes),
                qkv,
                one,
                one,
                np.array([0, 1], np.int32),
                one + 1,
                one[None],
                rope_table(SIZE),
                NONE,
                NONE,
                pool,
                pool,
                NONE,
                NONE,
                one,
                np.zeros(0, np.int32),
                np.zeros(0, np.int32),
                layer=np.int64(LAYERS - 1),
                heads=np.int64(HEADS),
                scale=np.float32(1),
                window=np.int64(0),
                soft_cap=np.float32(0),
                norm_eps=np.float32(1e-6),
                norms_values=False,
            )
        )
