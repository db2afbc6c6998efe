"""`ProcessLink`: an `EngineLink` to an engine in another process, watched and restarted; `Recovery`
has the next process go on with the open requests. The serving thread does all the work; others
append to the outbox and wake it. Invariants: each accepted request ends exactly once, whatever
happens to the process; `submit` and `cancel` never wait for it."""

import logging
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from cadenza import errors
from cadenza.config import EngineConfig, EngineLimits
from cadenza.engine.batch_engine import Cancel, Clock, Command, Emit, EngineStatus
from cadenza.engine.front import LOST, SHUT_DOWN, EngineFront
from cadenza.engine.process.child_process import (
    ChildProcess,
    EngineChild,
    EngineUnreachableError,
)
from cadenza.engine.process.frame_socket import Outbox
from cadenza.engine.process.launch import COMMAND
from cadenza.engine.process.messages import (
    EngineOutputs,
    Failed,
    FromEngine,
    Loading,
    Ready,
    Start,
    Stop,
    WireError,
    encode,
)
from cadenza.engine.process.recovery import ENGINE_FAILED, Recovery
from cadenza.engine.process.supervision import (
    STANDSTILL_S,
    START_SHORTAGES,
    Loss,
    Supervision,
    WatchdogTimeouts,
    num_oom_kills,
)
from cadenza.engine.request_check import RequestCheck
from cadenza.engine.stats import EngineStats
from cadenza.engine.step_watch import Watch
from cadenza.engine.stored_pages import CLOSE_WITHIN_S
from cadenza.engine.timeouts import RequestTimeouts
from cadenza.errors import CadenzaError, ConfigError, EngineUnavailableError
from cadenza.fingerprint import Fingerprint
from cadenza.kernel_proof import KernelProof
from cadenza.scheduler.turns import POLICIES

logger = logging.getLogger(__name__)

OnEngineFailure = Literal["resume", "error"]

CHANGED = (
    "the engine was started again with other weights or another arithmetic, so that it cannot go "
    "on with the request; send it once more"
)
SHORTAGE = "the engine process cannot be started for want of file descriptors, processes or memory"
UNREACHABLE = "no engine host takes the engine at present"
CANNOT_START = "the engine process cannot be started"
# What the log of a start says of each phase
PHASES = {
    "python": "the engine process starts",
    "imports": "libraries are imported, and the model's files opened",
    "load": "weights are read",
    "compile": "programs are compiled and timed",
}
LOG_EVERY_S = 60.0
_EXIT_S = 0.5
_LONGEST_SLEEP_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions:
    """Deadlines of requests, and how the process is started and watched."""

    timeouts: RequestTimeouts = field(default_factory=RequestTimeouts)
    watchdog: WatchdogTimeouts = field(default_factory=WatchdogTimeouts)
    # what becomes of the open requests when the process is lost: "resume" has the next one go on
    # with them, "error" ends each with an error
    on_failure: OnEngineFailure = "resume"
    command: Sequence[str] = COMMAND  # the engine process's program; `open_child` executes it
    open_child: Callable[[Sequence[str]], EngineChild] = ChildProcess
    # of messages that the process has not read; above it the queue is full
    max_unsent_bytes: int = 64 << 20
    front_end_bytes: int = 0  # private memory of this process, which the plan of memory counts
    bodies_bytes: int = 0  # of all bodies that this process reads at the same time, at most
    share_bytes: int | None = None  # as in `Start`
    num_engines: int = 1
    prefix_secret: bytes | None = None
    # processes that this machine has killed for want of memory
    count_oom_kills: Callable[[], int | None] = num_oom_kills


