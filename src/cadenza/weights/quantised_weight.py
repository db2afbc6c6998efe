"""Weights that are held quantised: `QuantisedWeight`, integer codes with scales, and the rounding
that makes one (rules: `csrc/core/quantised.h`; `core/pack_quantised.cpp` makes the same bits);
`Float8Weight` (`csrc/core/float8.h`); `BlockWeight`, blocks of a file as it is mapped. Shapes: N
out, K in, G groups of 32 or 16 consecutive elements of K; the last one may be shorter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cadenza.weights.weight_format import (
    FLOAT8_BLOCK,
    GROUP,
    HALF_GROUP,
    MXFP4,
    Correction,
    ScaleType,
    WeightFormat,
    code_format,
)


@dataclass(frozen=True, slots=True, eq=False)
class Float8Weight:
    """The element [n, k] is the value of codes[n, k] times scales[n, k // FLOAT8_BLOCK]."""

    codes: npt.NDArray[np.uint8]  # [N, K], the bytes of float8_e4m3fn
    scales: npt.NDArray[np.float32]  # [N, B]

    def __post_init__(self) -> None:
        rows, reduction = self.codes.shape
        assert self.scales.shape == (rows, -(-reduction // FLOAT8_BLOCK)), (
            "one scale for each block"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def __len__(self) -> int:
        return len(self.codes)

    def rows(self, start: int, stop: int) -> "Float8Weight":
        return Float8Weight(self.codes[start:stop], self.scales[start:stop])

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        return self.dequantised().astype(dtype or np.float32)

    def dequantised(self) -> npt.NDArray[np.float32]:
        """In float32, each product rounded once: [N, K]."""
        values = self.codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            return values * np.repeat(self.scales, FLOAT8_BLOCK, axis=1)[:, : self.shape[1]]


def scales_of_blocks(
    stored: npt.NDArray[np.float32], shape: tuple[int, int], block: tuple[int, int]
) -> npt.NDArray[np.float32]:
    """Scales [ceil(N / block[0]), ceil(K / block[1])] as [N, B]; block[1] is a multiple of
    `FLOAT8_BLOCK`, or at least K."""
    rows = np.arange(shape[0]) // block[0]
    firsts = np.arange(0, shape[1], FLOAT8_BLOCK) // block[1]
    return np.ascontiguousarray(stored[rows[:, None], firsts[None]])


MOST_CODE = 127


MOST_NIBBLE = 15

Scales = npt.NDArray[np.float16] | npt.NDArray[np.float32]

InputOrder = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedWeight:
    """The element [n, k] is (codes[n, k] - zero_points[n, g]) * scales[n, g] + offsets[n, g], where
    g = k // group; without zero points or offsets they are 0. There are never both. With an order
    of the inputs this is the element [n, order[k]] instead, so that any inputs can share a group;
    the order has each index below K once.

    Codes of 8 bits are from -128 to 127 and have no zero points. Codes of 4 bits are from 0 to 15
    with zero points or offsets, and from -8 to 7 without; with `is_mxfp4` they are twice the values
    of E2M1, from -12 to 12, and the scales are powers of two in float32. Groups of 16 have codes of
    8 bits and float32 scales. Scales and offsets, of one type, keep the type in which they are
    stored."""

    codes: npt.NDArray[np.int8]  # [N, K]
    scales: Scales  # [N, G]
    zero_points: npt.NDArray[np.uint8] | None = None  # [N, G]
    offsets: Scales | None = None  # [N, G]
    bits: Literal[4, 8] = 8
    group: int = GROUP
    order: InputOrder | None = None  # [K]
    is_mxfp4: bool = False

    def __post_init__(self) -> None:
        rows, reduction = self.codes.shape
        assert self.scales.shape == (rows, -(-reduction // self.group)), "one scale for each group"
        assert self.zero_points is None or self.offsets is None, "zero points or offsets"
        for each in (self.zero_points, self.offsets):
            assert each is None or each.shape == self.scales.shape, "one for each group"
        assert self.offsets is None or self.offsets.dtype == self.scales.dtype, "of one type"
        assert self.group == GROUP or (self.bits, self.scales.dtype.name) == (8, "float32")
        assert self.zero_points is None or self.bits == 4, "8 bits have no zero points"
        assert self.group in (GROUP, HALF_GROUP)
        assert self.order is None or self.order.shape == (reduction,), "one for each input"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def __len__(self) -> int:
        return len(self.codes)

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        return self.dequantised() if dtype is None else self.dequantised().astype(dtype)

    @property
    def format(self) -> WeightFormat:
        correction: Correction | None = "offset" if self.offsets is not None else None
        if self.is_mxfp4:
            return MXFP4
        if self.zero_points is not None:
            correction = "zero_point"
        scale = cast(ScaleType, self.scales.dtype.name)
        return code_format(self.bits, scale, correction, self.group)

    def as_codes(self) -> "QuantisedWeight":
        return self

    def rows(self, start: int, stop: int) -> "QuantisedWeight":
        part = slice(start, stop)
        return QuantisedWeight(
            codes=self.codes[part],
            scales=self.scales[part],
            zero_points=None if self.zero_points is None else self.zero_points[part],
            offsets=None if self.offsets is None else self.offsets[part],
            bits=self.bits,
            group=self.group,
            order=self.order,
            is_mxfp4=self.is_mxfp4,
        )

    def in_format(self, format: WeightFormat) -> "QuantisedWeight":
        """The same weight in a larger format, one of `joined`."""
        if format == self.format:
            return self
        codes, zeros = self.codes, self.zero_points
        if format.correction == "zero_point" and zeros is None:
            codes, zeros = codes + np.int8(8), np.full(self.scales.shape, 8, np.uint8)
        elif format.correction != "zero_point" and zeros is not None:
            signed = zeros.astype(np.int8)
            codes, zeros = codes - np.repeat(signed, GROUP, axis=1)[:, : self.shape[1]], None
        scales = self.scales.astype(format.scale)
        offsets = None if self.offsets is None else self.offsets.astype(format.scale)
        if format.correction == "offset" and offsets is None:
            offsets = np.zeros_like(scales)
        if format.group != self.group:
            width = -(-self.shape[1] // HALF_GROUP)
            scales = np.repeat(scales, 2, axis=1)[:, :width]
            offsets = None if offsets is None else np.repeat(offsets, 2, axis=1)[:, :width]
        bits = 8 if format.bits == 8 else 4
        group = format.group or GROUP
        return QuantisedWeight(codes, scales, zeros, offsets, bits, group, self.order)

    def dequantised(self) -> npt.NDArray[np.float32]:
        """In float32, the product and the sum rounded once each: [N, K]."""

        def wide(each: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
            repeated = np.repeat(each, self.group, axis=1)[:, : self.shape[1]]
            return repeated.astype(np.float32)

        codes = self.codes.astype(np.float32)
        if self.zero_points is not None:
            codes -= wide(self.zero_points)
        with np.errstate(invalid="ignore", over="ignore"):
            codes *= wide(self.scales)
            stored = codes if self.offsets is None else codes + wide(self.offsets)
        return stored if self.order is None else stored[:, np.argsort(self.order)]


class CodedWeight(Protocol):
    """A weight [N, K] as integer codes, in whatever form they are stored."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def format(self) -> WeightFormat: ...

    @property
    def order(self) -> InputOrder | None:
        """Of the inputs, as in `QuantisedWeight`."""
        ...

    def __len__(self) -> int: ...

    def rows(self, start: int, stop: int) -> "CodedWeight":
        """[start, stop), without a copy."""
        ...

    def as_codes(self) -> QuantisedWeight: ...

    def dequantised(self) -> npt.NDArray[np.float32]:
        """The elements: [N, K]."""
        ...

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]: ...


FloatsOrCodes = npt.NDArray[Any] | CodedWeight

HostWeight = FloatsOrCodes | Float8Weight  # [N, K] as it is loaded


def have_one_order(weights: Sequence[FloatsOrCodes]) -> bool:
    """Whether the same codes of activations can be multiplied by all weights."""
    orders = [None if isinstance(each, np.ndarray) else each.order for each in weights]
    first = orders[0]
    if first is None:
        return all(order is None for order in orders)
    return all(order is not None and np.array_equal(first, order) for order in orders)


def quantise_int8(weight: npt.NDArray[Any]) -> QuantisedWeight:
    """Rounds [N, K] floats of any type to codes from -127 to 127. Here and in `quantise_int4` a
    group that is not finite, or whose scale is not, gets a NaN scale."""
    groups, is_finite = _finite_groups(weight)
    scales, inverse = _scales(np.abs(groups).max(axis=-1) / np.float32(MOST_CODE), is_finite)
    codes = np.clip(np.rint(groups * inverse[..., None]), -MOST_CODE, MOST_CODE)
    return QuantisedWeight(_flat(codes, weight.shape[1]), scales)


def quantise_int4(weight: npt.NDArray[Any]) -> QuantisedWeight:
    """Rounds [N, K] floats of any type to codes from 0 to 15 with an integer zero point."""
    groups, is_finite = _finite_groups(weight)
    low = np.minimum(groups.min(axis=-1), np.float32(0.0))
    high = np.maximum(groups.max(axis=-1), np.float32(0.0))
    scales, inverse = _scales((high - low) / np.float32(MOST_NIBBLE), is_finite)
    zeros = np.clip(np.rint(-low * inverse), 0, MOST_NIBBLE)
    codes = np.rint(groups * inverse[..., None]) + zeros[..., None]
    codes = _flat(np.clip(codes, 0, MOST_NIBBLE), weight.shape[1])
    return QuantisedWeight(codes, scales, zeros.astype(np.uint8), bits=4)


def _finite_groups(
    weight: npt.NDArray[Any],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool]]:
    """In float32 [N, G, GROUP], and which groups are finite; the others are zeros."""
    rows, reduction = weight.shape
    padded = np.zeros((rows, -(-reduction // GROUP) * GROUP), np.float32)
    padded[:, :reduction] = weight
    groups = padded.reshape(rows, -1, GROUP)
    is_finite = np.isfinite(np.abs(groups).max(axis=-1))  # NaN propagates
    groups[~is_finite] = 0.0
    return groups, is_finite


def _scales(
    wanted: npt.NDArray[np.float32], is_finite: npt.NDArray[np.bool]
) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.float32]]:
    """In float16, and the inverse of each, or 0 if it is 0."""
    with np.errstate(over="ignore"):
        scales = wanted.astype(np.float16)
    wide = scales.astype(np.float32)
    inverse = np.divide(np.float32(1.0), wide, out=np.zeros_like(wide), where=wide > 0)
    scales[~is_finite | np.isinf(scales)] = np.nan
    return scales, inverse


def _flat(codes: npt.NDArray[np.float32], reduction: int) -> npt.NDArray[np.int8]:
    flat = codes.astype(np.int8).reshape(len(codes), -1)[:, :reduction]
    return np.ascontiguousarray(flat)


DECODED_AT_ONCE = 1 << 22  # elements; bounds the memory beside the result


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """A type of blocks."""

    name: str
    number: int  # ggml's
    block_len: int  # elements of a block
    block_bytes: int
    format: WeightFormat  # in which a weight of this type is held
    # blocks [B, block_bytes] as the codes of a weight [B, block_len]
    read: Callable[[npt.NDArray[np.uint8]], QuantisedWeight]

    def decode(self, stored: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """The elements of a tensor's bytes, flat."""
        blocks = stored.reshape(-1, self.block_bytes)
        decoded = np.empty((len(blocks), self.block_len), np.float32)
        step = DECODED_AT_ONCE // self.block_len
        for start in range(0, len(blocks), step):
            part = slice(start, start + step)
            decoded[part] = self.read(blocks[part]).dequantised()
        return decoded.reshape(-1)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BlockWeight:
    """A weight [N, K]. With `num_paired_heads` its rows are those of so many heads, each stored in
    the order 0, D / 2, 1, D / 2 + 1, …"""

    encoding: Encoding
    stored: npt.NDArray[np.uint8]  # [N, bytes of a row]
    num_paired_heads: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        blocks = self.stored.shape[1] // self.encoding.block_bytes
        return len(self.stored), blocks * self.encoding.block_len

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def format(self) -> WeightFormat:
        return self.encoding.format

    @property
    def order(self) -> None:
        return None

    def rows(self, start: int, stop: int) -> "BlockWeight":
        """Rows [start, stop), without a copy; not of paired heads."""
        assert self.num_paired_heads is None, "the rows of a head are not in order"
        return BlockWeight(encoding=self.encoding, stored=self.stored[start:stop])

    def as_codes(self) -> QuantisedWeight:
        rows, reduction = self.shape
        blocks = np.ascontiguousarray(self.stored).reshape(-1, self.encoding.block_bytes)
        read = self.encoding.read(blocks)
        order = self._order()

        def in_rows(each: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
            return None if each is None else each.reshape(rows, -1)[order]

        return QuantisedWeight(
            codes=read.codes.reshape(rows, reduction)[order],
            scales=read.scales.reshape(rows, -1)[order],
            offsets=in_rows(read.offsets),
            bits=read.bits,
            group=read.group,
            is_mxfp4=read.is_mxfp4,
        )

    def dequantised(self) -> npt.NDArray[np.float32]:
        return self.encoding.decode(self.stored.reshape(-1)).reshape(self.shape)[self._order()]

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        return np.asarray(self.dequantised(), dtype)

    def _order(self) -> npt.NDArray[np.intp] | slice:
        if self.num_paired_heads is None:
            return slice(None)
        pairs = np.arange(len(self)).reshape(self.num_paired_heads, -1, 2)  # [H, D / 2, 2]
        return pairs.swapaxes(1, 2).reshape(-1)
