"""`EngineFront`: the `BatchEngine` of servers and `AsyncEngine` over an `EngineLink`, which takes
commands to an engine and brings events back: `InProcessLink` here, `process.process_link` to a
process. Invariants: each accepted request ends exactly once; `submit` and `cancel` never wait for
the engine."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from cadenza.engine.batch_engine import (
    STOPPED,
    Cancel,
    Clock,
    Command,
    Emit,
    EngineState,
    EngineStatus,
    Resume,
    Submit,
    check_step_errors,
    run_steps,
)
from cadenza.engine.core import EngineCore
from cadenza.engine.open_requests import EngineLoad, OpenRequest, OpenRequests
from cadenza.engine.request_check import CheckedRequest, RequestCheck
from cadenza.engine.request_stats import RequestStats
from cadenza.engine.route_report import RouteReport
from cadenza.engine.stats import EngineStats, StepMeter
from cadenza.engine.step_watch import EngineChange, LiveNews, OnNews, StepSummary, Watch
from cadenza.engine.timeouts import RequestTimeouts
from cadenza.errors import (
    CadenzaError,
    EngineClosedError,
    EngineUnavailableError,
    QueueFullError,
)
from cadenza.events import Event
from cadenza.fingerprint import Fingerprint
from cadenza.request import Request
from cadenza.tenant import Tenant

logger = logging.getLogger(__name__)

OnEngineChange = Callable[[EngineChange], object]
OnReport = Callable[[RouteReport], object]

# Maximum time that an idle engine blocks waiting for a command before it updates its heartbeat.
WAKE_S = 60.0

SHUT_DOWN = "the engine was shut down"
LOST = "the engine stopped unexpectedly and is being started again; send the request once more"
UNAVAILABLE: dict[EngineState, str] = {
    "loading": "the engine is still loading; try again soon",
    "restarting": "the engine is being started again; try again soon",
    "draining": "the server is shutting down and takes no new requests; send it elsewhere",
    "dead": "the engine failed too often while it loaded and is not started again; send the "
    "request elsewhere",
}


class EngineLink(Protocol):
    """The way to one engine. `is_full`: it does not take what it was sent. `priority_s`: as for
    `StartForecast`."""

    timeouts: RequestTimeouts
    clock: Clock
    priority_s: float  # As for `StartForecast`

    @property
    def is_full(self) -> bool: ...

    @property
    def stats(self) -> EngineStats | None: ...

    def attach(self, front: "EngineFront") -> None:
        """Called once, before anything else."""
        ...

    def status(self) -> EngineStatus: ...

    def put(self, *commands: Command | Watch) -> None:
        """Never waits. The front's lock is held, as for `drain`."""
        ...

    def drain(self) -> None:
        """The front refuses new requests from now on."""
        ...

    def wake(self) -> None: ...

    def serve(self, emit: Emit) -> None:
        """Returns once `front.is_done`, after `front.end`."""
        ...


