"""`EngineStatus`: the state of an engine, for health checks and metrics."""

from dataclasses import dataclass, field
from typing import Literal

from cadenza.engine.request_check import RequestCheck
from cadenza.fingerprint import Fingerprint
from cadenza.kernel_proof import KernelProof

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
