"""The engine process's program, `run_child`, and its step loop, `Worker`: commands in,
`EngineOutputs` out. Invariants: events leave with the step that made them; an engine that has work
sends outputs at least every `BEAT_EVERY_S` between two steps; a request's `Started` is sent before
anything of it is computed; the process exits with its front end."""

import ctypes
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from cadenza.engine.batch_engine import (
    STOPPED,
    Cancel,
    Command,
    Resume,
    Submit,
    check_step_errors,
    run_steps,
)
from cadenza.engine.core import EngineCore
from cadenza.engine.process.launch import freeze_heap, loading
from cadenza.engine.process.messages import (
    EngineOutputs,
    Failed,
    FrameBuffer,
    FromEngine,
    LineFormatter,
    Loading,
    Ready,
    Start,
    Stop,
    ToEngine,
    WireError,
    decode_to_engine,
    encode,
)
from cadenza.engine.process.supervision import is_descriptor_shortage
from cadenza.engine.route_report import RouteReport, RouteReporter
from cadenza.engine.stats import StepMeter
from cadenza.engine.step_watch import Watch
from cadenza.errors import CadenzaError
from cadenza.events import Event, Preparing, Started
from cadenza.fingerprint import Fingerprint

BEAT_EVERY_S = 0.25
IDLE_BEAT_S = 1.0
# A step with a longer forecast is announced before it runs, so that it is not taken for a hang.
SLOW_STEP_S = 0.4

UNMEASURED_STEP_S = 6.0  # The forecast before the first step was measured
FADING = 0.98  # A slow step's share of the forecast after each faster one of its size.


COULD_NOT_LOAD = 3
STOPPED_ON_ERRORS = 4
FRONT_END_GONE = 5
_RECEIVE_BYTES = 1 << 18
_PR_SET_PDEATHSIG = 1


class FrontLink(Protocol):
    """The engine's way to its front end."""

    def receive(self, timeout_s: float) -> list[ToEngine] | None:
        """Waits up to `timeout_s` for a message. None to stop."""
        ...

    def send(self, message: FromEngine) -> None: ...


class StepForecast:
    """The slowest recent step for each power of two of tokens, never below one of that size or
    smaller."""

    def __init__(self) -> None:
        self._slowest_s: dict[int, float] = {}

    def record(self, num_tokens: int, seconds: float) -> None:
        size = num_tokens.bit_length()
        self._slowest_s[size] = max(seconds, FADING * self._slowest_s.get(size, 0.0))

    def predict_s(self, num_tokens: int) -> float:
        """Above the largest measured size the time is taken to grow with the tokens."""
        if not num_tokens:
            return 0.0
        if not self._slowest_s:
            return UNMEASURED_STEP_S
        size, largest = num_tokens.bit_length(), max(self._slowest_s)
        known = [seconds for each, seconds in self._slowest_s.items() if each <= size]
        slowest_s = max(known or self._slowest_s.values())
        return slowest_s * max(1, 1 << (size - largest)) if size > largest else slowest_s


