"""rope_append_attend of the kernels for GPUs: values, and bits that depend on a row alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cadenza.backends.xla.ops.cuda_library import CudaLibrary
from tests.cuda.attention_rows import (
    BF16,
    LAYER,
    Array,
    Caller,
    Row,
    Rows,
    Variant,
    in_chunks,
    in_float64,
    whole,
)

pytestmark = [pytest.mark.native, pytest.mark.kernels]

F32: Any = np.float32
LENGTH = 40
CHUNKS = [1, 9, 1, 12, 3, 1, 13]
SPANS = ((2, 9), (11, 23), (23, 26), (28, 40))  # each within a chunk

VARIANTS = [
    Variant(),
    Variant(rotary=0, heads=3, kv_heads=1),
    Variant(rotary=64, window=20),
    Variant(soft_cap=3.0, has_query_factors=True),
    Variant(has_norms=True, window=17, soft_cap=10.0, has_gate=True),
    Variant(has_norms=True, norm_spans_heads=True, has_sinks=True),
    Variant(kv_parts=1, norms_values=True, has_norms=True),
    Variant(norms_values=True, dtype=F32, has_sinks=True, has_gate=True),
    Variant(heads=20, kv_heads=1),
    Variant(size=80, heads=2),
    Variant(size=128, heads=2),
    Variant(size=256, heads=2, kv_heads=1),
    Variant(size=512, heads=2, kv_heads=1),
    Variant(dtype=F32, heads=5, kv_heads=1, window=20),
    Variant(dtype=F32, size=128, heads=2, kv_heads=1),
    Variant(dtype=F32, size=256, heads=1, kv_heads=1),
    Variant(dtype=F32, size=512, heads=1, kv_heads=1),
    Variant(spans=SPANS),
    Variant(spans=SPANS, window=8, heads=5, kv_heads=1, dtype=F32),
    Variant(skipped=(20, 40), window=24),
]
CODES = [
    Variant(has_codes=True),
    Variant(has_codes=True, window=20, has_norms=True, soft_cap=10.0, dtype=F32),
    Variant(has_codes=True, size=80, heads=2, has_sinks=True),
    Variant(has_codes=True, size=128, heads=2, dtype=F32),
    Variant(has_codes=True, size=256, heads=2, kv_heads=1),
    Variant(has_codes=True, size=512, heads=2, kv_heads=1),
    Variant(has_codes=True, spans=SPANS, window=20),
]
TYPES = [
    Variant(heads=1, kv_heads=1),
    Variant(heads=1, kv_heads=1, dtype=F32),
    Variant(heads=1, kv_heads=1, has_codes=True),
]


@pytest.fixture(scope="module")
def call(library: CudaLibrary) -> Caller:
    return Caller(library)


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_agrees_with_float64_however_the_row_is_cut_and_paged(
    call: Caller, variant: Variant
) -> None:
    inputs = variant.inputs(LENGTH, 1)
    found = whole(call, variant, inputs)
    atol = 2e-2 if variant.dtype == BF16 else 3e-6
    np.testing.assert_allclose(found.astype(float), in_float64(variant, inputs), atol=atol)
    assert in_chunks(call, variant, inputs, CHUNKS, page_size=32).tobytes() == found.tobytes()


@pytest.mark.parametrize("variant", CODES)
def test_attention_over_codes_is_near_float64_however_the_row_is_cut_and_paged(
    call: Caller, variant: Variant
) -> None:
    inputs = variant.inputs(LENGTH, 1)
    found = whole(call, variant, inputs)
    np.testing.assert_allclose(found.astype(float), in_float64(variant, inputs), atol=4e-2)
    assert in_chunks(call, variant, inputs, CHUNKS, page_size=48).tobytes() == found.tobytes()


@pytest.mark.parametrize(
    ("variant", "length", "window"),
    [(TYPES[0], 530, 0), (TYPES[0], 300, 60), (TYPES[1], 300, 0), (TYPES[2], 300, 200)],
)
def test_a_context_of_several_parts_has_the_same_bits_however_it_is_cut(
    call: Caller, variant: Variant, length: int, window: int
) -> None:
    variant = with_fields(variant, window=window)
    inputs = variant.inputs(length, 2)
    sizes = {"num_pages": 12, "page_size": 48, "pages_per_row": 12}
    found = whole(call, variant, inputs, **sizes)
    atol = 3e-6 if variant.dtype == F32 else 2e-2
    np.testing.assert_allclose(found.astype(float), in_float64(variant, inputs), atol=atol)
    chunks = [240, 8, 8, 1, 8, 1, length - 268, 1, 1]
    assert in_chunks(call, variant, inputs, chunks, **sizes).tobytes() == found.tobytes()


def with_fields(variant: Variant, **fields: Any) -> Variant:
    own = {name: getattr(variant, name) for name in Variant.__dataclass_fields__}
    return Variant(**{**own, **fields})


BATCHED = [
    Variant(window=30),
    Variant(dtype=F32, has_sinks=True),
    Variant(has_codes=True),
    Variant(heads=20, kv_heads=1, has_norms=True),
]


def play(call: Caller, variant: Variant, steps: Sequence[Sequence[tuple[int, int]]]) -> list[Array]:
    rows = Rows(call=call, variant=variant, num_pages=16, pages_per_row=6)
    order = np.random.default_rng(3).permutation(16)
    own = [Row(variant.inputs(64, 10 + i), order[i::3].tolist()) for i in range(3)]
    outputs: list[list[Array]] = [[], [], []]
    for step in steps:
        found = rows.step([(own[row], count) for row, count in step], bucket=33, rows=5)
        for (row, _), out in zip(step, found, strict=True):
            outputs[row].append(out)
    return [np.concatenate(each) if each else np.zeros(0) for each in outputs]


@pytest.mark.parametrize("variant", BATCHED)
def test_rows_have_the_bits_that_they_have_alone(call: Caller, variant: Variant) -> None:
    steps = [
        [(0, 20), (1, 1), (2, 8)],
        [(1, 9), (0, 1)],
        [(2, 1), (0, 1), (1, 30)],
        [(1, 2), (2, 1)],
    ]
    together = play(call, variant, steps)
    for row in range(3):
        own = [[part for part in step if part[0] == row] for step in steps]
        alone = play(call, variant, [step for step in own if step])
        assert alone[row].tobytes() == together[row].tobytes()


@pytest.mark.parametrize("variant", BATCHED)
def test_threads_in_another_order_give_the_same_bits(
    call: Caller, variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [[(0, 20), (1, 3)], [(0, 1), (1, 1)]]
    forward = play(call, variant, steps)
    monkeypatch.setenv("CADENZA_GPU_ORDER", "backward")
    backward = play(call, variant, steps)
    for row in range(2):
        assert backward[row].tobytes() == forward[row].tobytes()


@pytest.mark.parametrize("variant", TYPES)
def test_a_row_whose_inputs_are_not_finite_leaves_the_others_as_they_are(
    call: Caller, variant: Variant
) -> None:
    def run(first: Array) -> list[Array]:
        rows = Rows(call=call, variant=variant)
        own = [Row(first, [0, 1]), Row(variant.inputs(20, 1), [2, 3])]
        rows.step([(own[0], 10), (own[1], 18)])
        return rows.step([(own[0], 1), (own[1], 1)])

    sound, ill = run(variant.inputs(20, 0)), run(np.full_like(variant.inputs(20, 0), np.nan))
    assert ill[1].tobytes() == sound[1].tobytes()
    assert np.isfinite(sound[0].astype(float)).all()
    assert np.isnan(ill[0].astype(float)).all()


def test_rows_whose_partial_results_do_not_fit_are_computed_whole_with_the_same_bits(
    call: Caller,
) -> None:
    variant = Variant(heads=64, kv_heads=4)
    rows = Rows(call=call, variant=variant, pages_per_row=1)
    own = [Row(variant.inputs(8, i), [i]) for i in range(8)]
    together = rows.step([(row, 8) for row in own])
    alone = Rows(call=call, variant=variant, pages_per_row=1)
    (found,) = alone.step([(Row(own[3].inputs, [0]), 8)])
    assert found.tobytes() == together[3].tobytes()


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_tokens_are_written_to_their_slots_alone(call: Caller, dtype: Any) -> None:
    variant = Variant(dtype=dtype, rotary=0)
    rows = Rows(call=call, variant=variant, num_pages=3)
    before = [np.asarray(pool).copy() for pool in rows.pools]
    own = Row(variant.inputs(20, 0), [2, 0])
    rows.step([(own, 18)], bucket=24)
    heads = own.inputs.reshape(20, -1, variant.size)
    for side in range(2):
        first = variant.heads + side * variant.kv_heads
        expected = before[side]
        for token in range(18):
            page, offset = own.pages[token // 16], token % 16
            new = np.ascontiguousarray(heads[token, first : first + variant.kv_heads])
            expected[page, LAYER, :, offset] = new.view(expected.dtype)
        np.testing.assert_array_equal(np.asarray(rows.pools[side]), expected)


def test_codes_of_values_are_those_of_their_definition(call: Caller) -> None:
    variant = Variant(has_codes=True, dtype=F32, rotary=0)
    rows = Rows(call=call, variant=variant, num_pages=2)
    own = Row(variant.inputs(16, 0), [1])
    own.inputs[3] = 0.0
    rows.step([(own, 16)])
    heads = own.inputs.reshape(16, -1, variant.size)
    for side in range(2):
        first = variant.heads + side * variant.kv_heads
        part = heads[:, first : first + variant.kv_heads]
        largest = np.abs(part).max(axis=-1)
        inverse = np.float32(127) / np.where(largest > 0, largest, np.float32(np.inf))
        for head in range(variant.kv_heads):
            block = np.asarray(rows.pools[side])[1, LAYER, head].reshape(-1)
            codes, scales = block[: 16 * variant.size], block[16 * variant.size :].view(np.float32)
            if side == 0:
                codes = (codes ^ 0x80).reshape(16, variant.size)
            else:
                codes = codes.reshape(4, variant.size, 4).swapaxes(1, 2).reshape(16, variant.size)
            expected = np.rint(part[:, head] * inverse[:, head, None])
            np.testing.assert_array_equal(codes.view(np.int8), expected)
            np.testing.assert_array_equal(scales, largest[:, head] / np.float32(127))


def test_a_layer_without_keys_reads_those_of_another_and_writes_nothing(call: Caller) -> None:
    variant = Variant(rotary=0)
    rows = Rows(call=call, variant=variant)
    inputs = variant.inputs(12, 0)
    (expected,) = rows.step([(Row(inputs, [0]), 12)])
    before = [np.asarray(pool).copy() for pool in rows.pools]
    rows.variant = with_fields(variant, kv_parts=0)
    queries = np.ascontiguousarray(inputs[:, : variant.heads * variant.size])
    (found,) = rows.step([(Row(queries, [0]), 12)])
    assert found.tobytes() == expected.tobytes()
    for pool, old in zip(rows.pools, before, strict=True):
        np.testing.assert_array_equal(np.asarray(pool), old)


def test_a_row_without_context_gets_zeros(call: Caller) -> None:
    variant = Variant()
    rows = Rows(call=call, variant=variant)
    (found,) = rows.step([(Row(variant.inputs(1, 0), [], length=-1), 1)], writes=False)
    np.testing.assert_array_equal(found.astype(float), 0.0)
