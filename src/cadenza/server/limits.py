"""The server's limits, and what works within them: bytes of bodies (`BodyBudget`), threads for text
(`TextWork`), images of calls (`CallImages`). Invariants: a short prompt never waits for a long
text, nor a prompt for /tokenize, an encoded answer or a checked format; fetched bytes count as
bodies; cancelled work does not begin."""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from cadenza.errors import ConfigError, show_size
from cadenza.frontend.prepared_request import PreparedRequest
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.media.decode_pool import DecodePool
from cadenza.media.fetching import BudgetFullError, MediaFetcher
from cadenza.media.image_input import ImagesToFetch
from cadenza.media.opening import ImageOpener
from cadenza.server.errors import bodies_full, unavailable

Result = TypeVar("Result")
Purpose = Literal["generate", "form", "tokenize", "encode"]

LONG_BYTES = 64 << 10
"""A larger body is long: tokenising it takes more than the 50 ms or so that others may wait."""
NUM_THREADS: dict[tuple[Purpose, bool], int] = {
    ("generate", False): 2,
    ("generate", True): 1,
    ("form", False): 4,
    ("form", True): 2,
    ("tokenize", False): 1,
    ("tokenize", True): 1,
    ("encode", False): 1,
}
"""For each lane: its purpose, and whether its bodies are long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Bytes, counts and seconds. Raises ConfigError: a value cannot work."""

    max_url_bytes: int = 8 << 10
    max_head_bytes: int = 16 << 10
    max_num_headers: int = 100
    max_body_bytes: int = 4 << 20  # of one body
    max_seen_body_bytes: int = 64 << 20  # of one where a model sees, since images are in bodies
    max_bodies_bytes: int = 256 << 20  # of all that are being read
    head_s: float = 10.0
    body_idle_s: float = 30.0  # longest pause within a body
    body_s: float = 120.0  # of the whole body
    write_stall_s: float = 30.0  # after which a client that leaves 64 KiB unread is dropped
    keep_alive_s: float = 15.0  # silence in a stream after which a comment is sent
    drain_s: float = 30.0
    max_logprobs: int = 20
    max_connections: int | None = None  # open at once; None derives it from the limit of open files

    def __post_init__(self) -> None:
        _check("sse-keep-alive-interval", self.keep_alive_s, 0.001, 86_400.0)
        _check("shutdown-timeout", self.drain_s, 0.0, 86_400.0)
        _check("max-logprobs", self.max_logprobs, 0, 20)
        _check("max-bodies-bytes", self.max_bodies_bytes, self.max_body_bytes, 1 << 50)

    def for_images(self) -> "ServerLimits":
        """Of a server with a model that sees."""
        most = min(self.max_seen_body_bytes, self.max_bodies_bytes)
        return replace(self, max_body_bytes=max(most, self.max_body_bytes))


def _check(flag: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"--{flag} {value:g} must be from {low:g} to {high:g}")


class BodyBudget:
    """For one event loop. `on_full` is called for each body that finds it used up."""

    def __init__(self, max_bytes: int, on_full: Callable[[], None]) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.on_full = on_full

    @contextmanager
    def holding(self) -> Generator[Callable[[int], bool]]:
        """For one body until it has been decoded; yields a function that adds to its bytes, or
        returns False where the budget is used up."""
        num_held = 0

        def try_add(num_bytes: int) -> bool:
            nonlocal num_held
            if self.num_bytes + num_bytes > self.max_bytes:
                self.on_full()
                return False
            num_held += num_bytes
            self.num_bytes += num_bytes
            return True

        try:
            yield try_add
        finally:
            self.num_bytes -= num_held


class TextWork:
    """Runs functions in lanes of threads; admission bounds the number that wait."""

    def __init__(self) -> None:
        self._is_closed = False
        self._lanes = {
            lane: ThreadPoolExecutor(num_threads, thread_name_prefix="cadenza-text")
            for lane, num_threads in NUM_THREADS.items()
        }

    async def do(self, purpose: Purpose, num_body_bytes: int, work: Callable[[], Result]) -> Result:
        """In the lane for this size. Raises what `work` does; ApiError (503) if `close` comes
        before its turn."""
        if self._is_closed:
            raise unavailable("draining")
        doing = self._lanes[purpose, num_body_bytes > LONG_BYTES].submit(work)
        try:
            return await asyncio.wrap_future(doing)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and task is not None and not task.cancelling():
                raise unavailable("draining") from None
            raise

    def close(self) -> None:
        """Work that has not begun is not done."""
        self._is_closed = True
        for lane in self._lanes.values():
            lane.shutdown(wait=False, cancel_futures=True)


class CallImages:
    """For one event loop. `bodies`: the budget of bytes."""

    def __init__(self, fetcher: MediaFetcher, bodies: BodyBudget) -> None:
        self._bodies = bodies
        self.pool = DecodePool()
        self._opener = ImageOpener(fetcher, self.pool)

    async def with_files(self, make: Callable[[], Awaitable[Result]]) -> Result:
        """Calls `make` again with the image files that it lacked. Raises ApiError (429), and what
        `make` raises."""
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
        await asyncio.to_thread(self._opener.close)
