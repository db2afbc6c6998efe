"""Images as Python programs give them (PIL images, bytes, paths, URLs), and `PooledPixels`, which
opens them. Only for callers in this process, whose paths are read. Invariant: a file that is too
large is refused before it is read, and an image's size is known from its header before any pixel is
decoded."""

import os
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast
from weakref import finalize

from cadenza.errors import InvalidRequestError, must_be, show, show_size
from cadenza.media.decode_pool import DecodePool
from cadenza.media.decoding import prepared_picture
from cadenza.media.image_input import (
    DETAILS,
    MAX_ENCODED_BYTES,
    ImageFault,
    ImageInput,
    OpenedImage,
    image_part,
)
from cadenza.media.opening import measure_images
from cadenza.vision.processor import ImageProcessor

_KINDS = ("image", "image_url", "input_image", "image_pil")
_PLACES = ("image", "image_url", "image_pil", "url", "path", "base64")
_SCHEMES = ("data:", "http://", "https://")
_ALLOWED = "a PIL image, the bytes of a file, a path, a data: URL or an https: URL"


def with_images(messages: object) -> Any:
    """A conversation whose images, in the forms of OpenAI, transformers and vLLM, are
    `ImageInput`s; anything else stays as it is. Raises InvalidRequestError."""
    if not isinstance(messages, list | tuple):
        return messages
    return [
        _with_images(found, f"messages[{place}]") if (found := _members(each)) else each
        for place, each in enumerate(cast(SequenceOf[object], messages))
    ]


def _with_images(message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    parts = [
        _with_image(part, f"{where}.content[{place}]")
        for place, part in enumerate(cast(SequenceOf[object], content))
    ]
    return {**message, "content": parts}


def _with_image(part: object, where: str) -> object:
    members = _members(part)
    if members.get("type") not in _KINDS or isinstance(members.get("image"), ImageInput):
        return part
    given = next((value for name in _PLACES if (value := members.get(name)) is not None), None)
    detail = members.get("detail")
    if isinstance(given, Mapping):
        inner = _members(cast(object, given))
        given, detail = inner.get("url"), inner.get("detail", detail)
    if members.get("base64") is given and isinstance(given, str):
        given = f"data:image/png;base64,{given}"  # its bytes say what it is
    return image_part(image_input(given, where, detail))


def _members(given: object) -> Mapping[str, object]:
    return cast(Mapping[str, object], given) if isinstance(given, Mapping) else dict[str, object]()


def image_input(given: object, where: str, detail: object = None) -> ImageInput:
    """In one of the forms that programs have. Raises InvalidRequestError."""
    if isinstance(given, ImageInput):
        return given
    if detail not in (None, *DETAILS):
        raise InvalidRequestError(
            f"{where} has the detail {show(detail)}; there are {', '.join(DETAILS)}", param=where
        )
    chosen = "auto" if detail is None else detail
    if isinstance(given, bytes | bytearray):
        return ImageInput(data=bytes(given), detail=chosen, where=where)
    if isinstance(given, str) and given[:8].lower().startswith(_SCHEMES):
        return ImageInput(url=given, detail=chosen, where=where)
    if isinstance(given, str | os.PathLike):
        path = Path(cast("str | os.PathLike[str]", given)).expanduser()
        return ImageInput(data=read_image(path, where), detail=chosen, where=where)
    if hasattr(given, "convert") and hasattr(given, "size"):
        return ImageInput(picture=given, detail=chosen, where=where)
    raise must_be(where, given, _ALLOWED)


def read_image(path: Path, where: str) -> bytes:
    """Raises InvalidRequestError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_ENCODED_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no path"
        raise InvalidRequestError(
            f"the image {show(str(path))} cannot be read: {reason}", param=where
        ) from None
    if len(data) > MAX_ENCODED_BYTES:
        raise InvalidRequestError(
            f"the image {show(str(path))} has over {show_size(MAX_ENCODED_BYTES)}; make it smaller",
            param=where,
        )
    return data


def images_of_prompt(data: object) -> tuple[ImageInput, ...]:
    """vLLM's `multi_modal_data`: {"image": one or a list}. Raises InvalidRequestError."""
    members = _members(data)
    if not isinstance(data, Mapping) or [name for name in members if name != "image"]:
        allowed = 'a mapping {"image": …}; there is no other kind'
        raise must_be("multi_modal_data", cast(object, data), allowed)
    given = members.get("image")
    listed = cast(SequenceOf[object], given) if isinstance(given, list | tuple) else [given]
    return tuple(
        image_input(each, f"multi_modal_data.image[{place}]")
        for place, each in enumerate(listed)
        if given is not None
    )


class PooledPixels:
    """A thread-safe `PixelSource`; its processes start with the first image and end with `close`,
    this object or the interpreter."""

    def __init__(self, make_pool: Callable[[], DecodePool] = DecodePool) -> None:
        self._make_pool = make_pool
        self._pool: DecodePool | None = None
        self._end: Callable[[], object] = lambda: None

    def measure(self, images: SequenceOf[ImageInput], processor: ImageProcessor) -> None:
        measure_images(images, processor)

    def open(self, images: SequenceOf[ImageInput], processor: ImageProcessor) -> None:
        """As `PixelSource.open`; several files are decoded side by side."""
        started = [self._start(image, place, processor) for place, image in enumerate(images)]
        for place, (image, each) in enumerate(zip(images, started, strict=True)):
            try:
                image.opened = each.result() if isinstance(each, Future) else each
            except ImageFault as fault:
                raise fault.named(image, place) from None

    def close(self) -> None:
        """Idempotent; a later image starts processes again."""
        self._pool = None
        self._end()

    def _start(
        self, image: ImageInput, place: int, processor: ImageProcessor
    ) -> OpenedImage | Future[OpenedImage]:
        if image.picture is not None:
            try:
                return prepared_picture(image.picture, processor, image.detail)
            except ImageFault as fault:
                raise fault.named(image, place) from None
        if self._pool is None:
            self._pool = self._make_pool()
            self._end = finalize(self, self._pool.close)
        assert image.data is not None, "an image that was measured has its file"
        return self._pool.submit(image.data, processor, image.detail)
