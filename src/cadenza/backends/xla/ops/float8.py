"""Products with float8_e4m3fn weights in plain jnp: the definition of their arithmetic
(`csrc/core/float8.h`). Activations are multiplied in their own type; a block's sum is multiplied by
the block's scale, and blocks are folded in ascending order. Legend as in `ops.table`; B blocks of
`BLOCK` elements of K."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from cadenza.weights.float8_weight import BLOCK, Float8Weight
from cadenza.weights.quantised_weight import HostWeight

_HIGHEST = jax.lax.Precision.HIGHEST


class Float8Codes(NamedTuple):
    """A weight on the device; elements beyond K are zero."""

    codes: Any  # [..., N, B, BLOCK] float8_e4m3fn
    scales: Any  # [..., N, B] float32


def are_float8(parts: Sequence[HostWeight]) -> bool:
    """Whether all weights of an operand are in float8; beside others they are dequantised."""
    return all(isinstance(part, Float8Weight) for part in parts)


def join_float8(parts: Sequence[Any]) -> Float8Codes:
    codes = np.concatenate([part.codes for part in parts])
    scales = np.concatenate([part.scales for part in parts])
    padded = np.pad(codes, ((0, 0), (0, scales.shape[1] * BLOCK - codes.shape[1])))
    return Float8Codes(padded.view(ml_dtypes.float8_e4m3fn).reshape(*scales.shape, BLOCK), scales)


def stack_float8(weights: Sequence[Float8Codes]) -> Float8Codes:
    return Float8Codes(*(np.stack(field) for field in zip(*weights, strict=True)))


def float8_product(x: jax.Array, weight: Float8Codes) -> jax.Array:
    """Activations [T, K] times the transposed weight [N, K]: float32 [T, N]."""
    num_out, num_blocks, _ = weight.codes.shape
    wide = x.astype(jnp.float32)
    blocks = jnp.pad(wide, ((0, 0), (0, num_blocks * BLOCK - x.shape[1])))
    blocks = blocks.reshape(len(x), num_blocks, BLOCK)

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
