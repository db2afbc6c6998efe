"""`Supervision`: is the engine process well, and when is it started again?

A pure state machine: every method is told the time. Knows no process. Invariants: `ready` means
that a sign of progress came within the patience; a load may take as long as it works; after too
many crashes in the window it is dead and stays so; a start that the machine had no room for is no
crash.
"""

from dataclasses import dataclass, field

from cadenza.engine.process.work import Work
from cadenza.engine.status import EngineState

LOOKS = 8
"""How often in the patience with a load one looks whether it works."""

STANDSTILL_S = 1.0
"""Who watches looks at least so often, and counts it as a pause of the machine to wake so late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """When a process counts as hung, and how often and how soon another one is started.

    Args:
        hung_after_s: without progress, at least so long.
        hung_after_steps: and at least this many predicted steps.
        load_hung_after_s: while it loads, without any work; no disk that answers is so slow.
        max_crashes: this many in `crash_window_s` and there is no further start.
        backoff_s: before the first restart in the window; each further one waits four times that.
        max_postponed_s: the longest wait before a start that was postponed is tried again.
        stop_s: for an engine to exit that was told to.
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
    _work: Work | None = None
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
        self._work, self._looked_s = None, now_s
        self.entered(now_s, "python")

    def entered(self, now_s: float, phase: str) -> None:
        """Another phase of its start has begun."""
        self.phase, self._progress_s = phase, now_s

    def look_at_s(self) -> float | None:
        """When to look at its work again; None while it does not load."""
        if self.phase is None:
            return None
        return self._looked_s + self.patience.load_hung_after_s / LOOKS

    def looked(self, now_s: float, work: Work | None) -> None:
        """What it has done so far; None where that cannot be told."""
        self._looked_s = now_s
        if work is None or self._work is None or work.is_beyond(self._work):
            self._work, self._progress_s = work, now_s

    def ready(self, now_s: float, startup_s: dict[str, float]) -> None:
        """It serves. A state other than loading or restarting stays as it is."""
        self._load_s = now_s - self._started_at_s
        rest_s = max(0.0, self._load_s - sum(startup_s.values()))
        self.startup_s = {"python": rest_s, **startup_s}
        self.phase = None
        self._num_postponed = 0
        self._beat_s = self._progress_s = now_s
        self._num_steps, self._predicted_s = -1, 0.0
        if self.state in {"loading", "restarting"}:
            self.state, self.error, self.cause = "ready", None, None

    def beat(self, now_s: float, num_steps: int, predicted_s: float, *, is_idle: bool) -> None:
        """A sign of life; it is progress when a step was made, or there is none to make."""
        self._beat_s = now_s
        # A slower step that is announced has not begun yet.
        if is_idle or num_steps != self._num_steps or predicted_s > self._predicted_s:
            self._progress_s = now_s
        self._num_steps, self._predicted_s = num_steps, predicted_s

    def overslept(self, seconds: float) -> None:
        """Who watches woke so much too late. The engine may have stood still with it, as all do on
        a machine that was paused, so the time is not held against it.
        """
        if seconds >= STANDSTILL_S:
            self._progress_s += seconds

    def hung_at_s(self) -> float | None:
        """When it will count as hung unless it makes progress; None where there is nothing to
        judge it by.
        """
        patience = self.patience
        if self.phase is not None and self._work is not None:
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
        """What there is to say of one that is hung."""
        where = "" if self.phase is None else f" in its start, at {self.phase!r},"
        seconds = now_s - self._progress_s
        return f"the engine process made no progress{where} for {seconds:.0f} seconds"

    def crashed(self, now_s: float, error: str, cause: str | None = None) -> None:
        """The process is gone. Sets when the next one starts, if one does.

        Args:
            error: why, for the log and the operator.
            cause: why, in words for everybody, where `error` is not.
        """
        self._beat_s = self.phase = None
        self.error, self.cause = error, cause or error
        if self.state in {"draining", "dead"}:
            self.state = "dead"
            return
        window_s = self.patience.crash_window_s
        recent = [at_s for at_s in self._crashes_s if now_s - at_s < window_s]
        self._crashes_s = [*recent, now_s]
        if len(self._crashes_s) >= self.patience.max_crashes:
            self.died(
                f"{error}; that was crash {len(self._crashes_s)} in {window_s:g} seconds, and the "
                f"engine is not started again"
            )
            return
        self.state = "restarting"
        self.start_at_s = now_s + self.patience.backoff_s * 4.0 ** (len(self._crashes_s) - 1)

    def postponed(self, now_s: float, error: str) -> None:
        """A start failed for want of something that the machine may have later."""
        self._beat_s = self.phase = None
        self.error = self.cause = error
        if self.state in {"draining", "dead"}:
            self.state = "dead"
            return
        patience = self.patience
        wait_s = patience.backoff_s
        for _ in range(self._num_postponed):
            wait_s = min(4.0 * wait_s, patience.max_postponed_s)
        self._num_postponed += 1
        self.start_at_s = now_s + wait_s

    def died(self, error: str | None) -> None:
        """There will be no other process."""
        self.state, self.error, self.start_at_s, self.phase = "dead", error, None, None
        self._beat_s = None

    def since_beat_s(self, now_s: float) -> float | None:
        return None if self._beat_s is None else now_s - self._beat_s

    def retry_after_s(self, now_s: float) -> float | None:
        """When it may serve, by how long the last start took; None where that is not in sight."""
        if self.state not in {"loading", "restarting"}:
            return None
        begin_s = self._started_at_s if self.start_at_s is None else self.start_at_s
        ready_s = begin_s + (self._load_s if self._load_s is not None else 5.0)
        return max(1.0, ready_s - now_s)
