"""From stored codes, which have no sign, to a `QuantisedWeight`: `CodeLayout` of groups of any
length, and mxfp4 (OCP Microscaling Formats 1.0): e2m1 nibbles in groups of 32 with e8m0 scales,
held as integers, since twice an e2m1 value is one; gpt-oss stacks it (`MXFP4_METHOD`). Shapes: N
out, K in, S stored groups of K, G groups of `GROUP`, X experts."""

import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cadenza.checkpoint.formats.scheme import ModuleTensors, QuantisationScheme
from cadenza.checkpoint.stacked_experts import part_of_expert
from cadenza.errors import CheckpointError
from cadenza.weights.quantised_weight import QuantisedWeight
from cadenza.weights.stored_tensor import AnyArray, StoredTensor, StoredWeight
from cadenza.weights.tensor_spec import TensorSpec
from cadenza.weights.weight_format import (
    GROUP,
    MXFP4,
    ScaleType,
    StoredDType,
    WeightFormat,
    code_format,
)
from cadenza.weights.weights import Weights

MXFP4_GROUP = GROUP

E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_NOT_A_NUMBER = 255

Bits = Literal[4, 8]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeLayout:
    """What the codes of a weight are."""

    bits: Bits
    group: int | None  # consecutive elements of K with one scale; None for all of K
    scale_dtype: StoredDType
    # what is beside the scales: nothing, so that the middle code stands for 0; the code that stands
    # for 0; or the number for which the code 0 stands
    correction: Literal["zero_point", "minimum"] | None = None

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def scale_type(self) -> ScaleType:
        """bfloat16 is held in float32, and so are the scales beside offsets that are computed."""
        is_computed = self.bits == 8 and self.correction is not None
        return "float16" if self.scale_dtype == "float16" and not is_computed else "float32"

    @property
    def format(self) -> WeightFormat:
        if self.correction == "zero_point" and self.bits == 4:
            return code_format(4, self.scale_type, "zero_point")
        return code_format(self.bits, self.scale_type, "offset" if self.correction else None)

    def num_groups(self, reduction: int) -> int:
        return 1 if self.group is None else -(-reduction // self.group)

    def weight(
        self, codes: Bytes, scales: AnyArray, correction: AnyArray | None = None
    ) -> QuantisedWeight:
        """The weight of codes [N, K], with scales and corrections [N, S]."""
        reduction = codes.shape[1]

        def per_group(each: AnyArray) -> npt.NDArray[Any]:
            """[N, S] as [N, G]; `group` is a multiple of `GROUP`."""
            wide = np.broadcast_to(each, (len(codes), each.shape[1]))
            return wide[:, np.arange(0, reduction, GROUP) // (self.group or reduction)]

        factors = per_group(scales).astype(self.scale_type)
        zeros, offsets = None, None
        if correction is not None and self.correction == "zero_point" and self.bits == 4:
            zeros = per_group(correction).astype(np.uint8)
        elif correction is not None:
            offsets = self._offsets(factors, per_group(correction))
        is_signed = self.bits == 8 or correction is None
        signed = (codes - np.uint8(self.middle)) if is_signed else codes
        return QuantisedWeight(
            np.ascontiguousarray(signed).view(np.int8), factors, zeros, offsets, self.bits
        )

    def _offsets(self, scales: npt.NDArray[Any], correction: AnyArray) -> npt.NDArray[Any]:
        """The number for which the code 0 stands, once codes of 8 bits have a sign."""
        if self.correction == "zero_point":
            return scales * (np.float32(self.middle) - correction.astype(np.float32))
        minimums = correction.astype(self.scale_type)
        return minimums if self.bits == 4 else minimums + scales * np.float32(self.middle)


def as_bits(value: int) -> Bits | None:
    """The same number if codes of so many bits are supported, otherwise None."""
    return 4 if value == 4 else 8 if value == 8 else None


def unpack_codes(words: AnyArray, bits: int, count: int) -> Bytes:
    """The first `count` codes of 4 or 8 bits in words [..., W] of 32, lowest bits first."""
    stored: Bytes = np.ascontiguousarray(words).view(np.uint8)
    if bits == 4:
        halves = np.stack([stored & np.uint8(15), stored >> np.uint8(4)], axis=-1)
        stored = halves.reshape(*words.shape[:-1], -1)
    return stored[..., :count]


def stored_mxfp4(
    spec: TensorSpec, tensors: ModuleTensors, method: str, codes: StoredTensor, suffix: str
) -> StoredWeight:
    """The weight `spec` with `codes` that have the even elements in the low nibbles; `suffix` names
    the tensor of its scales. Raises `CheckpointError`."""
    rows, reduction = spec.shape
    scales = tensors.take(suffix, [(rows, reduction // MXFP4_GROUP)], ("uint8",))
    return StoredWeight(
        shape=spec.shape,
        stored_type=f"{method} mxfp4",
        format=MXFP4,
        parts=(codes, scales),
        load=lambda: mxfp4_weight(unpack_codes(codes.array(), 4, reduction), scales.array()),
    )


def mxfp4_weight(nibbles: Bytes, exponents: Bytes) -> QuantisedWeight:
    """The weight of nibbles [N, K] and the exponents [N, K / 32] of its scales."""
    halved = np.ldexp(np.float32(1.0), exponents.astype(np.int32) - 128).astype(np.float32)
    scales = np.where(exponents == _NOT_A_NUMBER, np.float32(np.nan), halved)
    return QuantisedWeight(E2M1_DOUBLED[nibbles], scales.astype(np.float32), bits=4, is_mxfp4=True)


_EXPERT = re.compile(r"(?P<stack>.+\.experts)\.(?P<index>\d+)\.(?P<part>gate|up|down)_proj\.weight")
_BLOCK_BYTES = MXFP4_GROUP // 2


def _find(spec: TensorSpec, weights: Weights) -> StoredWeight | None:
    found = _EXPERT.fullmatch(spec.name)
    if found is None:
        return None
    is_down = found["part"] == "down"
    name = "down_proj" if is_down else "gate_up_proj"
    tensors = ModuleTensors(weights, found["stack"])
    if not tensors.has(f"{name}_blocks"):
        return None
    rows, reduction = spec.shape
    if reduction % MXFP4_GROUP:
        raise CheckpointError(
            f"{spec.name} has {reduction} inputs, which is not a multiple of {MXFP4_GROUP}; "
            f"correct config.json"
        )
    sharing = 1 if is_down else 2
    groups = sharing * rows, reduction // MXFP4_GROUP
    blocks, scales = (
        _part(tensors, f"{name}_{suffix}", int(found["index"]), shape)
        for suffix, shape in (("blocks", (*groups, _BLOCK_BYTES)), ("scales", groups))
    )
    every = slice(int(found["part"] == "up"), None, sharing)

    def load() -> QuantisedWeight:
        own = blocks.array()[every].reshape(rows, -1)
        return mxfp4_weight(unpack_codes(own, 4, reduction), scales.array()[every])

    return StoredWeight(
        shape=spec.shape,
        stored_type="mxfp4",
        format=MXFP4,
        parts=(blocks, scales),
        load=load,
        num_sharing=sharing,
    )


def _part(tensors: ModuleTensors, suffix: str, index: int, shape: tuple[int, ...]) -> StoredTensor:
    """The part of expert `index` of a stacked tensor, which has at least so many."""
    name = f"{tensors.module}.{suffix}"
    stored = tensors.weights.shape(name)[:1] if tensors.has(suffix) else ()
    count = max((index + 1, *stored))
    return part_of_expert(tensors.take(suffix, [(count, *shape)], ("uint8",)), index)


# of a `quantization_config` whose method is `mxfp4`: the tensors say everything
MXFP4_METHOD = QuantisationScheme(name=f"mxfp4 with groups of {MXFP4_GROUP}", find=_find)
