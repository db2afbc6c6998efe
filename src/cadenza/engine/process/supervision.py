"""`Supervision`: the engine process's state, a state machine that is given the time and what was
seen. Invariants: `ready` means progress within the timeouts; a load may take any time while it
computes or reads; a process that has progressed is always followed by another; only a load that
fails repeatedly in the same way, not from outside or for a shortage, ends in `dead`."""

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path

from cadenza.engine.batch_engine import EngineState

# How often the usage of a loading process is read in the time after which it counts as hung.
NUM_USAGE_READS = 8

# The longest sleep of the watching thread. Waking later than that counts as a pause of the whole
# machine.
STANDSTILL_S = 1.0

IDLE_CPU_S = 0.25  # Less CPU time than this may be a sleeping library's housekeeping

# Fields of /proc/PID/stat, after the command's name
_MAJOR_FAULTS, _USER_TICKS, _SYSTEM_TICKS = 9, 11, 12

# Errors of making a process that may pass: descriptors, processes, memory to fork.
START_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
_DESCRIPTOR_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE})


def is_descriptor_shortage(error: BaseException) -> bool:
    cause: BaseException | None = error
    seen = set[int]()  # an error that was raised again from its own consequence is in a circle
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, OSError) and cause.errno in _DESCRIPTOR_SHORTAGES:
            return True
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUsage:
    """Of all threads: CPU time, bytes read, pages read from disk; they stand while it is stopped or
    waits."""

    cpu_s: float
    read_bytes: int
    num_major_faults: int

    def is_beyond(self, earlier: "ProcessUsage") -> bool:
        return (
            self.cpu_s >= earlier.cpu_s + IDLE_CPU_S
            or self.read_bytes > earlier.read_bytes
            or self.num_major_faults > earlier.num_major_faults
        )


def usage_of(pid: int) -> ProcessUsage | None:
    """None where the kernel has no such counts: the process is gone, or this is not Linux."""
    folder = Path("/proc") / str(pid)
    try:
        counts = (folder / "stat").read_text().rpartition(")")[2].split()
        reads = (folder / "io").read_text().splitlines()
    except OSError:
        return None
    read_bytes = dict(line.split(": ") for line in reads)["rchar"]
    ticks = int(counts[_USER_TICKS]) + int(counts[_SYSTEM_TICKS])
    return ProcessUsage(
        cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
        read_bytes=int(read_bytes),
        num_major_faults=int(counts[_MAJOR_FAULTS]),
    )


