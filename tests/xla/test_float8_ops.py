"""Operations with float8_e4m3fn weights: the native table against the definition in jnp."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.quantised import float8_product, join_float8
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.weights.quantised_weight import Float8Weight
from cadenza.weights.weight_format import FLOAT8, FLOAT8_BLOCK
from tests.by_day import by_day
from tests.xla.test_quantised_ops import TOKENS, assert_close, normal, step

MODEL = named_shape("tiny-qwen3-moe")
WIDTH = 170  # a whole block and a part of one


@pytest.fixture(params=by_day(["float32", "bfloat16"], {"bfloat16"}))
def spec(request: pytest.FixtureRequest) -> DecoderSpec:
    return DecoderSpec(model=MODEL, dtype=jnp.dtype(request.param).type, page_size=16)


def both(spec: DecoderSpec) -> tuple[OpTable, OpTable]:
    return NativeOps(spec), OpTable(spec)


def weight(seed: int, rows: int, reduction: int) -> Float8Weight:
    codes = normal(seed, rows, reduction).astype(jnp.float8_e4m3fn).view(np.uint8)
    scales = np.abs(normal(seed + 1000, rows, -(-reduction // FLOAT8_BLOCK))) + np.float32(0.1)
    return Float8Weight(codes, scales)


@pytest.mark.parametrize("reduction", [31, 128, 300])
def test_the_definition_is_the_product_of_the_dequantised_weight(reduction: int):
    own, x = weight(1, 40, reduction), normal(2, 5, reduction)
    found = np.asarray(jax.jit(float8_product)(x, join_float8([own])))
    expected = x.astype(np.float64) @ own.dequantised().astype(np.float64).T
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.native
def test_fused_float8_linears_with_biases_agree(spec: DecoderSpec):
    parts, bias = [weight(1, 40, WIDTH), weight(2, 21, WIDTH)], [normal(3, 40), normal(4, 21)]
    x = normal(5, TOKENS, WIDTH).astype(spec.dtype)
    loaded = [(ops, ops.load_linear(parts, bias)) for ops in both(spec)]
    assert all(linear.format == FLOAT8 for _, linear in loaded)
    ours, expected = (
        jax.jit(ops.linear)(x, linear, count=np.int32(TOKENS)) for ops, linear in loaded
    )
    assert_close(ours, expected, spec)


@pytest.mark.native
def test_gated_float8_linears_agree(spec: DecoderSpec):
    inner = MODEL.intermediate_size
    gate, up = weight(6, inner, WIDTH), weight(7, inner, WIDTH)
    x = normal(8, TOKENS, WIDTH).astype(spec.dtype) * np.dtype(spec.dtype).type(0.1)
    ours, expected = (
        jax.jit(ops.gated_linear)(x, ops.load_gate_up([gate, up], []), np.int32(TOKENS))
        for ops in both(spec)
    )
    assert_close(ours, expected, spec)


@pytest.mark.native
def test_mixtures_of_float8_experts_agree(spec: DecoderSpec):
    assert MODEL.experts is not None
    count, inner = MODEL.experts.num_experts, MODEL.experts.intermediate_size
    x, residual = normal(9, TOKENS, WIDTH).astype(spec.dtype), normal(10, TOKENS, WIDTH)
    between = normal(14, TOKENS, MODEL.experts.num_chosen, inner).astype(spec.dtype)

    def mix(ops: OpTable) -> Any:
        router = ops.load_linear([normal(11, count, WIDTH)], [])
        pairs = [(weight(20 + i, inner, WIDTH), weight(50 + i, inner, WIDTH)) for i in range(count)]
        gate_up = ops.load_experts(pairs)
        down = ops.load_experts([[weight(90 + i, WIDTH, inner)] for i in range(count)])
        assert gate_up.format == down.format == FLOAT8

        def run(weights: Any, x: Any, residual: Any, rows: Any) -> Any:
            choice = ops.route_experts(x, weights[0], rows)
            gated = ops.grouped_gated_linear(x, weights[1], choice, rows)
            return gated, ops.grouped_linear(between, weights[2], choice, residual, rows)

        return jax.jit(run)((router, gate_up, down), x, residual, np.int32(TOKENS))

    for ours, expected in zip(*map(mix, both(spec)), strict=True):
        assert_close(ours, expected, spec)


@pytest.mark.native
def test_a_float8_head_chooses_the_same_tokens(spec: DecoderSpec):
    head, found = weight(12, MODEL.vocab_size, MODEL.hidden_size), []
    for ops in both(spec):
        loaded, inputs = ops.load_linear([head], []), step(MODEL)
        num_rows = len(inputs.logits.token_indices)
        x = normal(13, num_rows, MODEL.hidden_size).astype(spec.dtype)
        found.append(np.asarray(jax.jit(ops.next_tokens)(x, loaded, inputs))[:TOKENS, 0].tolist())
    assert found[0] == found[1]


@pytest.mark.native
def test_float8_beside_floats_is_computed_in_floats(spec: DecoderSpec):
    coded, floats = weight(1, 40, WIDTH), normal(2, 21, WIDTH)
    for ops in both(spec):
        linear = ops.load_linear([coded, floats], [])
        assert linear.format == spec.weight_format
        expected = ops.load_linear([coded.dequantised(), floats], [])
        np.testing.assert_array_equal(
            np.asarray(linear.weight, np.float32), np.asarray(expected.weight, np.float32)
        )