class ProcessLink:
    """To a process that `serve` starts and ends; it opens `model`. Raises ConfigError if the
    model's path cannot be sent."""

    def __init__(
        self,
        model: str | Path | None,
        config: EngineConfig,
        options: ProcessOptions | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._options = options or ProcessOptions()
        self.timeouts = self._options.timeouts
        self.clock = clock
        self.priority_s = POLICIES[config.scheduling_policy](config.starvation_guard).priority_s
        level = logging.getLogger("cadenza").getEffectiveLevel()
        self._config = config
        self._start_message = Start(
            model=None if model is None else _sendable(str(model)),
            config=config,
            log_level=level,
            front_end_bytes=self._options.front_end_bytes,
            bodies_bytes=self._options.bodies_bytes,
            share_bytes=self._options.share_bytes,
            num_engines=self._options.num_engines,
            prefix_secret=self._options.prefix_secret,
        )
        self._supervision = Supervision(self._options.watchdog, clock())
        self._check: RequestCheck | None = None
        self._fingerprint: Fingerprint | None = None
        self._kernel_proof: KernelProof | None = None
        self._identity: str | None = None
        self.stats: EngineStats | None = None
        self._child: EngineChild | None = None
        self._failed: Failed | None = None
        self._failure: CadenzaError | None = None
        self._num_oom_kills: int | None = None
        self._log_at_s = clock()

    @property
    def pid(self) -> int | None:
        child = self._child
        return None if child is None else child.pid

    def attach(self, front: EngineFront) -> None:
        self._front = front
        self._requests, self._lock = front.requests, front.lock
        self._outbox = Outbox(front.lock)
        self._recovery = Recovery(front.requests)

    @property
    def is_full(self) -> bool:
        num_unsent_bytes = len(self._outbox)
        if self._child is not None:
            num_unsent_bytes += self._child.frames.num_unsent_bytes
        return num_unsent_bytes > self._options.max_unsent_bytes

    def put(self, *commands: Command | Watch) -> None:
        self._outbox.put(*commands)

    def drain(self) -> None:
        if self._supervision.state != "dead":
            self._supervision.state = "draining"
        self._outbox.wake()

    def wake(self) -> None:
        self._outbox.wake()

    def status(self) -> EngineStatus:
        now_s, supervision = self.clock(), self._supervision
        return EngineStatus(
            state=supervision.state,
            phase=supervision.phase,
            startup_s=supervision.startup_s,
            since_beat_s=supervision.since_beat_s(now_s),
            num_restarts=max(0, supervision.num_starts - 1),
            retry_after_s=supervision.retry_after_s(now_s),
            error=supervision.error,
            cause=supervision.cause,
            request_check=self._check,
            fingerprint=self._fingerprint,
            kernel_proof=self._kernel_proof,
        )

    def serve(self, emit: Emit) -> None:
        """After a load that failed it is dead, and refuses requests."""
        with selectors.DefaultSelector() as selector, self._outbox.waking(selector):
            try:
                while not self._front.is_done:
                    self._serve_once(selector, emit)
            finally:
                self._finish(emit)

    def _serve_once(self, selector: selectors.BaseSelector, emit: Emit) -> None:
        if self._child is None and self._supervision.may_start(self.clock()):
            self._start(emit)
        child = self._child
        if child is not None:
            if len(self._outbox):
                with self._lock:
                    frames = self._outbox.take()
                child.frames.send(frames)
            child.register(selector)
        start_s = self.clock()
        due_s = max(start_s, self._due_s(start_s))
        ready = {key.data for key, _ in selector.select(due_s - start_s)}
        now_s = self.clock()
        if now_s - due_s >= STANDSTILL_S:
            self._supervision.note_late_wakeup(now_s - due_s)
        if "wakeup" in ready:
            self._outbox.woken()
        if now_s >= due_s:
            self._end_overdue(emit)
        if child is None:
            return
        if child.frames.num_unsent_bytes:
            child.frames.flush()
        if "output" in ready:
            child.log_output()
        loss = self._receive(child, emit) if "messages" in ready else None
        if loss is None and now_s >= due_s:
            loss = self._check_for_hang(child)
        if loss is not None:
            child.unregister(selector)
            self._lose(child, loss, emit)
        elif not self._recovery.is_done:
            self._go_on()

    def _start(self, emit: Emit) -> None:
        self._failed = None
        self._num_oom_kills = self._options.count_oom_kills()
        try:
            child = self._options.open_child(self._options.command)
        except EngineUnreachableError as error:
            self._postpone(UNREACHABLE, str(error), emit)
            return
        except OSError as error:
            if error.errno in START_SHORTAGES:
                self._postpone(SHORTAGE, str(error), emit)
                return
            logger.error("the engine process cannot be started: %s", error)
            with self._lock:
                self._supervision.started(self.clock())
                self._supervision.crashed(
                    self.clock(),
                    Loss(error=CANNOT_START, cause=CANNOT_START, load_fault=str(error)),
                    has_requests=bool(self._requests.num_open),
                )
            self._give_up_if_dead(emit)
            return
        with self._lock:
            self._child = child
            self._supervision.started(self.clock())
        logger.debug("engine process %d started", child.pid)
        child.frames.send(encode(self._start_message))

    def _postpone(self, cause: str, error: str, emit: Emit) -> None:
        now_s = self.clock()
        with self._lock:
            self._supervision.postponed(now_s, cause, has_requests=bool(self._requests.num_open))
        if now_s >= self._log_at_s:
            self._log_at_s = now_s + LOG_EVERY_S
            logger.error("%s: %s; starts are tried again until one succeeds", cause, error)
        self._give_up_if_dead(emit)

    def _due_s(self, now_s: float) -> float:
        hung_at_s = self._supervision.hung_at_s()
        times_s = [
            self._requests.next_deadline_s(),
            # A pause of the machine is seen only where it is longer than the sleep that it is in.
            None if hung_at_s is None else min(hung_at_s, now_s + STANDSTILL_S),
            self._supervision.read_usage_at_s(),
            self._supervision.start_at_s,
            self._front.drained_by_s,
            now_s + _LONGEST_SLEEP_S,
        ]
        return min([each for each in times_s if each is not None])

    def _receive(self, child: EngineChild, emit: Emit) -> Loss | None:
        try:
            for message in child.frames.receive():
                self._take(message, emit)
        except WireError as error:
            return Loss(error=str(error), cause="the engine process did not keep to the protocol")
        if child.frames.has_hung_up:
            ended = "the engine process ended"
            if self._failed is None:
                return Loss(error=ended, cause=ended)
            cause = f"{ended} with an error that its log has"
            return Loss(error=self._failed.message, cause=cause)
        return None

    def _check_for_hang(self, child: EngineChild) -> Loss | None:
        now_s = self.clock()
        read_usage_at_s = self._supervision.read_usage_at_s()
        if read_usage_at_s is not None and now_s >= read_usage_at_s:
            self._supervision.record_usage(now_s, child.usage())
        if self._supervision.is_hung(now_s):
            return self._supervision.hang(now_s)
        return None

    def _take(self, message: FromEngine, emit: Emit) -> None:
        now_s = self.clock()
        if isinstance(message, EngineOutputs):
            if message.stats is not None:
                self.stats = message.stats
            if message.summary is not None:
                self._front.notify(message.summary)
            if message.route is not None:
                self._front.take_report(message.route)
            self._supervision.beat(
                now_s, message.num_steps, message.predicted_s, is_idle=message.is_idle
            )
            events = self._requests.record(message.events)
            if events:
                self._supervision.has_progress = True
                emit(events)
        elif isinstance(message, Loading):
            if message.phase != self._supervision.phase:
                logger.info("loading: %s", PHASES.get(message.phase, message.phase))
            self._supervision.entered(now_s, message.phase)
        elif isinstance(message, Ready):
            self._take_ready(message, now_s, emit)
        else:
            self._failed = message

    def _take_ready(self, message: Ready, now_s: float, emit: Emit) -> None:
        with self._lock:
            is_same = self._identity in (None, message.identity)
            self.stats, self._check = message.stats, message.request_check
            self._identity = message.identity
            self._fingerprint = message.fingerprint
            self._kernel_proof = message.kernel_proof
            self._start_message = msgspec.structs.replace(
                self._start_message,
                config=pinned(self._config, message.request_check.limits),
                is_restart=True,
            )
            self._supervision.loaded(now_s, message.startup_s)
            ended = [] if is_same else self._requests.end_all("engine_lost", CHANGED)
            self._outbox.put(*self._front.watch_commands(), *self._recovery.begin())
            if self._recovery.is_done:
                self._supervision.ready()
        self._front.notify("ready")
        if ended:
            logger.warning("%d requests were ended: %s", len(ended), CHANGED)
            emit([*ended])
        logger.info("engine ready in %s; process %s", _phases(message.startup_s), self.pid)
        self._front.finish_start()

    def _go_on(self) -> None:
        with self._lock:
            self._outbox.put(*self._recovery.advance())
            if self._recovery.is_done:
                self._supervision.ready()

    def _end_overdue(self, emit: Emit) -> None:
        overdue = self._requests.end_overdue()
        if overdue:
            with self._lock:
                self._outbox.put(*(Cancel(end.request_id, end.sample) for end in overdue))
            emit([*overdue])

    def _lose(self, child: EngineChild, loss: Loss, emit: Emit) -> None:
        """Ends the request that is the cause, if one is known; the others wait for the next
        process."""
        failed = self._failed
        is_postponed = failed is not None and failed.is_shortage
        with self._lock:
            is_loading = self._supervision.phase is not None
            self._child = self.stats = None
            self._outbox.clear()
            if not is_postponed:
                self._supervision.lost(loss)
            cause = self._recovery.lose_engine(self.clock())
            ended = [] if cause is None else cause.ends
            if self._options.on_failure != "resume":
                ended += self._requests.end_all("engine_lost", LOST)
        self._front.notify("lost")
        if ended:
            emit([*ended])
        if cause is not None:
            logger.error("request %d is ended: %s", cause.request_id, ENGINE_FAILED)
        code = child.close(within_s=_EXIT_S if child.frames.has_hung_up else 0.0)
        if is_postponed:
            self._postpone(SHORTAGE, loss.error, emit)
            return
        # Whoever waits for the first load raises its error, which is then not logged twice.
        is_refused = failed is not None and self._check is None
        level = logging.DEBUG if is_refused else logging.ERROR
        logger.log(level, "engine process %d: %s (exit status %d)", child.pid, loss.error, code)
        if is_loading and loss.load_fault is None and not self._was_ended(child, code):
            loss = replace(loss, load_fault=f"{loss.error} (exit status {code})")
        self._go_on_without(failed, loss, is_explained=cause is not None)
        self._give_up_if_dead(emit)

    def _was_ended(self, child: EngineChild, code: int) -> bool:
        """Somebody killed the process, other than for want of memory."""
        is_killed = child.frames.has_hung_up and code == -signal.SIGKILL
        return is_killed and self._options.count_oom_kills() == self._num_oom_kills

    def _go_on_without(self, failed: Failed | None, loss: Loss, *, is_explained: bool) -> None:
        with self._lock:
            self._supervision.crashed(
                self.clock(),
                loss,
                is_explained=is_explained,
                has_requests=bool(self._requests.num_open),
            )
            if failed is not None and self._check is None:
                self._failure = failed.exception()
                self._supervision.died(loss.error)
            if failed is not None and failed.kind == ConfigError.__name__:
                # What the first process resolved no longer fits: the next one chooses again.
                self._start_message = msgspec.structs.replace(
                    self._start_message, config=self._config
                )

    def _give_up_if_dead(self, emit: Emit) -> None:
        if self._supervision.state == "dead":
            error = self._supervision.error or LOST
            self._front.give_up(self._failure or EngineUnavailableError(error), emit)

    def _finish(self, emit: Emit) -> None:
        self._front.end(emit)
        with self._lock:
            child, self._child = self._child, None
            self._outbox.clear()
            self._supervision.died(SHUT_DOWN)
        if child is not None:
            child.frames.send(encode(Stop()))
            code = child.close(within_s=self._stop_s)
            logger.info("engine process %d stopped (exit status %d)", child.pid, code)

    @property
    def _stop_s(self) -> float:
        """With a disk the process writes the newest pages first."""
        is_storing = self._config.prefix_cache_disk is not None and self._check is not None
        return self._options.watchdog.stop_s + (CLOSE_WITHIN_S if is_storing else 0.0)


def _sendable(path: str) -> str:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"the model's path {errors.show(path)} is not UTF-8; rename it, or name a link to it"
        ) from None
    return path


def pinned(config: EngineConfig, limits: EngineLimits) -> EngineConfig:
    """With the rows, pool, context and queue of the first process, whatever memory is free then:
    otherwise streams could differ."""
    num_tokens = limits.num_pages * limits.page_size
    return replace(
        config,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        num_pages=num_tokens // config.page_size,
        max_num_queued_reqs=limits.max_num_queued_reqs,
        max_num_queued_tokens=limits.max_num_queued_tokens,
    )


def _phases(startup_s: Mapping[str, float]) -> str:
    """Such as `1.0 s (imports 0.4, load 0.6)`."""
    parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in startup_s.items())
    return f"{sum(startup_s.values()):.1f} s ({parts})"
