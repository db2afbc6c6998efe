"""`CallImages`: fetches, decodes and resizes the images of calls, beside the event loop.

Owns the processes that do it. Invariant: bytes that are fetched count against the budget of bodies,
as those do that clients send.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from cadenza.errors import show_size
from cadenza.frontend.prepared_request import PreparedRequest
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.media.decode_pool import DecodePool
from cadenza.media.fetching import BudgetFullError, MediaFetcher
from cadenza.media.image_input import ImagesToFetch
from cadenza.media.opening import ImageOpener
from cadenza.server.errors import bodies_full
from cadenza.server.limits import BodyBudget

Result = TypeVar("Result")


class CallImages:
    """For one event loop.

    Args:
        bodies: the budget of bytes.
    """

    def __init__(self, fetcher: MediaFetcher, bodies: BodyBudget) -> None:
        self._bodies = bodies
        self.pool = DecodePool()
        self._opener = ImageOpener(fetcher, self.pool)

    async def with_files(self, make: Callable[[], Awaitable[Result]]) -> Result:
        """What `make` does; it is called again with the files of images that it lacked.

        Raises ApiError (429), and what `make` raises.
        """
        try:
            return await make()
        except ImagesToFetch as lacking:
            images = lacking.images
        with self._bodies.holding() as try_add:
            try:
                await self._opener.fetch(images, try_add)
            except BudgetFullError:
                raise bodies_full(limit=show_size(self._bodies.max_bytes)) from None
            return await make()

    async def open(self, prepared: Sequence[PreparedRequest], text: TextFrontend) -> None:
        """Opens the images of requests that lack their pixels. Raises CadenzaError."""
        processor = text.prompts.image_processor
        for each in prepared:
            if each.pending is not None and processor is not None:
                images = [planned.image for planned in each.pending.images]
                await self._opener.open(images, processor, lambda _: True)

    async def close(self) -> None:
        """Ends the processes."""
        await asyncio.to_thread(self._opener.close)
