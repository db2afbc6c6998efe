"""Weights as integer codes with scales: rounding, groups, and what is not finite."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.checkpoint.tensor_formats import format_of, stored_bytes
from cadenza.models.declaration import declare
from cadenza.weights.quantised_weight import GROUP, MOST_CODE, quantise_int4, quantise_int8
from cadenza.weights.weight_format import INT4, INT8


@given(seed=st.integers(0, 1 << 32), columns=st.integers(1, 100), exponent=st.integers(-12, 12))
def test_every_element_is_within_half_a_step_of_its_float(seed: int, columns: int, exponent: int):
    weight = np.random.default_rng(seed).normal(size=(3, columns)).astype(np.float32)
    weight *= np.float32(2.0**exponent)
    found = quantise_int8(weight)
    assert found.scales.shape == (3, -(-columns // GROUP))
    steps = np.repeat(found.scales.astype(np.float32), GROUP, axis=1)[:, :columns]
    # A scale is rounded to float16, so the largest element may be clamped by 127 half roundings.
    slack = MOST_CODE * np.maximum(steps * 2.0**-11, 2.0**-25)
    assert (np.abs(found.dequantised() - weight) <= steps * 0.5001 + slack).all()


@given(seed=st.integers(0, 1 << 32), columns=st.integers(1, 100), shift=st.floats(-4, 4))
def test_every_element_is_within_a_step_of_its_int4_code(seed: int, columns: int, shift: float):
    """Half a step for the code, half for the zero point, which is rounded to an integer."""
    weight = (np.random.default_rng(seed).normal(size=(3, columns)) + shift).astype(np.float32)
    found = quantise_int4(weight)
    assert found.zero_points is not None
    assert found.codes.min() >= 0
    assert max(found.codes.max(), found.zero_points.max()) <= 15
    steps = np.repeat(found.scales.astype(np.float32), GROUP, axis=1)[:, :columns]
    assert (np.abs(found.dequantised() - weight) <= steps * 1.02).all()
    assert (quantise_int4(weight).dequantised()[weight == 0] == 0).all()


def test_codes_are_rounded_to_even_and_never_below_minus_127():
    weight = np.zeros((1, 32), np.float32)
    weight[0, :5] = [-127.0, 0.5, 1.5, 2.5, 126.6]
    found = quantise_int8(weight)
    assert found.scales[0, 0] == 1.0
    assert found.codes[0, :5].tolist() == [-127, 0, 2, 2, 127]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_floats_of_every_type_are_quantised_alike(dtype: type):
    weight = np.arange(-32, 32).reshape(1, 64).astype(dtype)
    for quantise in (quantise_int8, quantise_int4):
        found, wide = quantise(weight), quantise(weight.astype(np.float32))
        assert found.codes.tolist() == wide.codes.tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e7])
def test_a_group_that_cannot_be_represented_has_a_nan_scale(bad: float):
    weight = np.ones((2, 64), np.float32)
    weight[1, 40] = bad
    for quantise in (quantise_int8, quantise_int4):
        found = quantise(weight)
        assert np.isnan(found.scales).tolist() == [[False, False], [False, True]]


def test_a_group_of_zeros_is_zero():
    assert not quantise_int8(np.zeros((1, 40), np.float32)).dequantised().any()
    assert not quantise_int4(np.zeros((1, 40), np.float32)).dequantised().any()


def test_routers_norms_and_biases_keep_their_type():
    specs = declare(named_shape("tiny-qwen3-moe"))
    kinds = {spec.kind: format_of(spec, "bfloat16", "int8").name for spec in specs}
    assert kinds["router"] == kinds["norm"] == "bfloat16"
    assert kinds["linear"] == kinds["embedding"] == "int8"
    later = [spec for spec in specs if not spec.is_in_first_layer]
    kinds = {spec.kind: format_of(spec, "bfloat16", "int4").name for spec in later}
    assert kinds == {
        "embedding": "int8",
        "head": "int8",
        "linear": "int4",
        "router": "bfloat16",
        "norm": "bfloat16",
    }


def test_the_first_layer_has_8_bits_beside_4():
    first = [spec for spec in declare(named_shape("tiny-qwen3-moe")) if spec.is_in_first_layer]
    kinds = {(spec.kind, format_of(spec, "bfloat16", "int4").name) for spec in first}
    assert kinds == {("linear", "int8"), ("router", "bfloat16"), ("norm", "bfloat16")}
    assert not any(
        spec.is_in_first_layer
        for spec in declare(named_shape("smollm2-135m"))
        if spec.name.startswith(("model.layers.1", "model.embed", "model.norm"))
    )


def test_quantised_bytes_count_codes_scales_and_complete_groups():
    assert INT8.num_bytes((3, 70)) == 3 * 3 * (32 + 2)
    assert INT4.num_bytes((3, 70)) == 3 * 3 * (16 + 3)
    linears = [spec for spec in declare(named_shape("smollm2-135m")) if spec.kind == "linear"]
    assert stored_bytes(linears, "bfloat16", "int8") == 106_168_320 * 34 // 32
