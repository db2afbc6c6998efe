"""The arithmetic of products with float8_e4m3fn weights in numpy, and a program that compares the
kernels with it: `python -m tests.native.float8_definition`.

Prints the instruction set, the number of products, and a digest of the results in float32.
"""

import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.ops.native_library import float8_shape, load_native_library, packed_shape
from cadenza.backends.xla.ops.native_program import NativeProgram
from cadenza.backends.xla.ops.packed_memory import PackedMemory
from cadenza.weights.quantised_weight import Float8Weight
from cadenza.weights.weight_format import FLOAT8_BLOCK
from tests.native.quantised_definition import fma

Float32Array = npt.NDArray[np.float32]

ROWS = (*range(1, 41), 63, 64, 65, 255, 256, 257)
# Columns and reductions, most with incomplete panels, blocks and steps.
SHAPES = ((70, 256), (33, 31), (64, 128), (20, 300), (45, 129), (1, 1))

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


def random_weight(random: np.random.Generator, columns: int, reduction: int) -> Float8Weight:
    codes = (
        random.integers(0, 127, (columns, reduction)) | random.integers(0, 2, (1, reduction)) << 7
    )
    scales = random.lognormal(size=(columns, -(-reduction // FLOAT8_BLOCK)))
    return Float8Weight(codes.astype(np.uint8), scales.astype(np.float32))


def values(weight: Float8Weight) -> Float32Array:
    return weight.codes.view(FLOAT8).astype(np.float32)


def product(x: Float32Array, weight: Float8Weight) -> Float32Array:
    columns, total = values(weight), np.zeros((len(x), len(weight)), np.float32)
    for block in range(weight.scales.shape[1]):
        part = np.zeros_like(total)
        for k in range(block * FLOAT8_BLOCK, min((block + 1) * FLOAT8_BLOCK, x.shape[1])):
            part = fma(columns[None, :, k], x[:, k, None], part)
        total = fma(part, weight.scales[None, :, block], total)
    return total


def product_of_blocks(x: npt.NDArray[Any], weight: Float8Weight) -> Float32Array:
    """The same from the dense product of each block, in the type of the activations."""
    if load_native_library().cpu_isa == "amx":  # whose dense products of bfloat16 are of tiles
        x = x.astype(np.float32)
    total = np.zeros((len(x), len(weight)), np.float32)
    for block in range(weight.scales.shape[1]):
        part = slice(block * FLOAT8_BLOCK, (block + 1) * FLOAT8_BLOCK)
        dense = np.ascontiguousarray(values(weight)[:, part].astype(x.dtype))
        packed = PackedMemory().empty(packed_shape(len(dense), dense.shape[1], x.dtype), x.dtype)
        load_native_library().pack([dense], packed)
        own = np.ascontiguousarray(x[:, part])
        sums = np.asarray(linear(own, packed, np.int32(len(x)), columns=len(dense)))
        total = fma(sums, weight.scales[None, :, block], total)
    return total


def pack(*parts: Float8Weight, is_gated: bool = False) -> npt.NDArray[Any]:
    columns = len(parts[0]) if is_gated else sum(map(len, parts))
    shape = float8_shape(columns, parts[0].shape[1], is_gated=is_gated)
    packed = PackedMemory().empty(shape, FLOAT8)
    load_native_library().pack_float8(parts, packed, is_gated=is_gated)
    return packed


@functools.partial(jax.jit, static_argnames="columns")
def linear(x: Any, packed: Any, rows: Any, *, columns: int) -> Any:
    shape = jax.ShapeDtypeStruct((len(x), columns), jnp.float32)
    program = NativeProgram(load_native_library())
    record = program.call("linear", shape)
    return program.emit(record(x, packed, rows, None, None, scale=np.float32(1.0)))


def compare_products(digest: Any) -> int:
    random, count = np.random.default_rng(7), 0
    for columns, reduction in SHAPES:
        weight = random_weight(random, columns, reduction)
        packed = pack(weight)
        for dtype in (np.float32, ml_dtypes.bfloat16):
            x = (random.normal(size=(257, reduction)) * 3).astype(dtype)
            expected = product_of_blocks(x, weight)
            if dtype == np.float32:
                assert expected.tobytes() == product(x, weight).tobytes(), (columns, reduction)
                digest.update(expected.tobytes())
            for rows in ROWS:
                found = np.asarray(linear(x, packed, np.int32(rows), columns=columns))[:rows]
                assert found.tobytes() == expected[:rows].tobytes(), (columns, reduction, rows)
                count += 1
    return count


def main() -> None:
    digest = hashlib.sha256()
    count = compare_products(digest)
    print(load_native_library().cpu_isa, count, digest.hexdigest())


if __name__ == "__main__":
    main()
