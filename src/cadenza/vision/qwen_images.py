"""`QwenImages`, of Qwen2-VL, 2.5-VL, 3-VL and 3.5, to the bit as `Qwen2VLImageProcessorPil`, with a
token limit beside. Both sides become multiples of `unit` pixels, near the image's aspect, within
bounds of pixels. The patches of a token follow one another; values are in the order channel, time,
row, column; an image is each of the `temporal_size` frames."""

import json
import math
from dataclasses import asdict, dataclass

import numpy as np

from cadenza.errors import InvalidRequestError
from cadenza.vision.patches import Floats, Normalisation, cut_patches, image_array
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

MAX_ASPECT = 200
LOW_DETAIL_TOKENS = 256

_IMAGE_PAD = "<|image_pad|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenImages:
    """The settings of one model; an `ImageProcessor`."""

    patch_size: int
    merge_size: int
    temporal_size: int  # frames of a patch
    # min_pixels, max_pixels: of a resized image, as the file has them
    min_pixels: int
    max_pixels: int
    resample: Filter
    normalisation: Normalisation
    max_tokens: int  # larger images are reduced to it (`--image-max-tokens`)

    @property
    def placeholder(self) -> str:
        return _IMAGE_PAD

    @property
    def token(self) -> str:
        return _IMAGE_PAD

    @property
    def unit(self) -> int:
        return self.patch_size * self.merge_size

    @property
    def most_tokens(self) -> int:
        """Of any image: also the least number of pixels bounds it, which a long image exceeds,
        since its shorter side is at least one token."""
        largest, least = (pixels // self.unit**2 for pixels in (self.max_pixels, self.min_pixels))
        longest = least + math.ceil(math.sqrt(least * MAX_ASPECT) * 1.01) + 2
        return min(self.max_tokens, max(largest, longest, MAX_ASPECT))

    @property
    def settings(self) -> bytes:
        return json.dumps({"processor": "qwen", **asdict(self)}, sort_keys=True).encode()

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ImagePlan:
        """Raises InvalidRequestError if one side is more than `MAX_ASPECT` times the other."""
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise InvalidRequestError(
                f"the image has {width} x {height} pixels; supported for this model is a side of "
                f"at most {MAX_ASPECT} times the other; crop the image"
            )
        limit = self.max_tokens
        if detail == "low":
            limit = min(limit, LOW_DETAIL_TOKENS)
        rows, columns = self._grid(width, height, limit)
        part = ImagePart(
            width=columns * self.unit, height=rows * self.unit, rows=rows, columns=columns
        )
        return ImagePlan(parts=(part,), pieces=(Run(part=0, count=rows * columns),))

    def prepare(self, image: Image, detail: Detail = "auto") -> tuple[bytes, ...]:
        (part,) = self.plan(image.width, image.height, detail).parts
        return (image_bytes(resized(image, (part.width, part.height), self.resample)),)

    def check(self, part: ImagePart) -> None:
        unit = self.unit
        are_sides = (part.width, part.height) == (part.columns * unit, part.rows * unit)
        if not are_sides or not 1 <= part.num_tokens <= self.most_tokens:
            raise InvalidRequestError(
                f"an image of {part.width} x {part.height} pixels has {part.columns} x {part.rows} "
                f"tokens; a token of this model stands for {unit} x {unit} pixels, and an image "
                f"has at most {self.most_tokens}"
            )

    def patches(self, pixels: bytes, part: ImagePart) -> Floats:
        """[patches, channels x temporal_size x patch_size x patch_size]"""
        image = self.normalisation.apply(image_array(pixels, part))
        patches = cut_patches(image, part, self.merge_size, self.patch_size)  # [N, C, y, x]
        return np.repeat(patches[:, :, None], self.temporal_size, axis=2).reshape(len(patches), -1)

    def _grid(self, width: int, height: int, limit: int) -> tuple[int, int]:
        """Rows and columns of tokens, at most `limit` together."""
        unit = self.unit
        max_pixels = min(self.max_pixels, limit * unit * unit)
        min_pixels = min(self.min_pixels, max_pixels)
        # Python rounds half to even, as the definition does.
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit * unit > max_pixels:
            rows, columns = self._reduced(width, height, max_pixels)
        elif rows * columns * unit * unit < min_pixels:
            share = math.sqrt(min_pixels / (height * width))
            rows = math.ceil(height * share / unit)
            columns = math.ceil(width * share / unit)
        if rows * columns > limit:  # a small limit is below the file's least number of pixels
            rows, columns = self._reduced(width, height, limit * unit * unit)
        return min(rows, limit), min(columns, limit)

    def _reduced(self, width: int, height: int, max_pixels: int) -> tuple[int, int]:
        """Rows and columns of at most `max_pixels`, or one row or column of more."""
        share = math.sqrt(height * width / max_pixels)
        rows = max(1, math.floor(height / share / self.unit))
        return rows, max(1, math.floor(width / share / self.unit))
