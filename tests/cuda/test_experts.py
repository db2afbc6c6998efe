"""Routing and products of experts on GPUs: against their definitions, and each row alone."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cadenza.backends.xla.ops.experts import Routing, choose_experts
from cadenza.errors import ConfigError
from cadenza.weights.weight_format import INT4, INT8
from tests.cuda.conftest import Call, call_on_cpu
from tests.native.quantised_definition import pack, product, random_weight

pytestmark = [pytest.mark.native, pytest.mark.kernels]

NONE = np.zeros(0, np.float32)
DTYPES = [ml_dtypes.bfloat16, np.float32]
EXPERTS, CHOSEN = 5, 3
# Hidden and inner sizes; rows of the first are not aligned to 16 bytes.
SIZES = [(45, 37), (64, 32)]


def route(call: Call, x: Any, router: Any, routing: Routing, **given: Any) -> Any:
    shape = (len(x), routing.num_chosen)
    results = (jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32))
    choice = routing.sigmoid_choice
    ids, weights = call(
        *("route_experts", results, x, router, np.int32(len(x))),
        *(given.get("bias", NONE), given.get("factors", NONE), given.get("choice_bias", NONE)),
        experts=np.int64(routing.num_experts),
        over_chosen=routing.over_chosen,
        sigmoid=choice is not None,
        groups=1 if choice is None else choice.num_groups,
        chosen_groups=1 if choice is None else choice.num_chosen_groups,
        scale=np.float32(routing.scale),
        least_sum=np.float32(0.0 if choice is None else choice.least_sum),
    )
    return np.asarray(ids), np.asarray(weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("over_chosen", [False, True])
def test_routing_follows_its_definition_and_each_row_its_own(
    call: Call, dtype: Any, over_chosen: bool
) -> None:
    random = np.random.default_rng(1)
    routing = Routing(num_experts=40, num_chosen=3, over_chosen=over_chosen, scale=2.5)
    router, x = (random.normal(size=(n, 48)).astype(dtype) for n in (40, 9))
    bias = random.normal(size=40).astype(np.float32)
    ids, weights = route(call, x, router, routing, bias=bias)
    logits: Any = x.astype(np.float32) @ router.astype(np.float32).T + bias
    expected_ids, expected_weights = choose_experts(logits, routing)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-4)
    for row in (0, 8):
        alone = route(call, x[row : row + 1], router, routing, bias=bias)
        assert alone[1].tobytes() == weights[row : row + 1].tobytes()


def test_ties_and_rows_that_are_not_finite_are_routed_as_defined(call: Call) -> None:
    rows = np.array(
        [[0, 1, -0.0, 1, 0], [0, np.nan, 9, 1, 2], [np.inf, 0, 1, 2, 3], [-1e4, 5, 5, -3e4, 5]],
        np.float32,
    )
    routing = Routing(num_experts=5, num_chosen=3, over_chosen=True)
    one = np.array([[1, 0]], np.float32)
    for row in rows:
        router = np.stack([row, np.zeros_like(row)], axis=1)
        ids, weights = route(call, one, router, routing)
        expected_ids, expected_weights = choose_experts(row[None], routing)
        np.testing.assert_array_equal(ids, expected_ids)
        np.testing.assert_allclose(weights, expected_weights, rtol=1e-5)


@pytest.mark.parametrize("groups", [1, 4])
def test_sigmoids_with_a_bias_choose_among_the_best_groups_as_on_the_cpu(
    call: Call, groups: int
) -> None:
    random = np.random.default_rng(2)
    router, x = (random.normal(size=(n, 24)).astype(np.float32) for n in (16, 7))
    biases = random.normal(size=(2, 16)).astype(np.float32)
    attributes = {
        "experts": np.int64(16),
        "over_chosen": True,
        "sigmoid": True,
        "groups": groups,
        "chosen_groups": (groups + 1) // 2,
        "scale": np.float32(2.5),
        "least_sum": np.float32(1e-20),
    }
    results = tuple(jax.ShapeDtypeStruct((7, 3), each) for each in (jnp.int32, jnp.float32))
    rest = np.int32(7), NONE, np.abs(biases[0]), biases[1]
    found = call("route_experts", results, x, router, *rest, **attributes)
    logits = x @ router.T
    values = 1 / (1 + np.exp(-logits))
    scores = values + biases[1]
    best_two = np.sort(scores.reshape(7, groups, -1), axis=-1)[..., -2:].sum(-1)
    kept = np.argsort(-best_two, axis=-1)[:, : (groups + 1) // 2]
    of_group = np.arange(16) // (16 // groups)
    scores[~(of_group[None, :, None] == kept[:, None]).any(-1)] = -np.inf
    ids = np.argsort(-scores, axis=-1)[:, :3]
    chosen = np.take_along_axis(values, ids, 1)
    weights = chosen / chosen.sum(-1, keepdims=True) * 2.5 * np.abs(biases[0])[ids]
    np.testing.assert_array_equal(np.asarray(found[0]), ids)
    np.testing.assert_allclose(np.asarray(found[1]), weights, rtol=1e-5)


class Layer:
    def __init__(self, call: Call, sizes: tuple[int, int], dtype: Any) -> None:
        random = np.random.default_rng(3)
        self.call, self.dtype = call, dtype
        self.hidden, self.inner = sizes
        shapes = (EXPERTS, 2 * self.inner, self.hidden), (EXPERTS, self.hidden, self.inner)
        self.gate_up, self.down = (
            (random.normal(size=shape) * 0.2).astype(dtype) for shape in shapes
        )
        self.gate_up_bias = random.normal(size=shapes[0][:2]).astype(np.float32)
        self.down_bias = random.normal(size=shapes[1][:2]).astype(np.float32)

    def gated(self, x: Any, ids: Any, count: int) -> Any:
        out = jax.ShapeDtypeStruct((*ids.shape, self.inner), self.dtype)
        operands = x, self.gate_up, np.int32(count), self.gate_up_bias, ids
        return self.call("grouped_gated_linear", out, *operands, activation=np.int64(0))

    def combined(self, inner: Any, ids: Any, weights: Any, residual: Any, count: int) -> Any:
        out = jax.ShapeDtypeStruct(residual.shape, jnp.float32)
        operands = inner, self.down, np.int32(count), self.down_bias
        return self.call("grouped_linear", out, *operands, residual, ids, weights)

    def both(self, x: Any, ids: Any, weights: Any, residual: Any, count: int) -> Any:
        inner = self.gated(x, ids, count)
        return np.asarray(self.combined(inner, ids, weights, residual, count))[:count]

    def given(self, tokens: int) -> tuple[Any, Any, Any, Any]:
        random = np.random.default_rng(4)
        x = random.normal(size=(tokens, self.hidden)).astype(self.dtype)
        ids = np.argsort(random.normal(size=(tokens, EXPERTS)))[:, :CHOSEN].astype(np.int32)
        weights = random.uniform(0.1, 1, size=(tokens, CHOSEN)).astype(np.float32)
        return x, ids, weights, random.normal(size=(tokens, self.hidden)).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_products_of_experts_follow_their_definitions(
    call: Call, sizes: tuple[int, int], dtype: Any
) -> None:
    layer = Layer(call, sizes, dtype)
    x, ids, weights, residual = layer.given(7)
    ids[3, 1], ids[5] = -1, EXPERTS
    unwritten = layer.gated(x, ids, 7)  # in the slots without an expert
    valid = (ids >= 0) & (ids < EXPERTS)
    inner = np.where(valid[..., None], unwritten, np.zeros((), dtype)).astype(np.float64)
    own = np.where(valid, ids, 0)
    wide = np.einsum("te,tcfe->tcf", x.astype(np.float64), layer.gate_up.astype(np.float64)[own])
    gate, up = np.split(wide + layer.gate_up_bias[own], 2, axis=-1)
    rtol = 1e-2 if dtype == ml_dtypes.bfloat16 else 1e-4
    expected = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(inner[valid], expected[valid], rtol=rtol, atol=1e-4)
    out = np.asarray(layer.combined(unwritten, ids, weights, residual, 7))
    outputs = np.einsum("tcf,tcef->tce", inner, layer.down.astype(np.float64)[own])
    outputs = (outputs + layer.down_bias[own]) * (weights * valid)[..., None]
    np.testing.assert_allclose(out, residual + outputs.sum(1), rtol=1e-4, atol=1e-4)
    assert out[5].tobytes() == residual[5].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_a_row_has_the_same_bits_whatever_the_batch_and_the_bucket(
    call: Call, sizes: tuple[int, int], dtype: Any
) -> None:
    """Of so many pairs an expert that tiles of several heights are used."""
    layer = Layer(call, sizes, dtype)
    given = layer.given(40)
    whole = layer.both(*given, 40)
    for count in (1, 14):
        assert layer.both(*given, count).tobytes() == whole[:count].tobytes()
        few = [each[:count] for each in given]
        assert layer.both(*few, count=count).tobytes() == whole[:count].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_that_is_not_finite_stays_alone_with_its_experts(
    call: Call, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer(call, SIZES[1], dtype)
    x, ids, weights, residual = layer.given(9)
    ids[:] = ids[0]
    clean = layer.both(x, ids, weights, residual, 9)
    monkeypatch.setenv("CADENZA_GPU_ORDER", "backward")
    x[4], weights[4] = np.nan, np.nan
    out = layer.both(x, ids, weights, residual, 9)
    assert np.isnan(out[4]).all()
    others = np.arange(9) != 4
    assert out[others].tobytes() == clean[others].tobytes()


@pytest.mark.parametrize("has_orders", [False, True])
@pytest.mark.parametrize("tokens", [1, 13])
def test_experts_of_codes_have_the_bits_of_their_definition(
    call: Call, tokens: int, has_orders: bool
) -> None:
    random = np.random.default_rng(5)
    hidden, columns = 70, 33
    weights = [random_weight(random, INT4, columns, hidden) for _ in range(EXPERTS)]
    if has_orders:
        orders = [random.permutation(hidden).astype(np.int32) for _ in weights]
        weights = [replace(each, order=order) for each, order in zip(weights, orders, strict=True)]
    packed = np.stack([pack(INT4, each) for each in weights])
    x = (random.normal(size=(tokens, CHOSEN, hidden)) * 3).astype(np.float32)
    ids = np.argsort(random.normal(size=(tokens, EXPERTS)))[:, :CHOSEN].astype(np.int32)
    factors = np.zeros((tokens, CHOSEN), np.float32)
    out = jax.ShapeDtypeStruct((tokens, columns), jnp.float32)
    for slot in range(CHOSEN):
        factors[:] = np.arange(CHOSEN) == slot
        operands = x, packed, np.int32(tokens), NONE, NONE, ids, factors
        found = np.asarray(call("grouped_linear", out, *operands))
        for token, expert in enumerate(ids[:, slot]):
            row: Any = x[token, slot : slot + 1]
            expected = product(row, weights[int(expert)])
            assert found[token].tobytes() == (expected + 0.0).tobytes()


@pytest.mark.parametrize("has_orders", [False, True])
def test_gated_experts_of_codes_have_the_values_of_the_cpu(call: Call, has_orders: bool) -> None:
    random = np.random.default_rng(6)
    hidden, inner, tokens = 70, 20, 9
    packed: list[npt.NDArray[Any]] = []
    for _ in range(EXPERTS):
        pair = [random_weight(random, INT8, inner, hidden) for _ in range(2)]
        if has_orders:
            order = random.permutation(hidden).astype(np.int32)
            pair = [replace(each, order=order) for each in pair]
        packed.append(pack(INT8, *pair, is_gated=True))
    x = (random.normal(size=(tokens, hidden)) * 3).astype(np.float32)
    ids = np.argsort(random.normal(size=(tokens, EXPERTS)))[:, :CHOSEN].astype(np.int32)
    ids[2, 0], ids[4] = -1, EXPERTS
    bias = random.normal(size=(EXPERTS, 2, inner)).astype(np.float32)
    out = jax.ShapeDtypeStruct((tokens, CHOSEN, inner), jnp.float32)
    operands = out, x, np.stack(packed), np.int32(tokens), bias, ids
    found, expected = (
        np.asarray(run("grouped_gated_linear", *operands, activation=np.int64(3)))
        for run in (call, call_on_cpu)
    )
    valid = (ids >= 0) & (ids < EXPERTS)
    np.testing.assert_allclose(found[valid], expected[valid], rtol=1e-5, atol=1e-6)


def test_the_operations_name_what_is_wrong_with_their_operands(call: Call) -> None:
    layer = Layer(call, SIZES[1], np.float32)
    x, ids, weights, residual = layer.given(2)
    with pytest.raises(ConfigError, match="at most all"):
        route(call, x, layer.down[0][:2, :], Routing(num_experts=2, num_chosen=3, over_chosen=True))
    with pytest.raises(ConfigError, match="the experts' weights do not fit"):
        layer.gated(x[:, :9], ids, 2)
    inner = np.zeros((2, CHOSEN, layer.inner), np.float32)
    with pytest.raises(ConfigError, match=r"weights must be f32 \[T, C\]"):
        layer.combined(inner, ids, weights[:1], residual, 2)
