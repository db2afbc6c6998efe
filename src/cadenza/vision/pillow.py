"""Resizing by Pillow, imported when the first image comes.

Pillow's resampling of bytes is integer arithmetic, horizontal and then vertical, with the same
result on every machine.
"""

from typing import Literal

from cadenza.vision.processor import Image

Filter = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]

FILTERS: tuple[Filter, ...] = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""By Pillow's numbers, which processors' files have (`resample`)."""


def resized(image: Image, size: tuple[int, int], resample: Filter) -> Image:
    """The RGB image with another width and height."""
    from PIL.Image import Resampling

    return image.resize(size, Resampling[resample.upper()])


def image_bytes(image: Image) -> bytes:
    """Rows of RGB bytes."""
    return image.tobytes()


def crop_bytes(image: Image, corner: tuple[int, int], side: int) -> bytes:
    """Those of a square whose upper left corner is given."""
    left, top = corner
    return image.crop((left, top, left + side, top + side)).tobytes()
