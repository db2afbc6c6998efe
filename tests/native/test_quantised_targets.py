"""Quantised products through XLA equal their definition in numpy, on every instruction set."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.backends.xla.ops.native_library import CodedOperand, NativeLibrary, packed_bytes
from cadenza.backends.xla.ops.packed_memory import PackedMemory
from cadenza.backends.xla.ops.quantised import REMAINDER_SPAN
from cadenza.errors import ConfigError
from cadenza.weights.quantised_weight import QuantisedWeight, quantise_int4, quantise_int8
from cadenza.weights.weight_format import (
    GROUP,
    INT4,
    INT8,
    WeightFormat,
    code_format,
    joined,
    panel_formats,
)
from tests.native.each_isa import run_on_each
from tests.native.quantised_definition import (
    FORMATS,
    ROWS,
    fold,
    linear,
    pack,
    product,
    quantise_rows,
    random_weight,
)

pytestmark = pytest.mark.native

ROOT = Path(__file__).resolve().parents[2]
NONE = np.zeros(0, np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["few", pytest.param("all", marks=pytest.mark.soak)])
def test_every_instruction_set_gives_the_bits_of_the_definition(library: NativeLibrary, rows: str):
    """Of every format of codes and every type of GGUF."""
    module = "tests.native.quantised_definition"
    found = run_on_each(library.available_integer_isas, "CADENZA_CPU_INTEGER_ISA", module, rows)
    products = len(ROWS[rows]) * (24 + 6 * 12 + 2 + 1 + 9 * 2 + 2)
    assert {count for count, _ in found.values()} == {products}
    assert "scalar" in found
    assert len(set(found.values())) == 1, found


def test_the_largest_group_of_each_span_is_rounded_to_16_bits(random: np.random.Generator):
    """Beside a group of such elements the error of all others is small."""
    width, loud = 2 * REMAINDER_SPAN * GROUP, [3, REMAINDER_SPAN + 7]
    weight = quantise_int8(random.normal(size=(33, width)).astype(np.float32))
    x = random.normal(size=(5, width)).astype(np.float32)
    groups = x.reshape(len(x), -1, GROUP)
    groups[:, loud] *= 1e4
    steps = np.abs(groups).max(axis=-1) / 127
    steps[:, loud] /= 2 * 127
    exact = x.astype(np.float64) @ weight.dequantised().T.astype(np.float64)
    magnitudes = np.abs(weight.dequantised()).reshape(len(weight), -1, GROUP).sum(axis=-1)
    bound = 0.51 * steps @ magnitudes.T + 1e-5 * np.abs(x) @ np.abs(weight.dequantised()).T
    found = np.asarray(linear(x, pack(INT8, weight), np.int32(5), columns=33))
    assert (np.abs(found - exact) < bound).all()
    first_codes, _ = quantise_rows(x)
    without = fold(np.zeros((5, 33), np.float32), first_codes, weight)
    assert (np.abs(without - exact) > bound).any()


def test_another_order_of_the_groups_is_seen(random: np.random.Generator):
    """Negative control: the comparison can fail."""
    weight = quantise_int8(random.normal(size=(33, 96)).astype(np.float32))
    x = random.normal(size=(5, 96)).astype(np.float32)
    turned = np.concatenate([np.arange(64, 96), np.arange(32, 64), np.arange(32)])
    backwards = QuantisedWeight(weight.codes[:, turned], weight.scales[:, ::-1])
    assert product(x[:, turned], backwards).tobytes() != product(x, weight).tobytes()
    np.testing.assert_allclose(
        product(x[:, turned], backwards), product(x, weight), rtol=1e-4, atol=1e-4
    )


def test_the_order_of_the_inputs_decides(random: np.random.Generator):
    """Negative control: without the order the product is another one."""
    weight = random_weight(random, INT4, 33, 96)
    x = random.normal(size=(5, 96)).astype(np.float32)
    order = random.permutation(96).astype(np.int32)
    ordered = replace(weight, order=order)
    found = np.asarray(linear(x, pack(INT4, ordered), np.int32(5), columns=33))
    assert found.tobytes() == product(x, ordered).tobytes()
    assert np.abs(found - product(x, weight)).max() > 0.1
    np.testing.assert_allclose(found, x @ ordered.dequantised().T, atol=0.2)
    order[0] = order[1]
    with pytest.raises(ConfigError, match="does not have each of them once"):
        pack(INT4, ordered)


@pytest.mark.parametrize(("format", "most"), [(INT8, 0.012), (INT4, 0.12)])
def test_a_product_is_near_that_of_the_floats(
    random: np.random.Generator, format: WeightFormat, most: float
):
    floats = random.normal(size=(50, 256)).astype(np.float32)
    x = random.normal(size=(20, 256)).astype(np.float32)
    error = np.asarray(linear(x, pack(format, floats), np.int32(20), columns=50)) - x @ floats.T
    assert np.sqrt(np.mean(error**2)) < most * 16  # of sqrt(256), a column's deviation


def test_a_row_with_a_value_that_is_not_finite_is_nan_and_its_neighbours_are_not(
    random: np.random.Generator,
):
    packed = pack(INT8, random.normal(size=(40, 70)).astype(np.float32))
    for bad in (np.nan, np.inf, -np.inf):
        x = random.normal(size=(3, 70)).astype(np.float32)
        x[1, 69] = bad
        out = np.asarray(linear(x, packed, np.int32(3), columns=40))
        assert np.isnan(out[1]).all()
        assert np.isfinite(out[[0, 2]]).all()


def test_a_target_refuses_quantised_weights_that_do_not_fit(call, random: np.random.Generator):
    packed = pack(INT8, random.normal(size=(40, 70)).astype(np.float32))
    other_reduction, other_format, of_another_version = (packed.copy() for _ in range(3))
    of_another_version[0] ^= 1
    other_reduction[8] ^= 64
    other_format[16] ^= 1
    x = np.zeros((2, 70), np.float32)
    shape = jax.ShapeDtypeStruct((2, 40), jnp.float32)
    for unfit in (
        packed[:-64],
        packed[:40],
        pack(INT8, np.zeros((20, 70), np.float32)),
        other_reduction,
        other_format,
        of_another_version,
    ):
        given = np.ascontiguousarray(unfit)
        words = "the packed weight's shape does not fit"
        with pytest.raises(jax.errors.JaxRuntimeError, match=words):
            call("linear", shape, x, given, np.int32(2), NONE, NONE, scale=np.float32(1))


def groups_of(packed: np.ndarray) -> np.ndarray:
    return packed[64:].reshape(-1, 608)


def test_parts_whose_formats_do_not_change_at_a_panel_are_refused(random: np.random.Generator):
    parts = [random_weight(random, format, 31, 64) for format in (INT8, INT4)]
    with pytest.raises(ConfigError, match="the formats change within a panel"):
        pack([INT8, INT4], *parts)
    assert panel_formats([INT8, INT4], [31, 31]) == [INT8, INT8]
    assert panel_formats([INT8, INT4], [32, 31]) == [INT8, INT4]


@pytest.mark.parametrize("seed", range(3))
def test_a_weight_in_a_larger_format_gives_the_same_product(seed: int):
    """Of pairs of all formats: packed in one format that holds both, as `in_format` has them."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(3, 57)).astype(np.float32)
    for left, right in itertools.product(FORMATS, FORMATS):
        parts = [random_weight(random, format, 33, 57) for format in (left, right)]
        target = joined([left, right])
        found = np.asarray(linear(x, pack(target, *parts), np.int32(3), columns=66))
        assert found.tobytes() == product(x, *(part.in_format(target) for part in parts)).tobytes()
        for part in parts:
            wide = part.in_format(target)
            assert wide.format == target
            np.testing.assert_array_equal(wide.dequantised(), part.dequantised())


