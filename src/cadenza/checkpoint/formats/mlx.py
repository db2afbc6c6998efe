"""Reads checkpoints that MLX quantised: affine codes of 4 and 8 bits, and mxfp4. A module is
quantised if it has `scales`. Shapes: N out, K in, S stored groups of K."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from cadenza.checkpoint.formats.grouped import (
    MXFP4_GROUP,
    Bits,
    CodeLayout,
    stored_mxfp4,
    unpack_codes,
)
from cadenza.checkpoint.formats.scheme import SCALE_DTYPES, ModuleTensors, QuantisationScheme
from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, shorten
from cadenza.weights.stored_tensor import StoredWeight
from cadenza.weights.tensor_spec import TensorSpec
from cadenza.weights.weights import Weights

MAX_MODULES = 1 << 17
_GROUPS = (32, 64, 128)
_EXPERT = re.compile(r"\.experts\.\d+\.")

Mode = Literal["affine", "mxfp4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MLXSettings:
    """How a module is quantised."""

    mode: Mode
    bits: Bits
    group: int


def _find(
    default: MLXSettings, modules: Mapping[str, MLXSettings], spec: TensorSpec, weights: Weights
) -> StoredWeight | None:
    """`modules` have settings of their own."""
    tensors = ModuleTensors.of(spec, weights)
    if not tensors.has("scales"):
        return None
    named = (modules.get(name) for name in (tensors.module, *_stacks_of(tensors.module)))
    settings = next((each for each in named if each is not None), default)
    rows, reduction = spec.shape
    if reduction % settings.group:
        raise CheckpointError(
            f"{tensors.module} has {reduction} inputs, which is not a multiple of its "
            f"group_size {settings.group}; correct config.json"
        )
    if settings.mode == "mxfp4":
        codes = tensors.take("weight", [(rows, reduction // 8)], ("uint32",))
        return stored_mxfp4(spec, tensors, "mlx", codes, "scales")
    bits, groups = settings.bits, reduction // settings.group
    codes = tensors.take("weight", [(rows, reduction * bits // 32)], ("uint32",))
    scales = tensors.take("scales", [(rows, groups)], SCALE_DTYPES)
    biases = tensors.take("biases", [(rows, groups)], (scales.dtype,))
    layout = CodeLayout(
        bits=bits, group=settings.group, scale_dtype=scales.dtype, correction="minimum"
    )
    return StoredWeight(
        shape=spec.shape,
        stored_type=f"mlx int{bits}",
        format=layout.format,
        parts=(codes, scales, biases),
        load=lambda: layout.weight(
            unpack_codes(codes.array(), bits, reduction), scales.array(), biases.array()
        ),
    )


def _stacks_of(module: str) -> Iterator[str]:
    """How MLX names the stack of all experts that a module is one of."""
    for stack in ("switch_mlp", "experts"):
        yield _EXPERT.sub(f".{stack}.", module)


def read_mlx(raw: JsonObject) -> QuantisationScheme:
    """The scheme of a `quantization`: settings for all modules, and some by name."""
    default = _read_settings(raw, None)
    if len(raw.values) > MAX_MODULES:
        raise CheckpointError(f"{raw.where} has over {MAX_MODULES} entries")
    own = {key: raw.child(key) for key, value in raw.values.items() if isinstance(value, dict)}
    modules = {key: _read_settings(each, default) for key, each in own.items() if each}
    kind = default.mode if default.mode == "mxfp4" else f"{default.mode} int{default.bits}"
    return QuantisationScheme(
        name=f"mlx {kind} with groups of {default.group}", find=partial(_find, default, modules)
    )


def _read_settings(raw: JsonObject, default: MLXSettings | None) -> MLXSettings:
    mode = raw.text("mode") or (default.mode if default else "affine")
    if mode not in ("affine", "mxfp4"):
        raise CheckpointError(
            f"{raw.where}: mode {shorten(mode)} is not supported; supported are affine and mxfp4"
        )
    is_affine = mode == "affine"
    bits = raw.integer("bits", 1, 16, 4 if default is None else default.bits)
    found: Bits | None = 4 if bits == 4 else 8 if bits == 8 and is_affine else None
    group = raw.integer("group_size", 1, 1 << 16, 64 if is_affine else MXFP4_GROUP)
    if found is None or group not in (_GROUPS if is_affine else (MXFP4_GROUP,)):
        raise CheckpointError(
            f"{raw.where}: {bits} bits with group_size {group} are not supported in mode {mode}; "
            f"supported are affine with 4 or 8 bits and groups of 32, 64 or 128, and mxfp4"
        )
    return MLXSettings(mode="affine" if is_affine else "mxfp4", bits=found, group=group)
