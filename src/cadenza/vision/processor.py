"""`ImageProcessor`: how one family of models takes images, as transformers with Pillow does. An
image is one or more parts, each encoded by itself: the whole of it, or tiles. Pillow, imported with
the first image, resamples bytes in integer arithmetic, with the same result on every machine."""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL.Image import Image
else:
    Image = Any

Detail = Literal["auto", "low", "high"]  # "auto" and "high" are as the checkpoint's processor says

CHANNELS = 3  # red, green and blue bytes

_DIGEST_VERSION = b"cadenza image 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePart:
    """What a tower encodes at once: its pixels after resizing, and its tokens."""

    width: int  # pixels
    height: int  # pixels
    # rows, columns: of its tokens; there are rows * columns placeholders
    rows: int
    columns: int

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def num_bytes(self) -> int:
        return self.width * self.height * CHANNELS


@dataclass(frozen=True, slots=True)
class Run:
    """`count` consecutive placeholders, the next ones of part `part` of an image."""

    part: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """What an image becomes."""

    parts: tuple[ImagePart, ...]  # in the order of their placeholders
    # what stands in the prompt in place of the template's placeholder: text, which is as the
    # template's own, and runs of placeholders, whose counts are together those of the parts
    pieces: tuple[str | Run, ...]

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)


class ImageProcessor(Protocol):
    """The settings of one checkpoint. Immutable; equal for equal settings."""

    @property
    def placeholder(self) -> str:
        """What a chat template writes for an image."""
        ...

    @property
    def token(self) -> str:
        """The token that placeholders repeat, as text."""
        ...

    @property
    def settings(self) -> bytes:
        """All that decides the pixels and patches of an image, in one canonical form."""
        ...

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ImagePlan:
        """What an image of this size becomes. Raises InvalidRequestError for a size, or an aspect,
        that the model does not take."""
        ...

    def prepare(self, image: Image, detail: Detail = "auto") -> tuple[bytes, ...]:
        """The resized pixels of each part of an upright RGB image: rows of RGB bytes."""
        ...

    def check(self, part: ImagePart) -> None:
        """Raises InvalidRequestError if `plan` gives no such part for any image."""
        ...

    def patches(self, pixels: bytes, part: ImagePart) -> npt.NDArray[np.float32]:
        """The normalised patches [N, values] of a part, in the order of the tower's rows."""
        ...


def image_digest(settings: bytes, part: ImagePart, pixels: bytes) -> bytes:
    """Equal digests mean equal embeddings under one model. Width and height are in it, since equal
    bytes in another shape are another image."""
    found = hashlib.sha256(_DIGEST_VERSION)
    for size in (len(settings), part.width, part.height, part.rows, part.columns):
        found.update(size.to_bytes(8, "little"))
    found.update(settings)
    found.update(pixels)
    return found.digest()


Filter = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]

# By Pillow's numbers, as in processors' files (`resample`)
FILTERS: tuple[Filter, ...] = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")


def resized(image: Image, size: tuple[int, int], resample: Filter) -> Image:
    from PIL.Image import Resampling

    return image.resize(size, Resampling[resample.upper()])


def image_bytes(image: Image) -> bytes:
    return image.tobytes()


def crop_bytes(image: Image, corner: tuple[int, int], side: int) -> bytes:
    """Rows of RGB bytes of the square whose upper left corner is given."""
    left, top = corner
    return image.crop((left, top, left + side, top + side)).tobytes()