class EngineFront:
    """`ServedEngine` over the engine at the other end of `link`. `ids`, `engine_seed`: as for
    `OpenRequests`."""

    def __init__(
        self, link: EngineLink, ids: Iterator[int] | None = None, engine_seed: int | None = None
    ) -> None:
        self.link = link
        self.requests = OpenRequests(
            link.timeouts, link.clock, ids, engine_seed, priority_s=link.priority_s
        )
        self.lock = threading.Lock()
        self.drained_by_s: float | None = None
        self.is_shut_down = False
        self._closed_by = SHUT_DOWN
        self._failure: CadenzaError | None = None
        self._start_finished = threading.Event()
        self._on_death: Callable[[CadenzaError], object] | None = None
        self._on_change: OnEngineChange | None = None
        self._on_report: OnReport | None = None
        self._on_news: OnNews | None = None
        self._next_label = 1
        link.attach(self)

    @property
    def timeouts(self) -> RequestTimeouts:
        return self.link.timeouts

    @property
    def is_done(self) -> bool:
        """Whether `serve` is to return: drained or shut down."""
        if self.is_shut_down or self.drained_by_s is None:
            return self.is_shut_down
        return not self.requests.num_open or self.link.clock() >= self.drained_by_s

    @property
    def is_serving(self) -> bool:
        """Whether its engine computes, also where it refuses new requests; the lock is held."""
        status = self.link.status()
        is_there = status.state in ("ready", "draining") and status.since_beat_s is not None
        return is_there and not self.is_shut_down

    def submit(self, given: Request | CheckedRequest) -> int:
        with self.lock:
            check = self._accepting()
        if not isinstance(given, CheckedRequest) or given.check is not check:
            given = check.checked(given)
        with self.lock:
            check = self._accepting()
            if self.link.is_full:
                self.requests.count_rejection("queue_full")
                raise QueueFullError("the engine does not take what it was sent; try later")
            request_id = self.requests.accept(
                given.request, check.limits, given.times, self._prompts_s
            )
            accepted = self.requests.request_of(request_id)
            if accepted is not None:  # else its deadline is over
                self.link.put(Submit(request_id, accepted))
        return request_id

    def cancel(self, request_id: int, sample: int | None = None) -> None:
        with self.lock:
            if self.requests.cancel(request_id, sample):
                self.link.put(Cancel(request_id, sample))

    def release(self, request_id: int) -> OpenRequest | None:
        """To be adopted by another engine's front; None if it is not open."""
        with self.lock:
            entry = self.requests.release(request_id)
            if entry is not None and self.is_serving:
                self.link.put(Cancel(request_id, None))
            return entry

    def adopt(self, entry: OpenRequest) -> None:
        """Goes on with another engine's request at its next token. Raises
        EngineUnavailableError."""
        with self.lock:
            if not self.is_serving:
                raise EngineUnavailableError("no engine is there to go on with the request")
            self.requests.adopt(entry)
            resumed = self.requests.resume(entry.request_id)
            assert resumed is not None, "it is open"
            self.link.put(Resume(entry.request_id, *resumed))

    def watch(self, on_news: OnNews | None) -> None:
        with self.lock:
            self._on_news, self._next_label = on_news, 1
            if self.link.status().state in ("ready", "draining"):  # else the link asks once it is
                self.link.put(self._watch)

    def watch_commands(self) -> list[Watch]:
        """For a new engine; the lock is held."""
        return [] if self._on_news is None else [self._watch]

    def notify(self, news: LiveNews) -> None:
        """Called on the serving thread."""
        if isinstance(news, str) and self._on_change is not None:
            self._on_change(news)
        on_news = self._on_news
        if on_news is None:
            return
        if isinstance(news, StepSummary):
            labels = [row.label + 1 for row in news.rows]
            self._next_label = max(self._next_label, *labels) if labels else self._next_label
        on_news(news)

    @property
    def _watch(self) -> Watch:
        return Watch(None if self._on_news is None else self._next_label)

    def serve(self, emit: Emit) -> None:
        self.link.serve(emit)

    def drain(self, within_s: float) -> None:
        with self.lock:
            if self.drained_by_s is None:
                self.drained_by_s = self.link.clock() + within_s
            self.link.drain()

    def shutdown(self) -> None:
        with self.lock:
            self.is_shut_down = True
            self.link.wake()

    def wait_ready(self, timeout_s: float) -> None:
        """Raises EngineUnavailableError: not ready within `timeout_s`, or dead; else the error of
        its load."""
        self._start_finished.wait(timeout_s)
        status = self.status()
        if not status.is_ready:
            raise self._failure or EngineUnavailableError(status.error or UNAVAILABLE[status.state])

    def call_at_death(self, on_death: Callable[[CadenzaError], object]) -> None:
        """Called on the serving thread if the engine is given up, not where it is shut down. Set
        before `serve`."""
        self._on_death = on_death

    def call_at_changes(self, on_change: OnEngineChange) -> None:
        """Called on the serving thread when the engine is lost, and when one is ready. Set before
        `serve`."""
        self._on_change = on_change

    def call_at_reports(self, on_report: OnReport) -> None:
        """Called on the serving thread with each `RouteReport`. Set before `serve`."""
        self._on_report = on_report

    def take_report(self, report: RouteReport) -> None:
        if self._on_report is not None:
            self._on_report(report)

    def status(self) -> EngineStatus:
        with self.lock:
            return self.link.status()

    def stats(self) -> EngineStats | None:
        return self.link.stats

    def load(self) -> EngineLoad:
        return self.requests.load()

    def refusal(self, tenant: Tenant, priority: int) -> QueueFullError | None:
        check = self.link.status().request_check
        if check is None:
            return None
        return self.requests.refusal(tenant, priority, check.limits, self._prompts_s)

    @property
    def _prompts_s(self) -> float:
        stats = self.link.stats
        return 0.0 if stats is None else stats.numbers["queued_seconds"]

    def request_stats(self) -> RequestStats:
        return self.requests.stats()

    def finish_start(self) -> None:
        """The engine is ready, or never will be."""
        self._start_finished.set()

    def give_up(self, failure: CadenzaError, emit: Emit) -> None:
        """No request waits for an engine."""
        with self.lock:
            self._failure = failure
            ended = self.requests.end_all("engine_lost", LOST)
            on_death, self._on_death = self._on_death, None
        self.finish_start()
        if ended:
            emit([*ended])
        if on_death is not None:
            on_death(failure)

    def end(self, emit: Emit, error: str = SHUT_DOWN) -> None:
        """Open requests end with an error, those on their way to it too."""
        with self.lock:
            self.is_shut_down, self._closed_by = True, error
            ended = self.requests.end_all("engine_closed", error)
        self.finish_start()
        if ended:
            emit([*ended])

    def _accepting(self) -> RequestCheck:
        if self.is_shut_down:
            raise EngineClosedError(self._closed_by)
        status = self.link.status()
        if not status.is_ready:
            self.requests.count_rejection("unavailable")
            text = UNAVAILABLE[status.state]
            raise EngineUnavailableError(text, retry_after_s=status.retry_after_s)
        assert status.request_check is not None
        return status.request_check


