"""`Float8Weight`: a weight as float8_e4m3fn codes with float32 scales. Scales of larger blocks, of
rows or of the whole weight become one for each row and block of `BLOCK` elements;
`csrc/core/float8.h` states the arithmetic of products. Shapes: N out, K in, B blocks of `BLOCK`
consecutive elements of K; the last one may be shorter."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cadenza.weights.weight_format import FLOAT8_BLOCK as BLOCK


@dataclass(frozen=True, slots=True, eq=False)
class Float8Weight:
    """The element [n, k] is the value of codes[n, k] times scales[n, k // BLOCK]."""

    codes: npt.NDArray[np.uint8]  # [N, K], the bytes of float8_e4m3fn
    scales: npt.NDArray[np.float32]  # [N, B]

    def __post_init__(self) -> None:
        rows, reduction = self.codes.shape
        assert self.scales.shape == (rows, -(-reduction // BLOCK)), "one scale for each block"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def __len__(self) -> int:
        return len(self.codes)

    def rows(self, start: int, stop: int) -> "Float8Weight":
        """Rows [start, stop), without a copy."""
        return Float8Weight(self.codes[start:stop], self.scales[start:stop])

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        """For readers that compute in floats."""
        return self.dequantised().astype(dtype or np.float32)

    def dequantised(self) -> npt.NDArray[np.float32]:
        """In float32, each product rounded once: [N, K]."""
        values = self.codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            return values * np.repeat(self.scales, BLOCK, axis=1)[:, : self.shape[1]]


def scales_of_blocks(
    stored: npt.NDArray[np.float32], shape: tuple[int, int], block: tuple[int, int]
) -> npt.NDArray[np.float32]:
    """Scales [ceil(N / block[0]), ceil(K / block[1])] as [N, B]; block[1] is a multiple of `BLOCK`,
    or at least K."""
    rows = np.arange(shape[0]) // block[0]
    firsts = np.arange(0, shape[1], BLOCK) // block[1]
    return np.ascontiguousarray(stored[rows[:, None], firsts[None]])
