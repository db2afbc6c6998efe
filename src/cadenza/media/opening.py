"""Opens the images of a request: `ImageOpener` in a server, `PooledPixels` in a program. In this
order: count, all headers, pixels. An error names the first faulty image, its position and what
is allowed; no image is decoded where another one's header is refused. A data URL's media type is
ignored, since the bytes say what they are."""

import asyncio
import binascii
import re
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import finalize

from cadenza.errors import InvalidRequestError, show, show_size
from cadenza.media.decode_pool import DecodePool
from cadenza.media.decoding import picture_size, prepared_picture
from cadenza.media.fetching import MediaFetcher, TryAdd
from cadenza.media.headers import FORMATS_HELP, image_size, too_many_bytes
from cadenza.media.image_input import (
    MAX_ENCODED_BYTES,
    MAX_IMAGES,
    ImageFault,
    ImageInput,
    OpenedImage,
)

if TYPE_CHECKING:
    from cadenza.vision.processor import ImageProcessor


_NOT_FETCHED = (
    "its URL is remote; only a server fetches images, and only with --allowed-media-domains: give "
    "the file's bytes instead"
)


def check_count(images: Sequence[ImageInput]) -> None:
    if len(images) > MAX_IMAGES:
        raise ImageFault(
            f"a request may have at most {MAX_IMAGES} images, and this one has {len(images)}; "
            f"leave some out"
        ).named(images[MAX_IMAGES], MAX_IMAGES)


def measure_images(images: Sequence[ImageInput], processor: "ImageProcessor") -> None:
    """Sets `opened`, without pixels, of each image that has none yet: enough to count tokens.
    Raises InvalidRequestError."""
    check_count(images)
    for index, image in enumerate(images):
        if image.opened is None:
            with _naming(image, index):
                _measure(image, processor)


def _measure(image: ImageInput, processor: "ImageProcessor") -> None:
    picture = image.picture
    width, height = image_size(_given(image)) if picture is None else picture_size(picture)
    processor.plan(width, height, image.detail)  # refuses sizes that the model does not take
    image.opened = OpenedImage(width=width, height=height)


def _given(image: ImageInput) -> bytes:
    """Raises ImageFault."""
    if image.data is None and image.url is not None and is_data_url(image.url):
        image.data = data_of_url(image.url)
        image.url = None  # the request is kept for as long as it is answered
    if image.data is None:
        raise ImageFault(_NOT_FETCHED)
    return image.data


class ImageOpener:
    """Of a server; for one event loop, which it never blocks. `pool`: closed with this object."""

    def __init__(self, fetcher: MediaFetcher, pool: DecodePool) -> None:
        self._fetcher = fetcher
        self._pool = pool

    async def open(
        self, images: Sequence[ImageInput], processor: "ImageProcessor", try_add: TryAdd
    ) -> None:
        """Sets `opened` of each; fetched bytes count by `try_add`. Raises InvalidRequestError,
        BudgetFullError, EngineUnavailableError."""
        await self.fetch(images, try_add)
        await asyncio.to_thread(measure_images, images, processor)

        async def decode(image: ImageInput) -> None:
            if image.opened is not None and image.opened.parts is not None:
                return
            doing = self._pool.submit(_given(image), processor, image.detail)
            image.opened = await asyncio.wrap_future(doing)
            image.data = None  # the request is kept for as long as it is answered

        await _each(images, decode)

    async def fetch(self, images: Sequence[ImageInput], try_add: TryAdd) -> None:
        """Sets `data` of those at remote URLs. Raises as `open`."""
        check_count(images)
        for index, image in enumerate(images):
            if image.is_remote and image.url is not None:
                with _naming(image, index):
                    self._fetcher.check(image.url)

        async def fetch(image: ImageInput) -> None:
            if image.is_remote and image.url is not None:
                image.data = await self._fetcher.fetch(image.url, try_add)

        await _each(images, fetch)

    def close(self) -> None:
        self._pool.close()


