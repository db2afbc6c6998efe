"""`check_images`: whether the images of a request are what they say.

Sizes, grids and spans are set by the front end before any pixel is decoded; the engine believes
none of them. Invariant: of a request that passes, each placeholder has its own slot, and each slot
that it needs exists.
"""

from bisect import bisect_left

from cadenza.config import ImageLimits
from cadenza.errors import InvalidRequestError
from cadenza.request import Attachment, Request

CHANNELS = 3
"""Bytes of a pixel."""


def check_images(request: Request, images: ImageLimits | None) -> None:
    """Raises InvalidRequestError if the engine can never serve the request's images."""
    if images is None:
        raise _error("this engine encodes no images (--no-images, or a model of text alone)")
    places: list[int] = []
    if images.token_id in request.prompt_token_ids:
        ids = request.prompt_token_ids
        places = [place for place, each in enumerate(ids) if each == images.token_id]
    num_inside = 0
    for number, part in enumerate(request.attachments, start=1):
        first, stop = bisect_left(places, part.start), bisect_left(places, part.end)
        _check_part(number, part, places[first:stop])
        num_inside += stop - first
        if stop - first > images.num_slots:
            raise _error(
                f"image {number} has {stop - first} tokens and the engine has {images.num_slots} "
                f"slots for those of all images; send a smaller one, or start the engine with more "
                f"--image-cache-bytes"
            )
    allowed = request.params.allowed_token_ids
    if allowed is not None and set(allowed) == {images.token_id}:
        raise InvalidRequestError(
            f"allowed_token_ids holds the image token {images.token_id} alone, which is never "
            f"generated; allow others too",
            param="allowed_token_ids",
        )
    if num_inside < len(places):
        raise InvalidRequestError(
            f"the prompt holds the image token {images.token_id} where there is no image; leave it "
            f"out, or send the image with it",
            param="prompt",
        )


def _check_part(number: int, part: Attachment, places: list[int]) -> None:
    """`places` are those of the placeholders in its span."""
    if not part.rows * part.columns == len(places) > 0:
        raise _error(
            f"image {number} has {part.rows} x {part.columns} tokens and the prompt {len(places)} "
            f"in its place"
        )
    if places[0] != part.start or places[-1] != part.end - 1:
        raise _error(f"the span of image {number} begins and ends with no token of it")
    num_bytes = part.width * part.height * CHANNELS
    if not num_bytes or len(part.payload) != num_bytes:
        raise _error(
            f"image {number} has {len(part.payload)} bytes; {part.width} x {part.height} pixels "
            f"have {num_bytes}"
        )


def _error(text: str) -> InvalidRequestError:
    return InvalidRequestError(text, param="attachments")
