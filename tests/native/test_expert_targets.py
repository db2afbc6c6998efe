"""Routing and grouped products through XLA: against their definitions, exactness, errors."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from cadenza.backends.xla.ops.experts import (
    Routing,
    choose_experts,
    grouped_gated_linear,
    grouped_linear,
)
from cadenza.backends.xla.ops.native_library import packed_shape
from cadenza.backends.xla.ops.packed_memory import PackedMemory
from cadenza.backends.xla.ops.table import ExpertChoice, Linear
from cadenza.weights.weight_format import FLOAT_FORMATS

pytestmark = pytest.mark.native

NONE = np.zeros(0, np.float32)
DTYPES = [ml_dtypes.bfloat16, np.float32]
EXPERTS, CHOSEN, HIDDEN, INNER = 11, 3, 45, 37
ROUTINGS = [
    Routing(num_experts=EXPERTS, num_chosen=CHOSEN, over_chosen=False),
    Routing(num_experts=EXPERTS, num_chosen=CHOSEN, over_chosen=True),
    Routing(num_experts=EXPERTS, num_chosen=CHOSEN, over_chosen=True, scale=2.5),
]


def route(call: Any, x: Any, router: Any, count: int, routing: Routing, bias: Any = NONE) -> Any:
    shape = (len(x), routing.num_chosen)
    results = (jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32))
    ids, weights = call(
        "route_experts",
        results,
        x,
        router,
        np.int32(count),
        bias,
        NONE,
        NONE,
        experts=np.int64(routing.num_experts),
        over_chosen=routing.over_chosen,
        sigmoid=False,
        least_sum=np.float32(0.0),
        groups=1,
        chosen_groups=1,
        scale=np.float32(routing.scale),
    )
    return np.asarray(ids)[:count], np.asarray(weights)[:count]


class Layer:
    def __init__(self, call: Any, library: Any, random: np.random.Generator, dtype: Any) -> None:
        self.call, self.dtype = call, dtype
        self.gate_up = random.normal(size=(EXPERTS, 2 * INNER, HIDDEN)).astype(dtype) * dtype(0.2)
        self.down = random.normal(size=(EXPERTS, HIDDEN, INNER)).astype(dtype) * dtype(0.2)
        self.gate_up_bias = random.normal(size=(EXPERTS, 2 * INNER)).astype(np.float32)
        self.down_bias = random.normal(size=(EXPERTS, HIDDEN)).astype(np.float32)
        memory, gated = PackedMemory(), packed_shape(INNER, HIDDEN, dtype, is_gated=True)
        self.packed_gate_up = memory.empty((EXPERTS, *gated), dtype)
        self.packed_down = memory.empty((EXPERTS, *packed_shape(HIDDEN, INNER, dtype)), dtype)
        for expert in range(EXPERTS):
            gate, up = np.split(self.gate_up[expert], 2)
            library.pack((gate, up), self.packed_gate_up[expert], is_gated=True)
            library.pack([self.down[expert]], self.packed_down[expert])

    def gated(self, x: Any, ids: Any, count: int) -> Any:
        shape = jax.ShapeDtypeStruct((*ids.shape, INNER), self.dtype)
        code = np.int64(0)
        operands = (x, self.packed_gate_up, np.int32(count), self.gate_up_bias, ids)
        return self.call("grouped_gated_linear", shape, *operands, activation=code)

    def combined(self, inner: Any, ids: Any, weights: Any, residual: Any, count: int) -> Any:
        shape = jax.ShapeDtypeStruct(residual.shape, jnp.float32)
        operands = (inner, self.packed_down, np.int32(count), self.down_bias)
        return self.call("grouped_linear", shape, *operands, residual, ids, weights)

    def both(self, x: Any, ids: Any, weights: Any, residual: Any, count: int) -> Any:
        inner = self.gated(x, ids, count)
        return np.asarray(self.combined(inner, ids, weights, residual, count))[:count]


def choices(random: np.random.Generator, tokens: int) -> tuple[Any, Any, Any]:
    ids = np.argsort(random.normal(size=(tokens, EXPERTS)))[:, :CHOSEN].astype(np.int32)
    weights = random.uniform(0.1, 1, size=(tokens, CHOSEN)).astype(np.float32)
    return ids, weights, random.normal(size=(tokens, HIDDEN)).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_routing_follows_its_definition(call, pack, random, dtype, routing):
    router = random.normal(size=(EXPERTS, HIDDEN)).astype(dtype)
    x = random.normal(size=(40, HIDDEN)).astype(dtype)
    bias = random.normal(size=EXPERTS).astype(np.float32)
    ids, weights = route(call, x, pack(router, dtype=dtype), 37, routing, bias)
    logits = x.astype(np.float32) @ router.astype(np.float32).T + bias
    expected_ids, expected_weights = choose_experts(jnp.asarray(logits), routing)
    np.testing.assert_array_equal(ids, expected_ids[:37])
    np.testing.assert_allclose(weights, expected_weights[:37], rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_and_rows_without_a_softmax_are_routed_as_defined(call, pack, dtype):
    rows = np.array(
        [[0, 1, -0.0, 1, 0], [0, np.nan, 9, 1, 2], [np.inf, 0, 1, 2, 3], [-1e4, 5, 5, -3e4, 5]],
        dtype,
    )
    routing = Routing(num_experts=5, num_chosen=3, over_chosen=True)
    one = np.array([[1, 0]], dtype)
    for row in rows:
        router = np.stack([row, np.zeros_like(row)], axis=1)
        ids, weights = route(call, one, pack(router, dtype=dtype), 1, routing)
        logits = jnp.asarray(row.astype(np.float32))[None]
        expected_ids, expected_weights = choose_experts(logits, routing)
        np.testing.assert_array_equal(ids, expected_ids)
        np.testing.assert_allclose(weights, expected_weights, rtol=1e-5)
    assert np.asarray(expected_ids).tolist() == [[1, 2, 4]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_products_follow_their_definitions(call, library, random, dtype):
    layer = Layer(call, library, random, dtype)
    format = FLOAT_FORMATS["bfloat16" if dtype == ml_dtypes.bfloat16 else "float32"]
    x = random.normal(size=(21, HIDDEN)).astype(dtype)
    ids, weights, residual = choices(random, 21)
    ids[3, 1], ids[5] = -1, EXPERTS
    inner = layer.gated(x, ids, 21)
    expected = grouped_gated_linear(
        jnp.asarray(x),
        Linear(jnp.asarray(layer.gate_up), jnp.asarray(layer.gate_up_bias), format, 2 * INNER),
        jnp.asarray(ids),
    )
    valid = (ids >= 0) & (ids < EXPERTS)
    rtol = 1e-2 if dtype == ml_dtypes.bfloat16 else 1e-4
    np.testing.assert_allclose(
        np.asarray(inner, np.float32)[valid],
        np.asarray(expected, np.float32)[valid],
        rtol=rtol,
        atol=1e-4,
    )
    out = layer.combined(inner, ids, weights, residual, 21)
    expected = grouped_linear(
        inner,
        Linear(jnp.asarray(layer.down), jnp.asarray(layer.down_bias), format, HIDDEN),
        ExpertChoice(jnp.asarray(ids), jnp.asarray(weights)),
        jnp.asarray(residual),
    )
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
    assert np.asarray(out)[5].tobytes() == residual[5].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_expert_rows_are_bitwise_the_same_whatever_the_batch_and_bucket(
    call, library, random, dtype
):
    layer = Layer(call, library, random, dtype)
    x = random.normal(size=(70, HIDDEN)).astype(dtype)
    operands = (x, *choices(random, 70))
    whole = layer.both(*operands, 70)
    for count in (1, 14, 33, 69):
        assert layer.both(*operands, count).tobytes() == whole[:count].tobytes()
        moved = [np.roll(operand, 1 - count, axis=0) for operand in operands]
        assert layer.both(*moved, count=1)[0].tobytes() == whole[count - 1].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_that_is_not_finite_stays_alone_with_its_experts(call, library, random, dtype):
    layer = Layer(call, library, random, dtype)
    x = random.normal(size=(9, HIDDEN)).astype(dtype)
    ids, weights, residual = choices(random, 9)
    ids[:] = ids[0]
    clean = layer.both(x, ids, weights, residual, 9)
    x[4], weights[4] = np.nan, np.nan
    out = layer.both(x, ids, weights, residual, 9)
    assert np.isnan(out[4]).all()
    others = np.arange(9) != 4
    assert out[others].tobytes() == clean[others].tobytes()


def test_the_expert_targets_name_what_is_wrong_with_their_operands(call, library, pack, random):
    layer = Layer(call, library, random, np.float32)
    x = np.zeros((2, HIDDEN), np.float32)
    ids, weights, residual = choices(random, 2)
    router = pack(np.zeros((2, HIDDEN), np.float32), dtype=np.float32)
    routing = Routing(num_experts=2, num_chosen=3, over_chosen=False)
    with pytest.raises(jax.errors.JaxRuntimeError, match="at most all"):
        route(call, x, router, 2, routing)
    with pytest.raises(jax.errors.JaxRuntimeError, match="grouped_gated_linear: the experts'"):
        layer.gated(x[:, :9], ids, 2)
    with pytest.raises(jax.errors.JaxRuntimeError, match="true count"):
        layer.gated(x, ids, 3)
    inner = np.zeros((2, CHOSEN, INNER), np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"weights must be f32 \[T, C\]"):
        layer.combined(inner, ids, weights[:1], residual, 2)