class Worker:
    """Until `Stop`. With a `reporter`, outputs with statistics carry its reports."""

    def __init__(
        self,
        core: EngineCore,
        link: FrontLink,
        reporter: RouteReporter | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        count_compiles: Callable[[], int] = lambda: 0,
    ) -> None:
        self._core = core
        self._link = link
        self._reporter = reporter
        self._clock = clock
        self._forecast = StepForecast()
        self._last_launched = 0
        self._announced_s = 0.0
        self._sent_at_s = clock()
        self._is_idle = True
        self._has_changed = False  # A command or a step came after the newest outputs were sent
        self.meter = StepMeter(core, clock, count_compiles)

    def serve(self) -> None:
        """Raises RunnerError after too many failed steps in a row."""
        for events in run_steps(self._core, self._receive, self._step):
            self._is_idle = self._core.is_idle
            is_due = self._clock() - self._sent_at_s >= BEAT_EVERY_S
            is_due = is_due or self.meter.summary_due_in_s() == 0.0
            if events or self._is_idle or is_due:
                self._send(events)
            check_step_errors(self._core)

    def _receive(self, wait_s: float) -> list[Command] | None:
        if wait_s:
            self._announce_slow_step()
        start_s = self._clock()
        messages = self._link.receive(self._idle_wait_s() if self._is_idle else wait_s)
        if wait_s:
            self.meter.add_wait(self._clock() - start_s)
        if not messages:
            return None if messages is None else []
        commands: list[Command] = []
        for message in messages:
            if isinstance(message, Watch):
                self.meter.watch(message.first_label)
                continue
            if not isinstance(message, Submit | Resume | Cancel):
                raise WireError(f"a {type(message).__name__} came to an engine that serves")
            commands.append(message)
            if self._reporter is not None and not isinstance(message, Cancel):
                self._reporter.received(message.request_id)
        self._has_changed = True
        return commands

    def _idle_wait_s(self) -> float:
        due_in_s = self.meter.summary_due_in_s()
        return IDLE_BEAT_S if due_in_s is None else min(due_in_s, IDLE_BEAT_S)

    def _step(self) -> list[Event]:
        if self._is_idle and self._core.is_idle:
            return []
        self._is_idle = False
        self._announce_slow_step()
        scheduler = self._core.scheduler
        before = scheduler.num_scheduled_tokens
        events = self.meter.step(self._announce_starts)
        launched = scheduler.num_scheduled_tokens - before
        # An overlapped step is waited for in the call after the one that launched it.
        if launched + self._last_launched:
            self._forecast.record(launched + self._last_launched, self.meter.last_s)
        self._last_launched = launched
        self._has_changed = True
        return events

    def _announce_slow_step(self) -> None:
        if not self._has_changed:
            return  # the newest outputs hold the forecast of this step
        predicted_s = self._predicted_s()
        if predicted_s > SLOW_STEP_S and predicted_s > self._announced_s:
            self._send(())

    def _announce_starts(self, started: Sequence[Started | Preparing]) -> None:
        """Before the step, which may end this process."""
        self._link.send(
            EngineOutputs(
                num_steps=self._core.num_steps - 1,  # the step is progress when it is done
                is_idle=False,
                predicted_s=self._announced_s,
                events=tuple(started),
            )
        )

    def _predicted_s(self) -> float:
        scheduler, limits = self._core.scheduler, self._core.limits
        candidates = [*scheduler.running, *islice(scheduler.waiting, limits.max_num_seqs)]
        wanted = sum([sequence.num_uncomputed_tokens for sequence in candidates])
        budget = limits.max_num_batched_tokens
        return self._forecast.predict_s(min(budget, wanted) + self._last_launched)

    def _send(self, events: Sequence[Event]) -> None:
        # An engine that only stores pages makes no steps, and does not hang.
        now_s, is_idle = self._clock(), not self._core.has_requests
        stats = self.meter.due_stats(now_s, is_last=is_idle and self._has_changed)
        self._announced_s = 0.0 if is_idle else self._predicted_s()
        self._link.send(
            EngineOutputs(
                num_steps=self._core.num_steps,
                is_idle=is_idle,
                predicted_s=self._announced_s,
                # `Started` was sent before the step was computed.
                events=tuple([each for each in events if not isinstance(each, Started)]),
                stats=stats,
                summary=self.meter.take_summary(),
                route=None if stats is None else self._report(now_s),
            )
        )
        self._sent_at_s = now_s
        self._has_changed = False

    def _report(self, now_s: float) -> RouteReport | None:
        return None if self._reporter is None else self._reporter.report(now_s)


logger = logging.getLogger(__name__)


