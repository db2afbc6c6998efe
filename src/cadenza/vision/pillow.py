"""Resizing by Pillow, imported with the first image. Pillow resamples bytes in integer arithmetic,
horizontally and then vertically, with the same result on every machine."""

from typing import Literal

from cadenza.vision.processor import Image

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