class PooledPixels:
    """A thread-safe source of pixels; its processes start with the first image and end with
    `close`, this object or the interpreter."""

    def __init__(self, make_pool: Callable[[], DecodePool] = DecodePool) -> None:
        self._make_pool = make_pool
        self._pool: DecodePool | None = None
        self._end: Callable[[], object] = lambda: None

    def measure(self, images: Sequence[ImageInput], processor: "ImageProcessor") -> None:
        measure_images(images, processor)

    def open(self, images: Sequence[ImageInput], processor: "ImageProcessor") -> None:
        """Several files are decoded side by side."""
        started: list[OpenedImage | Future[OpenedImage]] = []
        for index, image in enumerate(images):
            with _naming(image, index):
                started.append(self._start(image, processor))
        for index, (image, each) in enumerate(zip(images, started, strict=True)):
            with _naming(image, index):
                image.opened = each.result() if isinstance(each, Future) else each

    def close(self) -> None:
        """Idempotent; a later image starts processes again."""
        self._pool = None
        self._end()

    def _start(
        self, image: ImageInput, processor: "ImageProcessor"
    ) -> OpenedImage | Future[OpenedImage]:
        if image.picture is not None:
            return prepared_picture(image.picture, processor, image.detail)
        if self._pool is None:
            self._pool = self._make_pool()
            self._end = finalize(self, self._pool.close)
        return self._pool.submit(_given(image), processor, image.detail)


async def _each(
    images: Sequence[ImageInput], work: Callable[[ImageInput], Awaitable[None]]
) -> None:
    """Works on all at once; raises the error of the first image that failed."""
    found = await asyncio.gather(*map(work, images), return_exceptions=True)
    for index, error in enumerate(found):
        if error is not None:
            with _naming(images[index], index):
                raise error


@contextmanager
def _naming(image: ImageInput, index: int) -> Generator[None]:
    try:
        yield
    except ImageFault as fault:
        raise fault.named(image, index) from None
    except InvalidRequestError as error:
        raise ImageFault(str(error)).named(image, index) from None


_SLICE = 1 << 18  # characters decoded at once, whole groups; other threads run between slices
MAX_BASE64_CHARS = -(-MAX_ENCODED_BYTES // 3) * 4
_HEAD = re.compile(r"data:([A-Za-z0-9.+-]+/[A-Za-z0-9.+-]+);base64,", re.ASCII | re.IGNORECASE)
_MAX_HEAD_CHARS = 256
_FORM = "data:image/png;base64,…"


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


def data_of_url(url: str) -> bytes:
    """Raises ImageFault: not one media type and base64, or another type of media."""
    found = _HEAD.match(url[:_MAX_HEAD_CHARS])
    if found is None:
        raise ImageFault(f"its URL is {show(url)}; a data URL has the form {_FORM}")
    media_type = found[1].lower()
    if not media_type.startswith("image/"):
        raise ImageFault(f"its data URL says {show(media_type)}; {FORMATS_HELP}: {_FORM}")
    return data_of_base64(url[found.end() :])


def data_of_base64(text: str) -> bytes:
    """Raises ImageFault."""
    if len(text) > MAX_BASE64_CHARS:
        raise too_many_bytes(f"about {show_size(len(text) // 4 * 3)}")
    try:
        return b"".join(_decoded(text))
    except ValueError:
        raise ImageFault(
            f"its base64 is damaged ({len(text)} characters); send the standard alphabet with "
            f"padding, without line breaks"
        ) from None


def _decoded(text: str) -> Iterator[bytes]:
    """Raises ValueError. Checks what Python does not: padding ends the whole text, and is at most
    two characters."""
    if text.endswith("==="):
        raise ValueError
    for start in range(0, len(text), _SLICE):
        part = text[start : start + _SLICE]
        if "=" in part and start + _SLICE < len(text):
            raise ValueError
        yield binascii.a2b_base64(part, strict_mode=True)