def test_a_smaller_format_than_the_codes_is_refused(random: np.random.Generator):
    weight = random_weight(random, code_format(8, "float32", "offset"), 32, 64)
    for target in (INT8, INT4, code_format(4, "float32", "offset"), code_format(8, "float32")):
        with pytest.raises(ConfigError, match="the target"):
            pack(target, weight)


def test_nibbles_in_another_order_and_a_shifted_zero_point_are_seen(random: np.random.Generator):
    """Negative controls of the layout of int4 codes."""
    floats, x = random.normal(size=(40, 64)), random.normal(size=(3, 64)).astype(np.float32)
    weight = quantise_int4(floats.astype(np.float32))
    assert weight.zero_points is not None
    expected = np.asarray(linear(x, pack(INT4, weight), np.int32(3), columns=40))
    assert expected.tobytes() == product(x, weight).tobytes()
    swapped = pack(INT4, weight)
    codes = groups_of(swapped)[:, :512]
    codes[:] = codes >> 4 | codes << 4
    shifted = pack(INT4, weight)
    groups_of(shifted)[:, 576:] += 1
    for wrong in (swapped, shifted):
        found = np.asarray(linear(x, wrong, np.int32(3), columns=40))
        assert np.abs(found - expected).max() > 1


def test_packing_codes_refuses_what_does_not_fit(library: NativeLibrary):
    packed = PackedMemory().empty((packed_bytes([(INT8, 32)], 64),), np.uint8)
    zeros = np.zeros((32, 64), np.float32)
    for unfit in ([zeros[:, :32]], [zeros, zeros], [zeros[:16], zeros[16:, :60]]):
        operand = CodedOperand(targets=[INT8] * len(unfit), parts=unfit)
        with pytest.raises(ConfigError, match="fit"):
            library.pack_quantised(operand, packed)
    integers = CodedOperand(targets=[INT8], parts=[zeros.astype(np.int32)])
    with pytest.raises(ConfigError, match="cannot be packed"):
        library.pack_quantised(integers, packed)


def test_an_unknown_integer_instruction_set_is_refused_by_name():
    script = "from cadenza.backends.xla.ops.native_library import load_native_library as l; l()"
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "CADENZA_CPU_INTEGER_ISA": "mmx"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "CADENZA_CPU_INTEGER_ISA is 'mmx'; this machine can run: " in ran.stderr
    assert "scalar" in ran.stderr


@pytest.mark.parametrize(("isa", "most"), [("avx512", 512), ("avx2", 256), ("scalar", 0)])
def test_forcing_an_instruction_set_forces_the_integer_kernels_too(
    library: NativeLibrary, isa: str, most: int
):
    if isa not in library.available_isas:
        pytest.skip(f"this CPU has no {isa}")
    script = (
        "from cadenza.backends.xla.ops.native_library import load_native_library\n"
        "print(load_native_library().cpu_integer_isa)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "CADENZA_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=True,
    )
    bits = {"amx": 512, "avx512_vnni": 512, "avx_vnni": 256, "avx2": 256, "scalar": 0}
    assert bits[ran.stdout.strip()] <= most
