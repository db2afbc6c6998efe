"""Reads checkpoints that MLX quantised: affine codes of 4 and 8 bits, and mxfp4.

Owns the settings. A module is quantised if it has `scales`.

Shapes: N out, K in, S stored groups of K.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cadenza.checkpoint.declaration import TensorSpec
from cadenza.checkpoint.formats.grouped import Bits, CodeLayout, unpack_codes
from cadenza.checkpoint.formats.mxfp4 import MXFP4_GROUP, stored_mxfp4
from cadenza.checkpoint.formats.scheme import SCALE_DTYPES, ModuleTensors
from cadenza.checkpoint.json_object import JsonObject, shorten
from cadenza.checkpoint.quantised_weight import QuantisedWeight
from cadenza.checkpoint.stored_weight import StoredWeight
from cadenza.checkpoint.weights import Weights
from cadenza.errors import CheckpointError

MAX_MODULES = 1 << 17
_GROUPS = (32, 64, 128)

Mode = Literal["affine", "mxfp4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MLXSettings:
    """How a module is quantised."""

    mode: Mode
    bits: Bits
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MLX:
    """A `QuantisationScheme`; `modules` have settings of their own."""

    default: MLXSettings
    modules: Mapping[str, MLXSettings]

    @property
    def name(self) -> str:
        own = self.default
        kind = own.mode if own.mode == "mxfp4" else f"{own.mode} int{own.bits}"
        return f"mlx {kind} with groups of {own.group}"

    @property
    def activations(self) -> str | None:
        return None

    def find(self, spec: TensorSpec, weights: Weights) -> StoredWeight | None:
        tensors = ModuleTensors.of(spec, weights)
        if not tensors.has("scales"):
            return None
        settings = self.modules.get(tensors.module, self.default)
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

        def load() -> QuantisedWeight:
            unsigned = unpack_codes(tensors.read(codes), bits, reduction)
            return layout.weight(unsigned, tensors.read(scales), tensors.read(biases))

        return StoredWeight(
            shape=spec.shape,
            stored_type=f"mlx int{bits}",
            format=layout.format,
            parts=(codes, scales, biases),
            load=load,
        )


def read_mlx(raw: JsonObject) -> MLX:
    """The scheme of a `quantization`: settings for all modules, and some by name."""
    default = _read_settings(raw, None)
    if len(raw.values) > MAX_MODULES:
        raise CheckpointError(f"{raw.where} has over {MAX_MODULES} entries")
    modules = [key for key, value in raw.values.items() if isinstance(value, dict)]
    own = {key: raw.child(key) for key in modules}
    return MLX(
        default=default,
        modules={key: _read_settings(each, default) for key, each in own.items() if each},
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
