"""Products with quantised and float8 weights in plain jnp: the definition (`csrc/core/quantised.h`,
`float8.h`). Activations are rounded to int8 by row and group; a group's dot is an exact integer;
groups are folded in ascending order, then second codes of each span's largest group. Legend as in
`ops.table`; G groups of `GROUP` elements of K, of one or two parts with a scale each."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

from cadenza.weights.quantised_weight import (
    MOST_CODE,
    Float8Weight,
    FloatsOrCodes,
    HostWeight,
    InputOrder,
    QuantisedWeight,
    have_one_order,
    quantise_int4,
    quantise_int8,
)
from cadenza.weights.weight_format import FLOAT8_BLOCK, GROUP, INT4, WeightFormat

_HIGHEST = jax.lax.Precision.HIGHEST
# A group whose largest magnitude is smaller counts as zero, so that no later value is denormal.
SMALLEST_LARGEST = np.float32(2.0**-64)
REMAINDER_SPAN = 64  # groups of a row, of which one has second codes


class Float8Codes(NamedTuple):
    """A weight on the device; elements beyond K are zero."""

    codes: Any  # [..., N, B, FLOAT8_BLOCK] float8_e4m3fn
    scales: Any  # [..., N, B] float32


def are_float8(parts: Sequence[HostWeight]) -> bool:
    """Whether all weights of an operand are in float8; beside others they are dequantised."""
    return all(isinstance(part, Float8Weight) for part in parts)


def join_float8(parts: Sequence[Any]) -> Float8Codes:
    codes = np.concatenate([part.codes for part in parts])
    scales = np.concatenate([part.scales for part in parts])
    padded = np.pad(codes, ((0, 0), (0, scales.shape[1] * FLOAT8_BLOCK - codes.shape[1])))
    return Float8Codes(
        padded.view(ml_dtypes.float8_e4m3fn).reshape(*scales.shape, FLOAT8_BLOCK), scales
    )


def stack_float8(weights: Sequence[Float8Codes]) -> Float8Codes:
    return Float8Codes(*(np.stack(field) for field in zip(*weights, strict=True)))


def float8_product(x: jax.Array, weight: Float8Codes) -> jax.Array:
    """Activations [T, K] times the transposed weight [N, K]: float32 [T, N]. A block's sum is
    multiplied by the block's scale; blocks are folded in ascending order."""
    num_out, num_blocks, _ = weight.codes.shape
    wide = x.astype(jnp.float32)
    blocks = jnp.pad(wide, ((0, 0), (0, num_blocks * FLOAT8_BLOCK - x.shape[1])))
    blocks = blocks.reshape(len(x), num_blocks, FLOAT8_BLOCK)

    def fold(block: jax.Array, total: jax.Array) -> jax.Array:
        part = jax.lax.dot_general(
            blocks[:, block],
            weight.codes[:, block].astype(jnp.float32),
            (((1,), (1,)), ((), ())),
            precision=_HIGHEST,
        )
        return total + part * weight.scales[:, block]

    start = jnp.zeros((len(x), num_out), jnp.float32)
    return jax.lax.fori_loop(0, num_blocks, fold, start)


class Codes(NamedTuple):
    """A quantised weight on the device; elements beyond K are zero."""

    codes: Any  # [..., N, 32 elements of K, parts with one scale, elements of a part] int8
    scales: Any  # [..., N, ., parts] float16 or float32
    zero_points: Any | None  # [..., N, ., parts] int32
    offsets: Any | None  # [..., N, ., parts], in the type of the scales
    order: Any | None = None  # [..., K]: of the inputs that the codes belong to


CodedParts = tuple[Codes, ...]  # weights side by side, each in its own format


def as_operand(parts: Sequence[HostWeight], format: WeightFormat) -> Sequence[FloatsOrCodes]:
    """Weights that are multiplied as one operand: all of integer codes, or all of floats. Codes
    beside floats that stay floats, or beside float8 weights, are dequantised."""
    held = [part for part in parts if not isinstance(part, Float8Weight)]
    have_codes = format.is_quantised or not any(isinstance(part, np.ndarray) for part in held)
    if len(held) == len(parts) and have_codes:
        return held
    return [as_floats(part) for part in parts]


