"""The arithmetic of quantised products in numpy, with exact fused multiply-adds, and a program that
compares the kernels with it: `python -m tests.native.quantised_definition few` (or `all`: numbers
of rows).

Prints a digest of every operation's results, which must be equal on every instruction set.
"""

import functools
import hashlib
import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.ops.native_library import CodedOperand, load_native_library, packed_bytes
from cadenza.backends.xla.ops.native_program import NativeProgram
from cadenza.backends.xla.ops.packed_memory import PackedMemory
from cadenza.backends.xla.ops.quantised import REMAINDER_SPAN, orders_of
from cadenza.checkpoint.gguf.blocks import ENCODINGS
from cadenza.weights.quantised_weight import (
    BlockWeight,
    FloatsOrCodes,
    QuantisedWeight,
    quantise_int4,
    quantise_int8,
)
from cadenza.weights.weight_format import (
    GROUP,
    INT4,
    INT8,
    Correction,
    ScaleType,
    WeightFormat,
    code_format,
)
from tests.checkpoint.gguf_random import TYPES, any_blocks

Float32Array = npt.NDArray[np.float32]

ROWS = {"few": (1, 2, 3, 5, 6, 7, 17, 40, 65), "all": (*range(1, 41), 63, 64, 65, 255, 256, 257)}
# Columns and reductions, most with incomplete panels and groups; the last has two spans.
SHAPES = ((70, 96), (33, 31), (64, 32), (100, 57), (17, 130), (5, 2100))

QUANTISED = {INT8: quantise_int8, INT4: quantise_int4}

_CORRECTED: tuple[tuple[Literal[4, 8], Correction | None], ...] = (
    (4, None),
    (4, "zero_point"),
    (4, "offset"),
    (8, None),
    (8, "offset"),
)
_SCALES: tuple[ScaleType, ...] = ("float16", "float32")
FORMATS = [
    *(code_format(bits, scale, kind) for scale in _SCALES for bits, kind in _CORRECTED),
    code_format(8, "float32", None, 16),
    code_format(8, "float32", "offset", 16),
]


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


# Codes [T, G, GROUP] and scales [T, G] of activations.
Coded = tuple[npt.NDArray[np.int32], Float32Array]


def quantise_rows(x: npt.NDArray[Any]) -> tuple[Coded, Coded]:
    """The codes of activations [T, K], and the second codes: 0 but in one group of each span."""
    padded = np.pad(x.astype(np.float32), ((0, 0), (0, -x.shape[1] % GROUP)))
    groups = padded.reshape(len(x), -1, GROUP)
    codes, scales = quantise_groups(groups)
    left = fma(-codes.astype(np.float32), np.broadcast_to(scales[..., None], codes.shape), groups)
    for row, of_row in zip(left, np.nan_to_num(scales, nan=0.0), strict=True):
        for begin in range(0, len(of_row), REMAINDER_SPAN):
            span = of_row[begin : begin + REMAINDER_SPAN]
            is_kept = (np.arange(len(span)) == span.argmax()) & (span > 0)
            row[begin : begin + len(span)][~is_kept] = 0.0
    return (codes, scales), quantise_groups(left)


def quantise_groups(groups: Float32Array) -> Coded:
    largest = np.abs(groups).max(axis=-1)
    is_used = np.isfinite(largest) & (largest >= np.float32(2.0**-64))
    safe = np.where(is_used, largest, np.float32(1.0))
    inverse = np.float32(127.0) / safe
    codes = np.rint(np.where(is_used[..., None], groups, np.float32(0.0)) * inverse[..., None])
    scales = np.where(is_used, safe / np.float32(127.0), np.float32(0.0))
    scales[~np.isfinite(largest)] = np.nan
    return codes.astype(np.int32), scales.astype(np.float32)


def product(x: npt.NDArray[Any], *parts: QuantisedWeight) -> Float32Array:
    order = parts[0].order
    first, second = quantise_rows(x if order is None else x[:, order])

    def product_with(weight: QuantisedWeight) -> Float32Array:
        zeros = np.zeros((len(x), len(weight)), np.float32)
        return fold(fold(zeros, first, weight), second, weight)

    return np.concatenate([product_with(weight) for weight in parts], axis=1)


