"""From pixels to a tower's patches, and where each lies: `cut_patches`, `PartOrder`. The side *
side patches of a token follow each other, row by row, and so do the tokens, unless layers have
windows. Pure numpy, with the arithmetic of transformers' Pillow backend. Legend: N patches, M
tokens, C channels, P values of a patch."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from cadenza.vision.processor import CHANNELS, ImagePart
from cadenza.vision.tower_config import TowerConfig

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalisation:
    """How a byte of a channel becomes a value: (byte * factor - mean) / std, with the product
    rounded to float32 first, as in transformers."""

    factor: float = 1.0 / 255.0
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    def apply(self, pixels: npt.NDArray[np.uint8]) -> Floats:
        """[..., C] bytes as [..., C] values."""
        table = _value_table(self.factor, self.mean, self.std)
        return table[np.arange(CHANNELS), pixels]


@lru_cache(maxsize=16)
def _value_table(factor: float, mean: tuple[float, ...], std: tuple[float, ...]) -> Floats:
    """[C, 256]: the value of each byte."""
    scaled = (np.arange(256, dtype=np.float64) * factor).astype(np.float32)
    means, stds = np.array(mean, np.float32)[:, None], np.array(std, np.float32)[:, None]
    return (scaled[None, :] - means) / stds


def image_array(pixels: bytes, part: ImagePart) -> npt.NDArray[np.uint8]:
    """[height, width, C] from the bytes of a part."""
    flat = np.frombuffer(pixels, np.uint8)
    return flat.reshape(part.height, part.width, CHANNELS)


def cut_patches(image: Floats, part: ImagePart, side: int, size: int) -> Floats:
    """The patches [N, C, size, size] of an image [height, width, C], `side` * `side` for each
    token, in the order of a tower without windows; pixels after the last whole patch are
    dropped."""
    rows, columns = part.rows * side, part.columns * side
    used = image[: rows * size, : columns * size]
    blocks = used.reshape(part.rows, side, size, part.columns, side, size, CHANNELS)
    ordered = blocks.transpose(0, 3, 1, 4, 6, 2, 5)
    return np.ascontiguousarray(ordered).reshape(-1, CHANNELS, size, size)


@dataclass(frozen=True, slots=True, eq=False)
class PartOrder:
    """Where the rows of a tower lie in an image part."""

    tokens: Indices  # [M] of the tower's tokens, in order, their index among the part's, row by row
    places: Indices  # [N, 2] row and column of the patch of each row of the tower
    # [N, 2] the rows of the tower that are in the window of each; None without windows
    bounds: Indices | None


def part_order(tower: TowerConfig, rows: int, columns: int) -> PartOrder:
    side, windows = tower.merge, tower.windows
    row, column = np.divmod(np.arange(rows * columns), columns)
    order, bounds = np.arange(rows * columns), None
    if windows is not None:
        across = -(-columns // windows.side)
        window = (row // windows.side) * across + column // windows.side
        order = np.argsort(window, kind="stable")
        bounds = _window_bounds(window[order], side**2)
    inner_row, inner_column = np.divmod(np.arange(side**2), side)
    places = np.stack(
        [
            (row[order, None] * side + inner_row).ravel(),
            (column[order, None] * side + inner_column).ravel(),
        ],
        axis=1,
    )
    return PartOrder(order.astype(np.int32), places.astype(np.int32), bounds)


def _window_bounds(windows: npt.NDArray[np.int64], num_patches: int) -> Indices:
    """[N, 2] from the ascending windows [M] of tokens with `num_patches` each."""
    starts = np.searchsorted(windows, windows, side="left")
    stops = np.searchsorted(windows, windows, side="right")
    bounds = np.stack([starts, stops], axis=1) * num_patches
    return np.repeat(bounds, num_patches, axis=0).astype(np.int32)


def band_of(part: ImagePart, tokens: Indices, height: int) -> tuple[int, ImagePart]:
    """The smallest band of whole token rows, `height` pixels each, that has these tokens: its first
    row, and the band as a part."""
    first, last = int(np.min(tokens)) // part.columns, int(np.max(tokens)) // part.columns
    count = last + 1 - first
    band = ImagePart(width=part.width, height=height * count, rows=count, columns=part.columns)
    return first, band
