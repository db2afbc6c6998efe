"""Embedding, norms and linears through XLA: values, padding, errors."""

import os
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from cadenza.backends.xla.ops.native_library import packed_shape
from cadenza.backends.xla.ops.packed_memory import PackedMemory
from cadenza.errors import ConfigError

pytestmark = pytest.mark.native

NONE = np.zeros(0, np.float32)
ONE = np.float32(1.0)
DTYPES = [ml_dtypes.bfloat16, np.float32]


def tolerance(dtype: Any) -> float:
    return 1e-2 if dtype == ml_dtypes.bfloat16 else 1e-5


@pytest.mark.parametrize("scale", [1.0, 0.22])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_multiplies_fused_weights_and_adds_bias_and_residual(
    call, pack, random, dtype, scale
):
    q, k = random.normal(size=(70, 45)).astype(dtype), random.normal(size=(21, 45)).astype(dtype)
    x = random.normal(size=(9, 45)).astype(dtype)
    bias, residual = random.normal(size=91), random.normal(size=(9, 91))
    out = call(
        "linear",
        jax.ShapeDtypeStruct((9, 91), jnp.float32),
        x,
        pack(q, k, dtype=dtype),
        np.int32(7),
        bias.astype(np.float32),
        residual.astype(np.float32),
        scale=np.float32(scale),
    )
    weight = np.concatenate([q, k]).astype(np.float64)
    expected = scale * (x.astype(np.float64) @ weight.T + bias) + residual
    np.testing.assert_allclose(out[:7], expected[:7], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_rows_are_bitwise_the_same_whatever_the_batch_and_bucket(call, pack, random, dtype):
    weight = pack(random.normal(size=(100, 64)).astype(dtype), dtype=dtype)
    x = random.normal(size=(130, 64)).astype(dtype)
    shape = jax.ShapeDtypeStruct((130, 100), dtype)
    whole = np.asarray(call("linear", shape, x, weight, np.int32(130), NONE, NONE, scale=ONE))
    for count in (1, 2, 13, 14, 15, 64, 129):
        some = np.asarray(call("linear", shape, x, weight, np.int32(count), NONE, NONE, scale=ONE))
        assert some[:count].tobytes() == whole[:count].tobytes()
        shifted = np.roll(x, 1 - count, axis=0)
        moved = np.asarray(
            call("linear", shape, shifted, weight, np.int32(1), NONE, NONE, scale=ONE)
        )
        assert moved[0].tobytes() == whole[count - 1].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("code", "name"), [(0, "silu"), (1, "gelu_tanh"), (2, "gelu")])
def test_gated_linear_applies_each_activation(call, pack, random, dtype, code, name):
    gate, up = (random.normal(size=(37, 24)).astype(dtype) * dtype(0.3) for _ in range(2))
    x = random.normal(size=(5, 24)).astype(dtype)
    out = call(
        "gated_linear",
        jax.ShapeDtypeStruct((5, 37), dtype),
        x,
        pack(gate, up, dtype=dtype, is_gated=True),
        np.int32(5),
        NONE,
        activation=np.int64(code),
    )
    activate = {
        "silu": jax.nn.silu,
        "gelu_tanh": lambda v: jax.nn.gelu(v, approximate=True),
        "gelu": lambda v: jax.nn.gelu(v, approximate=False),
    }[name]
    wide = x.astype(np.float32)
    expected = activate(wide @ gate.astype(np.float32).T) * (wide @ up.astype(np.float32).T)
    np.testing.assert_allclose(
        np.asarray(out, np.float32), expected, rtol=tolerance(dtype), atol=1e-4
    )


