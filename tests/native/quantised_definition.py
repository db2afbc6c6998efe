"""The arithmetic of quantised products in numpy, with exact fused multiply-adds, and a program that
compares the kernels with it: `python -m tests.native.quantised_definition`.

Prints a digest of every operation's results, which must be equal on every instruction set.
"""

import functools
import hashlib
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.ops.native_library import load_native_library, quantised_shape
from cadenza.backends.xla.ops.native_program import NativeProgram
from cadenza.backends.xla.ops.packed_memory import PackedMemory
from cadenza.checkpoint.quantised_weight import (
    GROUP,
    QuantisedWeight,
    quantise_int4,
    quantise_int8,
)
from cadenza.checkpoint.weight_format import INT4, INT8, WeightFormat

Float32Array = npt.NDArray[np.float32]

ROWS = (*range(1, 41), 63, 64, 65, 255, 256, 257)
SHAPES = ((70, 96), (33, 31), (64, 32), (100, 57), (17, 130))
"""Columns and reductions, most with incomplete panels and groups."""

FORMATS = {INT8: quantise_int8, INT4: quantise_int4}


def fma(a: Float32Array, b: Float32Array, c: Float32Array) -> Float32Array:
    """a * b + c, rounded once.

    The product is exact in float64; the sum is rounded to odd there, so that rounding it again to
    float32 is the rounding of the exact value (Boldo and Melquiond, 2008).
    """
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    is_even = (total.view(np.int64) & 1) == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    odd = np.where((error != 0) & is_even, np.nextafter(total, towards), total)
    return odd.astype(np.float32)


def quantise_rows(x: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int32], Float32Array]:
    """Codes [T, G, GROUP] and scales [T, G] of activations [T, K]."""
    padded = np.pad(x.astype(np.float32), ((0, 0), (0, -x.shape[1] % GROUP)))
    groups = padded.reshape(len(x), -1, GROUP)
    largest = np.abs(groups).max(axis=-1)
    is_used = np.isfinite(largest) & (largest >= np.float32(2.0**-64))
    safe = np.where(is_used, largest, np.float32(1.0))
    inverse = np.float32(127.0) / safe
    codes = np.rint(np.where(is_used[..., None], groups, np.float32(0.0)) * inverse[..., None])
    scales = np.where(is_used, safe / np.float32(127.0), np.float32(0.0))
    scales[~np.isfinite(largest)] = np.nan
    return codes.astype(np.int32), scales.astype(np.float32)


def product(x: npt.NDArray[Any], weight: QuantisedWeight) -> Float32Array:
    """x [T, K] times the transposed weight [N, K]."""
    codes, scales = quantise_rows(x)
    groups = weight.scales.shape[1]
    padding = groups * GROUP - weight.shape[1]
    columns = np.pad(weight.codes.astype(np.int32), ((0, 0), (0, padding)))
    columns = columns.reshape(len(weight), groups, GROUP)
    if weight.zero_points is not None:
        columns = columns - weight.zero_points[..., None]
    total = np.zeros((len(x), len(weight)), np.float32)
    for group in range(groups):
        dot = (codes[:, group] @ columns[:, group].T).astype(np.float32)
        part = dot * scales[:, group, None]
        total = fma(part, weight.scales[:, group].astype(np.float32)[None], total)
    return total


def pack(
    format: WeightFormat,
    *parts: npt.NDArray[Any] | QuantisedWeight,
    is_gated: bool = False,
) -> npt.NDArray[Any]:
    columns = len(parts[0]) if is_gated else sum(map(len, parts))
    shape = quantised_shape(format, columns, parts[0].shape[1], is_gated=is_gated)
    packed = PackedMemory().empty(shape, np.uint8)
    load_native_library().pack_quantised(format, parts, packed, is_gated=is_gated)
    return packed


def call(name: str, shape: Any, *operands: Any, **attributes: Any) -> npt.NDArray[Any]:
    """Runs one operation as a program of its own."""
    return np.asarray(jax.jit(lambda *each: _emit(name, shape, *each, **attributes))(*operands))


@functools.partial(jax.jit, static_argnames="columns")
def linear(x: Any, packed: Any, rows: Any, *, columns: int) -> Any:
    """The first `rows` of x [T, K] times a packed weight: float32 [T, columns]."""
    shape = jax.ShapeDtypeStruct((len(x), columns), jnp.float32)
    return _emit("linear", shape, x, packed, rows, None, None, scale=np.float32(1.0))


def _emit(name: str, shape: Any, *operands: Any, **attributes: Any) -> Any:
    program = NativeProgram(load_native_library())
    return program.emit(program.call(name, shape)(*operands, **attributes))


def compare_products(digest: Any) -> int:
    """Compares every number of rows with the definition, bit for bit; the number of products."""
    random, count = np.random.default_rng(7), 0
    for (columns, reduction), (format, quantise) in itertools.product(SHAPES, FORMATS.items()):
        floats = random.normal(size=(columns, reduction)).astype(np.float32)
        weight = quantise(floats)
        packed = pack(format, floats)
        assert pack(format, weight).tobytes() == packed.tobytes(), "packed otherwise"
        for dtype in (np.float32, ml_dtypes.bfloat16):
            x = (random.normal(size=(257, reduction)) * 3).astype(dtype)
            expected = product(x, weight)
            for rows in ROWS:
                found = np.asarray(linear(x, packed, np.int32(rows), columns=columns))[:rows]
                assert found.tobytes() == expected[:rows].tobytes(), (columns, reduction, rows)
                count += 1
            digest.update(expected.tobytes())
    return count


def add_other_operations(format: WeightFormat, digest: Any) -> None:
    """The gated product and the embedding."""
    random = np.random.default_rng(8)
    gate, up = (random.normal(size=(37, 45)).astype(np.float32) for _ in range(2))
    x = random.normal(size=(19, 45)).astype(np.float32)
    shape = jax.ShapeDtypeStruct((19, 37), jnp.float32)
    for activation in range(3):
        out = call(
            "gated_linear",
            shape,
            x,
            pack(format, gate, up, is_gated=True),
            np.int32(19),
            None,
            activation=np.int64(activation),
        )
        digest.update(out.tobytes())
    ids = np.array([0, 36, -1, 12], np.int32)
    shape = jax.ShapeDtypeStruct((4, 45), jnp.float32)
    attributes = {"vocab": np.int64(37), "scale": np.float32(1.7)}
    rows = call("embed", shape, ids, pack(format, gate), np.int32(4), **attributes)
    assert rows[0].tobytes() == (FORMATS[format](gate).dequantised()[0] * np.float32(1.7)).tobytes()
    digest.update(rows.tobytes())


def main() -> None:
    digest = hashlib.sha256()
    count = compare_products(digest)
    for format in FORMATS:
        add_other_operations(format, digest)
    print(load_native_library().cpu_integer_isa, count, digest.hexdigest())


if __name__ == "__main__":
    main()
