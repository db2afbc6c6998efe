"""`Idefics3Processor`, of Idefics3 and SmolVLM, as transformers with Pillow. An image is resized to
a longer side of `longest_edge` pixels, stretched to multiples of `tile` and cut into square tiles;
the whole, squeezed into one tile, comes last. Each of the three resizes rounds to bytes."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cadenza.errors import InvalidRequestError
from cadenza.vision.patches import Normalisation, cut_patches, image_array
from cadenza.vision.processor import (
    Detail,
    Filter,
    Image,
    ImagePart,
    ImagePlan,
    Run,
    crop_bytes,
    image_bytes,
    resized,
)

PLACEHOLDER = "<image>"
AROUND = "<fake_token_around_image>"
GLOBAL = "<global-img>"

LARGEST_SIDE = 4096  # pixels of a resized image's longer side, whatever the settings say

REVISION = 1  # of what this module makes of pixels; part of `settings`


@dataclass(frozen=True, slots=True, kw_only=True)
class Idefics3Processor:
    """The settings of one checkpoint."""

    longest_edge: int  # pixels of the longer side before tiles are cut
    tile: int  # pixels of a tile's side
    # pixels of a patch, along each side; pixels after the last whole one are unused
    patch_size: int
    merge: int  # patches of a token, along each side
    splits: bool  # whether images are cut into tiles at all
    resample: Filter
    normalisation: Normalisation

    @property
    def placeholder(self) -> str:
        return PLACEHOLDER

    @property
    def token(self) -> str:
        return PLACEHOLDER

    @property
    def settings(self) -> bytes:
        values = {
            "processor": "idefics3",
            "revision": REVISION,
            "longest_edge": self.longest_edge,
            "tile": self.tile,
            "patch_size": self.patch_size,
            "merge": self.merge,
            "splits": self.splits,
            "resample": self.resample,
            "factor": self.normalisation.factor,
            "mean": self.normalisation.mean,
            "std": self.normalisation.std,
        }
        return json.dumps(values, sort_keys=True).encode()

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ImagePlan:
        """Tiles row by row, then the whole image; without tiles for the detail "low"."""
        if width < 1 or height < 1:
            raise InvalidRequestError(f"an image of {width} x {height} pixels has no pixels")
        rows, columns = self._grid(width, height, detail)
        pieces: list[str | Run] = []
        for row in range(rows):
            for column in range(columns):
                start = f"{AROUND}<row_{row + 1}_col_{column + 1}>"
                pieces += [start, Run(row * columns + column, self._num_tokens)]
            pieces.append("\n")
        num_tiles = rows * columns
        before = "\n" if num_tiles else ""
        pieces += [f"{before}{AROUND}{GLOBAL}", Run(num_tiles, self._num_tokens), AROUND]
        return ImagePlan(parts=(self._part,) * (num_tiles + 1), pieces=tuple(_joined(pieces)))

    def prepare(self, image: Image, detail: Detail = "auto") -> tuple[bytes, ...]:
        whole = (self.tile, self.tile)
        image = resized(image, self._first_size(*image.size), self.resample)
        if not self.splits:
            return (image_bytes(resized(image, whole, self.resample)),)
        width, height = self._second_size(*image.size)
        image = resized(image, (width, height), self.resample)
        rows, columns = self._tiles(width, height)
        if not rows:
            return (image_bytes(image),)
        last = image_bytes(resized(image, whole, self.resample))
        if detail == "low":
            return (last,)
        tiles = [
            crop_bytes(image, (column * self.tile, row * self.tile), self.tile)
            for row in range(rows)
            for column in range(columns)
        ]
        return *tiles, last

    def check(self, part: ImagePart) -> None:
        if part != self._part:
            raise InvalidRequestError(
                f"an image part of {part.width} x {part.height} pixels in {part.rows} x "
                f"{part.columns} tokens; parts of this model have {self.tile} x {self.tile} pixels "
                f"in {self.side} x {self.side} tokens"
            )

    def patches(self, pixels: bytes, part: ImagePart) -> npt.NDArray[np.float32]:
        image = self.normalisation.apply(image_array(pixels, part))
        found = cut_patches(image, part, self.merge, self.patch_size)
        return found.reshape(len(found), -1)

    @property
    def side(self) -> int:
        return self.tile // self.patch_size // self.merge

    @property
    def _num_tokens(self) -> int:
        return self.side**2

    @property
    def _part(self) -> ImagePart:
        return ImagePart(width=self.tile, height=self.tile, rows=self.side, columns=self.side)

    def _grid(self, width: int, height: int, detail: Detail) -> tuple[int, int]:
        """Rows and columns of tiles; 0 without tiles."""
        if not self.splits or detail == "low":
            return 0, 0
        return self._tiles(*self._second_size(*self._first_size(width, height)))

    def _tiles(self, width: int, height: int) -> tuple[int, int]:
        if width <= self.tile and height <= self.tile:
            return 0, 0
        return height // self.tile, width // self.tile

    def _first_size(self, width: int, height: int) -> tuple[int, int]:
        """The longer side at `longest_edge`, the other one even."""
        aspect = width / height
        if width >= height:
            width = self.longest_edge
            height = int(width / aspect)
            height += height % 2
        else:
            height = self.longest_edge
            width = int(height * aspect)
            width += width % 2
        width, height = max(width, 1), max(height, 1)
        aspect = width / height
        if width >= height and width > LARGEST_SIDE:
            width, height = LARGEST_SIDE, int(LARGEST_SIDE / aspect)
        elif height > width and height > LARGEST_SIDE:
            width, height = int(LARGEST_SIDE * aspect), LARGEST_SIDE
        return max(width, 1), max(height, 1)

    def _second_size(self, width: int, height: int) -> tuple[int, int]:
        """Both sides as multiples of `tile`."""
        aspect = width / height
        if width >= height:
            width = self._whole_tiles(width)
            height = self._whole_tiles(int(width / aspect))
        else:
            height = self._whole_tiles(height)
            width = self._whole_tiles(int(height * aspect))
        return width, height

    def _whole_tiles(self, size: int) -> int:
        return math.ceil(size / self.tile) * self.tile


def _joined(pieces: Sequence[str | Run]) -> list[str | Run]:
    found: list[str | Run] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, str) and isinstance(last, str):
            found[-1] = last + piece
        else:
            found.append(piece)
    return found