class OnPhase(Protocol):
    """Called when a phase of the start begins."""

    def __call__(self, phase: str, /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A warm core, the digest of what decides its bits, and the number of programs compiled since
    warm-up; `held` is kept as long as the process serves."""

    core: EngineCore
    identity: str = ""
    fingerprint: Fingerprint | None = None
    count_compiles: Callable[[], int] = lambda: 0
    held: object = None


Load = Callable[[Start, OnPhase], Serving]


class FrontEndGone(Exception):
    """The other end of the socket is closed."""


class SocketLink:
    """Sending blocks while the socket is full. All but `close` raise FrontEndGone."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = FrameBuffer()
        self._messages: deque[ToEngine] = deque()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def receive(self, timeout_s: float) -> list[ToEngine] | None:
        if timeout_s and not self._messages:
            self._poll.poll(timeout_s * 1000)
        self._read()
        messages = list(self._messages)
        self._messages.clear()
        return None if Stop in map(type, messages) else messages

    def receive_one(self) -> ToEngine:
        """Waits without a limit."""
        while not self._messages:
            self._poll.poll()
            self._read()
        return self._messages.popleft()

    def send(self, message: FromEngine) -> None:
        try:
            self._connection.sendall(encode(message))
        except OSError as error:
            raise FrontEndGone from error

    def _read(self) -> None:
        try:
            received = self._connection.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            raise FrontEndGone from error
        if not received:
            raise FrontEndGone
        self._messages.extend(map(decode_to_engine, self._frames.feed(received)))


@dataclass(slots=True, eq=False)
class _Startup:
    link: SocketLink
    clock: Callable[[], float]
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    phase: str | None = None
    since_s: float = 0.0

    def begin(self, phase: str) -> None:
        self.end()
        self.phase, self.since_s = phase, self.clock()
        self.link.send(Loading(phase))

    def end(self) -> None:
        if self.phase is not None:
            taken_s = self.clock() - self.since_s
            self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + taken_s
            self.phase = None


def run_child(
    arguments: list[str], load: Load, load_libraries: Callable[[], None] | None = None
) -> None:
    """Serves one front end and exits. `arguments`: socket, lifeline, the front end's process id.
    `load_libraries` may run before the front end can say what to load."""
    connection_fd, lifeline_fd, parent_pid = map(int, arguments)
    _follow_front_end(lifeline_fd, parent_pid)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    code = 1
    try:
        startup = _Startup(SocketLink(socket.socket(fileno=connection_fd)), time.monotonic)
        with loading():
            if load_libraries is not None:
                startup.begin("imports")
                load_libraries()
                startup.end()
            code = _serve(startup, load)
    except FrontEndGone:
        code = FRONT_END_GONE
    except BaseException:
        logger.exception("the engine process exits on an error")
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        # A normal exit would wait for threads that may be in native code.
        os._exit(code)


def _serve(startup: _Startup, load: Load) -> int:
    link = startup.link
    try:
        start = link.receive_one()
        if not isinstance(start, Start):
            raise WireError(f"the first message is a {type(start).__name__}")
        _log_to_stderr(start.log_level)
        serving = load(start, startup.begin)
    except FrontEndGone:
        raise
    except Exception as error:
        is_shortage = is_descriptor_shortage(error)
        if not is_shortage and not isinstance(error, CadenzaError):
            raise
        if not is_shortage:
            logger.debug("could not load", exc_info=True)
        link.send(Failed(type(error).__name__, str(error), is_shortage))
        return COULD_NOT_LOAD
    startup.end()
    freeze_heap()
    reporter = None if start.prefix_secret is None else RouteReporter(serving.core)
    worker = Worker(serving.core, link, reporter, count_compiles=serving.count_compiles)
    link.send(
        Ready(
            request_check=serving.core.request_check,
            identity=serving.identity,
            fingerprint=serving.fingerprint,
            kernel_proof=serving.core.kernel_proof,
            startup_s=startup.seconds,
            stats=worker.meter.stats(),
        )
    )
    try:
        worker.serve()
    except FrontEndGone:
        raise
    except Exception as error:
        logger.exception("the engine stopped")
        text = str(error) if isinstance(error, CadenzaError) else STOPPED
        link.send(Failed(type(error).__name__, text))
        return STOPPED_ON_ERRORS
    serving.core.close()
    return 0


def _log_to_stderr(level: int) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("cadenza").setLevel(level)


def _follow_front_end(lifeline_fd: int, parent_pid: int) -> None:
    """A thread sees the lifeline close even while native code computes; on Linux the kernel's
    signal arrives even while native code holds the GIL."""

    def watch() -> None:
        os.read(lifeline_fd, 1)
        os._exit(FRONT_END_GONE)

    threading.Thread(target=watch, name="cadenza-lifeline", daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The front end may have exited before the prctl call.
        if os.getppid() != parent_pid:
            os._exit(FRONT_END_GONE)