class InProcessLink:
    """To `core`, which only the serving thread uses. Commands pass through an inbox, whose size the
    queue's bounds limit."""

    is_full = False

    def __init__(
        self,
        core: EngineCore,
        timeouts: RequestTimeouts | None = None,
        clock: Clock = time.monotonic,
        fingerprint: Fingerprint | None = None,
    ) -> None:
        self.timeouts = timeouts or RequestTimeouts()
        self.clock = clock
        self.priority_s = core.priority_s
        self._core = core
        self._fingerprint = fingerprint
        self._meter = StepMeter(core, clock)
        self.stats: EngineStats = self._meter.stats()
        self._inbox: queue.SimpleQueue[Command | Watch | None] = queue.SimpleQueue()
        self._error: str | None = None
        self._beat_s = clock()

    def attach(self, front: EngineFront) -> None:
        self._front = front
        front.finish_start()

    def status(self) -> EngineStatus:
        front = self._front
        is_ready = front.drained_by_s is None
        return EngineStatus(
            state="dead" if front.is_shut_down else "ready" if is_ready else "draining",
            since_beat_s=self.clock() - self._beat_s,
            error=self._error,
            request_check=self._core.request_check,
            fingerprint=self._fingerprint,
            kernel_proof=self._core.kernel_proof,
        )

    def put(self, *commands: Command | Watch) -> None:
        for command in commands:
            self._inbox.put(command)

    def wake(self) -> None:
        self._inbox.put(None)

    drain = wake

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
            self._front.end(emit, self._error or SHUT_DOWN)
            self._core.close()
            self.stats = self._meter.stats()

    def _deliver(self, events: list[Event], emit: Emit) -> None:
        passed = self._front.requests.record(events)
        overdue = self._front.requests.end_overdue()
        for finished in overdue:
            self._core.cancel(finished.request_id)
        self._beat_s = self.clock()
        due = self._meter.due_stats(self._beat_s, is_last=not self._core.has_requests)
        self.stats = due or self.stats
        self._tell_summary()
        if passed or overdue:
            emit([*passed, *overdue])

    def _receive(self, wait_s: float) -> list[Command] | None:
        """Without commands it waits for one, up to `wait_s` or while the core is idle. None once
        drained or shut down."""
        commands: list[Command] = []
        start_s = self.clock()
        while not self._front.is_done:
            is_idle = not commands and self._core.is_idle
            timeout_s = self._idle_wait_s() if is_idle else 0.0 if commands else wait_s
            try:
                command = self._inbox.get(block=timeout_s > 0, timeout=timeout_s)
            except queue.Empty:
                if not is_idle:
                    if wait_s:
                        self._meter.add_wait(self.clock() - start_s)
                    return commands
                self._beat_s = self.clock()
                self._tell_summary()
                continue
            if command is None:
                wait_s = 0.0  # `drain` has woken it; the loop asks again how long to wait
            elif isinstance(command, Watch):
                self._meter.watch(command.first_label)
            else:
                commands.append(command)
        return None

    def _idle_wait_s(self) -> float:
        due_in_s = self._meter.summary_due_in_s()
        return WAKE_S if due_in_s is None else min(due_in_s, WAKE_S)

    def _tell_summary(self) -> None:
        summary = self._meter.take_summary()
        if summary is not None:
            self._front.notify(summary)