def num_oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int | None:
    """Of this machine; None where the kernel has no count."""
    try:
        counts = vmstat.read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) for line in counts if line.startswith("oom_kill ")]
    return found[0] if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogTimeouts:
    """When a process counts as hung, and how soon another one is started."""

    hung_after_s: float = 5.0  # least time without progress
    hung_after_steps: float = 10.0  # least number of predicted steps without progress
    # time without computing or reading while it loads; any working disk is faster
    load_hung_after_s: float = 120.0
    # after so many in a row with the same fault there is no further start
    max_failed_loads: int = 3
    # before the start that follows a process which has got requests on; each further start waits
    # twice as long
    backoff_s: float = 0.25
    max_backoff_s: float = 30.0  # the longest such wait
    max_postponed_s: float = 10.0  # the longest wait before a postponed start is tried again
    stop_s: float = 1.5  # time to exit after `Stop`, before it is killed


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Why a process is gone, or is given up."""

    error: str  # for the log and the operator
    cause: str  # in words for clients, where `error` is not fit for them
    # what went wrong in its load, in the same words each time; None if it had loaded, or if
    # something outside ended it
    load_fault: str | None = None


@dataclass(slots=True, eq=False)
class Supervision:
    """Of one engine over all its processes. `has_progress`: it computed something for a request
    that none had before."""

    watchdog: WatchdogTimeouts
    now_s: float
    state: EngineState = "loading"
    phase: str | None = None
    error: str | None = None
    cause: str | None = None
    num_starts: int = 0
    startup_s: dict[str, float] = field(default_factory=dict[str, float])
    start_at_s: float | None = None
    has_progress: bool = False
    _num_fruitless: int = 0  # Processes in a row that were lost without progress
    _load_fault: str | None = None
    _num_failed_loads: int = 0  # Loads in a row that ended with `_load_fault`
    _num_postponed: int = 0
    _started_at_s: float = 0.0
    _load_s: float | None = None
    _beat_s: float | None = None
    _progress_s: float = 0.0
    _usage: ProcessUsage | None = None
    _usage_read_s: float = 0.0
    _num_steps: int = -1
    _predicted_s: float = 0.0

    def __post_init__(self) -> None:
        self.start_at_s = self.now_s

    def may_start(self, now_s: float) -> bool:
        return self.start_at_s is not None and now_s >= self.start_at_s

    def started(self, now_s: float) -> None:
        self.num_starts += 1
        self.start_at_s = None
        self.has_progress = False
        self._started_at_s = now_s
        self._beat_s = None
        self._usage, self._usage_read_s = None, now_s
        self.entered(now_s, "python")

    def entered(self, now_s: float, phase: str) -> None:
        self.phase, self._progress_s = phase, now_s

    def read_usage_at_s(self) -> float | None:
        """None unless it is loading."""
        if self.phase is None:
            return None
        return self._usage_read_s + self.watchdog.load_hung_after_s / NUM_USAGE_READS

    def record_usage(self, now_s: float, usage: ProcessUsage | None) -> None:
        self._usage_read_s = now_s
        if usage is None or self._usage is None or usage.is_beyond(self._usage):
            self._usage, self._progress_s = usage, now_s

    def loaded(self, now_s: float, startup_s: dict[str, float]) -> None:
        """New requests are accepted from `ready` on."""
        self._load_s = now_s - self._started_at_s
        rest_s = max(0.0, self._load_s - sum(startup_s.values()))
        self.startup_s = {"python": rest_s, **startup_s}
        self.phase = None
        self._num_postponed = self._num_failed_loads = 0
        self._beat_s = self._progress_s = now_s
        self._num_steps, self._predicted_s = -1, 0.0

    def ready(self) -> None:
        """States other than loading and restarting do not change."""
        if self.state in {"loading", "restarting"}:
            self.state, self.error, self.cause = "ready", None, None

    def beat(self, now_s: float, num_steps: int, predicted_s: float, *, is_idle: bool) -> None:
        """It is progress where a step was made, or the engine is idle."""
        self._beat_s = now_s
        # A slow step is announced before it begins.
        if is_idle or num_steps != self._num_steps or predicted_s > self._predicted_s:
            self._progress_s = now_s
        self._num_steps, self._predicted_s = num_steps, predicted_s

    def note_late_wakeup(self, seconds: float) -> None:
        """If the machine was paused so was the engine: that is no time without progress."""
        if seconds >= STANDSTILL_S:
            self._progress_s += seconds

    def hung_at_s(self) -> float | None:
        """None where progress cannot be seen."""
        watchdog = self.watchdog
        if self.phase is not None and self._usage is not None:
            return self._progress_s + watchdog.load_hung_after_s
        if self._beat_s is None:
            return None
        return self._progress_s + max(
            watchdog.hung_after_s, watchdog.hung_after_steps * self._predicted_s
        )

    def is_hung(self, now_s: float) -> bool:
        hung_at_s = self.hung_at_s()
        return hung_at_s is not None and now_s >= hung_at_s

    def hang(self, now_s: float) -> Loss:
        where = "" if self.phase is None else f" in its start, at {self.phase!r},"
        seconds = now_s - self._progress_s
        text = f"the engine process made no progress{where} for {seconds:.0f} seconds"
        fault = None if self.phase is None else "no progress"
        return Loss(error=text, cause=text, load_fault=fault)

    def lost(self, loss: Loss) -> None:
        """`crashed` follows once the process has ended."""
        self._beat_s = self.phase = None
        self.error, self.cause = loss.error, loss.cause
        if self.state in {"loading", "ready"}:
            self.state = "restarting"

    def crashed(
        self, now_s: float, loss: Loss, *, is_explained: bool = False, has_requests: bool = False
    ) -> None:
        """Sets the time of the next start. `is_explained`: a request was the cause, and will not be
        in the next one; `has_requests`: requests wait for it, so that it is needed even to
        drain."""
        self.lost(loss)
        if not self._may_start_again(has_requests=has_requests):
            return
        if loss.load_fault is not None:
            is_same = loss.load_fault == self._load_fault
            self._num_failed_loads = self._num_failed_loads + 1 if is_same else 1
            self._load_fault = loss.load_fault
            if self._num_failed_loads >= self.watchdog.max_failed_loads:
                self.died(
                    f"{loss.error}; the engine failed so {self._num_failed_loads} times in a row "
                    f"while it loaded, and is not started again"
                )
                return
        self._num_fruitless = 0 if self.has_progress or is_explained else self._num_fruitless + 1
        self.start_at_s = now_s + self._backoff_s()

    def _backoff_s(self) -> float:
        wait_s, most_s = self.watchdog.backoff_s, self.watchdog.max_backoff_s
        for _ in range(1, self._num_fruitless):
            wait_s = min(2.0 * wait_s, most_s)
            if wait_s in (0.0, most_s):
                break
        return wait_s

    def postponed(self, now_s: float, error: str, *, has_requests: bool = False) -> None:
        """For a shortage, which may pass."""
        self._beat_s = self.phase = None
        self.error = self.cause = error
        if not self._may_start_again(has_requests=has_requests):
            return
        watchdog = self.watchdog
        wait_s = watchdog.backoff_s
        for _ in range(self._num_postponed):
            wait_s = min(4.0 * wait_s, watchdog.max_postponed_s)
        self._num_postponed += 1
        self.start_at_s = now_s + wait_s

    def _may_start_again(self, *, has_requests: bool) -> bool:
        if self.state == "dead" or (self.state == "draining" and not has_requests):
            self.state = "dead"
            return False
        return True

    def died(self, error: str | None) -> None:
        self.state, self.error, self.start_at_s, self.phase = "dead", error, None, None
        self._beat_s = None

    def since_beat_s(self, now_s: float) -> float | None:
        return None if self._beat_s is None else now_s - self._beat_s

    def retry_after_s(self, now_s: float) -> float | None:
        """Estimated from the last start; None unless one is to come."""
        if self.state not in {"loading", "restarting"}:
            return None
        begin_s = self._started_at_s if self.start_at_s is None else self.start_at_s
        ready_s = begin_s + (self._load_s if self._load_s is not None else 5.0)
        return max(1.0, ready_s - now_s)
