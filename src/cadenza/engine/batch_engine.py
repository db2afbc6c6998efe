"""`BatchEngine`: the engine's interface for servers and `AsyncEngine`; `run_steps`: the step loop.

One thread serves; any thread may submit and cancel. `CoreService` implements it over an
`EngineCore` in this process, `engine.process.EngineProcess` over one in another. `run_steps` is the
only receive-step-deliver loop: `CoreService`, the engine process's `Worker` and `LLM` each pass it
a source of commands and consume its events. Knows no text.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from cadenza.engine.core import EngineCore
from cadenza.engine.open_requests import EngineLoad, OpenRequests, RequestStats, RequestTimeouts
from cadenza.engine.request_check import RequestCheck
from cadenza.engine.resumption import Resumption
from cadenza.engine.stats import EngineStats, StepMeter
from cadenza.engine.status import EngineState, EngineStatus
from cadenza.errors import (
    CadenzaError,
    EngineClosedError,
    EngineUnavailableError,
    RunnerError,
)
from cadenza.events import Event
from cadenza.fingerprint import Fingerprint
from cadenza.request import Request

logger = logging.getLogger(__name__)

Emit = Callable[[list[Event]], None]
"""Called with the events of one step on the serving thread; must not block."""

Clock = Callable[[], float]
"""Seconds, monotonic."""

WAKE_S = 60.0
"""Maximum time that an idle engine blocks waiting for a command before it updates its heartbeat."""

SHUT_DOWN = "the engine was shut down"
STOPPED = "the engine stopped on an error; its log has the cause"
DRAINING = "the server is shutting down and takes no new requests; send it elsewhere"


class BatchEngine(Protocol):
    """Accepts requests on any thread; emits events on the serving thread."""

    def submit(self, request: Request, passed: RequestCheck | None = None) -> int:
        """Accepts a request and returns its id.

        Args:
            passed: a check that the request has passed; the request is not checked again if this
                is the engine's own check.

        Raises InvalidRequestError, QueueFullError, EngineUnavailableError, EngineClosedError.
        """
        ...

    def cancel(self, request_id: int, sample: int | None = None) -> None:
        """Ends a request, or one of its samples; events already being emitted still arrive."""
        ...

    def serve(self, emit: Emit) -> None:
        """Runs until drained or shut down; requests still open then end with an error."""
        ...

    def drain(self, within_s: float) -> None:
        """Refuses new requests; `serve` returns once all have ended or `within_s` has elapsed."""
        ...

    def shutdown(self) -> None:
        """Makes `serve` return at once."""
        ...


def check_step_errors(core: EngineCore) -> None:
    """Raises RunnerError if too many consecutive steps have failed."""
    failures, most = core.num_consecutive_failures, core.limits.max_consecutive_step_errors
    if failures >= most:
        raise RunnerError(
            f"{failures} steps in a row have failed, the most that --max-consecutive-step-errors "
            f"allows; the engine's log has each cause"
        )


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A checked request with an id greater than all earlier ones."""

    request_id: int
    request: Request


