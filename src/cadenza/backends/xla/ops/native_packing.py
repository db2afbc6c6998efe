"""How the native kernels' packed weights are made: `plan_packing`.

Owns the choice between floats, float8 and integer codes; `csrc/core/pack.h` has the layouts.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.ops.float8 import are_float8
from cadenza.backends.xla.ops.native_library import (
    CodedOperand,
    NativeLibrary,
    float8_shape,
    num_columns,
    packed_bytes,
    packed_shape,
)
from cadenza.backends.xla.ops.quantised import (
    are_codes,
    as_floats,
    as_operand,
    formats_of,
    orders_of,
)
from cadenza.weights.quantised_weight import FloatsOrCodes, HostWeight
from cadenza.weights.weight_format import FLOAT8, WeightFormat, joined, panel_formats


class Packing(NamedTuple):
    """How the weights of experts are packed: the array of each, and what writes it.

    `format` is that of the first part.
    """

    shape: tuple[int, ...]
    dtype: Any
    format: WeightFormat
    writers: Sequence[Callable[[npt.NDArray[Any]], None]]


def plan_packing(
    library: NativeLibrary,
    experts: Sequence[Sequence[HostWeight]],
    format: WeightFormat,
    *,
    is_gated: bool,
) -> Packing:
    sizes = num_columns(experts[0], is_gated=is_gated), experts[0][0].shape[1]
    if all(are_float8(parts) for parts in experts):
        coded: Sequence[Any] = experts
        shape, dtype = float8_shape(*sizes, is_gated=is_gated), jnp.float8_e4m3fn
        writers = [partial(library.pack_float8, each, is_gated=is_gated) for each in coded]
        return Packing(shape, dtype, FLOAT8, writers)
    held = [as_operand(parts, format) for parts in experts]
    if all(are_codes(parts, format) for parts in held):
        return _plan_codes(library, held, format, is_gated=is_gated)
    floats = [[as_floats(part) for part in parts] for parts in held]
    dtype = jnp.dtype(format.name)
    writers = [partial(library.pack, each, is_gated=is_gated) for each in floats]
    return Packing(packed_shape(*sizes, dtype, is_gated=is_gated), dtype, format, writers)


def _plan_codes(
    library: NativeLibrary,
    experts: Sequence[Sequence[FloatsOrCodes]],
    format: WeightFormat,
    *,
    is_gated: bool,
) -> Packing:
    formats = [each for parts in experts for each in formats_of(parts, format)]
    rows, orders = [len(part) for part in experts[0]], orders_of(experts)
    if is_gated or len(experts) > 1:
        targets = [joined(formats)] * len(rows)
    else:
        targets = panel_formats(formats, rows)
    columns = [rows[0]] if is_gated else rows
    num_bytes = packed_bytes(
        [*zip(targets[: len(columns)], columns, strict=True)],
        experts[0][0].shape[1],
        is_gated=is_gated,
        is_ordered=orders[0] is not None,
    )
    operands = [
        CodedOperand(targets=targets, parts=parts, order=order)
        for parts, order in zip(experts, orders, strict=True)
    ]
    writers = [partial(library.pack_quantised, each, is_gated=is_gated) for each in operands]
    return Packing((num_bytes,), np.uint8, targets[0], writers)