@pytest.mark.parametrize("magnitude", [1.0, 1e-3], ids=["large", "where epsilon counts"])
def test_rms_norm_takes_residuals(call, random, magnitude):
    x = random.normal(size=(6, 50)).astype(np.float32) * np.float32(magnitude)
    weight = random.normal(size=50).astype(np.float32)
    attrs = {"eps": np.float32(1e-5)}
    scale = 1 / np.sqrt(np.mean(np.square(x, dtype=np.float64), axis=1, keepdims=True) + 1e-5)
    expected = x * scale * weight
    shape = jax.ShapeDtypeStruct((6, 50), jnp.float32)
    plain = call("rms_norm", shape, x, weight, np.int32(6), **attrs)
    np.testing.assert_allclose(plain, expected, rtol=1e-5)
    added = call("rms_norm_add", shape, x, weight, np.int32(6), x, NONE, **attrs)
    assert np.asarray(added).tobytes() == (np.asarray(plain) + x).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_taken_as_they_are(call, random, dtype):
    x = random.normal(size=(6, 50)).astype(dtype)
    rows = np.array([5, 0, -1, 6, 3], np.int32)
    some = call("take_rows", jax.ShapeDtypeStruct((5, 50), dtype), x, np.int32(4), rows)
    assert np.asarray(some)[:2].tobytes() == x[rows[:2]].tobytes()
    assert not np.asarray(some)[2:4].any()
    with pytest.raises(jax.errors.JaxRuntimeError, match="cadenza_take_rows: the result must"):
        call("take_rows", jax.ShapeDtypeStruct((5, 51), dtype), x, np.int32(4), rows)
    with pytest.raises(jax.errors.JaxRuntimeError, match="cadenza_take_rows: there are too few"):
        call("take_rows", jax.ShapeDtypeStruct((6, 50), dtype), x, np.int32(6), rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed_reads_the_packed_head(call, pack, random, dtype):
    table = random.normal(size=(75, 33)).astype(dtype)
    ids = np.array([0, 74, 40, -1], np.int32)
    shape = jax.ShapeDtypeStruct((4, 33), jnp.float32)
    attrs = {"vocab": np.int64(75), "scale": np.float32(2)}
    for stored in (pack(table, dtype=dtype), table):
        out = np.asarray(call("embed", shape, ids, stored, np.int32(4), **attrs))
        np.testing.assert_array_equal(out[:3], table[ids[:3]].astype(np.float32) * 2)
        assert not out[3].any()


def test_a_target_names_what_is_wrong_with_its_operands(call, pack, random):
    weight = pack(random.normal(size=(32, 16)).astype(np.float32), dtype=np.float32)
    x = np.zeros((2, 16), np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="cadenza_linear: the packed weight"):
        call(
            "linear",
            jax.ShapeDtypeStruct((2, 65), jnp.float32),
            x,
            weight,
            np.int32(2),
            NONE,
            NONE,
            scale=ONE,
        )
    with pytest.raises(jax.errors.JaxRuntimeError, match="true count"):
        call(
            "linear",
            jax.ShapeDtypeStruct((2, 32), jnp.float32),
            x,
            weight,
            np.int32(3),
            NONE,
            NONE,
            scale=ONE,
        )


def test_packing_refuses_what_does_not_fit(library, random):
    memory = PackedMemory()
    packed = memory.empty(packed_shape(32, 16, np.float32), np.float32)
    zeros = np.zeros((32, 16), np.float32)
    for unfit in ([np.zeros((33, 16), np.float32)], [zeros, zeros], [zeros, np.zeros((0, 17))]):
        with pytest.raises(ConfigError, match="fit"):
            library.pack(unfit, packed)
    with pytest.raises(ConfigError, match="cannot be packed"):
        library.pack([zeros.astype(np.int32)], packed)
    with pytest.raises(ConfigError, match="strides"):
        library.pack([np.zeros((16, 32), np.float32).T], packed)
    gated = memory.empty(packed_shape(32, 16, np.float32, is_gated=True), np.float32)
    with pytest.raises(ConfigError, match="equal sizes"):
        library.pack([zeros, zeros[1:]], gated, is_gated=True)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("CADENZA_CPU_ISA", "mmx", "this machine can run: .*scalar"),
        ("CADENZA_NUM_THREADS", "many", "whole number from 1 to 256"),
    ],
)
def test_loading_refuses_an_unknown_isa_or_thread_count_by_name(name, value, match):
    script = (
        "from cadenza.backends.xla.ops.native_library import load_native_library\n"
        "from cadenza.errors import ConfigError\n"
        "try:\n    load_native_library()\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    environment = {**os.environ, name: value}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert re.search(match, result.stdout), result


def test_every_available_isa_can_be_chosen(library):
    assert library.cpu_isa in library.available_isas
    assert library.available_isas[-1] == "scalar"
    script = (
        "from cadenza.backends.xla.ops.native_library import load_native_library\n"
        "print(load_native_library().cpu_isa, load_native_library().num_threads)\n"
    )
    for isa in library.available_isas:
        environment = {**os.environ, "CADENZA_CPU_ISA": isa, "CADENZA_NUM_THREADS": "3"}
        result = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.split() == [isa, "3"]
