"""What processors of several families share: levels of bytes, and patches in blocks.

Invariant: values are those of transformers' Pillow backend, to the bit.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cadenza.vision.processor import CHANNELS, ImagePart

Values = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalising:
    """How a byte becomes a value: times `factor`, less the channel's mean, over its deviation.

    Without `mean` and `std` it is the product alone.
    """

    factor: float = 1 / 255
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None

    def values(self) -> Values:
        """[channels, 256]: each channel's value for each byte."""
        scaled = np.tile((np.arange(256) * self.factor).astype(np.float32), (CHANNELS, 1))
        if self.mean is None or self.std is None:
            return scaled
        mean, std = (np.array(each, np.float32)[:, None] for each in (self.mean, self.std))
        return (scaled - mean) / std


def patches_in_blocks(
    pixels: bytes, part: ImagePart, values: Values, *, merge: int, channels_last: bool = False
) -> Values:
    """The patches [N, patch values] of a part whose tokens are blocks of `merge` x `merge` patches.

    They follow one another by block, row by row over the blocks and within each. A patch's values
    are in the order channel, row, column; or row, column, channel.

    Args:
        values: as of `Normalising.values`.
    """
    size = part.height // (part.rows * merge)
    sides = part.rows, merge, size, part.columns, merge, size, CHANNELS
    by_block = np.frombuffer(pixels, np.uint8).reshape(sides).transpose(0, 3, 1, 4, 2, 5, 6)
    if channels_last:
        found = np.empty(by_block.shape, np.float32)
        for channel in range(CHANNELS):
            found[..., channel] = values[channel][by_block[..., channel]]
    else:
        found = np.empty((*by_block.shape[:4], CHANNELS, size, size), np.float32)
        for channel in range(CHANNELS):
            found[..., channel, :, :] = values[channel][by_block[..., channel]]
    return found.reshape(part.num_tokens * merge * merge, -1)


def places_in_blocks(rows: int, columns: int, merge: int) -> npt.NDArray[np.int32]:
    """[N, 2]: column and row of each patch of rows x columns blocks, in the order of
    `patches_in_blocks`."""
    grid = np.mgrid[: rows * merge, : columns * merge].astype(np.int32)  # [2, y, x]
    blocks = grid.reshape(2, rows, merge, columns, merge).transpose(1, 3, 2, 4, 0)
    return np.ascontiguousarray(blocks.reshape(-1, 2)[:, ::-1])
