"""Processors of images that are encoded whole, to the bit as transformers' Pillow backends: Gemma 3
(a square, whatever the aspect), and Gemma 4, Pixtral, Mistral 3 and Qwen's, whose grids of tokens
keep the aspect. The patches of a token follow one another."""

import json
import math
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt

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

LOW_DETAIL_TOKENS = 256  # of Pixtral and Qwen
MAX_ASPECT = 200  # of Qwen

BUDGETS = (70, 140, 280, 560, 1120)  # most tokens that Gemma 4 may make of an image; low: the first

_TO_UNIT = Normalisation()  # from -1 to 1
_AS_IS = Normalisation(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
_IMAGE_PAD = "<|image_pad|>"


def _settings(name: str, processor: "_WholeImages") -> bytes:
    return json.dumps({"processor": name, **asdict(processor)}, sort_keys=True).encode()


def _prepared(processor: "_WholeImages", image: Image, detail: Detail) -> tuple[bytes, ...]:
    (part,) = processor.plan(image.width, image.height, detail).parts
    return (image_bytes(resized(image, (part.width, part.height), processor.resample)),)


def _grid_part(unit: int, rows: int, columns: int) -> ImagePart:
    return ImagePart(width=columns * unit, height=rows * unit, rows=rows, columns=columns)


def _check_grid(part: ImagePart, unit: int, max_tokens: int, max_side: int | None = None) -> None:
    are_sides = part == _grid_part(unit, part.rows, part.columns)
    is_short = max_side is None or max(part.rows, part.columns) <= max_side
    if not (are_sides and is_short and 1 <= part.num_tokens <= max_tokens):
        most = "" if max_side is None else f", of at most {max_side} on a side"
        raise InvalidRequestError(
            f"an image of {part.width} x {part.height} pixels has {part.columns} x {part.rows} "
            f"tokens; a token of this model stands for {unit} x {unit} pixels, and an image has at "
            f"most {max_tokens}{most}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Images:
    """The settings of one model; an `ImageProcessor`."""

    side: int = 896  # pixels of an image after resizing
    patch_size: int = 14  # pixels on a side of a patch
    merge_size: int = 4  # patches on a side of what one token stands for
    resample: Filter = "bilinear"
    normalisation: Normalisation = _TO_UNIT
    placeholder: str = "<start_of_image>"
    token: str = "<image_soft_token>"  # noqa: S105 (no password)
    end: str = "<end_of_image>"

    @property
    def part(self) -> ImagePart:
        count = self.side // (self.patch_size * self.merge_size)
        return ImagePart(width=self.side, height=self.side, rows=count, columns=count)

    @property
    def max_tokens(self) -> int:
        return self.part.num_tokens

    @property
    def settings(self) -> bytes:
        return _settings("gemma3", self)

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ImagePlan:  # noqa: ARG002 (all images are of one size)
        run = Run(part=0, count=self.part.num_tokens)
        pieces = (f"\n\n{self.placeholder}", run, f"{self.end}\n\n")
        return ImagePlan(parts=(self.part,), pieces=pieces)

    def prepare(self, image: Image, detail: Detail = "auto") -> tuple[bytes, ...]:
        return _prepared(self, image, detail)

    def check(self, part: ImagePart) -> None:
        if part != self.part:
            own = self.part
            raise InvalidRequestError(
                f"an image of {part.width} x {part.height} pixels has {part.columns} x {part.rows} "
                f"tokens; for this model every image has {own.width} x {own.height} pixels and "
                f"{own.columns} x {own.rows} tokens"
            )

    def patches(self, pixels: bytes, part: ImagePart) -> npt.NDArray[np.float32]:
        values = self.normalisation.apply(image_array(pixels, part))
        found = cut_patches(values, part, self.merge_size, self.patch_size)
        return found.reshape(len(found), -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Images:
    """The settings of one model; an `ImageProcessor`. Both sides become multiples of a token's, as
    large as the token budget allows, so that small images are enlarged."""

    patch_size: int = 16  # pixels on a side of a patch of the tower
    merge_size: int = 3  # patches on a side of what one token stands for
    max_tokens: int = 280  # of an image, one of `BUDGETS`
    is_unified: bool = False  # there is no tower; a token is one patch
    resample: Filter = "bicubic"
    factor: float = 1 / 255  # of a byte
    placeholder: str = "<|image|>"
    token: str = "<|image|>"  # noqa: S105 (no password)
    begin: str = "<|image>"
    end: str = "<image|>"

    @property
    def unit(self) -> int:
        return self.patch_size * self.merge_size

    @property
    def settings(self) -> bytes:
        return _settings("gemma4", self)

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ImagePlan:
        budget = min(self.max_tokens, BUDGETS[0]) if detail == "low" else self.max_tokens
        part = _grid_part(self.unit, *self._grid(width, height, budget))
        run = Run(part=0, count=part.num_tokens)
        return ImagePlan(parts=(part,), pieces=(self.begin, run, self.end))

    def prepare(self, image: Image, detail: Detail = "auto") -> tuple[bytes, ...]:
        return _prepared(self, image, detail)

    def check(self, part: ImagePart) -> None:
        _check_grid(part, self.unit, self.max_tokens)

    def patches(self, pixels: bytes, part: ImagePart) -> npt.NDArray[np.float32]:
        """[patches, size x size x channels], from -1 to 1; of a unified model a patch is a token of
        `unit` pixels on a side, from 0 to 1."""
        side, size = (1, self.unit) if self.is_unified else (self.merge_size, self.patch_size)
        values = replace(_AS_IS if self.is_unified else _TO_UNIT, factor=self.factor)
        found = cut_patches(values.apply(image_array(pixels, part)), part, side, size)
        return np.ascontiguousarray(found.transpose(0, 2, 3, 1)).reshape(len(found), -1)

    def _grid(self, width: int, height: int, budget: int) -> tuple[int, int]:
        """Rows and columns of tokens, here and below at most `budget` or `limit` together."""
        unit = self.unit
        # The definition's own order of operations: other ones round differently.
        target = budget * self.merge_size**2 * self.patch_size**2
        factor = math.sqrt(target / (height * width))
        rows = math.floor(factor * height / unit)
        columns = math.floor(factor * width / unit)
        if rows == 0:
            return 1, min(math.floor(width / height), budget)
        if columns == 0:
            return min(math.floor(height / width), budget), 1
        return rows, columns


def budget_within(max_tokens: int) -> int | None:
    """Gemma 4's largest budget of at most `max_tokens`; None if there is none."""
    return max((budget for budget in BUDGETS if budget <= max_tokens), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralImages:
    """The settings of one model; an `ImageProcessor`. A longer side above the limit is reduced;
    then both are rounded up to multiples of a token's. A token ends each row of tokens, another one
    the image: these have embeddings of their own."""

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
        return _settings("pixtral", self)

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ImagePlan:
        limit = min(self.max_tokens, LOW_DETAIL_TOKENS) if detail == "low" else self.max_tokens
        part = _grid_part(self.unit, *self._grid(width, height, limit))
        row = Run(part=0, count=part.columns)
        pieces = (row, self.row_end) * (part.rows - 1) + (row, self.end)
        return ImagePlan(parts=(part,), pieces=pieces)

    def prepare(self, image: Image, detail: Detail = "auto") -> tuple[bytes, ...]:
        return _prepared(self, image, detail)

    def check(self, part: ImagePart) -> None:
        max_side = math.ceil(self.longest_edge / self.unit)
        _check_grid(part, self.unit, self.max_tokens, max_side)

    def patches(self, pixels: bytes, part: ImagePart) -> npt.NDArray[np.float32]:
        values = self.normalisation.apply(image_array(pixels, part))
        found = cut_patches(values, part, self.merge_size, self.patch_size)
        return found.reshape(len(found), -1)

    def _grid(self, width: int, height: int, limit: int) -> tuple[int, int]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenImages:
    """The settings of one model; an `ImageProcessor` as `Qwen2VLImageProcessorPil`, with a token
    limit beside. Both sides become multiples of `unit` pixels within bounds of pixels. Values are
    in the order channel, time, row, column; an image is each of the `temporal_size` frames."""

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
        return _settings("qwen", self)

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ImagePlan:
        """Raises InvalidRequestError if one side is more than `MAX_ASPECT` times the other."""
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise InvalidRequestError(
                f"the image has {width} x {height} pixels; supported for this model is a side of "
                f"at most {MAX_ASPECT} times the other; crop the image"
            )
        limit = min(self.max_tokens, LOW_DETAIL_TOKENS) if detail == "low" else self.max_tokens
        part = _grid_part(self.unit, *self._grid(width, height, limit))
        return ImagePlan(parts=(part,), pieces=(Run(part=0, count=part.num_tokens),))

    def prepare(self, image: Image, detail: Detail = "auto") -> tuple[bytes, ...]:
        return _prepared(self, image, detail)

    def check(self, part: ImagePart) -> None:
        _check_grid(part, self.unit, self.most_tokens)

    def patches(self, pixels: bytes, part: ImagePart) -> Floats:
        """[patches, channels x temporal_size x patch_size x patch_size]"""
        image = self.normalisation.apply(image_array(pixels, part))
        patches = cut_patches(image, part, self.merge_size, self.patch_size)  # [N, C, y, x]
        return np.repeat(patches[:, :, None], self.temporal_size, axis=2).reshape(len(patches), -1)

    def _grid(self, width: int, height: int, limit: int) -> tuple[int, int]:
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
        """Of at most `max_pixels`, or one row or column of more."""
        share = math.sqrt(height * width / max_pixels)
        rows = max(1, math.floor(height / share / self.unit))
        return rows, max(1, math.floor(width / share / self.unit))


_WholeImages = Gemma3Images | Gemma4Images | PixtralImages | QwenImages
