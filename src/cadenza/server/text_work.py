"""Tokenising and rendering away from the event loop: `TextWork`.

Owns a small pool of threads: the tokenizer lets other threads run, templates have caps on time and
steps. Invariant: what a caller gave up before it began is never done.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

NUM_THREADS = 2


class TextWork:
    """Runs functions on the pool; how many may wait is bounded by who admits requests."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="cadenza-text")

    async def do(self, work: Callable[[], Result]) -> Result:
        """Raises what `work` raises."""
        return await asyncio.wrap_future(self._pool.submit(work))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
