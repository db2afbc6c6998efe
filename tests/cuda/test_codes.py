"""Products with weights of codes on GPUs: the bits of their definition, as on the CPU."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cadenza.checkpoint.gguf.blocks import ENCODINGS
from cadenza.weights.weight_format import INT4, INT8, WeightFormat
from tests.cuda.conftest import Call, call_on_cpu
from tests.native.quantised_definition import FORMATS, pack, product, random_blocks, random_weight

pytestmark = [pytest.mark.native, pytest.mark.kernels]

NONE = np.zeros(0, np.float32)


def linear(call: Call, x: npt.NDArray[Any], packed: npt.NDArray[Any], columns: int) -> Any:
    out = jax.ShapeDtypeStruct((len(x), columns), jnp.float32)
    scale = np.float32(1.0)
    return np.asarray(call("linear", out, x, packed, jnp.int32(len(x)), NONE, NONE, scale=scale))


def activations(seed: int, rows: int, reduction: int, dtype: Any = np.float32) -> Any:
    return (np.random.default_rng(seed).normal(size=(rows, reduction)) * 3).astype(dtype)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_product_has_the_bits_of_its_definition_in_every_format(
    call: Call, format: WeightFormat
) -> None:
    weight = random_weight(np.random.default_rng(7), format, 33, 70)
    x = activations(8, 5, 70)
    found = linear(call, x, pack(format, weight), 33)
    assert found.tobytes() == product(x, weight).tobytes()


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_product_has_the_bits_of_its_definition_for_every_type_of_gguf(
    call: Call, name: str
) -> None:
    weight = random_blocks(name, 34, 256)
    x = activations(9, 3, 256)
    found = linear(call, x, pack(weight.format, weight), 34)
    assert found.tobytes() == product(x, weight.as_codes()).tobytes()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("rows", [1, 8, 9, 17, 33])
def test_a_row_has_the_same_bits_in_every_number_of_rows(call: Call, rows: int, dtype: Any) -> None:
    weight = random_weight(np.random.default_rng(1), INT4, 32, 45)
    x = activations(2, 33, 45, dtype)
    found = linear(call, x[:rows], pack(INT4, weight), 32)
    assert found.tobytes() == product(x, weight)[:rows].tobytes()


@pytest.mark.parametrize("format", [INT4, FORMATS[-1]], ids=str)
@pytest.mark.parametrize("rows", [2, 17])
def test_each_span_of_groups_has_second_codes(call: Call, rows: int, format: WeightFormat) -> None:
    """Of 2100 elements, which are two spans and rounds of groups that are not whole."""
    weight = random_weight(np.random.default_rng(3), format, 5, 2100)
    x = activations(4, rows, 2100)
    found = linear(call, x, pack(format, weight), 5)
    assert found.tobytes() == product(x, weight).tobytes()


def test_parts_side_by_side_have_their_own_formats(call: Call) -> None:
    parts = [random_blocks(name, 32, 256) for name in ("Q4_K", "Q6_K", "Q5_0")]
    packed = pack([part.format for part in parts], *parts)
    x = activations(5, 2, 256)
    expected = product(x, *(part.as_codes() for part in parts))
    assert linear(call, x, packed, 96).tobytes() == expected.tobytes()


def test_the_inputs_are_read_in_the_order_of_the_weight(call: Call) -> None:
    random = np.random.default_rng(6)
    order = random.permutation(57).astype(np.int32)
    weight = replace(random_weight(random, INT4, 33, 57), order=order)
    x = activations(7, 3, 57)
    found = linear(call, x, pack(INT4, weight), 33)
    assert found.tobytes() == product(x, weight).tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_nan_and_its_neighbours_are_not(call: Call, bad: float) -> None:
    weight = random_weight(np.random.default_rng(1), INT8, 32, 70)
    x = activations(2, 3, 70)
    x[1, 69] = bad
    found = linear(call, x, pack(INT8, weight), 32)
    assert np.isnan(found[1]).all()
    expected = product(x, weight)
    assert found[[0, 2]].tobytes() == expected[[0, 2]].tobytes()


def test_rows_behind_the_count_change_nothing(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CADENZA_GPU_ORDER", "backward")
    weight = random_weight(np.random.default_rng(1), INT4, 32, 64)
    x = activations(2, 12, 64)
    x[7:] = np.nan
    out = jax.ShapeDtypeStruct((12, 32), jnp.float32)
    scale = np.float32(1.0)
    found = call("linear", out, x, pack(INT4, weight), jnp.int32(7), NONE, NONE, scale=scale)
    assert np.asarray(found)[:7].tobytes() == product(x[:7], weight).tobytes()


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0"])
def test_a_gated_product_has_the_bits_of_the_cpu(call: Call, name: str) -> None:
    gate, up = (random_blocks(name, 37, 256), random_blocks(name, 37, 256))
    packed = pack(gate.format, gate, up, is_gated=True)
    x = activations(3, 3, 256)
    bias = np.random.default_rng(4).normal(size=(2, 37)).astype(np.float32)
    out = jax.ShapeDtypeStruct((3, 37), jnp.float32)
    operands = out, x, packed, np.int32(3), bias
    attributes = {"activation": np.int64(0)}
    found = call("gated_linear", *operands, **attributes)
    expected = call_on_cpu("gated_linear", *operands, **attributes)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=3e-6, atol=1e-6)


def test_each_head_has_a_weight_of_its_own(call: Call) -> None:
    heads, width, columns = 3, 40, 33
    random = np.random.default_rng(5)
    weights = [random_weight(random, INT8, columns, width) for _ in range(heads)]
    packed = np.stack([pack(INT8, each) for each in weights])
    x = activations(6, 2, heads * 48)
    out = jax.ShapeDtypeStruct((2, heads * columns), jnp.float32)
    found = np.asarray(call("head_linear", out, x, packed, np.int32(2), width=np.int64(width)))
    parts = x.reshape(2, heads, 48)[:, :, :width]
    expected = [product(parts[:, h], each) for h, each in enumerate(weights)]
    assert found.tobytes() == np.stack(expected, axis=1).tobytes()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_row_of_a_table_of_codes_is_its_elements(call: Call, format: WeightFormat) -> None:
    weight = random_weight(np.random.default_rng(7), format, 37, 70)
    assert_embeds(call, pack(format, weight), weight.dequantised())


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_row_of_a_table_of_blocks_is_its_elements(call: Call, name: str) -> None:
    weight = random_blocks(name, 37, 256)
    assert_embeds(call, pack(weight.format, weight), weight.as_codes().dequantised())


def assert_embeds(call: Call, packed: npt.NDArray[Any], elements: npt.NDArray[Any]) -> None:
    ids = np.array([0, 36, -1, 12, 37, 5], np.int32)
    out = jax.ShapeDtypeStruct((6, elements.shape[1]), jnp.float32)
    attributes = {"vocab": np.int64(37), "scale": np.float32(1.7)}
    found = np.asarray(call("embed", out, ids, packed, np.int32(6), **attributes))
    expected = elements * np.float32(1.7)
    assert found[[0, 1, 3, 5]].tobytes() == expected[ids[[0, 1, 3, 5]]].tobytes()
    assert not found[[2, 4]].any()
