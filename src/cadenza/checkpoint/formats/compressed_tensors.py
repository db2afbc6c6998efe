"""Reads compressed-tensors checkpoints, as vLLM's llm-compressor writes them
(https://github.com/vllm-project/compressed-tensors): `pack-quantized` with integers of 4 and 8
bits, `int-quantized` and `naive-quantized` of 8 bits, and `mxfp4-pack-quantized`; `formats/float8`
reads `float-quantized`. Shapes: N out, K in, S stored groups of K."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np

from cadenza.checkpoint.formats.float8 import Block, check_block, find_float8
from cadenza.checkpoint.formats.grouped import (
    MXFP4_GROUP,
    Bits,
    Bytes,
    CodeLayout,
    as_bits,
    stored_mxfp4,
    unpack_codes,
)
from cadenza.checkpoint.formats.scheme import (
    MAX_GROUP,
    MAX_TARGETS,
    SCALE_DTYPES,
    ModuleTensors,
    QuantisationScheme,
    Target,
)
from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, shorten
from cadenza.weights.quantised_weight import QuantisedWeight
from cadenza.weights.stored_tensor import (
    AnyArray,
    StoredTensor,
    StoredWeight,
)
from cadenza.weights.tensor_spec import TensorSpec
from cadenza.weights.weight_format import GROUP
from cadenza.weights.weights import Weights

MAX_CONFIG_GROUPS = 256

_STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSettings:
    """The `weights` of a config group: the type of the codes, and what shares a scale. `group` is
    the number of consecutive elements of K with one scale, for strategy `group`."""

    where: str
    bits: int
    type: str
    is_symmetric: bool
    strategy: str
    group: int | None
    block: tuple[int, ...] | None
    is_activation_ordered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigGroup:
    """The modules that are stored in one layout with the same settings."""

    targets: tuple[Target, ...]
    layout: str
    weights: WeightSettings
    activations: str | None


# finds the stored tensors of one weight, checks them, and says how it is read
Layout = Callable[[WeightSettings, TensorSpec, Weights], StoredWeight]


def _find(
    groups: tuple[ConfigGroup, ...],
    ignored: tuple[Target, ...],
    spec: TensorSpec,
    weights: Weights,
) -> StoredWeight | None:
    module = spec.name.removesuffix(".weight")
    kind = "Embedding" if spec.kind == "embedding" else "Linear"
    if any(each.rank(module, kind) is not None for each in ignored):
        return None
    matches = [
        (rank, group)
        for group in groups
        for rank in (target.rank(module, kind) for target in group.targets)
        if rank is not None
    ]
    if not matches:
        return None
    _, group = min(matches, key=lambda match: match[0])
    return _LAYOUTS[group.layout](group.weights, spec, weights)


def read_compressed_tensors(raw: JsonObject) -> QuantisationScheme:
    """The scheme of a `quantization_config`. Raises `CheckpointError`."""
    _refuse(raw)
    table = raw.child("config_groups")
    if table is None or not 0 < len(table.values) <= MAX_CONFIG_GROUPS:
        raise raw.wrong("config_groups", f"an object of 1 to {MAX_CONFIG_GROUPS} groups")
    default = raw.text("format")
    groups = tuple(_read_group(table, key, default) for key in table.values)
    ignored = _read_targets(raw, "ignore")
    kinds = {f"{group.layout} {group.weights.type}{group.weights.bits}" for group in groups}
    activations = {group.activations for group in groups if group.activations is not None}
    return QuantisationScheme(
        name=f"compressed-tensors ({', '.join(sorted(kinds))})",
        activations=", ".join(sorted(activations)) or None,
        find=partial(_find, groups, ignored),
    )


def _refuse(raw: JsonObject) -> None:
    """Refuses settings that change values and are not followed."""
    if raw.get("kv_cache_scheme") not in (None, {}):
        raise CheckpointError(
            f"{raw.where}: kv_cache_scheme is set, and stored KV scales are not supported; use a "
            f"checkpoint without it"
        )
    for key in ("sparsity_config", "transform_config"):
        value = raw.get(key)
        table = cast("Mapping[str, object]", value if isinstance(value, dict) else {})
        if value not in (None, {}) and table.get("format", "") != "dense":
            raise CheckpointError(
                f"{raw.where}: {key} is set, which is not supported; use a checkpoint without it"
            )


def _read_targets(raw: JsonObject, key: str) -> tuple[Target, ...]:
    values = raw.items_of(key)
    if len(values) > MAX_TARGETS:
        raise raw.wrong(key, f"at most {MAX_TARGETS} names")
    return tuple(Target.of(value, f"{raw.where}: {key}") for value in values)


def _read_group(table: JsonObject, key: str, default: str | None) -> ConfigGroup:
    raw = table.child(key)
    if raw is None:
        raise table.wrong(key, "an object")
    settings = raw.child("weights")
    if settings is None:
        raise raw.wrong("weights", "an object with the settings of the weights")
    layout = raw.text("format") or default
    if layout not in _LAYOUTS:
        raise CheckpointError(
            f"{raw.where}: format {shorten(layout)} is not supported; supported are "
            f"{', '.join(_LAYOUTS)}; use another checkpoint of the model"
        )
    if raw.child("output_activations"):
        raise CheckpointError(
            f"{raw.where}: output_activations is set, which is not supported; use a checkpoint "
            f"without it"
        )
    weights = _read_weights(settings)
    activations = _read_activations(raw.child("input_activations"), weights.type)
    if weights.type == "int" and activations is not None and not activations.startswith("int"):
        raise CheckpointError(
            f"{raw.where}: activations as {activations} beside integer weights are not supported; "
            f"use a checkpoint with int8 activations, or without input_activations"
        )
    return ConfigGroup(
        targets=_read_targets(raw, "targets"),
        layout=layout,
        weights=weights,
        activations=activations,
    )


def _read_weights(raw: JsonObject) -> WeightSettings:
    size = raw.get("group_size")
    group = None if size in (None, -1) else raw.integer("group_size", 1, MAX_GROUP)
    strategy = raw.text("strategy") or (
        "tensor" if size is None else "group" if group else "channel"
    )
    if strategy not in _STRATEGIES:
        raise raw.wrong("strategy", "one of " + ", ".join(_STRATEGIES))
    if strategy == "group" and (group is None or group % GROUP):
        raise raw.wrong("group_size", f"a multiple of {GROUP}")
    if raw.flag("dynamic", False):
        raise raw.wrong("dynamic", "false for weights")
    block = tuple(
        each for each in raw.items_of("block_structure") if isinstance(each, int) and each > 0
    )
    return WeightSettings(
        where=raw.where,
        bits=raw.integer("num_bits", 1, 16, 8),
        type=raw.text("type") or "int",
        is_symmetric=raw.flag("symmetric", True),
        strategy=strategy,
        group=group if strategy == "group" else None,
        block=block or None,
        is_activation_ordered=raw.get("actorder") in ("group", "dynamic", True),
    )


def _read_activations(raw: JsonObject | None, weights: str | None) -> str | None:
    """How the inputs are rounded, such as "int8 per token"; None if they are not. It is followed
    for integer weights, so scales of the inputs must not be stored."""
    if raw is None:
        return None
    bits, kind = raw.integer("num_bits", 1, 16, 8), raw.text("type") or "int"
    strategy = raw.text("strategy") or "tensor"
    if raw.get("dynamic") is not True and weights != "float":
        raise CheckpointError(
            f"{raw.where}: static activation scales are not supported; use a checkpoint whose "
            f"activations are dynamic, or not quantised"
        )
    if bits != 8 or not raw.flag("symmetric", True):
        raise CheckpointError(
            f"{raw.where}: activations with {bits} bits and symmetric "
            f"{raw.flag('symmetric', True)} are not supported; use a checkpoint with symmetric "
            f"activations of 8 bits, or without input_activations"
        )
    return f"{kind}8 per {strategy}"


def _find_packed(settings: WeightSettings, spec: TensorSpec, weights: Weights) -> StoredWeight:
    """`weight_packed` [N, words] holds unsigned codes, lowest bits first."""
    bits = _check_integers(settings, (4, 8))
    tensors = ModuleTensors.of(spec, weights)
    rows, reduction = spec.shape
    packed = tensors.take("weight_packed", [(rows, -(-reduction * bits // 32))], ("int32",))
    shape = tensors.take("weight_shape", [(2,)], ("int64", "int32"))
    if tuple(shape.array().tolist()) != spec.shape:
        raise CheckpointError(
            f"tensor {shape.name} is {shape.array().tolist()}; config.json requires "
            f"{list(spec.shape)}; correct config.json or fetch the checkpoint again"
        )
    scales = _take_scales(settings, tensors, spec)
    layout = _layout(settings, bits, scales)
    groups = layout.num_groups(reduction)
    zeros = None
    if not settings.is_symmetric:
        packed_zeros = (-(-rows * bits // 32), groups)
        zeros = tensors.take("weight_zero_point", [packed_zeros], ("int32",))

    def load() -> QuantisedWeight:
        codes = unpack_codes(packed.array(), bits, reduction)
        points = None
        if zeros is not None:
            points = unpack_codes(zeros.array().T, bits, rows).T
        return layout.weight(codes, scales.array().reshape(-1, groups), points)

    return _stored(spec, layout, (packed, shape, scales, zeros), load)


def _find_plain(settings: WeightSettings, spec: TensorSpec, weights: Weights) -> StoredWeight:
    """`weight` [N, K] holds signed codes, and so does `weight_zero_point`."""
    bits = _check_integers(settings, (8,))
    tensors = ModuleTensors.of(spec, weights)
    codes = tensors.take("weight", [spec.shape], ("int8",))
    scales = _take_scales(settings, tensors, spec)
    layout = _layout(settings, bits, scales)
    groups = layout.num_groups(spec.shape[1])
    zeros = None
    if not settings.is_symmetric:
        zeros = tensors.take("weight_zero_point", [scales.shape], ("int8",))

    def load() -> QuantisedWeight:
        points = None if zeros is None else _without_sign(zeros.array()).reshape(-1, groups)
        scale = scales.array().reshape(-1, groups)
        return layout.weight(_without_sign(codes.array()), scale, points)

    return _stored(spec, layout, (codes, scales, zeros), load)


def _find_mxfp4(settings: WeightSettings, spec: TensorSpec, weights: Weights) -> StoredWeight:
    """`weight_packed` [N, K / 2] has the even elements in the low nibbles."""
    if settings.group != MXFP4_GROUP or spec.shape[1] % MXFP4_GROUP:
        raise CheckpointError(
            f"{settings.where}: mxfp4 needs group_size {MXFP4_GROUP}, and inputs that are a "
            f"multiple of it; correct config.json"
        )
    tensors = ModuleTensors.of(spec, weights)
    rows, reduction = spec.shape
    packed = tensors.take("weight_packed", [(rows, reduction // 2)], ("uint8",))
    return stored_mxfp4(spec, tensors, "compressed-tensors", packed, "weight_scale")


def _find_float(settings: WeightSettings, spec: TensorSpec, weights: Weights) -> StoredWeight:
    """`weight` [N, K] holds float8_e4m3."""
    if settings.type != "float" or settings.bits != 8 or not settings.is_symmetric:
        raise CheckpointError(
            f"{settings.where}: weights of type {shorten(settings.type)} with num_bits "
            f"{settings.bits} and symmetric {str(settings.is_symmetric).lower()} are not supported "
            f"in this format; supported is symmetric float with 8; use another checkpoint of the "
            f"model"
        )
    return find_float8(spec, ModuleTensors.of(spec, weights), _float8_block(settings))


def _float8_block(settings: WeightSettings) -> Block:
    if settings.strategy in ("tensor", "channel"):
        return "tensor" if settings.strategy == "tensor" else "channel"
    sizes = settings.block if settings.strategy == "block" else (1, settings.group or 0)
    return check_block(settings.where, "block_structure or group_size", sizes)


def _find_naive(settings: WeightSettings, spec: TensorSpec, weights: Weights) -> StoredWeight:
    find = _find_float if settings.type == "float" else _find_plain
    return find(settings, spec, weights)


def _without_sign(codes: AnyArray) -> Bytes:
    return codes.view(np.uint8) ^ np.uint8(128)


_LAYOUTS: dict[str, Layout] = {
    "pack-quantized": _find_packed,
    "int-quantized": _find_plain,
    "naive-quantized": _find_naive,
    "mxfp4-pack-quantized": _find_mxfp4,
    "float-quantized": _find_float,
}


def _check_integers(settings: WeightSettings, supported: tuple[Bits, ...]) -> Bits:
    bits = as_bits(settings.bits)
    if settings.type != "int" or bits is None or bits not in supported:
        raise CheckpointError(
            f"{settings.where}: weights of type {shorten(settings.type)} with num_bits "
            f"{settings.bits} are not supported in this format; supported is int with "
            f"{' or '.join(map(str, supported))}; use another checkpoint of the model"
        )
    if settings.strategy == "block":
        raise CheckpointError(
            f"{settings.where}: strategy block is not supported for integers; use a checkpoint "
            f"with group or channel"
        )
    if settings.is_activation_ordered:
        raise CheckpointError(
            f"{settings.where}: actorder group is not supported; use a checkpoint with actorder "
            f"weight, or without it"
        )
    return bits


def _take_scales(
    settings: WeightSettings, tensors: ModuleTensors, spec: TensorSpec
) -> StoredTensor:
    """`weight_scale`: [N, S], or one element with strategy `tensor`."""
    rows, reduction = spec.shape
    shapes: list[tuple[int, ...]] = [(rows, -(-reduction // (settings.group or reduction)))]
    if settings.strategy == "tensor":
        shapes = [(1,), (), (1, 1)]
    elif settings.strategy == "channel":
        shapes.append((rows,))
    return tensors.take("weight_scale", shapes, SCALE_DTYPES)


def _layout(settings: WeightSettings, bits: Bits, scales: StoredTensor) -> CodeLayout:
    return CodeLayout(
        bits=bits,
        group=settings.group,
        scale_dtype=scales.dtype,
        correction=None if settings.is_symmetric else "zero_point",
    )


def _stored(
    spec: TensorSpec,
    layout: CodeLayout,
    parts: tuple[StoredTensor | None, ...],
    load: Callable[[], QuantisedWeight],
) -> StoredWeight:
    return StoredWeight(
        shape=spec.shape,
        stored_type=f"compressed-tensors int{layout.bits}",
        format=layout.format,
        parts=tuple(part for part in parts if part is not None),
        load=load,
    )
