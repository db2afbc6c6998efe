"""`LiveSteps`: what an engine does, for viewers on one event loop; a later load of the model may
follow. Invariants: an engine has a listener only while there is a viewer; history and unread news
are bounded: a slow reader loses the oldest."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from cadenza.engine.step_watch import EngineChange, LiveNews, OnNews, StepSummary
from cadenza.errors import QueueFullError

MAX_VIEWERS = 8
HISTORY_S = 60.0
MAX_HISTORY_BYTES = 1 << 20
MAX_UNREAD = 10

Listen = Callable[[OnNews | None], object]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StepSummary | EngineChange).decode


@dataclass(frozen=True, slots=True)
class LiveEntry:
    """`at_s` is in seconds since the `LiveSteps` was made, when the news came."""

    at_s: float
    news: LiveNews


class Viewer:
    """`history` is what had come before it; closed, it gets no more."""

    def __init__(self, history: tuple[LiveEntry, ...]) -> None:
        self.history = history
        self.is_closed = False
        self._unread: deque[LiveEntry] = deque(maxlen=MAX_UNREAD)
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_unread(self) -> bool:
        return bool(self._unread)

    async def next(self, within_s: float | None = None) -> list[LiveEntry]:
        """Entries since the last call; waits, and is empty after `within_s` or when closed."""
        if not self._unread and not self.is_closed:
            self._waiter = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._waiter}, timeout=within_s)
            self._waiter = None
        found = [*self._unread]
        self._unread.clear()
        return found

    def push(self, entry: LiveEntry) -> None:
        self._unread.append(entry)
        self._wake()

    def close(self) -> None:
        self.is_closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class LiveSteps:
    """On one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start_s = clock()
        self._viewers: list[Viewer] = []
        self._history: deque[tuple[float, bytes]] = deque()
        self._num_history_bytes = 0
        self._listen: Listen | None = None

    @property
    def is_attached(self) -> bool:
        return self._listen is not None

    def attach(self, listen: Listen) -> None:
        self._listen = listen
        if self._viewers:
            listen(self.take)

    def detach(self) -> None:  # viewers stay: another engine may follow
        if self._listen is not None:
            self._listen = None
            self.take("unloaded")

    @contextmanager
    def viewing(self) -> Generator[Viewer]:
        """A viewer until the block ends. Raises QueueFullError where there are too many."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise QueueFullError(
                f"{MAX_VIEWERS} viewers watch the batch already, the most that may; close one of "
                f"them, then try again"
            )
        if not self._viewers:  # what came before has other labels
            self._history.clear()
            self._num_history_bytes = 0
        viewer = Viewer(self._seen())
        self._viewers.append(viewer)
        if len(self._viewers) == 1 and self._listen is not None:
            self._listen(self.take)
        try:
            yield viewer
        finally:
            if viewer in self._viewers:
                self._viewers.remove(viewer)
                self._end_if_unwatched()

    def close(self) -> None:
        for viewer in self._viewers:
            viewer.close()

    def forget_viewers(self) -> None:
        if self._viewers:
            self._viewers.clear()
            self._end_if_unwatched()

    def _end_if_unwatched(self) -> None:
        if not self._viewers and self._listen is not None:
            self._listen(None)

    def take(self, news: LiveNews) -> None:
        if not self._viewers:  # it was under way when the last one left
            return
        entry = LiveEntry(self._clock() - self._start_s, news)
        self._keep(entry)
        for viewer in self._viewers:
            viewer.push(entry)

    def _keep(self, entry: LiveEntry) -> None:
        encoded = _encode(entry.news)
        self._history.append((entry.at_s, encoded))
        self._num_history_bytes += len(encoded)
        while (
            self._history[0][0] < entry.at_s - HISTORY_S
            or self._num_history_bytes > MAX_HISTORY_BYTES
        ):
            self._num_history_bytes -= len(self._history.popleft()[1])

    def _seen(self) -> tuple[LiveEntry, ...]:
        return tuple(LiveEntry(at_s, _decode(encoded)) for at_s, encoded in self._history)
