"""Layouts of weights for the kernels of GPUs: `hold_weights`.

Weights of floats keep the checkpoint's layout, [N, K]. Codes are packed as for the CPU
(`csrc/core/code_format.h`), whose panels are what a warp of a GPU reads, and by its library.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.ops.float8 import are_float8
from cadenza.backends.xla.ops.native_library import load_native_library
from cadenza.backends.xla.ops.native_packing import plan_packing
from cadenza.backends.xla.ops.packed_memory import PackedMemory
from cadenza.backends.xla.ops.quantised import are_codes, as_floats, as_operand
from cadenza.weights.quantised_weight import HostWeight
from cadenza.weights.weight_format import WeightFormat


class HeldWeights(NamedTuple):
    """The weights of experts with equal parts, [X, ...]; `format` is that of the first part."""

    weights: npt.NDArray[Any]
    format: WeightFormat


def hold_weights(
    experts: Sequence[Sequence[HostWeight]], format: WeightFormat, *, is_gated: bool
) -> HeldWeights:
    """Weights [Ni, K] side by side of each expert; floats of one expert and one part are not
    copied."""
    held = [as_operand(parts, format) for parts in experts]
    are_packed = all(are_float8(parts) for parts in experts) or all(
        are_codes(parts, format) for parts in held
    )
    if are_packed:
        return _pack(experts, format, is_gated=is_gated)
    floats = [_join([as_floats(part) for part in parts], format) for parts in held]
    return HeldWeights(floats[0][None] if len(floats) == 1 else np.stack(floats), format)


def _join(parts: Sequence[npt.NDArray[Any]], format: WeightFormat) -> npt.NDArray[Any]:
    floats = [part.astype(jnp.dtype(format.name), copy=False) for part in parts]
    return floats[0] if len(floats) == 1 else np.concatenate(floats)


def _pack(
    experts: Sequence[Sequence[HostWeight]], format: WeightFormat, *, is_gated: bool
) -> HeldWeights:
    packing = plan_packing(load_native_library(), experts, format, is_gated=is_gated)
    packed = PackedMemory().empty((len(experts), *packing.shape), packing.dtype)
    for place, write in zip(packed, packing.writers, strict=True):
        write(place)
    return HeldWeights(packed, packing.format)