def as_floats(weight: HostWeight) -> npt.NDArray[Any]:
    return weight if isinstance(weight, np.ndarray) else weight.dequantised()


def are_codes(parts: Sequence[FloatsOrCodes], format: WeightFormat) -> bool:
    """Whether an operand is held as codes; floats are quantised to `format`."""
    return format.is_quantised or not isinstance(parts[0], np.ndarray)


def formats_of(parts: Sequence[FloatsOrCodes], format: WeightFormat) -> list[WeightFormat]:
    return [format if isinstance(part, np.ndarray) else part.format for part in parts]


def quantise_parts(format: WeightFormat, parts: Sequence[FloatsOrCodes]) -> CodedParts:
    """Weights [Ni, K], quantised unless they are already."""
    quantise = quantise_int4 if format == INT4 else quantise_int8
    return tuple(
        _codes_of(quantise(part) if isinstance(part, np.ndarray) else part.as_codes())
        for part in parts
    )


def _codes_of(weight: QuantisedWeight) -> Codes:
    rows, reduction = weight.shape
    shape = (rows, -(-reduction // GROUP), GROUP // weight.group)

    def complete(each: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
        if each is None:
            return None
        return np.pad(each, ((0, 0), (0, shape[1] * shape[2] - each.shape[1]))).reshape(shape)

    codes = np.pad(weight.codes, ((0, 0), (0, shape[1] * GROUP - reduction)))
    zeros = None if weight.zero_points is None else weight.zero_points.astype(np.int32)
    return Codes(
        codes=codes.reshape(*shape, weight.group),
        scales=complete(weight.scales),
        zero_points=complete(zeros),
        offsets=complete(weight.offsets),
        order=weight.order,
    )


def orders_of(experts: Sequence[Sequence[FloatsOrCodes]]) -> list[InputOrder | None]:
    """The order of the inputs of each operand, which its parts share. With one of them ordered all
    are, since the weights of experts have one layout."""
    orders = [_order_of(parts) for parts in experts]
    if all(order is None for order in orders):
        return orders
    as_they_come = np.arange(experts[0][0].shape[1], dtype=np.int32)
    return [as_they_come if order is None else order for order in orders]


def _order_of(parts: Sequence[FloatsOrCodes]) -> InputOrder | None:
    assert have_one_order(parts), "checked before weights are loaded into an operand"
    return None if isinstance(parts[0], np.ndarray) else parts[0].order


def stack_codes(weights: Sequence[CodedParts], orders: Sequence[InputOrder | None]) -> CodedParts:
    ordered = [
        tuple(part._replace(order=order) for part in parts)
        for parts, order in zip(weights, orders, strict=True)
    ]
    return jax.tree.map(lambda *each: np.stack(each), *ordered)


def quantise_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes int8 [T, 2 G, GROUP] and scales float32 [T, 2 G] of activations [T, K]: of the groups,
    then second codes, 0 in all but one group of each span. A group that is not finite has a NaN
    scale."""
    wide = x.astype(jnp.float32)
    padded = jnp.pad(wide, ((0, 0), (0, -x.shape[1] % GROUP)))
    groups = padded.reshape(len(x), -1, GROUP)
    codes, scales = quantise_groups(groups)
    left = groups - codes.astype(jnp.float32) * scales[..., None]
    second = quantise_groups(jnp.where(_is_largest(scales)[..., None], left, 0.0))
    all_codes, all_scales = (
        jnp.concatenate(pair, axis=1) for pair in zip((codes, scales), second, strict=True)
    )
    return all_codes, all_scales


def _is_largest(scales: jax.Array) -> jax.Array:
    used = jnp.nan_to_num(scales, nan=0.0)
    num_groups = scales.shape[1]
    padded = jnp.pad(used, ((0, 0), (0, -num_groups % REMAINDER_SPAN)))
    spans = padded.reshape(len(scales), -1, REMAINDER_SPAN)
    first = jnp.argmax(spans, axis=-1)[..., None]
    is_first = jnp.arange(REMAINDER_SPAN) == first
    return is_first.reshape(len(scales), -1)[:, :num_groups] & (used > 0)


def quantise_groups(groups: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes int8 [..., n] and scales float32 [...] of groups of n elements [..., n] in float32. A
    group that is not finite has codes 0 and a NaN scale."""
    exact, largest = scale_groups(groups, MOST_CODE)
    return jnp.round(exact).astype(jnp.int8), largest / np.float32(MOST_CODE)


def scale_groups(groups: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Groups [..., n] in float32, scaled to the largest magnitude `most`, and their magnitudes
    [...]: NaN, with a group of 0, for one that is not finite; 0 in both for one of very small
    elements."""
    largest = jnp.max(jnp.abs(groups), axis=-1)  # NaN propagates
    is_finite = jnp.isfinite(largest)
    is_used = is_finite & (largest >= SMALLEST_LARGEST)
    inverse = jnp.where(is_used, most / jnp.where(is_used, largest, 1.0), 0.0)
    exact = jnp.where(is_used[..., None], groups, 0.0) * inverse[..., None]
    return exact, jnp.where(is_finite, jnp.where(is_used, largest, 0.0), jnp.nan)


def quantised_product(x: jax.Array, parts: CodedParts) -> jax.Array:
    """Activations [T, K] times the transposed weights [Ni, K]: float32 [T, N]."""
    order = parts[0].order
    rows = quantise_rows(x if order is None else x[:, order])
    return jnp.concatenate([_product(*rows, weight) for weight in parts], axis=1)


def _product(codes: jax.Array, scales: jax.Array, weight: Codes) -> jax.Array:
    num_groups, num_parts, part_len = weight.codes.shape[-3:]
    cut = codes.reshape(*codes.shape[:2], num_parts, part_len)
    totals = jnp.sum(cut.astype(jnp.int32), axis=-1)  # [T, 2 G, parts]

    def fold(step: jax.Array, sums: jax.Array) -> jax.Array:
        group, part = step // num_parts, step % num_parts
        of_weight = group % num_groups
        scale = scales[:, group, None]
        dot = jax.lax.dot_general(
            cut[:, group, part],
            weight.codes[:, of_weight, part],
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.int32,
        )
        total = totals[:, group, part, None]
        if weight.zero_points is not None:
            dot = dot - total * weight.zero_points[:, of_weight, part]
        sums = sums + dot.astype(jnp.float32) * scale * _wide(weight.scales[:, of_weight, part])
        if weight.offsets is not None:
            sums += total.astype(jnp.float32) * scale * _wide(weight.offsets[:, of_weight, part])
        return sums

    start = jnp.zeros((len(codes), weight.scales.shape[0]), jnp.float32)
    return jax.lax.fori_loop(0, scales.shape[1] * num_parts, fold, start)


def dequantised_rows(parts: CodedParts, ids: jax.Array, num_columns: int) -> jax.Array:
    """Rows `ids` [T] of a weight [N, K], which has one part, in float32: [T, K]."""
    (weight,) = parts
    codes = weight.codes[ids].astype(jnp.int32)
    if weight.zero_points is not None:
        codes = codes - weight.zero_points[ids][..., None]
    rows = codes.astype(jnp.float32) * _wide(weight.scales[ids])[..., None]
    if weight.offsets is not None:
        rows = rows + _wide(weight.offsets[ids])[..., None]
    rows = rows.reshape(len(ids), -1)[:, :num_columns]
    return rows if weight.order is None else rows[:, jnp.argsort(weight.order)]


def _wide(values: jax.Array) -> jax.Array:
    return values.astype(jnp.float32)
