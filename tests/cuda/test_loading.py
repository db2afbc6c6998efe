"""Weights as the table of the kernels for GPUs loads them: they give what the CPU's give."""

from collections.abc import Callable
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.backends.xla.ops.cuda import CudaOps
from cadenza.backends.xla.ops.cuda_library import CudaLibrary
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec, ExpertChoice
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.weights.weight_format import INT4, INT8, WeightFormat, code_format
from tests.cuda.conftest import on_cpu
from tests.native.quantised_definition import random_blocks, random_weight

pytestmark = [pytest.mark.native, pytest.mark.kernels]

TOKENS = 3


Both = Callable[[Callable[[OpTable], Any]], tuple[Any, Any]]


@pytest.fixture
def both(library: CudaLibrary) -> Both:
    spec = DecoderSpec(
        model=named_shape("tiny-qwen3-moe"),
        dtype=jnp.dtype("float32").type,
        page_size=16,
        quantization="int8",
    )
    return lambda compute: (compute(CudaOps(spec, library)), on_cpu(compute)(NativeOps(spec)))


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(operation: Any, x: Any, weight: Any) -> Any:
    return np.asarray(operation(x, weight, count=np.int32(TOKENS)))


@pytest.mark.parametrize("format", [INT8, INT4], ids=str)
def test_fused_linears_with_biases_have_the_bits_of_the_cpu(
    both: Both, format: WeightFormat
) -> None:
    parts, bias = [normal(1, 40, 70), normal(2, 21, 70)], [normal(3, 40), normal(4, 21)]
    x = normal(5, TOKENS, 70)
    found, expected = both(lambda ops: run(ops.linear, x, ops.load_linear(parts, bias, format)))
    assert found.tobytes() == expected.tobytes()


def test_parts_of_several_formats_have_the_bits_of_the_cpu(both: Both) -> None:
    random = np.random.default_rng(1)
    x = normal(5, TOKENS, 70)
    formats = (INT8, code_format(4, "float32", "offset"), code_format(8, "float32", None, 16))
    for rows in ((32, 64, 21), (31, 20, 10)):
        parts = [random_weight(random, *each, 70) for each in zip(formats, rows, strict=True)]
        found, expected = both(lambda ops, parts=parts: run(ops.linear, x, ops.load_linear(parts)))
        assert found.tobytes() == expected.tobytes()


def test_gate_and_up_of_blocks_are_one_operand(both: Both) -> None:
    parts = [random_blocks("Q4_K", 37, 256), random_blocks("Q4_K", 37, 256)]
    bias, x = [normal(3, 37), normal(4, 37)], normal(5, TOKENS, 256)
    found, expected = both(lambda ops: run(ops.gated_linear, x, ops.load_gate_up(parts, bias)))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_experts_of_several_formats_are_one_operand(both: Both) -> None:
    random = np.random.default_rng(2)
    gate_up = [[random_weight(random, each, 20, 45) for _ in range(2)] for each in (INT8, INT4)]
    down = [[random_weight(random, each, 45, 20)] for each in (INT4, INT4)]
    x, ids = normal(5, TOKENS, 45), np.array([[1], [0], [1]], np.int32)
    choice: Any = ExpertChoice(cast(Any, ids), normal(6, TOKENS, 1))

    def inner_and_outer(ops: OpTable) -> Any:
        weights = ops.load_experts(gate_up), ops.load_experts(down)

        def compute(x: Any, weights: Any, count: Any) -> Any:
            inner = ops.grouped_gated_linear(x, weights[0], choice, count)
            return ops.grouped_linear(inner, weights[1], choice, None, count)

        return run(compute, x, weights)

    found, expected = both(inner_and_outer)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_floats_keep_their_layout(library: CudaLibrary, dtype: str) -> None:
    spec = DecoderSpec(
        model=named_shape("tiny-qwen3-moe"), dtype=jnp.dtype(dtype).type, page_size=16
    )
    ops = CudaOps(spec, library)
    gate, up = normal(1, 6, 8), normal(2, 6, 8)
    held = np.asarray(ops.load_gate_up([gate, up]).weight)
    assert held.tobytes() == np.concatenate([gate, up]).astype(jnp.dtype(dtype)).tobytes()
    stored = gate.astype(jnp.dtype(dtype))
    assert np.asarray(ops.load_linear([stored]).weight).tobytes() == stored.tobytes()
    experts = ops.load_experts([[gate], [up]]).weight
    assert np.asarray(experts).shape == (2, 6, 8)
