"""`Gemma3Images` and `Gemma4Images`, to the bit as transformers' Pillow backend. Gemma 3 resizes an
image to a square, whatever its aspect. Gemma 4 keeps the aspect: both sides become multiples of a
token's side, as large as a token budget allows, so small images are enlarged. The patches of a
token follow one another."""

import json
import math
from dataclasses import asdict, dataclass, replace

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

BUDGETS = (70, 140, 280, 560, 1120)  # most tokens that Gemma 4 may make of an image

LOW_DETAIL_TOKENS = BUDGETS[0]

_TO_UNIT = Normalisation()  # from -1 to 1
_AS_IS = Normalisation(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


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
        return json.dumps({"processor": "gemma3", **asdict(self)}, sort_keys=True).encode()

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ImagePlan:  # noqa: ARG002 (all images are of one size)
        run = Run(part=0, count=self.part.num_tokens)
        return ImagePlan(
            parts=(self.part,),
            pieces=(f"\n\n{self.placeholder}", run, f"{self.end}\n\n"),
        )

    def prepare(self, image: Image, detail: Detail = "auto") -> tuple[bytes, ...]:  # noqa: ARG002
        return (image_bytes(resized(image, (self.side, self.side), self.resample)),)

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
    """The settings of one model; an `ImageProcessor`."""

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
        return json.dumps({"processor": "gemma4", **asdict(self)}, sort_keys=True).encode()

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ImagePlan:
        budget = min(self.max_tokens, LOW_DETAIL_TOKENS) if detail == "low" else self.max_tokens
        rows, columns = self._grid(width, height, budget)
        part = ImagePart(
            width=columns * self.unit, height=rows * self.unit, rows=rows, columns=columns
        )
        run = Run(part=0, count=rows * columns)
        return ImagePlan(parts=(part,), pieces=(self.begin, run, self.end))

    def prepare(self, image: Image, detail: Detail = "auto") -> tuple[bytes, ...]:
        (part,) = self.plan(image.width, image.height, detail).parts
        return (image_bytes(resized(image, (part.width, part.height), self.resample)),)

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
        """[patches, size x size x channels], from -1 to 1; of a unified model a patch is a token of
        `unit` pixels on a side, from 0 to 1."""
        side, size = (1, self.unit) if self.is_unified else (self.merge_size, self.patch_size)
        values = replace(_AS_IS if self.is_unified else _TO_UNIT, factor=self.factor)
        found = cut_patches(values.apply(image_array(pixels, part)), part, side, size)
        return np.ascontiguousarray(found.transpose(0, 2, 3, 1)).reshape(len(found), -1)

    def _grid(self, width: int, height: int, budget: int) -> tuple[int, int]:
        """Rows and columns of tokens, at most `budget` together."""
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
