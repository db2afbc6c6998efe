"""`BlockWeight`: a weight in the quantised blocks of a file, as it is mapped, and their `Encoding`.
Nothing is decoded before it is asked for. Shapes: N out, K in; a row is whole blocks of consecutive
elements."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cadenza.weights.quantised_weight import QuantisedWeight
from cadenza.weights.weight_format import WeightFormat

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
        """The inputs of blocks are in order."""
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
        """For `np.asarray`."""
        return np.asarray(self.dequantised(), dtype)

    def _order(self) -> npt.NDArray[np.intp] | slice:
        """The stored rows in order."""
        if self.num_paired_heads is None:
            return slice(None)
        pairs = np.arange(len(self)).reshape(self.num_paired_heads, -1, 2)  # [H, D / 2, 2]
        return pairs.swapaxes(1, 2).reshape(-1)
