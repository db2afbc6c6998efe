"""The server's bounds, and what is kept within them: body bytes and threads for text.

Owns the table `ServerLimits`, one sum over the bodies of every connection (`BodyBudget`), and the
threads that tokenise and render (`TextWork`): the tokenizer lets other threads run, templates have
caps on time and steps. Knows no HTTP. Invariants: every number that a client controls is here,
unless it is a field of a body; bodies hold at most `max_bodies_bytes`; a short prompt never waits
for a long text, and no prompt for /tokenize or /detokenize; what a caller gave up before it began
is never done.
"""

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

from cadenza.errors import ConfigError

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Bytes, counts and seconds.

    Args:
        max_body_bytes: of one body; `max_bodies_bytes` of all that are being read.
        body_idle_s: how long a body may stand still; `body_s` how long it may take in all.
        write_stall_s: how long a client may leave 64 KiB unread before it is dropped.
        keep_alive_s: silence in a stream after which a comment is sent.
        max_connections: open at once; None: as many as the limit of open files has room for.

    Raises:
        ConfigError: a value cannot work.
    """

    max_url_bytes: int = 8 << 10
    max_head_bytes: int = 16 << 10
    max_num_headers: int = 100
    max_body_bytes: int = 4 << 20
    max_bodies_bytes: int = 256 << 20
    head_s: float = 10.0
    body_idle_s: float = 30.0
    body_s: float = 120.0
    write_stall_s: float = 30.0
    keep_alive_s: float = 15.0
    drain_s: float = 30.0
    max_logprobs: int = 20
    max_connections: int | None = None

    def __post_init__(self) -> None:
        _check("sse-keep-alive-interval", self.keep_alive_s, 0.001, 86_400.0)
        _check("shutdown-timeout", self.drain_s, 0.0, 86_400.0)
        _check("max-logprobs", self.max_logprobs, 0, 20)
        _check("max-bodies-bytes", self.max_bodies_bytes, self.max_body_bytes, 1 << 50)


def _check(flag: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"--{flag} {value:g} must be from {low:g} to {high:g}")


class HeldBytes:
    """What one body holds of the budget."""

    def __init__(self, budget: "BodyBudget") -> None:
        self.num_bytes = 0
        self._budget = budget

    def try_add(self, num_bytes: int) -> bool:
        """False where the budget is spent; then nothing is added."""
        if self._budget.num_bytes + num_bytes > self._budget.max_bytes:
            self._budget.on_full()
            return False
        self.num_bytes += num_bytes
        self._budget.num_bytes += num_bytes
        return True


class BodyBudget:
    """Use it on one event loop. `on_full` is called for each body that finds it spent."""

    def __init__(self, max_bytes: int, on_full: Callable[[], None]) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.on_full = on_full

    @contextmanager
    def holding(self) -> Generator[HeldBytes]:
        """For one body, from its first byte until it has been read and understood."""
        held = HeldBytes(self)
        try:
            yield held
        finally:
            self.num_bytes -= held.num_bytes


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
