"""`PooledPixels`: the images of prompts that programs give, by a `DecodePool`.

Invariant: an image's size is known by its header, before a pixel of it is decoded.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from weakref import finalize

from cadenza.media.decode_pool import DecodePool
from cadenza.media.decoding import prepared_picture
from cadenza.media.image_input import ImageFault, ImageInput, OpenedImage
from cadenza.media.opening import measure_images
from cadenza.vision.processor import ImageProcessor


class PooledPixels:
    """A `PixelSource`. Thread-safe; its processes start with the first image, and end with
    `close`, or with this object or the interpreter, as programs often close nothing."""

    def __init__(self, make_pool: Callable[[], DecodePool] = DecodePool) -> None:
        self._make_pool = make_pool
        self._pool: DecodePool | None = None
        self._end: Callable[[], object] = lambda: None

    def measure(self, images: SequenceOf[ImageInput], processor: ImageProcessor) -> None:
        """As `PixelSource.measure`."""
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
