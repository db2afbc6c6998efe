"""`PixtralImages`, of Pixtral and Mistral 3, to the bit as transformers' Pillow backend. A longer
side above the limit is reduced; then both sides are rounded up to multiples of a token's side. A
token ends each row of tokens, another one the image: these have embeddings of their own. The
patches of a token follow one another."""

import json
import math
from dataclasses import asdict, dataclass

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
    image_bytes,
    resized,
)

LOW_DETAIL_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralImages:
    """The settings of one model; an `ImageProcessor`."""

    longest_edge: int  # pixels
    patch_size: int  # pixels on a side of a patch
    merge_size: int  # patches on a side of what one token stands for
    normalisation: Normalisation
    max_tokens: int  # placeholders; larger images are reduced to it (`--image-max-tokens`)
    resample: Filter = "bicubic"
    placeholder: str = "[IMG]"
    token: str = "[IMG]"  # noqa: S105 (no password)
    row_end: str = "[IMG_BREAK]"
    end: str = "[IMG_END]"

    @property
    def unit(self) -> int:
        return self.patch_size * self.merge_size

    @property
    def settings(self) -> bytes:
        return json.dumps({"processor": "pixtral", **asdict(self)}, sort_keys=True).encode()

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ImagePlan:
        limit = min(self.max_tokens, LOW_DETAIL_TOKENS) if detail == "low" else self.max_tokens
        rows, columns = self._grid(width, height, limit)
        part = ImagePart(
            width=columns * self.unit, height=rows * self.unit, rows=rows, columns=columns
        )
        row = Run(part=0, count=columns)
        pieces = (row, self.row_end) * (rows - 1) + (row, self.end)
        return ImagePlan(parts=(part,), pieces=pieces)

    def prepare(self, image: Image, detail: Detail = "auto") -> tuple[bytes, ...]:
        (part,) = self.plan(image.width, image.height, detail).parts
        return (image_bytes(resized(image, (part.width, part.height), self.resample)),)

    def check(self, part: ImagePart) -> None:
        unit, most = self.unit, math.ceil(self.longest_edge / self.unit)
        are_sides = (part.width, part.height) == (part.columns * unit, part.rows * unit)
        are_few = 1 <= part.num_tokens <= self.max_tokens and max(part.rows, part.columns) <= most
        if not (are_sides and are_few):
            raise InvalidRequestError(
                f"an image of {part.width} x {part.height} pixels has {part.columns} x {part.rows} "
                f"tokens; a token of this model stands for {unit} x {unit} pixels, and an image "
                f"has at most {self.max_tokens}, of at most {most} on a side"
            )

    def patches(self, pixels: bytes, part: ImagePart) -> npt.NDArray[np.float32]:
        values = self.normalisation.apply(image_array(pixels, part))
        found = cut_patches(values, part, self.merge_size, self.patch_size)
        return found.reshape(len(found), -1)

    def _grid(self, width: int, height: int, limit: int) -> tuple[int, int]:
        """Rows and columns of tokens, at most `limit` together."""
        ratio = max(height / self.longest_edge, width / self.longest_edge)
        if ratio > 1:
            # A side of 0 would be no image; the definition fails there.
            height, width = max(1, math.floor(height / ratio)), max(1, math.floor(width / ratio))
        rows, columns = self._tokens(height), self._tokens(width)
        if rows * columns <= limit:
            return rows, columns
        # Rounded up, the sides may still have a few tokens more than the pixels would.
        share = math.sqrt(rows * columns / limit)
        rows, columns = max(1, math.floor(rows / share)), max(1, math.floor(columns / share))
        return min(rows, limit), min(columns, limit)

    def _tokens(self, side: int) -> int:
        return (side - 1) // self.unit + 1