def fold(total: Float32Array, coded: Coded, weight: QuantisedWeight) -> Float32Array:
    codes, scales = coded
    rows, num_groups = len(weight), weight.scales.shape[1]
    padded = np.pad(weight.codes.astype(np.int32), ((0, 0), (0, -weight.shape[1] % weight.group)))
    columns = padded.reshape(rows, num_groups, weight.group)
    if weight.zero_points is not None:
        columns = columns - weight.zero_points[..., None]
    own = codes.reshape(len(codes), -1, weight.group)
    for group in range(num_groups):
        scale = scales[:, group * weight.group // GROUP, None]
        dot = (own[:, group] @ columns[:, group].T).astype(np.float32)
        total = fma(dot * scale, weight.scales[:, group].astype(np.float32)[None], total)
        if weight.offsets is not None:
            of_row = own[:, group].sum(axis=-1, keepdims=True).astype(np.float32) * scale
            total = fma(of_row, weight.offsets[:, group].astype(np.float32)[None], total)
    return total


def random_weight(
    random: np.random.Generator, format: WeightFormat, rows: int, reduction: int
) -> QuantisedWeight:
    assert format.group is not None
    shape = (rows, -(-reduction // format.group))
    low = -128 if format.bits == 8 else (-8 if format.correction is None else 0)
    codes = random.integers(low, low + (1 << format.bits), (rows, reduction)).astype(np.int8)
    scales, offsets = (
        (random.normal(size=shape) * 0.01).astype(format.scale) for _ in range(2)
    )  # also negative
    zeros = random.integers(0, 16, shape).astype(np.uint8)
    return QuantisedWeight(
        codes=codes,
        scales=scales,
        zero_points=zeros if format.correction == "zero_point" else None,
        offsets=offsets if format.correction == "offset" else None,
        bits=8 if format.bits == 8 else 4,
        group=format.group,
    )


def pack(
    targets: WeightFormat | Sequence[WeightFormat], *parts: FloatsOrCodes, is_gated: bool = False
) -> npt.NDArray[Any]:
    each = [targets] * len(parts) if isinstance(targets, WeightFormat) else targets
    columns = [len(parts[0])] if is_gated else [len(part) for part in parts]
    formats = [*zip(each, columns, strict=False)]
    (order,) = orders_of([parts])
    is_ordered = order is not None
    size = packed_bytes(formats, parts[0].shape[1], is_gated=is_gated, is_ordered=is_ordered)
    packed = PackedMemory().empty((size,), np.uint8)
    operand = CodedOperand(targets=each, parts=parts, order=order)
    load_native_library().pack_quantised(operand, packed, is_gated=is_gated)
    return packed


def call(name: str, shape: Any, *operands: Any, **attributes: Any) -> npt.NDArray[Any]:
    return np.asarray(jax.jit(lambda *each: _emit(name, shape, *each, **attributes))(*operands))


@functools.partial(jax.jit, static_argnames="columns")
def linear(x: Any, packed: Any, rows: Any, *, columns: int) -> Any:
    shape = jax.ShapeDtypeStruct((len(x), columns), jnp.float32)
    return _emit("linear", shape, x, packed, rows, None, None, scale=np.float32(1.0))


def _emit(name: str, shape: Any, *operands: Any, **attributes: Any) -> Any:
    program = NativeProgram(load_native_library())
    return program.emit(program.call(name, shape)(*operands, **attributes))


def compare_products(batches: Sequence[int], digest: Any) -> int:
    random, count = np.random.default_rng(7), 0
    for (columns, reduction), (format, quantise) in itertools.product(SHAPES, QUANTISED.items()):
        floats = random.normal(size=(columns, reduction)).astype(np.float32)
        weight = quantise(floats)
        packed = pack(format, floats)
        assert pack(format, weight).tobytes() == packed.tobytes(), "packed otherwise"
        for dtype in (np.float32, ml_dtypes.bfloat16):
            count += compare(random, packed, dtype, weight, batches=batches, digest=digest)
    return count


def compare_formats(batches: Sequence[int], digest: Any) -> int:
    """As `compare_products`, every format of codes, and parts of several formats side by side."""
    random, count = np.random.default_rng(9), 0
    for (columns, reduction), format in itertools.product(SHAPES, FORMATS):
        weight = random_weight(random, format, columns, reduction)
        count += compare(
            random, pack(format, weight), np.float32, weight, batches=batches, digest=digest
        )
    order = random.permutation(57).astype(np.int32)
    pair = [replace(random_weight(random, INT4, rows, 57), order=order) for rows in (32, 9)]
    for dtype in (np.float32, ml_dtypes.bfloat16):
        count += compare(random, pack(INT4, *pair), dtype, *pair, batches=batches, digest=digest)
    parts = [random_weight(random, format, 32, 57) for format in FORMATS[:5]]
    packed = pack([part.format for part in parts], *parts)
    return count + compare(random, packed, np.float32, *parts, batches=batches, digest=digest)


def random_blocks(
    name: str, rows: int, reduction: int, num_paired_heads: int | None = None
) -> BlockWeight:
    kind = TYPES[name]
    stored = any_blocks(name, rows * reduction // kind.block_len, seed=len(name) + rows)
    if name == "MXFP4":
        stored[:, 0] = 120 + stored[:, 0] % 8  # scales that do not exceed float32 in a sum
    return BlockWeight(
        encoding=ENCODINGS[name], stored=stored.reshape(rows, -1), num_paired_heads=num_paired_heads
    )


def compare_blocks(batches: Sequence[int], digest: Any) -> int:
    """Every type of blocks, by themselves, with the rows of heads in pairs, and side by side."""
    random, count = np.random.default_rng(10), 0
    for name in ENCODINGS:
        for rows, heads in ((70, None), (80, 5)):
            weight = random_blocks(name, rows, 512, heads)
            packed = pack(weight.format, weight)
            count += compare(
                random, packed, np.float32, weight.as_codes(), batches=batches, digest=digest
            )
    for names in (("Q4_K", "Q6_K", "Q5_0"), ("Q5_K", "Q8_0", "MXFP4")):
        parts = [random_blocks(name, 32, 256) for name in names]
        codes = [part.as_codes() for part in parts]
        packed = pack([part.format for part in parts], *parts)
        count += compare(random, packed, np.float32, *codes, batches=batches, digest=digest)
    return count


def compare(
    random: np.random.Generator,
    packed: npt.NDArray[Any],
    dtype: Any,
    *parts: QuantisedWeight,
    batches: Sequence[int],
    digest: Any,
) -> int:
    reduction, columns = parts[0].shape[1], sum(map(len, parts))
    x = (random.normal(size=(max(batches), reduction)) * 3).astype(dtype)
    expected = product(x, *parts)
    digest.update(expected.tobytes())
    for rows in batches:
        found = np.asarray(linear(x, packed, np.int32(rows), columns=columns))[:rows]
        where = (*(part.format.name for part in parts), reduction, rows)
        assert found.tobytes() == expected[:rows].tobytes(), where
    return len(batches)


def add_other_operations(
    format: WeightFormat, pair: Sequence[QuantisedWeight | BlockWeight], digest: Any
) -> None:
    gate, up = pair
    width = gate.shape[1]
    x = np.random.default_rng(8).normal(size=(19, width)).astype(np.float32)
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
    shape = jax.ShapeDtypeStruct((4, width), jnp.float32)
    attributes = {"vocab": np.int64(37), "scale": np.float32(1.7)}
    rows = call("embed", shape, ids, pack(format, gate), np.int32(4), **attributes)
    expected = gate.dequantised() * np.float32(1.7)
    assert rows[[0, 1, 3]].tobytes() == expected[ids[[0, 1, 3]]].tobytes()
    assert not rows[2].any()
    digest.update(rows.tobytes())


def main() -> None:
    digest, batches = hashlib.sha256(), ROWS[sys.argv[1]]
    parts = (compare_products, compare_formats, compare_blocks)
    count = sum(compare_part(batches, digest) for compare_part in parts)
    random = np.random.default_rng(8)
    for format in FORMATS:
        pair = [random_weight(random, format, 37, 45) for _ in range(2)]
        add_other_operations(format, pair, digest)
    for name in ENCODINGS:
        pair = [random_blocks(name, 37, 256) for _ in range(2)]
        add_other_operations(pair[0].format, pair, digest)
    print(load_native_library().cpu_integer_isa, count, digest.hexdigest())


if __name__ == "__main__":
    main()
