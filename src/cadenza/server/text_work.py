"""Tokenising and rendering away from the event loop: `TextWork`.

Owns a few threads in lanes: the tokenizer lets other threads run, templates have caps on time and
steps. Invariants: a short prompt never waits for a long text, and no prompt for /tokenize or
/detokenize; what a caller gave up before it began is never done.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

Result = TypeVar("Result")
Purpose = Literal["generate", "tokenize"]

LONG_BYTES = 64 << 10
"""A body of more is long: tokenising it takes longer than the others should wait, some 50 ms."""
NUM_THREADS: dict[tuple[Purpose, bool], int] = {
    ("generate", False): 2,
    ("generate", True): 1,
    ("tokenize", False): 1,
    ("tokenize", True): 1,
}
"""Of each lane: what for, and whether the body is long."""


class TextWork:
    """Runs functions in lanes; how many may wait is bounded by who admits requests."""

    def __init__(self) -> None:
        self._lanes = {
            lane: ThreadPoolExecutor(num_threads, thread_name_prefix="cadenza-text")
            for lane, num_threads in NUM_THREADS.items()
        }

    async def do(self, purpose: Purpose, num_body_bytes: int, work: Callable[[], Result]) -> Result:
        """Does what a request with a body of this size needs. Raises what `work` raises."""
        lane = self._lanes[purpose, num_body_bytes > LONG_BYTES]
        return await asyncio.wrap_future(lane.submit(work))

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.shutdown(wait=False, cancel_futures=True)
