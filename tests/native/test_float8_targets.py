"""Products with float8_e4m3fn weights through XLA equal their definition in numpy, on every
instruction set.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.backends.xla.ops.native_library import NativeLibrary, float8_shape
from cadenza.backends.xla.ops.packed_memory import PackedMemory
from cadenza.errors import ConfigError
from cadenza.weights.quantised_weight import Float8Weight
from tests.native.each_isa import run_on_each
from tests.native.float8_definition import FLOAT8, linear, pack, product, random_weight

pytestmark = pytest.mark.native

ROOT = Path(__file__).resolve().parents[2]
NONE = np.zeros(0, np.float32)


@pytest.mark.slow
def test_every_instruction_set_gives_the_bits_of_the_float8_definition(library: NativeLibrary):
    module = "tests.native.float8_definition"
    found = run_on_each(library.available_isas, "CADENZA_CPU_ISA", module)
    assert {count for count, _ in found.values()} == {552}
    assert len({digest for _, digest in found.values()}) == 1, found


def test_another_order_of_the_blocks_is_seen(random: np.random.Generator):
    """Negative control: the comparison can fail."""
    weight = random_weight(random, 33, 384)
    x = random.normal(size=(5, 384)).astype(np.float32)
    turned = np.concatenate([np.arange(256, 384), np.arange(128, 256), np.arange(128)])
    backwards = Float8Weight(
        np.ascontiguousarray(weight.codes[:, turned]), np.ascontiguousarray(weight.scales[:, ::-1])
    )
    found = np.asarray(linear(x[:, turned], pack(backwards), np.int32(5), columns=33))
    assert found.tobytes() != product(x, weight).tobytes()
    np.testing.assert_allclose(found, product(x, weight), rtol=1e-3, atol=1)


def test_a_product_is_that_of_the_dequantised_weight(random: np.random.Generator):
    weight = random_weight(random, 50, 257)
    x = random.normal(size=(20, 257)).astype(np.float32)
    expected = x.astype(np.float64) @ weight.dequantised().astype(np.float64).T
    found = np.asarray(linear(x, pack(weight), np.int32(20), columns=50))
    size = np.abs(x.astype(np.float64)) @ np.abs(weight.dequantised().astype(np.float64)).T
    assert (np.abs(found - expected) / size).max() < 1e-6


def test_weights_side_by_side_are_those_of_each(random: np.random.Generator):
    parts = [random_weight(random, rows, 130) for rows in (40, 7, 29)]
    fused = Float8Weight(parts[1].codes, parts[1].scales)
    x = random.normal(size=(3, 130)).astype(np.float32)
    together = np.asarray(linear(x, pack(parts[0], fused, parts[2]), np.int32(3), columns=76))
    alone = [np.asarray(linear(x, pack(w), np.int32(3), columns=len(w))) for w in parts]
    assert together.tobytes() == np.concatenate(alone, axis=1).tobytes()


def test_rows_of_a_weight_are_packed_without_a_copy(random: np.random.Generator):
    weight = random_weight(random, 64, 200)
    wide = np.zeros((64, 256), np.uint8)
    wide[:, :200] = weight.codes
    strided = Float8Weight(wide[:, :200], weight.scales).rows(16, 48)
    assert pack(strided).tobytes() == pack(weight.rows(16, 48)).tobytes()


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_code_gives_nan_in_its_column_alone(random: np.random.Generator, code: int):
    weight = random_weight(random, 40, 200)
    weight.codes[7, 150] = code
    out = np.asarray(linear(np.zeros((2, 200), np.float32), pack(weight), np.int32(2), columns=40))
    assert np.isnan(out[:, 7]).all()
    assert (np.delete(out, 7, axis=1) == 0).all()


def test_a_target_refuses_float8_weights_that_do_not_fit(call, random: np.random.Generator):
    packed = pack(random_weight(random, 40, 200))
    x = np.zeros((2, 200), np.float32)
    shape = jax.ShapeDtypeStruct((2, 40), jnp.float32)
    for unfit in (packed[:, :-1], packed[:1], packed[:, :, :16]):
        given = np.ascontiguousarray(unfit)
        with pytest.raises(jax.errors.JaxRuntimeError, match="does not fit"):
            call("linear", shape, x, given, np.int32(2), NONE, NONE, scale=np.float32(1))


def test_an_embedding_in_float8_is_refused(call, random: np.random.Generator):
    packed = pack(random_weight(random, 40, 64))
    ids, shape = np.zeros(2, np.int32), jax.ShapeDtypeStruct((2, 64), jnp.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no kernel for float8"):
        call("embed", shape, ids, packed, np.int32(2), vocab=np.int64(40), scale=np.float32(1))


def test_packing_float8_refuses_what_does_not_fit(
    library: NativeLibrary, random: np.random.Generator
):
    packed = PackedMemory().empty(float8_shape(32, 64), FLOAT8)
    whole = random_weight(random, 32, 64)
    for unfit in ([random_weight(random, 32, 32)], [whole, whole]):
        with pytest.raises(ConfigError, match="fit"):
            library.pack_float8(unfit, packed)
