"""`BatchEngine`: the engine-level seam that servers and async faces talk to.

One thread serves; any thread submits and cancels. `CoreService` is the first implementation,
over `EngineCore`; another process or another engine may stand behind the same calls.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cadenza.engine.core import EngineCore
from cadenza.engine.open_requests import EngineLoad, OpenRequests, RequestStats, RequestTimeouts
from cadenza.engine.stats import EngineStats, StepMeter
from cadenza.engine.status import EngineState, EngineStatus
from cadenza.errors import (
    CadenzaError,
    EngineClosedError,
    EngineUnavailableError,
    RunnerError,
)
from cadenza.request import Event, Request

logger = logging.getLogger(__name__)

Emit = Callable[[list[Event]], None]
"""Takes the events of one step, on the serving thread; must not block."""

Clock = Callable[[], float]
"""Seconds, monotonic."""

WAKE_S = 60.0
"""The longest an idle engine sleeps before it looks up; submitting wakes it at once."""

SHUT_DOWN = "the engine was shut down"
STOPPED = "the engine stopped on an error; its log has the cause"
DRAINING = "the server is shutting down and takes no new requests; send it elsewhere"


class BatchEngine(Protocol):
    """Requests in from any thread, events out of one."""

    def submit(self, request: Request) -> int:
        """The accepted request's id.

        Raises InvalidRequestError, QueueFullError, EngineUnavailableError, EngineClosedError.
        """
        ...

    def cancel(self, request_id: int, sample: int | None = None) -> None:
        """Ends a request, or one of its samples, soon; events under way may still follow."""
        ...

    def serve(self, emit: Emit) -> None:
        """Runs until `drain` or `shutdown` is done; what is open then ends with an error."""
        ...

    def drain(self, within_s: float) -> None:
        """Refuses new requests and makes `serve` return when the open ones have ended, or then."""
        ...

    def shutdown(self) -> None:
        """Makes `serve` return at once."""
        ...


def check_step_errors(core: EngineCore) -> None:
    """Raises RunnerError when too many steps in a row have failed."""
    failures, most = core.num_consecutive_failures, core.limits.max_consecutive_step_errors
    if failures >= most:
        raise RunnerError(
            f"{failures} steps in a row have failed, the most that --max-consecutive-step-errors "
            f"allows; the engine's log has each cause"
        )


@dataclass(frozen=True, slots=True)
class _Submitted:
    request_id: int
    request: Request


@dataclass(frozen=True, slots=True)
class _Cancelled:
    request_id: int
    sample: int | None


_Message = _Submitted | _Cancelled | None


class CoreService:
    """`BatchEngine` over an `EngineCore` in this process, which only the serving thread touches.

    Submitted requests pass through an inbox that the queue's bounds keep finite; the engine sleeps
    while there is nothing to do.
    """

    def __init__(
        self,
        core: EngineCore,
        timeouts: RequestTimeouts | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._core = core
        self._clock = clock
        self._meter = StepMeter(core, clock)
        self._stats = self._meter.stats()
        self._requests = OpenRequests(timeouts or RequestTimeouts(), clock)
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._state: EngineState = "ready"
        self._error: str | None = None
        self._drained_by_s: float | None = None
        self._beat_s = clock()

    @property
    def timeouts(self) -> RequestTimeouts:
        return self._requests.timeouts

    def submit(self, request: Request) -> int:
        self._core.request_check.check(request)
        with self._lock:
            if self._state == "dead":
                raise EngineClosedError(self._error or SHUT_DOWN)
            if self._state == "draining":
                self._requests.count_rejection("unavailable")
                raise EngineUnavailableError(DRAINING)
            request_id = self._requests.accept(request, self._core.limits)
            self._inbox.put(_Submitted(request_id, request))
        return request_id

    def cancel(self, request_id: int, sample: int | None = None) -> None:
        if self._requests.cancel(request_id, sample):
            self._inbox.put(_Cancelled(request_id, sample))

    def drain(self, within_s: float) -> None:
        with self._lock:
            if self._state == "ready":
                self._state = "draining"
                self._drained_by_s = self._clock() + within_s
        self._inbox.put(None)

    def shutdown(self) -> None:
        with self._lock:
            self._state = "dead"
        self._inbox.put(None)

    def serve(self, emit: Emit) -> None:
        try:
            while self._take_messages():
                self._step(emit)
        except Exception as error:
            logger.exception("the engine stopped")
            self._error = str(error) if isinstance(error, CadenzaError) else STOPPED
            raise
        finally:
            self._end(emit)

    def status(self) -> EngineStatus:
        return EngineStatus(
            state=self._state,
            since_beat_s=self._clock() - self._beat_s,
            error=self._error,
            request_check=self._core.request_check,
        )

    def stats(self) -> EngineStats:
        return self._stats

    def load(self) -> EngineLoad:
        return self._requests.load()

    def request_stats(self) -> RequestStats:
        return self._requests.stats()

    def _step(self, emit: Emit) -> None:
        events = self._requests.pass_on(self._meter.step())
        overdue = self._requests.end_overdue()
        for finished in overdue:
            self._core.cancel(finished.request_id)
        self._stats = self._meter.stats()
        self._beat_s = self._clock()
        if events or overdue:
            emit([*events, *overdue])
        check_step_errors(self._core)

    def _take_messages(self) -> bool:
        """Handles what has arrived, sleeping when there is nothing else to do; False to stop."""
        while not self._is_done():
            try:
                message = self._inbox.get(block=self._core.is_idle, timeout=WAKE_S)
            except queue.Empty:
                if self._core.is_idle:
                    self._beat_s = self._clock()
                    continue
                return True
            if isinstance(message, _Submitted):
                self._core.enqueue(message.request_id, message.request)
            elif isinstance(message, _Cancelled):
                self._core.cancel(message.request_id, message.sample)
        return False

    def _is_done(self) -> bool:
        if self._state != "draining":
            return self._state == "dead"
        assert self._drained_by_s is not None
        return not self._requests.num_open or self._clock() >= self._drained_by_s

    def _end(self, emit: Emit) -> None:
        """One error for each open request, whether it had reached the core or not."""
        with self._lock:
            self._state = "dead"
        ended = self._requests.end_all("engine_closed", self._error or SHUT_DOWN)
        if ended:
            emit([*ended])
        self._core.close()
        self._stats = self._meter.stats()
