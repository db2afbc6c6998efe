"""Products with quantised weights in plain jnp: the definition of their arithmetic.

`csrc/core/quantised.h` states the rules. Activations are rounded to int8 for each row and group;
the dot of a group's codes is an exact integer, and the groups are folded in ascending order.

Legend as in `ops.table`; G groups of `GROUP` elements of K.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from cadenza.checkpoint.quantised_weight import (
    GROUP,
    MOST_CODE,
    QuantisedWeight,
    quantise_int4,
    quantise_int8,
)
from cadenza.checkpoint.weight_format import INT4, WeightFormat

SMALLEST_LARGEST = np.float32(2.0**-64)
"""A group whose largest magnitude is smaller counts as zero, so that no later value is denormal."""


class Codes(NamedTuple):
    """A quantised weight on the device; elements beyond K are zero."""

    codes: Any  # [..., N, G, GROUP] int8
    scales: Any  # [..., N, G] float16
    zero_points: Any  # [..., N, G] int32; zeros for int8 codes


def quantise_parts(
    format: WeightFormat, parts: Sequence[npt.NDArray[Any] | QuantisedWeight]
) -> Codes:
    """Weights [Ni, K] side by side, quantised unless they are already."""
    quantise = quantise_int4 if format == INT4 else quantise_int8
    weights = [part if isinstance(part, QuantisedWeight) else quantise(part) for part in parts]
    codes = np.concatenate([weight.codes for weight in weights])
    scales = np.concatenate([weight.scales for weight in weights])
    zeros = [
        np.zeros(each.scales.shape) if each.zero_points is None else each.zero_points
        for each in weights
    ]
    padding = scales.shape[1] * GROUP - codes.shape[1]
    padded = np.pad(codes, ((0, 0), (0, padding)))
    groups = padded.reshape(*scales.shape, GROUP)
    return Codes(groups, scales, np.concatenate(zeros).astype(np.int32))


def stack_codes(weights: Sequence[Codes]) -> Codes:
    """The weights of all experts: [X, N, G, GROUP]."""
    return Codes(*(np.stack(field) for field in zip(*weights, strict=True)))


def quantise_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes int8 [T, G, GROUP] and scales float32 [T, G] of activations [T, K].

    A group that is not finite has a NaN scale, so that its row's outputs are NaN.
    """
    wide = x.astype(jnp.float32)
    padded = jnp.pad(wide, ((0, 0), (0, -x.shape[1] % GROUP)))
    groups = padded.reshape(len(x), -1, GROUP)
    largest = jnp.max(jnp.abs(groups), axis=-1)  # [T, G]; NaN propagates
    is_finite = jnp.isfinite(largest)
    is_used = is_finite & (largest >= SMALLEST_LARGEST)
    inverse = jnp.where(is_used, MOST_CODE / jnp.where(is_used, largest, 1.0), 0.0)
    codes = jnp.round(jnp.where(is_used[..., None], groups, 0.0) * inverse[..., None])
    scales = jnp.where(is_used, largest / np.float32(MOST_CODE), 0.0)
    return codes.astype(jnp.int8), jnp.where(is_finite, scales, jnp.nan)


def quantised_product(x: jax.Array, weight: Codes) -> jax.Array:
    """Activations [T, K] times the transposed weight [N, K]: float32 [T, N]."""
    codes, scales = quantise_rows(x)
    sums = jnp.sum(codes.astype(jnp.int32), axis=-1)  # [T, G]
    weight_scales = weight.scales.astype(jnp.float32)  # [N, G]

    def fold(group: jax.Array, total: jax.Array) -> jax.Array:
        dot = jax.lax.dot_general(
            codes[:, group],
            weight.codes[:, group],
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.int32,
        )
        dot = dot - sums[:, group, None] * weight.zero_points[:, group]
        part = dot.astype(jnp.float32) * scales[:, group, None]
        return total + part * weight_scales[:, group]

    start = jnp.zeros((len(x), weight.scales.shape[0]), jnp.float32)
    return jax.lax.fori_loop(0, scales.shape[1], fold, start)


def dequantised_rows(weight: Codes, ids: jax.Array, num_columns: int) -> jax.Array:
    """Rows `ids` [T] of a weight [N, K] in float32: [T, K]."""
    scales = weight.scales[ids].astype(jnp.float32)[..., None]
    codes = weight.codes[ids].astype(jnp.int32) - weight.zero_points[ids][..., None]
    rows = codes.astype(jnp.float32) * scales  # [T, G, GROUP]
    return rows.reshape(len(ids), -1)[:, :num_columns]
