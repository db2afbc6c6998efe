"""`QuantisedWeight`: a weight as integer codes with scales, and the rounding that makes one.

Owns the rounding of weights; `csrc/core/quantised.h` states the rules for weights, activations and
products, and `core/pack_quantised.cpp` makes the same bits from floats. Knows no layouts.

Shapes: N out, K in, G groups of `GROUP` consecutive elements of K; the last one may be shorter.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

GROUP = 32
MOST_CODE = 127


MOST_NIBBLE = 15


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedWeight:
    """The element [n, k] is (codes[n, k] - zero_points[n, g]) * scales[n, g], g = k // GROUP.

    int4 codes are from 0 to 15 and have zero points; int8 codes have none.
    """

    codes: npt.NDArray[np.int8]  # [N, K]
    scales: npt.NDArray[np.float16]  # [N, G]
    zero_points: npt.NDArray[np.uint8] | None = None  # [N, G]

    def __post_init__(self) -> None:
        rows, reduction = self.codes.shape
        assert self.scales.shape == (rows, -(-reduction // GROUP)), "one scale for each group"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def __len__(self) -> int:
        return len(self.codes)

    def dequantised(self) -> npt.NDArray[np.float32]:
        """The elements in float32, exactly: [N, K]."""
        reduction = self.codes.shape[1]
        wide = np.repeat(self.scales.astype(np.float32), GROUP, axis=1)[:, :reduction]
        codes = self.codes.astype(np.float32)
        if self.zero_points is not None:
            codes -= np.repeat(self.zero_points, GROUP, axis=1)[:, :reduction]
        return codes * wide


def quantise_int8(weight: npt.NDArray[Any]) -> QuantisedWeight:
    """Rounds [N, K] floats of any type to codes from -127 to 127.

    Here and in `quantise_int4` a group that is not finite, or whose scale is not, gets a NaN scale.
    """
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
    return QuantisedWeight(codes, scales, zeros.astype(np.uint8))


def _finite_groups(
    weight: npt.NDArray[Any],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool]]:
    """The elements in float32 [N, G, GROUP], and which groups are finite; the others are zeros."""
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
    """Scales in float16, and the inverse of each, or 0 if it is 0."""
    with np.errstate(over="ignore"):
        scales = wanted.astype(np.float16)
    wide = scales.astype(np.float32)
    inverse = np.divide(np.float32(1.0), wide, out=np.zeros_like(wide), where=wide > 0)
    scales[~is_finite | np.isinf(scales)] = np.nan
    return scales, inverse


def _flat(codes: npt.NDArray[np.float32], reduction: int) -> npt.NDArray[np.int8]:
    """Codes [N, G, GROUP] as [N, K]."""
    flat = codes.astype(np.int8).reshape(len(codes), -1)[:, :reduction]
    return np.ascontiguousarray(flat)
