"""`QwenImages`: what Qwen2-VL, 2.5-VL, 3-VL and 3.5 make of an image before their tower.

An image is one part of any size: both sides become multiples of `unit` pixels, near to the image's
own aspect, within a least and a largest number of pixels. A token stands for `unit` x `unit`
pixels. Sizes, resampling and normalisation are those of transformers' Pillow backend, to the bit
(`Qwen2VLImageProcessorPil`); beside them there is a limit of tokens, which the files do not have.

Patches follow one another by blocks of `merge_size` x `merge_size`, row by row over the blocks and
within each, so that consecutive patches are merged into a token. A patch's values are in the order
channel, time, row, column; an image is each of the `temporal_size` frames.
"""

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cadenza.errors import InvalidRequestError
from cadenza.vision.processor import CHANNELS, Detail, ImagePart, ImagePlan, Run

if TYPE_CHECKING:
    from PIL.Image import Image
else:
    Image = Any

MAX_ASPECT = 200
LOW_DETAIL_TOKENS = 256

_IMAGE_PAD = "<|image_pad|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenImages:
    """The settings of one model; an `ImageProcessor`.

    Args:
        temporal_size: frames of a patch.
        min_pixels, max_pixels: of a resized image, as the file has them.
        mean, std: of each channel, of values from 0 to 1.
        max_tokens: larger images are reduced to it (`--image-max-tokens`).
    """

    patch_size: int
    merge_size: int
    temporal_size: int
    min_pixels: int
    max_pixels: int
    rescale_factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    max_tokens: int

    @property
    def placeholder(self) -> str:
        return _IMAGE_PAD

    @property
    def token(self) -> str:
        return _IMAGE_PAD

    @property
    def unit(self) -> int:
        """Pixels on a side of what one token stands for."""
        return self.patch_size * self.merge_size

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
        from PIL.Image import Resampling

        (part,) = self.plan(image.width, image.height, detail).parts
        resized = image.resize((part.width, part.height), Resampling.BICUBIC)
        return (resized.tobytes(),)

    def check(self, part: ImagePart) -> None:
        unit = self.unit
        are_sides = (part.width, part.height) == (part.columns * unit, part.rows * unit)
        if not are_sides or not 1 <= part.num_tokens <= self.max_tokens:
            raise InvalidRequestError(
                f"an image of {part.width} x {part.height} pixels has {part.columns} x {part.rows} "
                f"tokens; a token of this model stands for {unit} x {unit} pixels, and an image "
                f"has at most {self.max_tokens}"
            )

    def patches(self, pixels: bytes, part: ImagePart) -> npt.NDArray[np.float32]:
        """[patches, channels x temporal_size x patch_size x patch_size]"""
        size, merge = self.patch_size, self.merge_size
        sides = part.rows, merge, size, part.columns, merge, size, CHANNELS
        levels = np.frombuffer(pixels, np.uint8).reshape(sides)
        by_block = levels.transpose(0, 3, 1, 4, 6, 2, 5)  # [rows, columns, m, m, C, y, x]
        found = np.empty((*by_block.shape[:5], self.temporal_size, size, size), np.float32)
        for channel, values in enumerate(self._values()):
            found[..., channel, :, :, :] = values[by_block[..., channel, None, :, :]]
        return found.reshape(part.num_tokens * merge * merge, -1)

    def _values(self) -> npt.NDArray[np.float32]:
        """Each channel's value for each level of a byte: [channels, 256]."""
        scaled = (np.arange(256) * self.rescale_factor).astype(np.float32)
        mean, std = (np.array(each, np.float32)[:, None] for each in (self.mean, self.std))
        return (scaled[None, :] - mean) / std

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
        """Rows and columns of at most so many pixels, or one row or column of more."""
        share = math.sqrt(height * width / max_pixels)
        rows = max(1, math.floor(height / share / self.unit))
        return rows, max(1, math.floor(width / share / self.unit))
