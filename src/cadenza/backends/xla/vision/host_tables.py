"""`PartTables`: what a block of an image part takes besides weights, made on the host with the same
bits on every machine: patches, embeddings of positions, rotations, bounds of windows. Legend as in
`stages`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cadenza.models.host_math import power, rotations
from cadenza.request import Attachment
from cadenza.vision.patches import Floats, Indices, PartOrder, band_of, part_order
from cadenza.vision.processor import CHANNELS, ImagePart
from cadenza.vision.tower_config import PatchTable, TowerRope, VisionConfig

# Embeddings [B, E] of patches at places [B, 2] of a part.
TableRows = Callable[[Indices, ImagePart], Floats]


@dataclass(frozen=True, slots=True, eq=False)
class PartTables:
    """Of one image part; a method gives what the tower's rows [start, stop) take."""

    vision: VisionConfig
    part: ImagePart
    pixels: bytes
    order: PartOrder
    rotations_of_all: Floats | None  # [N, R]
    positions: npt.NDArray[Any] | None  # [rows, E], the table

    @classmethod
    def of(
        cls, vision: VisionConfig, attachment: Attachment, positions: npt.NDArray[Any] | None
    ) -> "PartTables":
        tower = vision.tower
        part = part_of(attachment)
        order = part_order(tower, part.rows, part.columns)
        rotations = None
        if tower.rope is not None:
            rotations = patch_rotations(tower.rope, tower.head_dim, order.places)
        return cls(vision, part, attachment.payload, order, rotations, positions)

    def patches(self, start: int, stop: int) -> Floats:
        """[B, P], normalised, of the band of the image that has them."""
        side = self.vision.tower.merge
        each = side**2
        tokens = self.order.tokens[start // each : -(-stop // each)]
        height = side * self.vision.tower.patch_size
        first, band = band_of(self.part, tokens, height)
        row_bytes = band.width * CHANNELS * height
        pixels = self.pixels[first * row_bytes : (first + band.rows) * row_bytes]
        found = self.vision.processor.patches(pixels, band)
        of_tokens = found.reshape(band.num_tokens, each, -1)[tokens - first * band.columns]
        flat = of_tokens.reshape(len(tokens) * each, -1)
        return flat[start - start // each * each :][: stop - start]

    def embeddings(self, start: int, stop: int) -> Floats | None:
        """[B, E] of positions; None for a tower without a table."""
        table = self.vision.tower.table
        if table is None or self.positions is None:
            return None
        places = self.order.places[start:stop]
        return table_rows(table, self.positions, places, self._grid)

    def rotations(self, start: int, stop: int) -> Floats | None:
        """[B, R]: cosines, then sines; None for a tower without rope."""
        return None if self.rotations_of_all is None else self.rotations_of_all[start:stop]

    def bounds(self, layer: int, start: int, stop: int) -> Indices | None:
        """[B, 2] of the rows that each attends to; None for all."""
        windows = self.vision.tower.windows
        if windows is None or layer in windows.full_layers or self.order.bounds is None:
            return None
        return self.order.bounds[start:stop]

    @property
    def _grid(self) -> tuple[int, int]:
        side = self.vision.tower.merge
        return self.part.rows * side, self.part.columns * side


def part_of(attachment: Attachment) -> ImagePart:
    return ImagePart(
        width=attachment.width,
        height=attachment.height,
        rows=attachment.rows,
        columns=attachment.columns,
    )


def table_rows(
    table: PatchTable, stored: npt.NDArray[Any], places: Indices, grid: tuple[int, int]
) -> Floats:
    row, column = places[:, 0], places[:, 1]
    match table.rule:
        case "raster":
            assert grid == (table.side, table.side), "checked by the processor"
            return stored[row * table.side + column].astype(np.float32)
        case "sum":
            of_columns = stored[column].astype(np.float32)
            return of_columns + stored[table.side + row].astype(np.float32)
        case "bilinear":
            return _bilinear_rows(table.side, stored, places, grid)


def _bilinear_rows(
    side: int, stored: npt.NDArray[Any], places: Indices, grid: tuple[int, int]
) -> Floats:
    """The corners of both grids are aligned; the arithmetic is float32."""
    taps: list[tuple[Indices, Indices, Floats]] = []
    for axis, count in enumerate(grid):
        scaled = places[:, axis].astype(np.float32) * np.float32(side - 1)
        at = scaled / np.float32(max(count - 1, 1))
        low = at.astype(np.int32)
        high = np.minimum(low + 1, side - 1).astype(np.int32)
        taps.append((low, high, at - low.astype(np.float32)))
    (top, bottom, down), (left, right, across) = taps
    one = np.float32(1.0)
    weighted = (
        (top, left, (one - down) * (one - across)),
        (top, right, (one - down) * across),
        (bottom, left, down * (one - across)),
        (bottom, right, down * across),
    )
    total = np.zeros((len(places), stored.shape[1]), np.float32)
    for row, column, weight in weighted:
        total += stored[row * side + column].astype(np.float32) * weight[:, None]
    return total


def patch_rotations(rope: TowerRope, head_dim: int, places: Indices) -> Floats:
    """[N, D]: cosines, then sines, of each patch's pairs."""
    count = head_dim // 2
    if rope.alternates:
        found = [power(rope.theta, -2.0 * index / head_dim) for index in range(count)]
        by_axis = [found[0::2], found[1::2]]
    else:
        own = [power(rope.theta, -4.0 * index / head_dim) for index in range(count // 2)]
        by_axis = [own, own]
    axes = (1, 0) if rope.columns_first else (0, 1)
    halves = [_axis_rotations(places[:, axis], by_axis[place]) for place, axis in enumerate(axes)]
    parts = [half[part] for part in (0, 1) for half in halves]  # all cosines, then all sines
    return np.concatenate(parts, axis=1)


def _axis_rotations(places: Indices, frequencies: list[float]) -> tuple[Floats, Floats]:
    each = np.arange(int(places.max()) + 1, dtype=np.float64)
    cosines, sines = rotations(each[:, None] * np.array(frequencies)[None, :])
    return cosines.astype(np.float32)[places], sines.astype(np.float32)[places]
