"""What a client adds to the latencies that it measures: processor time, and lateness of its loop,
seen by timing the event loop's selector. Invariant: watching takes no task of its own and less than
a microsecond a call."""

import math
import selectors
import time
from dataclasses import dataclass

from cadenza.bench import Clock

_EPOLL_S = 0.001
"""Timeouts are rounded up to this, which is not the client's being late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedTime:
    """What was seen of the client within `elapsed_s`."""

    elapsed_s: float
    cpu_s: float
    lag_s: float
    longest_busy_s: float


class WatchedSelector(selectors.DefaultSelector):
    """The default selector, which notes how long the loop is away from it and how late it wakes;
    for `asyncio.SelectorEventLoop`."""

    def __init__(
        self, clock: Clock = time.perf_counter, cpu_clock: Clock = time.process_time
    ) -> None:
        super().__init__()
        self._clock, self._cpu_clock = clock, cpu_clock
        self.restart()

    def restart(self) -> None:
        self._start_s = self._woken_s = self._clock()
        self._cpu_start_s = self._cpu_clock()
        self._longest_s = self._squares = self._late_s = 0.0
        self._num_timers = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        asked_s = self._clock()
        self._note_busy(asked_s - self._woken_s)
        events = super().select(timeout)
        self._woken_s = self._clock()
        if not events and timeout:
            due_s = asked_s + math.ceil(timeout / _EPOLL_S) * _EPOLL_S
            self._num_timers += 1
            self._late_s += max(0.0, self._woken_s - due_s)
        return events

    def read(self) -> WatchedTime:
        """Since the last restart. `lag_s`: what a chunk waits on average if it arrives at any time:
        the mean lateness of a wake-up, and half of the square of each busy time over the whole
        time."""
        now_s = self._clock()
        elapsed_s = max(now_s - self._start_s, 1e-9)
        busy_s = now_s - self._woken_s
        squares, longest_s = self._squares + busy_s**2, max(self._longest_s, busy_s)
        return WatchedTime(
            elapsed_s=elapsed_s,
            cpu_s=self._cpu_clock() - self._cpu_start_s,
            lag_s=self._late_s / max(1, self._num_timers) + squares / (2 * elapsed_s),
            longest_busy_s=longest_s,
        )

    def _note_busy(self, busy_s: float) -> None:
        self._squares += busy_s**2
        self._longest_s = max(self._longest_s, busy_s)
