"""Each operation of the reference table against float64 numpy, and the wire that feeds it.

Shapes are hostile: grouped heads, rows of different lengths, scattered pages, padding, NaN in every
slot that is nobody's. Legend as in `ops.table`.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import erf

from cadenza.backends.token_choice import COLUMN_STATE, COLUMN_TOKEN, COLUMN_TOP, NUM_TOP
from cadenza.backends.xla.ops.head_math import rotate
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import (
    AttendingLayer,
    DecoderSpec,
    HeadFactors,
    HeadInputs,
    KVPool,
    Linear,
    StepArrays,
)
from cadenza.backends.xla.step_program import unpack
from cadenza.batch.step_schema import (
    LAST_SAMPLED,
    NUM_EXTRA_LOGIT_ROWS,
    LogitInputs,
    ModelInputs,
    RowInputs,
    StepLayout,
    TokenInputs,
    specs_of,
)
from cadenza.models.rope_factors import rope_factors
from cadenza.weights.weight_format import FLOAT_FORMATS
from tests.by_day import by_day
from tests.contract.steps import Chunk, Draw, Geometry, Stream, build_inputs
from tests.xla.harness import HOSTILE, NAN, slots_of

GEOMETRY = Geometry(bucket=24, num_rows=4, page_size=16)
NUM_PAGES = 30
LAYER = 1  # of the pool's three
TOLERANCE = {"float32": 2e-6, "bfloat16": 1.2e-2}
COUNT = jnp.int32(24)


def make_ops(dtype: str = "float32", **changes: Any) -> OpTable:
    model = replace(HOSTILE, **changes)
    return OpTable(DecoderSpec(model=model, dtype=jnp.dtype(dtype).type, page_size=16))


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_close(actual: jax.Array, expected: np.ndarray, dtype: str) -> None:
    error = np.abs(np.asarray(actual, np.float64) - expected).max()
    assert error <= TOLERANCE[dtype] * np.abs(expected).max() * 4, f"off by {error}"


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    return np.asarray(jnp.asarray(values, dtype)).astype(np.float64)


def device_step(inputs: ModelInputs, page_table: np.ndarray) -> StepArrays:
    shape = StepLayout(len(inputs.tokens.ids), len(inputs.rows.kv_lens))
    last_sampled = jnp.arange(100, 100 + shape.num_rows, dtype=jnp.int32)
    return unpack(shape, jnp.asarray(inputs.words), last_sampled, jnp.asarray(page_table))


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


def test_embed_takes_the_rows_of_the_table(dtype: str):
    ops, table = make_ops(dtype), normal(1, 211, 40)
    tokens = np.arange(24) * 7
    inputs = ModelInputs.empty(bucket=24, num_rows=4)
    inputs.tokens.ids[:] = tokens
    step = device_step(inputs, np.zeros((4, 2), np.int32))
    embedded = ops.embed(ops.load_linear([table]), step)
    assert embedded.dtype == jnp.float32
    assert np.array_equal(np.asarray(embedded), rounded(table, dtype)[tokens])
    scaled = make_ops(dtype, embedding_scale=6.5).embed(ops.load_linear([table]), step)
    assert np.array_equal(np.asarray(scaled), np.asarray(embedded) * np.float32(6.5))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rms_norm_divides_by_the_root_of_the_mean_square(dtype: str, scale: float):
    ops, x, weight = make_ops(dtype), normal(2, 24, 40) * np.float32(scale), normal(3, 40)
    wide = x.astype(np.float64)
    root = np.sqrt((wide**2).mean(axis=1, keepdims=True) + HOSTILE.rms_norm_eps)
    normed = ops.rms_norm(jnp.asarray(x), jnp.asarray(weight), COUNT)
    assert normed.dtype == jnp.dtype(dtype)
    assert_close(normed, wide / root * weight, dtype)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_linear_multiplies_adds_bias_and_residual(dtype: str, has_bias: bool, has_residual: bool):
    ops = make_ops(dtype, residual_scale=0.22)
    parts, biases = [normal(4, 7, 40), normal(5, 10, 40)], [normal(6, 7), normal(7, 10)]
    x, residual = normal(8, 24, 40), normal(9, 24, 17)
    weight = ops.load_linear(parts, biases if has_bias else [])
    expected = rounded(x, dtype) @ rounded(np.concatenate(parts), dtype).T
    expected += np.concatenate(biases) if has_bias else 0.0
    expected = residual + 0.22 * expected if has_residual else expected
    given_residual = jnp.asarray(residual) if has_residual else None
    y = ops.linear(jnp.asarray(x, dtype), weight, COUNT, residual=given_residual)
    assert y.dtype == (jnp.float32 if has_residual else jnp.dtype(dtype))
    assert_close(y, expected, dtype)


def test_linear_norm_add_norms_the_product_before_it_is_added(dtype: str):
    ops, x, table = make_ops(dtype), normal(8, 24, 40), normal(4, 40, 40)
    norm, residual = normal(3, 40), normal(9, 24, 40)
    wide = rounded(x, dtype) @ rounded(table, dtype).T
    root = np.sqrt((wide**2).mean(axis=1, keepdims=True) + HOSTILE.rms_norm_eps)
    y = ops.linear_norm_add(
        jnp.asarray(x, dtype),
        ops.load_linear([table], []),
        jnp.asarray(norm),
        jnp.asarray(residual),
        COUNT,
    )
    assert y.dtype == jnp.float32
    assert_close(y, residual + wide / root * norm, dtype)


def test_to_activations_rounds_to_the_type(dtype: str):
    x = normal(30, 24, 40)
    y = make_ops(dtype).to_activations(jnp.asarray(x), jnp.int32(len(x)))
    assert y.dtype == jnp.dtype(dtype)
    assert np.array_equal(np.asarray(y, np.float64), rounded(x, dtype))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + erf(x / np.sqrt(2))) / 2


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


def test_a_clamped_swiglu_bounds_gate_and_up(dtype: str):
    ops = make_ops(dtype, activation="clamped_swiglu")
    gate, up, x = 4 * normal(10, 56, 40), 4 * normal(11, 56, 40), normal(12, 24, 40)
    wide = rounded(x, dtype)
    gates, ups = wide @ rounded(gate, dtype).T, wide @ rounded(up, dtype).T
    assert gates.max() > 7 > -7 > gates.min()
    assert ups.max() > 7 > -7 > ups.min()
    bounded = np.minimum(gates, 7.0)
    expected = bounded / (1 + np.exp(-1.702 * bounded)) * (1 + np.clip(ups, -7.0, 7.0))
    result = ops.gated_linear(jnp.asarray(x, dtype), ops.load_gate_up([gate, up]), COUNT)
    assert_close(result, expected, dtype)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", [silu, gelu_tanh, gelu], ids=lambda f: f.__name__)
def test_gated_linear_is_the_activated_gate_times_up(dtype: str, has_bias: bool, activation: Any):
    ops = make_ops(dtype, activation=activation.__name__)
    gate, up, x = normal(10, 56, 40), normal(11, 56, 40), normal(12, 24, 40)
    biases = [normal(13, 56), normal(14, 56)] if has_bias else []
    wide = rounded(x, dtype)
    gates = wide @ rounded(gate, dtype).T + (biases[0] if has_bias else 0.0)
    ups = wide @ rounded(up, dtype).T + (biases[1] if has_bias else 0.0)
    result = ops.gated_linear(jnp.asarray(x, dtype), ops.load_gate_up([gate, up], biases), COUNT)
    assert_close(result, activation(gates) * ups, dtype)


def test_rotate_turns_pairs_by_their_angles():
    factors = rope_factors(HOSTILE.rope, 50)[[3, 49]]  # [2, 16]
    heads = normal(15, 2, 3, 20)
    pairs = heads[..., :8] + 1j * heads[..., 8:16]
    turned = pairs.astype(np.complex128) * (factors[:, :8] + 1j * factors[:, 8:])[:, None, :]
    expected = np.concatenate([turned.real, turned.imag, heads[..., 16:]], axis=-1)
    assert_close(rotate(jnp.asarray(heads), jnp.asarray(factors)), expected, "float32")


def streams_and_chunks() -> tuple[list[Stream], list[Chunk]]:
    """Rows 0, 1 and 3 with 150, 37 and 0 tokens behind them, in scattered pages."""
    pages = np.random.default_rng(16).permutation(NUM_PAGES).tolist()
    streams = [
        Stream(row=row, pages=pages[i * 10 : i * 10 + 10]) for i, row in enumerate([0, 1, 3])
    ]
    for stream, length in zip(streams, [150, 37, 0], strict=True):
        stream.num_computed = length
    counts = [1, 9, 12]
    chunks = [s.chunk([5] * c, samples=True) for s, c in zip(streams, counts, strict=True)]
    return streams, chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    norms: tuple[np.ndarray, np.ndarray] | None = None
    window: int | None = None
    soft_cap: float | None = None
    has_rope: bool = True

    @property
    def factors(self) -> np.ndarray:
        return rope_factors(HOSTILE.rope if self.has_rope else None, 320)

    def score(self, products: np.ndarray) -> np.ndarray:
        scores = products * 0.3
        return scores if self.soft_cap is None else self.soft_cap * np.tanh(scores / self.soft_cap)


ATTENTIONS: dict[str, Attention] = {
    "plain": Attention(),
    "normed heads": Attention(norms=(normal(26, 16), normal(27, 16))),
    "norms over all heads": Attention(norms=(normal(26, 96), normal(27, 32))),
    "window": Attention(window=23),
    "window of one": Attention(window=1),
    "soft cap": Attention(soft_cap=2.0),
    "no rope": Attention(has_rope=False),
}


def attend_by_hand(
    heads: np.ndarray, pool: KVPool, chunks: list[Chunk], attention: Attention
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Whole-softmax attention in float64: outputs [T, Hq, D], and K|V by slot of the new tokens."""
    factors = attention.factors.astype(np.float64)
    out, written = np.zeros((24, 6, 16)), {}
    at = 0
    for chunk in chunks:
        slots = slots_of(chunk.stream.pages, chunk.end, 16)
        keys = np.asarray(pool.keys, np.float64)[slots, LAYER]  # [kv_len, Hkv, D]
        values = np.asarray(pool.values, np.float64)[slots, LAYER]
        for offset in range(len(chunk.token_ids)):
            position = chunk.start + offset
            query, key = heads[at, :6].copy(), heads[at, 6:8].copy()
            if attention.norms is not None:
                query, key = unit(query, attention.norms[0]), unit(key, attention.norms[1])
            query, key = turn(query, factors[position]), turn(key, factors[position])
            keys[position], values[position] = key, heads[at, 8:]
            written[int(slots[position])] = np.stack([key, heads[at, 8:]])
            first = max(0, position + 1 - (attention.window or 320))
            seen = slice(first, position + 1)
            for head in range(6):
                scores = attention.score(keys[seen, head // 3] @ query[head])
                weights = np.exp(scores - scores.max())
                out[at, head] = weights @ values[seen, head // 3] / weights.sum()
            at += 1
    return out, written


def unit(heads: np.ndarray, weight: np.ndarray) -> np.ndarray:
    rows = heads.reshape(-1, len(weight))
    root = np.sqrt((rows**2).mean(axis=-1, keepdims=True) + HOSTILE.rms_norm_eps)
    return (rows / root * weight).reshape(heads.shape)


def turn(heads: np.ndarray, factors: np.ndarray) -> np.ndarray:
    if len(factors) == 0:
        return heads
    turned = (heads[:, :8] + 1j * heads[:, 8:]) * (factors[:8] + 1j * factors[8:])
    return np.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.parametrize(
    "case",
    by_day(
        product(["float32", "bfloat16"], ATTENTIONS),
        [*product(["float32"], ATTENTIONS), ("bfloat16", "plain")],
    ),
    ids="-".join,
)
def test_rope_append_attend_equals_whole_softmax_attention(case: tuple[str, str]):
    dtype, attention = case[0], ATTENTIONS[case[1]]
    ops = make_ops(dtype, attention_scale=0.3, attention_soft_cap=attention.soft_cap)
    streams, chunks = streams_and_chunks()
    inputs = build_inputs(chunks, GEOMETRY)
    table = np.zeros((4, 20), np.int32)
    for stream in streams:
        table[stream.row, :10] = stream.pages
    content = np.full((2, NUM_PAGES * 16, 3, 2, 16), NAN, np.float32)
    for stream, chunk in zip(streams, chunks, strict=True):
        slots = slots_of(stream.pages, chunk.start, 16)
        content[:, slots, LAYER] = normal(17 + stream.row, 2, len(slots), 2, 16)
    pool = KVPool(jnp.asarray(content[0], dtype), jnp.asarray(content[1], dtype))
    qkv = jnp.asarray(normal(25, 24, 160), dtype)
    step = device_step(inputs, table)
    given = HeadFactors(attention.norms, attention.factors, step.tokens.positions)
    factors = jax.tree.map(jnp.asarray, given)
    layer = AttendingLayer(LAYER, ops._model.heads, attention.window)
    out, after = ops.rope_append_attend(HeadInputs(qkv), pool, factors, step, layer)
    heads = np.asarray(qkv, np.float64).reshape(24, 10, 16)
    expected, written = attend_by_hand(heads, pool, chunks, attention)
    assert_close(out, expected.reshape(24, -1), dtype)
    assert np.all(np.asarray(out)[inputs.num_tokens :] == 0), "padding gave something"
    check_pool(pool, after, written, dtype)


def check_pool(before: KVPool, after: KVPool, written: dict[int, np.ndarray], dtype: str) -> None:
    """The new tokens' keys and values are at their slots; nowhere else a bit has changed."""
    slots = np.array(sorted(written))
    for side, index in ((after.keys, 0), (after.values, 1)):
        expected = np.stack([written[slot][index] for slot in slots])
        assert_close(side[slots, LAYER], expected, dtype)
    for old, new in zip(before, after, strict=True):
        kept = [np.asarray(side).copy() for side in (old, new)]
        for side in kept:
            side[slots, LAYER] = 0
        assert np.array_equal(*(side.view(np.uint8) for side in kept))


def test_next_tokens_multiplies_by_the_head_and_takes_the_best(dtype: str):
    ops, x, head = (make_ops(dtype), normal(28, 4 + NUM_EXTRA_LOGIT_ROWS, 40), normal(29, 211, 40))
    step = device_step(ModelInputs.empty(bucket=24, num_rows=4), np.zeros((4, 2), np.int32))
    result = ops.next_tokens(jnp.asarray(x, dtype), ops.load_linear([head], []), step)
    logits = rounded(x, dtype) @ rounded(head, dtype).T
    assert np.array_equal(np.asarray(result)[:, COLUMN_TOKEN], logits.argmax(axis=1))


def test_logits_are_divided_and_capped_before_anybody_reads_them():
    ops = make_ops(logit_divisor=1.5, logit_soft_cap=6.0)
    x, head = normal(28, 4 + NUM_EXTRA_LOGIT_ROWS, 40), normal(29, 211, 40)
    inputs = ModelInputs.empty(bucket=24, num_rows=4)
    inputs.logits.num_logprobs[:] = NUM_TOP
    step = device_step(inputs, np.zeros((4, 2), np.int32))
    result = np.asarray(ops.next_tokens(jnp.asarray(x), ops.load_linear([head], []), step))
    logits = 6.0 * np.tanh(x.astype(np.float64) @ head.T / 1.5 / 6.0)
    exact = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    ids = result[:, COLUMN_TOP : COLUMN_TOP + NUM_TOP]
    top = np.ascontiguousarray(result[:, COLUMN_TOP + NUM_TOP :]).view(np.float32)
    assert np.abs(top - np.take_along_axis(exact, ids, axis=1)).max() < 1e-5
    assert np.abs(top + np.sort(-exact, axis=1)[:, :NUM_TOP]).max() < 1e-5


def test_a_soft_cap_does_not_hide_an_infinite_logit():
    ops, head = make_ops(logit_soft_cap=30.0), normal(29, 211, 40)
    x = normal(28, 4 + NUM_EXTRA_LOGIT_ROWS, 40)
    x[2, 3] = np.inf
    step = device_step(ModelInputs.empty(bucket=24, num_rows=4), np.zeros((4, 2), np.int32))
    result = ops.next_tokens(jnp.asarray(x), ops.load_linear([head], []), step)
    assert np.array_equal(np.asarray(result)[:4, COLUMN_STATE], [1, 1, 0, 1])


def test_a_wrong_weight_is_off_by_more_than_the_tolerance():
    """The comparison can fail: one element of one weight."""
    ops, x, table = make_ops(), normal(8, 24, 40), normal(4, 7, 40)
    spoilt = table.copy()
    spoilt[3, 3] += 1e-3
    y = ops.linear(
        jnp.asarray(x), Linear(jnp.asarray(spoilt), None, FLOAT_FORMATS["float32"], 7), COUNT
    )
    with pytest.raises(AssertionError, match="off by"):
        assert_close(y, x.astype(np.float64) @ table.T, "float32")


@given(data=st.data())
def test_the_wire_brings_every_field_across_bit_for_bit(data: st.DataObject):
    seed = data.draw(st.integers(0, 1 << 32))
    rng = np.random.default_rng(seed)
    rows = rng.permutation(4)[: rng.integers(0, 5)].tolist()
    chunks: list[Chunk] = []
    for row in rows:
        draw = Draw(
            temperature=float(rng.random()),
            top_k=int(rng.integers(0, 1 << 31)),
            top_p=float(rng.random()),
            min_p=float(rng.random()),
            seed=int(rng.integers(0, 1 << 62)),
            num_logprobs=int(rng.integers(-1, 21)),
        )
        stream = Stream(row=row, pages=[row * 2, row * 2 + 1], draw=draw)
        stream.num_computed = int(rng.integers(0, 20))
        tokens = rng.integers(0, 99, rng.integers(1, 7)).tolist()
        tokens[-1] = LAST_SAMPLED if rng.random() < 0.3 else tokens[-1]
        chunks.append(stream.chunk(tokens, samples=bool(rng.random() < 0.7)))
    inputs = build_inputs(chunks, GEOMETRY)
    arrays = device_step(inputs, np.zeros((4, 2), np.int32))
    check_arrays(arrays, inputs)


def check_arrays(arrays: StepArrays, inputs: ModelInputs) -> None:
    assert (arrays.num_tokens, arrays.num_logits) == (inputs.num_tokens, inputs.num_logits)
    for name, group in (("tokens", TokenInputs), ("rows", RowInputs), ("logits", LogitInputs)):
        for spec in specs_of(group):
            theirs = np.ascontiguousarray(getattr(getattr(arrays, name), spec.name))
            ours = np.ascontiguousarray(getattr(getattr(inputs, name), spec.name))
            assert theirs.dtype == ours.dtype == spec.dtype, spec.name
            if spec.name != "ids":
                assert np.array_equal(theirs.view(np.int32), ours.view(np.int32)), spec.name
    lengths = np.diff(inputs.rows.query_starts)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    assert np.array_equal(np.asarray(arrays.token_rows)[: inputs.num_tokens], rows)
    sampled = np.where(
        inputs.tokens.ids == LAST_SAMPLED, 100 + np.asarray(arrays.token_rows), inputs.tokens.ids
    )
    assert np.array_equal(arrays.tokens.ids, sampled)
