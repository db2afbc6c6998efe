"""Reads GPTQ, as AutoGPTQ and GPTQModel write it, in 4 and 8 bits, in both versions of zero points,
and AWQ in AutoAWQ's gemm layout. With `desc_act`, `g_idx` has the group of each input, and the
codes are put into the order of the groups. A module is quantised if it has `qweight`. Shapes: N
out, K in, S stored groups of K."""

from dataclasses import dataclass, replace
from functools import partial
from re import Pattern

import numpy as np

from cadenza.checkpoint.formats.grouped import Bits, Bytes, CodeLayout, as_bits, unpack_codes
from cadenza.checkpoint.formats.scheme import (
    MAX_TARGETS,
    ModuleTensors,
    QuantisationScheme,
    compile_pattern,
    read_group_size,
)
from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, shorten
from cadenza.weights.quantised_weight import InputOrder, QuantisedWeight
from cadenza.weights.stored_tensor import AnyArray, StoredWeight
from cadenza.weights.tensor_spec import TensorSpec
from cadenza.weights.weights import Weights

_FIRST_VERSION = "gptq"
_SECOND_VERSION = "gptq_v2"


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTQSettings:
    """How a module is quantised."""

    bits: Bits
    group: int | None
    is_symmetric: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _GPTQ:
    default: GPTQSettings
    is_first_version: bool  # stored zero points are one less than the code that stands for 0
    # settings of modules whose name a pattern matches at its start; the first counts
    overrides: tuple[tuple[Pattern[str], GPTQSettings], ...] = ()

    def find(self, spec: TensorSpec, weights: Weights) -> StoredWeight | None:
        tensors = ModuleTensors.of(spec, weights)
        if not tensors.has("qweight"):
            return None
        columns, reduction = spec.shape
        settings = self._settings_of(tensors.module)
        bits, per_word = settings.bits, 32 // settings.bits
        if columns % per_word or reduction % per_word:
            raise CheckpointError(
                f"{tensors.module} has shape {list(spec.shape)}; GPTQ with {bits} bits needs "
                f"multiples of {per_word}"
            )
        groups = -(-reduction // (settings.group or reduction))
        codes, zeros, scales = parts = tensors.take_columns(
            (reduction // per_word, columns), (groups, columns // per_word), columns
        )
        has_order = tensors.has("g_idx")
        groups_of = tensors.take("g_idx", [(reduction,)], ("int32",)) if has_order else None
        layout = CodeLayout(
            bits=bits,
            group=settings.group,
            scale_dtype=scales.dtype,
            correction=None if settings.is_symmetric else "zero_point",
        )

        def load() -> QuantisedWeight:
            order = None
            if groups_of is not None:
                order = order_of_groups(groups_of.name, groups_of.array(), settings.group)
            points = unpack_codes(self._zeros(zeros.array(), bits), bits, columns).T
            if settings.is_symmetric:
                _check_symmetric(zeros.name, points, layout.middle)
            unpacked = unpack_codes(codes.array().T, bits, reduction)
            weight = layout.weight(
                unpacked if order is None else unpacked[:, order],
                scales.array().T,
                None if settings.is_symmetric else points,
            )
            return replace(weight, order=order)

        return StoredWeight(
            shape=spec.shape,
            stored_type=f"gptq int{bits}",
            format=layout.format,
            parts=parts if groups_of is None else (*parts, groups_of),
            load=load,
        )

    def _zeros(self, words: AnyArray, bits: Bits) -> AnyArray:
        """Words of zero points. The first version subtracts 1 of each with borrows, so that adding
        it with carries restores a zero point of 0 too."""
        ones = {4: 0x11111111, 8: 0x01010101}[bits]
        return words.view(np.uint32) + np.uint32(ones) if self.is_first_version else words

    def _settings_of(self, module: str) -> GPTQSettings:
        return next((own for pattern, own in self.overrides if pattern.match(module)), self.default)


def read_gptq(raw: JsonObject) -> QuantisationScheme:
    """The scheme of a `quantization_config`. Raises `CheckpointError`."""
    version = raw.text("checkpoint_format") or raw.text("format") or _FIRST_VERSION
    if version not in (_FIRST_VERSION, _SECOND_VERSION):
        raise CheckpointError(
            f"{raw.where}: checkpoint_format {shorten(version)} is not supported; supported are "
            f"{_FIRST_VERSION} and {_SECOND_VERSION}; use such a checkpoint"
        )
    default = GPTQSettings(
        bits=_read_bits(raw, None),
        group=read_group_size(raw, "group_size"),
        is_symmetric=raw.flag("sym", True),
    )
    modules = _GPTQ(
        default=default,
        is_first_version=version == _FIRST_VERSION,
        overrides=_read_overrides(raw.child("dynamic"), default),
    )
    name = f"gptq int{default.bits} with groups of {default.group or 'all inputs'}"
    return QuantisationScheme(name=name, find=modules.find)


def _read_bits(raw: JsonObject, default: Bits | None) -> Bits:
    bits = raw.integer("bits", 1, 16, default)
    found = as_bits(bits)
    if found is None:
        raise CheckpointError(
            f"{raw.where}: bits is {bits}; supported for GPTQ are 4 and 8; use such a checkpoint"
        )
    return found


def _read_overrides(
    raw: JsonObject | None, default: GPTQSettings
) -> tuple[tuple[Pattern[str], GPTQSettings], ...]:
    """Settings by pattern. Patterns with "-:" name modules that are not quantised."""
    if raw is None:
        return ()
    if len(raw.values) > MAX_TARGETS:
        raise CheckpointError(f"{raw.where} has over {MAX_TARGETS} patterns; use fewer")
    found: list[tuple[Pattern[str], GPTQSettings]] = []
    for key in raw.values:
        own = raw.child(key)
        pattern = compile_pattern(key.removeprefix("+:").removeprefix("-:"), raw.where)
        if own is None or key.startswith("-:"):
            found.append((pattern, default))
            continue
        changed = replace(
            default,
            bits=_read_bits(own, default.bits),
            is_symmetric=own.flag("sym", default.is_symmetric),
        )
        if own.has("group_size"):
            changed = replace(changed, group=read_group_size(own, "group_size"))
        found.append((pattern, changed))
    return tuple(found)


def _check_symmetric(name: str, zeros: Bytes, middle: int) -> None:
    if (zeros != middle).any():
        raise CheckpointError(
            f"tensor {name} has zero points other than {middle}, but config.json says sym; "
            f"set sym to false or fetch the checkpoint again"
        )


def order_of_groups(name: str, groups: AnyArray, group: int | None) -> InputOrder | None:
    """The inputs in the order of their groups [K], or None if they are in that order. Raises
    CheckpointError if a group has more or fewer inputs than `group`, or than all of them."""
    size = group or len(groups)
    order = np.argsort(groups, kind="stable").astype(np.int32)
    if (groups[order] != np.arange(len(groups)) // size).any():
        raise CheckpointError(
            f"tensor {name} does not name {size} inputs for each group, the group_size of "
            f"config.json; correct config.json or fetch the checkpoint again"
        )
    return None if (order == np.arange(len(order))).all() else order


_AWQ_BITS = 4
_AWQ_PER_WORD = 32 // _AWQ_BITS

# the position in its word of each of eight columns: a word has the even columns first
_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)


def _find_awq(group: int | None, spec: TensorSpec, weights: Weights) -> StoredWeight | None:
    tensors = ModuleTensors.of(spec, weights)
    if not tensors.has("qweight"):
        return None
    columns, reduction = spec.shape
    if columns % _AWQ_PER_WORD:
        raise CheckpointError(
            f"{tensors.module} has {columns} outputs; AWQ needs a multiple of {_AWQ_PER_WORD}"
        )
    words, groups = columns // _AWQ_PER_WORD, -(-reduction // (group or reduction))
    shapes = (reduction, words), (groups, words)
    codes, zeros, scales = tensors.take_columns(*shapes, columns)
    layout = CodeLayout(
        bits=_AWQ_BITS, group=group, scale_dtype=scales.dtype, correction="zero_point"
    )
    return StoredWeight(
        shape=spec.shape,
        stored_type="awq int4",
        format=layout.format,
        parts=(codes, zeros, scales),
        load=lambda: layout.weight(
            _awq_columns(codes.array()).T, scales.array().T, _awq_columns(zeros.array()).T
        ),
    )


def read_awq(raw: JsonObject) -> QuantisationScheme:
    """The scheme of a `quantization_config`. Raises `CheckpointError`."""
    bits = raw.get("bits") if raw.has("bits") else raw.get("w_bit")
    if bits != _AWQ_BITS:
        raise CheckpointError(
            f"{raw.where}: bits is {shorten(bits)}; supported for AWQ is {_AWQ_BITS}"
        )
    version = (raw.text("version") or "gemm").lower()
    if version != "gemm":
        raise CheckpointError(
            f"{raw.where}: version {shorten(version)} of AWQ is not supported; use a checkpoint in "
            f"version gemm"
        )
    if not raw.flag("zero_point", True):
        raise raw.wrong("zero_point", "true")
    key = "group_size" if raw.has("group_size") else "q_group_size"
    group = read_group_size(raw, key)
    name = f"awq int{_AWQ_BITS} with groups of {group or 'all inputs'}"
    return QuantisationScheme(name=name, find=partial(_find_awq, group))


def _awq_columns(words: AnyArray) -> Bytes:
    """Codes [., N] of words [., N / 8]."""
    stored = unpack_codes(words, _AWQ_BITS, words.shape[1] * _AWQ_PER_WORD)
    return stored.reshape(len(words), -1, _AWQ_PER_WORD)[..., _POSITIONS].reshape(len(words), -1)
