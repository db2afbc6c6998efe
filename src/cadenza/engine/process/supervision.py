"""`Supervision`: the engine process's state: loading, ready, hung, to be restarted, or dead.

A state machine without a clock or a process: the time and what was seen are passed in. Also here:
what it judges by (`ProcessUsage`, which tells a slow load from one that hangs) and which errors of
a start are a shortage of the machine. Invariants: `ready` means that progress was seen within the
patience; a load may take any time while it computes or reads; after too many crashes in the window
the state is `dead` for good; a start that failed for a shortage, or a crash that a request has
caused, does not count as one.
"""

import errno
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from cadenza.engine.status import EngineState

NUM_LOOKS = 8
"""How often the usage of a loading process is read in the time after which it counts as hung."""

STANDSTILL_S = 1.0
"""The longest sleep of the watching thread. Waking later than that counts as a pause of the whole
machine."""

IDLE_CPU_S = 0.25
"""Less CPU time than this may be a sleeping library's housekeeping."""

_MAJOR_FAULTS, _USER_TICKS, _SYSTEM_TICKS = 9, 11, 12
"""Fields of /proc/PID/stat, behind the command's name."""

START_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
"""Errors of making a process that may pass: descriptors, processes, memory to fork."""
_DESCRIPTOR_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE})


