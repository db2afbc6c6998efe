"""Opens the images of a request: `ImageOpener` in a server; `measure_images` elsewhere. In this
order: count, all headers, pixels. An error names the first faulty image, its position and what is
allowed; no image is decoded where another one's header is refused."""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cadenza.errors import InvalidRequestError
from cadenza.media.data_urls import data_of_url, is_data_url
from cadenza.media.decode_pool import DecodePool
from cadenza.media.decoding import picture_size
from cadenza.media.fetching import MediaFetcher, TryAdd
from cadenza.media.headers import image_size
from cadenza.media.image_input import (
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
    for place, image in enumerate(images):
        if image.opened is None:
            with _naming(image, place):
                _measure(image, processor)


def _measure(image: ImageInput, processor: "ImageProcessor") -> None:
    if image.picture is not None:
        width, height = picture_size(image.picture)
    else:
        width, height = image_size(_given(image))
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
        for place, image in enumerate(images):
            if image.is_remote and image.url is not None:
                with _naming(image, place):
                    self._fetcher.check(image.url)

        async def fetch(image: ImageInput) -> None:
            if image.is_remote and image.url is not None:
                image.data = await self._fetcher.fetch(image.url, try_add)

        await _each(images, fetch)

    def close(self) -> None:
        self._pool.close()


async def _each(
    images: Sequence[ImageInput], work: Callable[[ImageInput], Awaitable[None]]
) -> None:
    """Works on all at once; raises the error of the first image that failed."""
    found = await asyncio.gather(*map(work, images), return_exceptions=True)
    for place, error in enumerate(found):
        if error is not None:
            with _naming(images[place], place):
                raise error


@contextmanager
def _naming(image: ImageInput, place: int) -> Generator[None]:
    try:
        yield
    except ImageFault as fault:
        raise fault.named(image, place) from None
    except InvalidRequestError as error:
        raise ImageFault(str(error)).named(image, place) from None
