"""Each native operation against the reference's on the same inputs, in both types.

Shapes are hostile: widths that no tile divides, fused parts, grouped heads, partial rotation,
biases, scattered pages, contexts over two softmax spans, ragged rows, NaN in unwritten slots.
The sampler is held to `ops.sampling` and to the reference engine's on logits that both sides have
to the last bit: x times an identity. Legend as in `ops.table`.

Tolerances: 4e-6 of the row's largest value; in bfloat16 one rounding of each value more (2^-7), and
in its attention, whose softmax weights are bfloat16 too, 2^-8 of the row's largest more.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.backends.token_choice import (
    COLUMN_LOGPROB,
    COLUMN_RANK,
    COLUMN_STATE,
    COLUMN_TOKEN,
    COLUMN_TOP,
    NUM_TOP,
)
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.reference import CHOICE, OpTable
from cadenza.backends.xla.ops.table import (
    AttendingLayer,
    DecoderSpec,
    HeadFactors,
    HeadInputs,
    Linear,
    StepArrays,
)
from cadenza.backends.xla.step_program import unpack
from cadenza.batch.step_schema import LogitInputs, ModelInputs, StepLayout
from cadenza.config import KVCacheDType
from cadenza.models.layer_kind import LayerKind
from cadenza.models.model_config import ExpertsConfig, ModelConfig
from cadenza.models.rope_config import RopeConfig
from cadenza.models.rope_factors import rope_factors
from cadenza.request import SamplingParams
from cadenza.verification.reference import choose_token, gumbel_noise, kept_tokens
from tests.by_day import by_day
from tests.contract.steps import Chunk, Geometry, Stream, build_inputs
from tests.xla.harness import HOSTILE, NAN
from tests.xla.test_sampling import (
    ROWS,
    arrays_of,
    is_on_the_edge,
    random_logits,
    random_params,
    scaled_by,
)

pytestmark = pytest.mark.native

FLOAT32_TOLERANCE = 4e-6
ROUNDING = 2.0**-7
LOGPROB_TOLERANCE = 1e-5

BUCKETS = (64, 200)
# Buckets and true numbers of rows.
SIZES = ((64, 1), (64, 2), (64, 7), (64, 64), (200, 1), (200, 65), (200, 200))

PARTS = (64, 33, 20)
NUM_OUT = sum(PARTS)
MAX_LEN = 640
WIDE = replace(
    HOSTILE,
    family="qwen3",
    vocab_size=997,
    hidden_size=138,
    intermediate_size=203,
    num_heads=5,
    num_kv_heads=1,
    head_dim=80,
    rope=RopeConfig(theta=1e6, rotary_dim=40),
    qk_norm="head",
)
SCALED = replace(
    HOSTILE,
    num_kv_heads=3,
    head_dim=48,
    activation="gelu_tanh",
    qk_norm="all_heads",
    layer_pattern=(LayerKind(window=100, has_rope=False),),
    attention_scale=0.2,
    attention_soft_cap=2.5,
    logit_soft_cap=4.0,
    logit_divisor=1.7,
    embedding_scale=6.3,
    residual_scale=0.22,
)
SHAPES: dict[str, ModelConfig] = {"hostile": HOSTILE, "wide": WIDE, "scaled": SCALED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    spec: DecoderSpec
    native: OpTable
    reference: OpTable

    @property
    def model(self) -> ModelConfig:
        return self.spec.model

    @property
    def is_float32(self) -> bool:
        return jnp.dtype(self.spec.dtype) == jnp.float32

    def activations(self, seed: int, *shape: int) -> np.ndarray:
        return normal(seed, *shape).astype(self.spec.dtype)

    def check(self, ours: Any, expected: Any, count: int) -> None:
        assert (ours.dtype, ours.shape[1:]) == (expected.dtype, expected.shape[1:])
        rounds = ours.dtype == jnp.bfloat16
        rows, expected_rows = np.asarray(ours)[:count], np.asarray(expected)[:count]
        assert_close(rows, expected_rows, rounding=ROUNDING if rounds else 0.0)


@functools.cache
def make_pair(
    model: ModelConfig, dtype: str, page_size: int = 16, kv_cache_dtype: KVCacheDType = "auto"
) -> Pair:
    spec = DecoderSpec(
        model=model, dtype=jnp.dtype(dtype).type, page_size=page_size, kv_cache_dtype=kv_cache_dtype
    )
    return Pair(spec=spec, native=NativeOps(spec), reference=OpTable(spec))


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


def shapes_and_types(*chosen: str) -> list[Any]:
    """All pairs; `make test` takes the chosen ones, since compiling the reference takes seconds."""
    pairs = [f"{dtype}-{shape}" for dtype in ("float32", "bfloat16") for shape in SHAPES]
    return by_day(pairs, chosen)


@pytest.fixture(params=shapes_and_types("float32-hostile", "bfloat16-wide", "float32-scaled"))
def pair(request: pytest.FixtureRequest) -> Pair:
    dtype, shape = request.param.split("-")
    return make_pair(SHAPES[shape], dtype)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_close(
    ours: Any, expected: Any, *, rounding: float, tolerance: float = FLOAT32_TOLERANCE
) -> None:
    wide_ours, wide = np.asarray(ours, np.float64), np.asarray(expected, np.float64)
    largest = np.abs(wide).max(axis=-1, keepdims=True)
    error = (np.abs(wide_ours - wide) - rounding * np.abs(wide)) / largest
    assert np.isfinite(wide_ours).all()
    assert error.max() <= tolerance, f"off by {error.max():.2e}"


unpack_on_device = jax.jit(unpack, static_argnums=0)


def device_step(inputs: ModelInputs, page_table: np.ndarray) -> StepArrays:
    shape = StepLayout(len(inputs.tokens.ids), len(inputs.rows.kv_lens))
    last_sampled = np.zeros(shape.num_rows, np.int32)
    return unpack_on_device(shape, inputs.words, last_sampled, page_table)


def token_step(count: int, token_ids: np.ndarray, logit_indices: np.ndarray) -> StepArrays:
    inputs = ModelInputs.empty(bucket=len(token_ids), num_rows=len(logit_indices))
    inputs.groups.counts.num_tokens[0] = count
    inputs.groups.counts.num_logits[0] = len(logit_indices)
    inputs.tokens.ids[:] = token_ids
    inputs.logits.token_indices[: len(logit_indices)] = logit_indices
    return device_step(inputs, np.zeros((len(logit_indices), 1), np.int32))


@pytest.mark.parametrize("bucket", BUCKETS)
def test_embed_takes_the_same_rows_to_the_last_bit(pair: Pair, bucket: int):
    table = normal(1, pair.model.vocab_size, pair.model.hidden_size)
    ids = np.random.default_rng(2).integers(0, pair.model.vocab_size, bucket)
    ids[:2] = 0, pair.model.vocab_size - 1
    step = token_step(bucket - 3, ids, np.zeros(4))
    ours, expected = (
        np.asarray(jax.jit(ops.embed)(ops.load_linear([table]), step))[: bucket - 3]
        for ops in (pair.native, pair.reference)
    )
    assert np.array_equal(ours, expected)


def test_rms_norm_agrees(pair: Pair):
    scales = np.resize(np.float32([1.0, 1e-4, 1e4, 1e-20]), BUCKETS[-1])
    x = normal(3, BUCKETS[-1], pair.model.hidden_size) * scales[:, None]
    weight = normal(4, pair.model.hidden_size)
    expected = jax.jit(pair.reference.rms_norm)(x, weight, np.int32(0))
    call = jax.jit(pair.native.rms_norm)
    for bucket, count in SIZES:
        pair.check(call(x[:bucket], weight, np.int32(count)), expected, count)


def test_the_same_logit_rows_are_taken(pair: Pair):
    rows = np.array([59, 0, 7, 7, 31])
    step = token_step(60, np.zeros(64), rows)
    for x in (normal(5, 64, pair.model.hidden_size), pair.activations(6, 64, 48)):
        for ops in (pair.native, pair.reference):
            taken = np.asarray(jax.jit(ops.take_logit_rows)(x, step))
            assert taken[: len(rows)].tobytes() == np.asarray(x)[rows].tobytes()


@functools.cache  # so that no bucket is traced twice
def jitted_linear(ops: OpTable) -> Any:
    return jax.jit(ops.linear)


def run_linear(
    ops: OpTable, x: np.ndarray, weight: Linear, count: int, residual: Any = None
) -> np.ndarray:
    return np.asarray(jitted_linear(ops)(x, weight, np.int32(count), residual))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_linear_agrees_on_fused_parts(pair: Pair, has_bias: bool, has_residual: bool):
    width = pair.model.hidden_size
    parts = [normal(7 + i, part, width) for i, part in enumerate(PARTS)]
    bias = [normal(17 + i, part) for i, part in enumerate(PARTS)] if has_bias else []
    x = pair.activations(30, BUCKETS[-1], width)
    residual = normal(31, BUCKETS[-1], NUM_OUT) if has_residual else None
    reference = pair.reference.load_linear(parts, bias)
    expected = run_linear(pair.reference, x, reference, BUCKETS[-1], residual)
    weight = pair.native.load_linear(parts, bias)
    for bucket, count in SIZES:
        given = None if residual is None else residual[:bucket]
        pair.check(run_linear(pair.native, x[:bucket], weight, count, given), expected, count)


def test_linear_norm_add_agrees(pair: Pair):
    width = pair.model.hidden_size
    table, norm = normal(32, width, width), normal(33, width)
    x, residual = pair.activations(34, BUCKETS[-1], width), normal(35, BUCKETS[-1], width)
    reference = pair.reference.load_linear([table], [])
    expected = jax.jit(pair.reference.linear_norm_add)(x, reference, norm, residual, np.int32(0))
    weight, call = pair.native.load_linear([table], []), jax.jit(pair.native.linear_norm_add)
    for bucket, count in SIZES:
        ours = call(x[:bucket], weight, norm, residual[:bucket], np.int32(count))
        pair.check(ours, expected, count)


@pytest.mark.parametrize("has_bias", [False, True])
def test_gated_linear_agrees(pair: Pair, has_bias: bool):
    inner, outer = pair.model.hidden_size, pair.model.intermediate_size
    gate, up = normal(40, outer, inner), normal(41, outer, inner)
    bias = [normal(42, outer), normal(43, outer)] if has_bias else []
    x = pair.activations(44, BUCKETS[-1], inner)
    reference = pair.reference.load_gate_up([gate, up], bias)
    expected = jax.jit(pair.reference.gated_linear)(x, reference, np.int32(0))
    weight, call = pair.native.load_gate_up([gate, up], bias), jax.jit(pair.native.gated_linear)
    for bucket, count in SIZES:
        pair.check(call(x[:bucket], weight, np.int32(count)), expected, count)


MIXTURE = replace(
    HOSTILE,
    experts=ExpertsConfig(num_experts=11, num_chosen=3, intermediate_size=37, over_chosen=True),
    activation="gelu_tanh",
    residual_scale=0.6,
)
MIXTURES = {
    "biased": replace(MIXTURE, activation="clamped_swiglu"),
    "over_chosen": MIXTURE,
    "over_all": replace(MIXTURE, experts=replace(MIXTURE.experts, over_chosen=False)),
    "all_chosen": replace(MIXTURE, experts=replace(MIXTURE.experts, num_chosen=11)),
}


Mix = Callable[[np.ndarray, np.ndarray, int], list[np.ndarray]]


def mixture(ops: OpTable, width: int, *, has_bias: bool = False) -> Mix:
    def biases(seed: int, *sizes: int) -> list[list[np.ndarray]]:
        own = ([normal(seed + i + 50 * j, n) for j, n in enumerate(sizes)] for i in range(11))
        return list(own) if has_bias else []

    inner, gain = 37, 8 if has_bias else 1
    router = ops.load_linear([normal(45, 11, width)], [normal(48, 11)] if has_bias else [])
    pairs = [
        (gain * normal(100 + i, inner, width), normal(200 + i, inner, width)) for i in range(11)
    ]
    downs = [[normal(300 + i, width, inner)] for i in range(11)]
    gate_up = ops.load_experts(pairs, biases=biases(400, inner, inner))
    down = ops.load_experts(downs, biases=biases(500, width))

    @jax.jit
    def run(weights: tuple[Linear, ...], x: Any, residual: Any, count: Any) -> tuple[Any, ...]:
        choice = ops.route_experts(x, weights[0], count)
        gated = ops.grouped_gated_linear(x, weights[1], choice, count)
        return *choice, gated, ops.grouped_linear(gated, weights[2], choice, residual, count)

    return lambda x, residual, count: list(
        run((router, gate_up, down), x, residual, np.int32(count))
    )


@pytest.mark.parametrize("name", by_day(MIXTURES, {"over_chosen", "over_all", "biased"}))
def test_a_mixture_of_experts_agrees(name: str, dtype: str):
    pair, has_bias = make_pair(MIXTURES[name], dtype), name == "biased"
    x, residual = pair.activations(46, BUCKETS[-1], 40), normal(47, BUCKETS[-1], 40)
    expected = mixture(pair.reference, 40, has_bias=has_bias)(x, residual, BUCKETS[-1])
    mix = mixture(pair.native, 40, has_bias=has_bias)
    for bucket, count in SIZES:
        ours = mix(x[:bucket], residual[:bucket], count)
        assert np.array_equal(ours[0][:count], expected[0][:count])
        for mine, theirs in zip(ours[1:], expected[1:], strict=True):
            pair.check(mine, theirs, count)


@pytest.mark.parametrize("stored_dtype", ["float32", "bfloat16", "float16"])
def test_weights_of_every_stored_type_are_read_alike(pair: Pair, stored_dtype: str):
    stored = np.asarray(jnp.asarray(normal(50, NUM_OUT, pair.model.hidden_size), stored_dtype))
    x = pair.activations(51, 64, pair.model.hidden_size)
    ours, expected = (
        run_linear(ops, x, ops.load_linear([stored], []), 64)
        for ops in (pair.native, pair.reference)
    )
    pair.check(ours, expected, 64)


# New tokens of four rows, step by step; the first row's context crosses a span of 512.
ATTEND_STEPS = ((530, 1, 17, 0), (1, 1, 5, 6), (0, 40, 1, 16), (20, 1, 9, 1), (1, 1, 1, 1))


def attend_inputs(page_size: int, buckets: tuple[int, int]) -> tuple[list[ModelInputs], np.ndarray]:
    """The steps over scattered pages, the first in the large bucket; and the page table."""
    per_row = MAX_LEN // page_size
    pages = np.random.default_rng(60).permutation(4 * per_row).reshape(4, per_row)
    streams = [Stream(row=row, pages=pages[row].tolist()) for row in range(4)]
    steps: list[ModelInputs] = []
    for counts in ATTEND_STEPS:
        chunks: list[Chunk] = [
            stream.chunk([0] * count, samples=True)
            for stream, count in zip(streams, counts, strict=True)
            if count
        ]
        bucket = min(size for size in buckets if size >= sum(counts))
        geometry = Geometry(bucket=bucket, num_rows=4, page_size=page_size)
        steps.append(build_inputs(chunks, geometry))
    return steps, pages.astype(np.int32)


def attend(
    pair: Pair, ops: OpTable, buckets: tuple[int, int] = (64, 560), *, has_norms: bool = True
) -> list[np.ndarray]:
    model, page_size = pair.model, pair.spec.page_size
    steps, pages = attend_inputs(page_size, buckets)
    kind, heads = model.layer_pattern[0], model.heads
    layer, norms = AttendingLayer(1, heads, kind.window), None
    if model.qk_norm is not None and has_norms:
        is_whole = model.qk_norm == "all_heads"
        sizes = (heads.query_size, heads.kv_size) if is_whole else (model.head_dim,) * 2
        norms = (normal(61, sizes[0]), normal(62, sizes[1]))
    call = jax.jit(ops.rope_append_attend, donate_argnums=1, static_argnames="layer")
    pool = ops.new_kv_pool(model.kv_groups[0], pages.size, NAN)
    outputs: list[np.ndarray] = []
    for index, inputs in enumerate(steps):
        values = normal(70 + index, inputs.num_tokens, heads.query_size + 2 * heads.kv_size)
        qkv = np.full((len(inputs.tokens.ids), values.shape[1]), NAN, np.float32)
        qkv[: inputs.num_tokens] = values
        step = device_step(inputs, pages)
        rope = rope_factors(model.rope_of(kind), MAX_LEN)
        factors = HeadFactors(norms, rope, step.tokens.positions)
        out, pool = call(HeadInputs(qkv.astype(pair.spec.dtype)), pool, factors, step, layer=layer)
        outputs.append(np.asarray(out, np.float32)[: inputs.num_tokens])
    return outputs


@functools.cache
def reference_attention(
    shape: str, dtype: str, kv_cache_dtype: KVCacheDType = "auto"
) -> list[np.ndarray]:
    """Computed once, since what a page holds cannot depend on its size, and in one bucket."""
    pair = make_pair(SHAPES[shape], dtype, kv_cache_dtype=kv_cache_dtype)
    return attend(pair, pair.reference, (560, 560))


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(
    "name", shapes_and_types("float32-hostile", "bfloat16-wide", "bfloat16-scaled")
)
def test_attention_agrees_over_chunks_and_decodes(name: str, page_size: int):
    dtype, shape = name.split("-")
    pair = make_pair(SHAPES[shape], dtype, page_size)
    ours, expected = attend(pair, pair.native), reference_attention(shape, dtype)
    for mine, theirs in zip(ours, expected, strict=True):
        if pair.is_float32:
            assert_close(mine, theirs, rounding=0.0)
        else:
            assert_close(mine, theirs, rounding=ROUNDING, tolerance=ROUNDING / 2)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("name", shapes_and_types("float32-hostile", "bfloat16-wide"))
def test_attention_over_kv_in_int8_agrees_with_its_definition(name: str, page_size: int):
    """A value on the edge between two codes may get the other one, which few results see."""
    dtype, shape = name.split("-")
    pair = make_pair(SHAPES[shape], dtype, page_size, "int8")
    ours, expected = attend(pair, pair.native), reference_attention(shape, dtype, "int8")
    errors: list[np.ndarray] = []
    for mine, theirs in zip(ours, expected, strict=True):
        largest = np.abs(theirs).max(axis=-1, keepdims=True)
        errors.append((np.abs(mine - theirs) / largest).ravel())
        assert_close(mine, theirs, rounding=0.0, tolerance=2 * ROUNDING)
    median = np.median(np.concatenate(errors))
    assert median < (FLOAT32_TOLERANCE if pair.is_float32 else ROUNDING / 4)


def test_attention_over_kv_in_int8_is_not_that_over_float_kv():
    """The negative control: the tolerance of int8 KV tells the two apart."""
    pair = make_pair(SHAPES["hostile"], "float32", kv_cache_dtype="int8")
    ours = np.concatenate(attend(pair, pair.native))
    plain = np.concatenate(reference_attention("hostile", "float32"))
    assert np.median(np.abs(ours - plain) / np.abs(plain).max()) > 10 * FLOAT32_TOLERANCE


def test_results_have_the_same_bits_in_every_bucket(pair: Pair):
    """A small bucket and a large one around the same rows."""
    model = pair.model
    small, large = attend(pair, pair.native), attend(pair, pair.native, (576, 576))
    assert all(np.array_equal(*outputs) for outputs in zip(small, large, strict=True))
    weight = pair.native.load_linear([normal(80, NUM_OUT, model.hidden_size)], [])
    gate, up = (normal(81 + i, model.intermediate_size, model.hidden_size) for i in range(2))
    gated, call = pair.native.load_gate_up([gate, up], []), jax.jit(pair.native.gated_linear)
    x = pair.activations(83, 200, model.hidden_size)
    for bucket in (3, 64, 199):
        linears = [run_linear(pair.native, y, weight, 3)[:3] for y in (x[:bucket], x)]
        assert np.array_equal(*linears)
        products = [np.asarray(call(y, gated, np.int32(3)))[:3] for y in (x[:bucket], x)]
        assert np.array_equal(*products)


def test_a_wrong_weight_is_off_by_more_than_the_tolerance(pair: Pair):
    """The negative control: one element of a linear."""
    width = pair.model.hidden_size
    table, x = normal(90, NUM_OUT, width), pair.activations(91, 64, width)
    spoilt = table.copy()
    spoilt[5, 7] += 0.3
    ours = run_linear(pair.native, x, pair.native.load_linear([spoilt], []), 64)
    expected = run_linear(pair.reference, x, pair.reference.load_linear([table], []), 64)
    with pytest.raises(AssertionError, match="off by"):
        pair.check(ours, expected, 64)


def test_attention_without_its_norms_is_off_by_more_than_the_tolerance():
    """The negative control."""
    pair = make_pair(SHAPES["wide"], "bfloat16")
    plain = attend(pair, pair.native, has_norms=False)
    with pytest.raises(AssertionError, match="off by"):
        assert_close(plain[0], reference_attention("wide", "bfloat16")[0], rounding=10 * ROUNDING)


def sampling_step(sampling: LogitInputs[Any], count: int) -> StepArrays:
    nothing = dict.fromkeys(StepArrays._fields, np.int32(0))
    changes = {"num_logits": np.int32(count), "logits": sampling, "rules": None}
    return StepArrays(**{**nothing, **changes})


@functools.cache
def chooser(vocab_size: int, dtype: str) -> Callable[[np.ndarray, StepArrays], np.ndarray]:
    ops = make_pair(replace(HOSTILE, vocab_size=vocab_size), dtype).native
    identity = ops.load_linear([np.eye(vocab_size, dtype=np.float32)], [])
    call = jax.jit(ops.next_tokens)
    return lambda logits, step: np.asarray(call(logits, identity, step))


def native_choices(logits: np.ndarray, sampling: LogitInputs[Any], dtype: str) -> np.ndarray:
    choose = chooser(logits.shape[1], dtype)
    return choose(logits.astype(jnp.dtype(dtype)), sampling_step(sampling, len(logits)))


def representable(logits: np.ndarray, dtype: str) -> np.ndarray:
    """The logits in a type, without negative zeros, which a sum of products never gives."""
    return logits.astype(jnp.dtype(dtype)).astype(np.float32) + np.float32(0.0)


def is_a_near_tie(logits: np.ndarray, params: SamplingParams, position: int) -> bool:
    scaled = scaled_by(logits, params)
    noisy = scaled + gumbel_noise(params.seed or 0, position, len(logits))
    best = np.sort(np.where(kept_tokens(scaled, params), noisy, -np.inf))[-2:]
    return bool(best[1] - best[0] <= 1e-6 * max(1.0, np.abs(scaled).max()))


@pytest.mark.parametrize("vocab_size", by_day([23, 331], {331}))
def test_choices_are_the_samplers_and_the_references(vocab_size: int, dtype: str):
    """Tokens, ranks and top ids are equal, but for rows in which rounding alone decides."""
    num_other = num_rows = 0
    for seed in range(8):
        rng = np.random.default_rng([vocab_size, seed])
        logits = representable(random_logits(rng, vocab_size), dtype)
        params, positions = random_params(rng, vocab_size), rng.integers(0, 1 << 20, ROWS)
        sampling = arrays_of(params, positions)
        ours = native_choices(logits, sampling, dtype)
        theirs = np.asarray(jax.jit(CHOICE.choose_tokens)(logits, sampling))
        for row, each in enumerate(params):
            place = int(positions[row])
            plain = choose_token(logits[row], each, seed=each.seed or 0, position=place)
            num_rows += 1
            if len({int(ours[row, 0]), int(theirs[row, 0]), plain}) > 1:
                num_other += 1
                assert not each.is_greedy
                scaled = scaled_by(logits[row], each)
                assert is_on_the_edge(scaled, each) or is_a_near_tie(logits[row], each, place)
        check_details(ours, theirs, logits, params)
    assert num_other <= num_rows // 500, f"{num_other} of {num_rows} rows differ"


def check_details(
    ours: np.ndarray, theirs: np.ndarray, logits: np.ndarray, params: list[SamplingParams]
) -> None:
    asks = np.array([each.logprobs is not None for each in params])
    assert (ours[:, COLUMN_STATE] == 1).all()
    assert (ours[~asks, COLUMN_LOGPROB:] == 0).all()
    same = asks & (ours[:, COLUMN_TOKEN] == theirs[:, COLUMN_TOKEN])
    ours, theirs, scale = ours[same], theirs[same], np.abs(logits[same]).max(axis=1, keepdims=True)
    whole = [COLUMN_TOKEN, COLUMN_RANK, *range(COLUMN_TOP, COLUMN_TOP + NUM_TOP)]
    assert np.array_equal(ours[:, whole], theirs[:, whole])
    bits = [COLUMN_LOGPROB, *range(COLUMN_TOP + NUM_TOP, COLUMN_TOP + 2 * NUM_TOP)]
    mine, expected = (np.ascontiguousarray(x[:, bits]).view(np.float32) for x in (ours, theirs))
    assert (np.abs(mine - expected) <= LOGPROB_TOLERANCE * np.maximum(1.0, scale)).all()


@pytest.mark.parametrize("num_logprobs", by_day([-1, NUM_TOP], {NUM_TOP}))
def test_greedy_ties_go_to_the_lowest_id_in_a_large_vocabulary(num_logprobs: int, dtype: str):
    """Small whole numbers, so that every sum is exact and most maxima are shared."""
    rng = np.random.default_rng(100)
    x, head = rng.integers(-2, 3, (ROWS, 6)), rng.integers(-2, 3, (5003, 6))
    logits = (x @ head.T).astype(np.float32)
    assert ((logits == logits.max(axis=1, keepdims=True)).sum(axis=1) > 1).mean() > 0.5
    params = [SamplingParams(temperature=0.0, logprobs=20 if num_logprobs > 0 else None)] * ROWS
    sampling = arrays_of(params, np.zeros(ROWS))
    ops = make_pair(replace(HOSTILE, vocab_size=5003), dtype).native
    weight = ops.load_linear([head.astype(np.float32)], [])
    step = sampling_step(sampling, ROWS)
    ours = np.asarray(jax.jit(ops.next_tokens)(jnp.asarray(x, dtype), weight, step))
    assert np.array_equal(ours[:, COLUMN_TOKEN], logits.argmax(axis=1))
    check_details(ours, np.asarray(jax.jit(CHOICE.choose_tokens)(logits, sampling)), logits, params)


def test_next_tokens_agrees_on_random_heads(pair: Pair):
    """The head's product too: logits are only as equal as two orders of summation make them."""
    model = pair.model
    head, x = normal(110, model.vocab_size, model.hidden_size), normal(111, 16, model.hidden_size)
    params = [SamplingParams(temperature=0.0, logprobs=20)] * 16
    step = sampling_step(arrays_of(params, np.zeros(16)), 16)
    ours, theirs = (
        np.asarray(
            jax.jit(ops.next_tokens)(
                jnp.asarray(x, pair.spec.dtype), ops.load_linear([head], []), step
            )
        )
        for ops in (pair.native, pair.reference)
    )
    check_details(ours, theirs, x @ head.T / model.logit_divisor, params)


def test_rows_beyond_the_count_are_not_chosen_for():
    sampling = arrays_of([SamplingParams(temperature=0.0)] * ROWS, np.zeros(ROWS))
    logits = representable(random_logits(np.random.default_rng(120), 23), "float32")
    spoilt = logits.copy()
    spoilt[5:] = NAN
    ours = chooser(23, "float32")(spoilt, sampling_step(sampling, 5))
    assert np.array_equal(ours[:5, COLUMN_TOKEN], logits[:5].argmax(axis=1))
    assert (ours[:5, COLUMN_STATE] == 1).all()
    assert (ours[5:] == 0).all()
