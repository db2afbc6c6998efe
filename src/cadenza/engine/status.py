"""`EngineStatus`: how an engine is, for those who answer for its health; plain values.

Knows no process and no server. Invariant: `is_ready` is true only while steps make progress.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from cadenza.engine.open_requests import EngineLoad, RequestStats, RequestTimeouts
from cadenza.engine.request_check import RequestCheck
from cadenza.engine.stats import EngineStats

EngineState = Literal["loading", "ready", "draining", "restarting", "dead"]
"""`loading` the first start · `restarting` another one, or the wait before it · `draining` open
requests still run and new ones are refused · `dead` stays so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """One moment.

    Args:
        phase: while it loads: what it does now.
        startup_s: seconds that each phase of the last start took.
        since_beat_s: seconds since the step loop last gave a sign of life; None while there is
            no loop.
        num_restarts: starts after the first one.
        retry_after_s: when it may be ready again, where that is to be expected.
        error: why it is restarting or dead; for the log and the operator.
        cause: the same in words that anybody may read.
        request_check: what requests are held against; None until the first load is done.
    """

    state: EngineState
    phase: str | None = None
    startup_s: dict[str, float] = field(default_factory=dict[str, float])
    since_beat_s: float | None = None
    num_restarts: int = 0
    retry_after_s: float | None = None
    error: str | None = None
    cause: str | None = None
    request_check: RequestCheck | None = None

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"


class EngineMonitor(Protocol):
    """What a front end asks of its engine beside `BatchEngine`'s calls; from any thread, at once.

    Asking never waits for the engine and gives it no work.
    """

    @property
    def timeouts(self) -> RequestTimeouts:
        """What each request is held to."""
        ...

    def status(self) -> EngineStatus: ...

    def stats(self) -> EngineStats | None:
        """The newest snapshot of the engine now running; None before its first one."""
        ...

    def load(self) -> EngineLoad:
        """What is open and waits now; asked for each request, unlike the statistics."""
        ...

    def request_stats(self) -> RequestStats: ...