class Resume(msgspec.Struct, frozen=True, tag=True):
    """A request that another engine began, under the id that it had there."""

    request_id: int
    request: Request
    resumption: Resumption


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Ends a request, or one of its samples, without further events."""

    request_id: int
    sample: int | None


Command = Submit | Resume | Cancel


def run_steps(
    core: EngineCore,
    receive: Callable[[float], Sequence[Command] | None],
    step: Callable[[], list[Event]],
) -> Iterator[list[Event]]:
    """Repeatedly applies the received commands, runs a step and yields its events.

    Args:
        receive: returns the commands since its last call; without any it may wait for as many
            seconds as it is given, and without end while the core is idle. None ends the loop.
        step: advances `core` by one step.
    """
    while (commands := receive(wait_s := core.launch_in_s())) is not None:
        for command in commands:
            if isinstance(command, Submit):
                core.enqueue(command.request_id, command.request)
            elif isinstance(command, Resume):
                core.resume(command.request_id, command.request, command.resumption)
            else:
                core.cancel(command.request_id, command.sample)
        if commands and wait_s:
            continue  # more may come before the next step has to be launched
        yield step()


class CoreService:
    """`BatchEngine` over an `EngineCore` in this process, used only by the serving thread.

    Commands pass through an inbox, whose size is limited by the queue's bounds; the serving thread
    sleeps while the core is idle.
    """

    def __init__(
        self,
        core: EngineCore,
        timeouts: RequestTimeouts | None = None,
        clock: Clock = time.monotonic,
        fingerprint: Fingerprint | None = None,
    ) -> None:
        self._core = core
        self._fingerprint = fingerprint
        self._clock = clock
        self._meter = StepMeter(core, clock)
        self._stats = self._meter.stats()
        self._requests = OpenRequests(timeouts or RequestTimeouts(), clock)
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._state: EngineState = "ready"
        self._error: str | None = None
        self._drained_by_s: float | None = None
        self._beat_s = clock()

    @property
    def timeouts(self) -> RequestTimeouts:
        return self._requests.timeouts

    def submit(self, request: Request, passed: RequestCheck | None = None) -> int:
        if passed is not self._core.request_check:
            self._core.request_check.check(request)
        with self._lock:
            if self._state == "dead":
                raise EngineClosedError(self._error or SHUT_DOWN)
            if self._state == "draining":
                self._requests.count_rejection("unavailable")
                raise EngineUnavailableError(DRAINING)
            request_id = self._requests.accept(request, self._core.limits)
            self._inbox.put(Submit(request_id, request))
        return request_id

    def cancel(self, request_id: int, sample: int | None = None) -> None:
        if self._requests.cancel(request_id, sample):
            self._inbox.put(Cancel(request_id, sample))

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
            for events in run_steps(self._core, self._receive, self._meter.step):
                self._deliver(events, emit)
                check_step_errors(self._core)
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
            fingerprint=self._fingerprint,
        )

    def stats(self) -> EngineStats:
        return self._stats

    def load(self) -> EngineLoad:
        return self._requests.load()

    def request_stats(self) -> RequestStats:
        return self._requests.stats()

    def _deliver(self, events: list[Event], emit: Emit) -> None:
        passed = self._requests.pass_on(events)
        overdue = self._requests.end_overdue()
        for finished in overdue:
            self._core.cancel(finished.request_id)
        self._stats = self._meter.stats()
        self._beat_s = self._clock()
        if passed or overdue:
            emit([*passed, *overdue])

    def _receive(self, wait_s: float) -> list[Command] | None:
        """The pending commands; without any it waits for one, up to `wait_s` or while the core is
        idle. None once drained or shut down."""
        commands: list[Command] = []
        start_s = self._clock()
        while not self._is_done():
            is_idle = not commands and self._core.is_idle
            timeout_s = WAKE_S if is_idle else 0.0 if commands else wait_s
            try:
                command = self._inbox.get(block=timeout_s > 0, timeout=timeout_s)
            except queue.Empty:
                if not is_idle:
                    if wait_s:
                        self._meter.add_wait(self._clock() - start_s)
                    return commands
                self._beat_s = self._clock()
                continue
            if command is None:
                wait_s = 0.0  # `drain` has woken it; the loop asks again how long to wait
            else:
                commands.append(command)
        return None

    def _is_done(self) -> bool:
        if self._state != "draining":
            return self._state == "dead"
        assert self._drained_by_s is not None
        return not self._requests.num_open or self._clock() >= self._drained_by_s

    def _end(self, emit: Emit) -> None:
        """Ends all open requests with an error, including those still in the inbox."""
        with self._lock:
            self._state = "dead"
        ended = self._requests.end_all("engine_closed", self._error or SHUT_DOWN)
        if ended:
            emit([*ended])
        self._core.close()
        self._stats = self._meter.stats()
