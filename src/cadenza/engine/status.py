"""`EngineStatus` and `EngineMonitor`: the state of an engine, for health checks and metrics.

Plain values; knows no process and no server. Invariant: reading them never waits for the engine.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from cadenza.engine.open_requests import EngineLoad, RequestStats
from cadenza.engine.request_check import RequestCheck
from cadenza.engine.stats import EngineStats
from cadenza.engine.timeouts import RequestTimeouts
from cadenza.errors import QueueFullError
from cadenza.fingerprint import Fingerprint
from cadenza.kernel_proof import KernelProof
from cadenza.tenant import Tenant

EngineState = Literal["loading", "ready", "draining", "restarting", "dead"]
"""`loading`: first start · `restarting`: a later start, or the delay before it · `draining`: open
requests continue, new ones are refused · `dead`: stopped, never restarted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """A snapshot of an engine's state.

    Args:
        phase: current phase of a start; None otherwise.
        startup_s: duration in seconds of each phase of the last start.
        since_beat_s: seconds since the step loop's last heartbeat; None while no loop runs.
        num_restarts: starts after the first one.
        retry_after_s: estimated seconds until it is ready; None if unknown.
        error: why it is restarting or dead; for the log and the operator.
        cause: the same without internal details, for clients.
        request_check: the check for requests; None until the first load is done.
        fingerprint: that of its answers; None until then, and where it is not known.
        kernel_proof: what was compared of its kernels when it was loaded; None if nothing was.
        replicas: the state of each of the engines that serve as one; empty for a single one.
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
    fingerprint: Fingerprint | None = None
    kernel_proof: KernelProof | None = None
    replicas: tuple[EngineState, ...] = ()

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"


class EngineMonitor(Protocol):
    """Monitoring interface of an engine, in addition to `BatchEngine`. Thread-safe.

    Its methods return immediately and cause no work in the engine.
    """

    @property
    def timeouts(self) -> RequestTimeouts:
        """The time limits of each request."""
        ...

    def status(self) -> EngineStatus: ...

    def stats(self) -> EngineStats | None:
        """The latest snapshot from the current engine; None before its first one."""
        ...

    def load(self) -> EngineLoad:
        """The current load; cheap, because it is read for each request."""
        ...

    def refusal(self, tenant: Tenant, priority: int) -> QueueFullError | None:
        """Why a request of the tenant would not be accepted now, because of those that wait; None
        if it would be, or if other bounds decide. As cheap."""
        ...

    def request_stats(self) -> RequestStats: ...