def is_descriptor_shortage(error: BaseException) -> bool:
    """Whether a file or a socket that could not be opened for want of a descriptor is the cause."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _DESCRIPTOR_SHORTAGES:
            return True
        cause = cause.__cause__ or cause.__context__
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUsage:
    """The kernel's counts of a process, all threads: CPU time, bytes read, pages read from disk.

    A stopped process, or one that waits for something that never comes, does not advance.
    """

    cpu_s: float
    read_bytes: int
    num_major_faults: int

    def is_beyond(self, earlier: "ProcessUsage") -> bool:
        """Whether the process has computed or read since."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """When a process counts as hung, and how often and how soon another one is started.

    Args:
        hung_after_s: least time without progress.
        hung_after_steps: least number of predicted steps without progress.
        load_hung_after_s: time without computing or reading while it loads; any working disk is
            faster.
        max_crashes: after so many in `crash_window_s` there is no further start.
        backoff_s: before the first restart in the window; each further one waits four times longer.
        max_postponed_s: the longest wait before a postponed start is tried again.
        stop_s: time to exit after `Stop`, before it is killed.
    """

    hung_after_s: float = 5.0
    hung_after_steps: float = 10.0
    load_hung_after_s: float = 120.0
    max_crashes: int = 3
    crash_window_s: float = 300.0
    backoff_s: float = 0.25
    max_postponed_s: float = 10.0
    stop_s: float = 1.5


@dataclass(slots=True, eq=False)
class Supervision:
    """The state of one engine over all its processes."""

    patience: Patience
    now_s: float
    state: EngineState = "loading"
    phase: str | None = None
    error: str | None = None
    cause: str | None = None
    num_starts: int = 0
    startup_s: dict[str, float] = field(default_factory=dict[str, float])
    start_at_s: float | None = None
    _num_postponed: int = 0
    _crashes_s: list[float] = field(default_factory=list[float])
    _started_at_s: float = 0.0
    _load_s: float | None = None
    _beat_s: float | None = None
    _progress_s: float = 0.0
    _usage: ProcessUsage | None = None
    _looked_s: float = 0.0
    _num_steps: int = -1
    _predicted_s: float = 0.0

    def __post_init__(self) -> None:
        self.start_at_s = self.now_s

    def may_start(self, now_s: float) -> bool:
        return self.start_at_s is not None and now_s >= self.start_at_s

    def started(self, now_s: float) -> None:
        """A process was started."""
        self.num_starts += 1
        self.start_at_s = None
        self._started_at_s = now_s
        self._beat_s = None
        self._usage, self._looked_s = None, now_s
        self.entered(now_s, "python")

    def entered(self, now_s: float, phase: str) -> None:
        """The next phase of its start has begun."""
        self.phase, self._progress_s = phase, now_s

    def look_at_s(self) -> float | None:
        """When to read its usage again; None unless it is loading."""
        if self.phase is None:
            return None
        return self._looked_s + self.patience.load_hung_after_s / NUM_LOOKS

    def looked(self, now_s: float, usage: ProcessUsage | None) -> None:
        """Its usage was read; None where the kernel has no counts of it."""
        self._looked_s = now_s
        if usage is None or self._usage is None or usage.is_beyond(self._usage):
            self._usage, self._progress_s = usage, now_s

    def loaded(self, now_s: float, startup_s: dict[str, float]) -> None:
        """It computes; new requests are accepted from `ready` on."""
        self._load_s = now_s - self._started_at_s
        rest_s = max(0.0, self._load_s - sum(startup_s.values()))
        self.startup_s = {"python": rest_s, **startup_s}
        self.phase = None
        self._num_postponed = 0
        self._beat_s = self._progress_s = now_s
        self._num_steps, self._predicted_s = -1, 0.0

    def ready(self) -> None:
        """It serves. States other than loading and restarting do not change."""
        if self.state in {"loading", "restarting"}:
            self.state, self.error, self.cause = "ready", None, None

    def beat(self, now_s: float, num_steps: int, predicted_s: float, *, is_idle: bool) -> None:
        """A heartbeat; it is progress where a step was made, or the engine is idle."""
        self._beat_s = now_s
        # A slow step is announced before it begins.
        if is_idle or num_steps != self._num_steps or predicted_s > self._predicted_s:
            self._progress_s = now_s
        self._num_steps, self._predicted_s = num_steps, predicted_s

    def overslept(self, seconds: float) -> None:
        """The watching thread woke this much too late. On a machine that was paused the engine was
        paused, too, so the time does not count as time without progress.
        """
        if seconds >= STANDSTILL_S:
            self._progress_s += seconds

    def hung_at_s(self) -> float | None:
        """When it counts as hung unless it makes progress; None where progress cannot be seen."""
        patience = self.patience
        if self.phase is not None and self._usage is not None:
            return self._progress_s + patience.load_hung_after_s
        if self._beat_s is None:
            return None
        return self._progress_s + max(
            patience.hung_after_s, patience.hung_after_steps * self._predicted_s
        )

    def is_hung(self, now_s: float) -> bool:
        hung_at_s = self.hung_at_s()
        return hung_at_s is not None and now_s >= hung_at_s

    def describe_hang(self, now_s: float) -> str:
        """A hang in words, for the log."""
        where = "" if self.phase is None else f" in its start, at {self.phase!r},"
        seconds = now_s - self._progress_s
        return f"the engine process made no progress{where} for {seconds:.0f} seconds"

    def crashed(
        self,
        now_s: float,
        error: str,
        cause: str | None = None,
        *,
        explained_s: Collection[float] | None = None,
        has_requests: bool = False,
    ) -> None:
        """The process is gone. Sets the time of the next start, if there is one.

        Args:
            error: the reason, for the log and the operator.
            cause: the reason in words for clients, where `error` is not fit for them.
            explained_s: if a request has caused this crash: the times of all that it has caused,
                which then do not count.
            has_requests: requests wait for the next process, so that it is needed even to drain.
        """
        self._beat_s = self.phase = None
        self.error, self.cause = error, cause or error
        if not self._may_start_again(has_requests=has_requests):
            return
        window_s = self.patience.crash_window_s
        recent = [at_s for at_s in self._crashes_s if now_s - at_s < window_s]
        if explained_s is None:
            self._crashes_s = [*recent, now_s]
        else:
            self._crashes_s = [at_s for at_s in recent if at_s not in explained_s]
        if len(self._crashes_s) >= self.patience.max_crashes:
            self.died(
                f"{error}; that was crash {len(self._crashes_s)} in {window_s:g} seconds, and the "
                f"engine is not started again"
            )
            return
        if self.state != "draining":
            self.state = "restarting"
        num_waits = max(0, len(self._crashes_s) - 1)
        self.start_at_s = now_s + self.patience.backoff_s * 4.0**num_waits

    def postponed(self, now_s: float, error: str, *, has_requests: bool = False) -> None:
        """A start failed for a shortage, which may pass."""
        self._beat_s = self.phase = None
        self.error = self.cause = error
        if not self._may_start_again(has_requests=has_requests):
            return
        patience = self.patience
        wait_s = patience.backoff_s
        for _ in range(self._num_postponed):
            wait_s = min(4.0 * wait_s, patience.max_postponed_s)
        self._num_postponed += 1
        self.start_at_s = now_s + wait_s

    def _may_start_again(self, *, has_requests: bool) -> bool:
        if self.state == "dead" or (self.state == "draining" and not has_requests):
            self.state = "dead"
            return False
        return True

    def died(self, error: str | None) -> None:
        """There will be no further process."""
        self.state, self.error, self.start_at_s, self.phase = "dead", error, None, None
        self._beat_s = None

    def since_beat_s(self, now_s: float) -> float | None:
        return None if self._beat_s is None else now_s - self._beat_s

    def retry_after_s(self, now_s: float) -> float | None:
        """Seconds until it may serve, estimated from the last start; None unless one is to come."""
        if self.state not in {"loading", "restarting"}:
            return None
        begin_s = self._started_at_s if self.start_at_s is None else self.start_at_s
        ready_s = begin_s + (self._load_s if self._load_s is not None else 5.0)
        return max(1.0, ready_s - now_s)
