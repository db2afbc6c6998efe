"""Quantised operations: the native table against the definition in jnp."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.backends.xla.decoder import load_decoder
from cadenza.backends.xla.layers.weight_source import WeightSource
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec, ExpertChoice, StepArrays
from cadenza.backends.xla.step_program import unpack
from cadenza.batch.step_schema import ModelInputs, StepLayout
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.errors import CheckpointError
from cadenza.models.model_config import ModelConfig
from cadenza.weights.quantised_weight import QuantisedWeight
from cadenza.weights.weight_format import INT4, INT8, WeightFormat, code_format
from tests.by_day import by_day
from tests.checkpoint.quantised_folders import write_quantised
from tests.checkpoint.quantised_writers import ALIGNED, ORDERED, gptq_in_many_orders
from tests.native.quantised_definition import random_weight

pytestmark = pytest.mark.native

MODEL = named_shape("tiny-qwen3-moe")
TOKENS = 40


def spec_of(dtype: str) -> DecoderSpec:
    return DecoderSpec(model=MODEL, dtype=jnp.dtype(dtype).type, page_size=16, quantization="int8")


@pytest.fixture(params=by_day(["float32", "bfloat16"], {"bfloat16"}))
def spec(request: pytest.FixtureRequest) -> DecoderSpec:
    return spec_of(request.param)


@pytest.fixture(
    params=[
        pytest.param(("float32", INT4), id="float32-int4"),
        pytest.param(("bfloat16", INT8), id="bfloat16-int8"),
        pytest.param(("float32", INT8), id="float32-int8", marks=pytest.mark.soak),
        pytest.param(("bfloat16", INT4), id="bfloat16-int4", marks=pytest.mark.soak),
    ]
)
def case(request: pytest.FixtureRequest) -> tuple[DecoderSpec, WeightFormat]:
    """Each type and each format by day, and every pair of them in `make soak`."""
    dtype, format = request.param
    return spec_of(dtype), format


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def both(spec: DecoderSpec) -> tuple[OpTable, OpTable]:
    return NativeOps(spec), OpTable(spec)


def assert_close(ours: Any, expected: Any, spec: DecoderSpec) -> None:
    wide, theirs = np.asarray(ours, np.float64), np.asarray(expected, np.float64)
    largest = np.abs(theirs).max(axis=-1, keepdims=True)
    rounding = 2.0**-7 if jnp.dtype(spec.dtype) == jnp.bfloat16 else 0.0
    assert ((np.abs(wide - theirs) - rounding * np.abs(theirs)) / largest).max() < 1e-5


def step(model: ModelConfig) -> StepArrays:
    inputs = ModelInputs.empty(bucket=TOKENS, num_rows=TOKENS)
    inputs.groups.counts.num_tokens[0] = inputs.groups.counts.num_logits[0] = TOKENS
    inputs.tokens.ids[:] = np.arange(TOKENS) * 7 % model.vocab_size
    inputs.logits.token_indices[:TOKENS] = np.arange(TOKENS)
    shape = StepLayout(TOKENS, TOKENS)
    last, table = np.zeros(TOKENS, np.int32), np.zeros((TOKENS, 1), np.int32)
    return jax.jit(unpack, static_argnums=0)(shape, inputs.words, last, table)


def test_fused_linears_with_biases_agree(case: tuple[DecoderSpec, WeightFormat]):
    spec, format = case
    parts, bias = [normal(1, 40, 70), normal(2, 21, 70)], [normal(3, 40), normal(4, 21)]
    x = normal(5, TOKENS, 70).astype(spec.dtype)
    ours, expected = (
        jax.jit(ops.linear)(x, ops.load_linear(parts, bias, format), count=np.int32(TOKENS))
        for ops in both(spec)
    )
    assert_close(ours, expected, spec)


def test_fused_linears_with_codes_of_several_formats_agree(spec: DecoderSpec):
    random = np.random.default_rng(1)
    x = normal(5, TOKENS, 70).astype(spec.dtype)
    for rows in ((32, 64, 21), (31, 20, 10)):
        formats = (INT8, code_format(4, "float32", "offset"), code_format(8, "float32", None, 16))
        parts = [random_weight(random, *each, 70) for each in zip(formats, rows, strict=True)]
        ours, expected = (
            jax.jit(ops.linear)(x, ops.load_linear(parts, []), count=np.int32(TOKENS))
            for ops in both(spec)
        )
        assert_close(ours, expected, spec)


def test_codes_beside_floats_are_dequantised(spec: DecoderSpec):
    codes = random_weight(np.random.default_rng(1), INT8, 32, 70)
    floats = normal(5, 21, 70)
    for ops in both(spec):
        mixed = ops.load_linear([codes, floats], [])
        assert mixed.format == spec.weight_format
        wanted = ops.load_linear([codes.dequantised(), floats], [])
        assert np.asarray(mixed.weight).tobytes() == np.asarray(wanted.weight).tobytes()


def test_a_mixture_of_experts_with_codes_of_several_formats_agrees(spec: DecoderSpec):
    random, x = np.random.default_rng(2), normal(9, TOKENS, 70).astype(spec.dtype)
    formats = (code_format(4, "float16", "offset"), INT4)
    pairs = [tuple(random_weight(random, each, 96, 70) for each in formats) for _ in range(2)]
    ids = jnp.asarray([[row % 2] for row in range(TOKENS)], jnp.int32)
    choice = ExpertChoice(ids, jnp.ones((TOKENS, 1), jnp.float32))
    assert MODEL.experts is not None
    experts = replace(MODEL.experts, num_experts=2, num_chosen=1, intermediate_size=96)
    small = replace(spec, model=replace(MODEL, experts=experts))
    ours, expected = (
        jax.jit(ops.grouped_gated_linear)(x, ops.load_experts(pairs), choice, np.int32(TOKENS))
        for ops in both(small)
    )
    assert_close(ours, expected, spec)


def in_order(weight: QuantisedWeight, seed: int) -> QuantisedWeight:
    order = np.random.default_rng(seed).permutation(weight.shape[1]).astype(np.int32)
    return replace(weight, order=order)


def test_operands_whose_inputs_are_ordered_agree(spec: DecoderSpec):
    random, x = np.random.default_rng(3), normal(9, TOKENS, 70).astype(spec.dtype)
    pair = [in_order(random_weight(random, INT4, rows, 70), 1) for rows in (32, 21)]
    ours, expected = (
        jax.jit(ops.linear)(x, ops.load_linear(pair, []), count=np.int32(TOKENS))
        for ops in both(spec)
    )
    assert_close(ours, expected, spec)
    ids = jnp.asarray([[row % 3, (row + 1) % 3] for row in range(TOKENS)], jnp.int32)
    choice = ExpertChoice(ids, jnp.full((TOKENS, 2), 0.5, jnp.float32))
    assert MODEL.experts is not None
    experts = replace(MODEL.experts, num_experts=3, num_chosen=2, intermediate_size=96)
    small = replace(spec, model=replace(MODEL, experts=experts))
    pairs = [tuple(random_weight(random, INT4, 96, 70) for _ in range(2)) for _ in range(3)]
    pairs[1:] = [
        (in_order(gate, seed), in_order(up, seed)) for seed, (gate, up) in enumerate(pairs[1:])
    ]
    downs = [in_order(random_weight(random, INT4, 40, 96), seed) for seed in range(3)]
    between, residual = normal(5, TOKENS, 2, 96).astype(spec.dtype), normal(6, TOKENS, 40)

    def mix(ops: OpTable) -> Any:
        weights = ops.load_experts(pairs), ops.load_experts([[each] for each in downs])
        gated = jax.jit(ops.grouped_gated_linear)(x, weights[0], choice, np.int32(TOKENS))
        down = jax.jit(ops.grouped_linear)
        return gated, down(between, weights[1], choice, residual, np.int32(TOKENS))

    for ours, expected in zip(*map(mix, both(small)), strict=True):
        assert_close(ours, expected, spec)


def test_linears_of_one_operand_in_several_orders_are_refused_by_name(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(ALIGNED))
    config = str(tmp_path / "config.json")
    checkpoint = open_checkpoint(write_quantised(tmp_path, config, ORDERED, gptq_in_many_orders))
    model = checkpoint.config
    spec = DecoderSpec(model=model, dtype=jnp.float32, page_size=16)
    with pytest.raises(CheckpointError, match=r"layers\.0.*q_proj.*v_proj have the inputs in dif"):
        load_decoder(WeightSource(OpTable(spec), spec, checkpoint.weights), 64)


def test_an_embedding_whose_inputs_are_ordered_gives_its_rows(spec: DecoderSpec):
    random = np.random.default_rng(4)
    weight = random_weight(random, INT8, MODEL.vocab_size, MODEL.hidden_size)
    ordered = in_order(weight, 5)
    expected = ordered.dequantised()[np.arange(TOKENS) * 7 % MODEL.vocab_size]
    for ops in both(spec):
        rows = jax.jit(ops.embed)(ops.load_linear([ordered]), step(MODEL))
        np.testing.assert_allclose(np.asarray(rows)[:TOKENS], expected, rtol=1e-6)


def test_gated_linears_agree(case: tuple[DecoderSpec, WeightFormat]):
    spec, format = case
    gate, up = normal(6, MODEL.intermediate_size, 70), normal(7, MODEL.intermediate_size, 70)
    x = normal(8, TOKENS, 70).astype(spec.dtype)
    ours, expected = (
        jax.jit(ops.gated_linear)(x, ops.load_gate_up([gate, up], [], format), np.int32(TOKENS))
        for ops in both(spec)
    )
    assert_close(ours, expected, spec)


def test_mixtures_of_experts_agree(case: tuple[DecoderSpec, WeightFormat]):
    spec, format = case
    assert MODEL.experts is not None
    count, inner, width = MODEL.experts.num_experts, MODEL.experts.intermediate_size, 70
    x, residual = normal(9, TOKENS, width).astype(spec.dtype), normal(10, TOKENS, width)
    between = normal(14, TOKENS, MODEL.experts.num_chosen, inner).astype(spec.dtype)

    def mix(ops: OpTable) -> Any:
        router = ops.load_linear([normal(11, count, width)], [])
        pairs = [(normal(20 + i, inner, width), normal(50 + i, inner, width)) for i in range(count)]
        gate_up = ops.load_experts(pairs, format)
        down = ops.load_experts([[normal(90 + i, width, inner)] for i in range(count)], format)

        def run(weights: Any, x: Any, residual: Any, rows: Any) -> Any:
            choice = ops.route_experts(x, weights[0], rows)
            gated = ops.grouped_gated_linear(x, weights[1], choice, rows)
            # Of its own, so that a code of `gated` that rounds otherwise changes nothing.
            return gated, ops.grouped_linear(between, weights[2], choice, residual, rows)

        return jax.jit(run)((router, gate_up, down), x, residual, np.int32(TOKENS))

    for ours, expected in zip(*map(mix, both(spec)), strict=True):
        assert_close(ours, expected, spec)


def test_embedded_rows_and_chosen_tokens_are_those_of_the_tied_table(
    case: tuple[DecoderSpec, WeightFormat],
):
    spec, format = case
    model = replace(MODEL, logit_soft_cap=None)
    table = normal(12, model.vocab_size, model.hidden_size)
    found = []
    for ops in both(replace(spec, model=model)):
        weight = ops.load_linear([table], [], format)
        rows = np.asarray(jax.jit(ops.embed)(weight, step(model)))
        num_rows = len(step(model).logits.token_indices)
        x = normal(13, num_rows, model.hidden_size).astype(spec.dtype)
        chosen = np.asarray(jax.jit(ops.next_tokens)(x, weight, step(model)))[:TOKENS, 0]
        found.append((rows.tobytes(), chosen.tolist()))
    assert found[0] == found[1]
