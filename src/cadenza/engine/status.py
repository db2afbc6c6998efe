"""`EngineStatus`: the state of an engine, for health checks and metrics."""

from dataclasses import dataclass, field
from typing import Literal

from cadenza.engine.request_check import RequestCheck
from cadenza.fingerprint import Fingerprint
from cadenza.kernel_proof import KernelProof

# `loading`: first start · `restarting`: a later start, or the delay before it · `draining`: open
# requests continue, new ones are refused · `dead`: stopped, never restarted.
EngineState = Literal["loading", "ready", "draining", "restarting", "dead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """A snapshot of an engine's state."""

    state: EngineState
    phase: str | None = None  # current phase of a start; None otherwise
    # duration in seconds of each phase of the last start
    startup_s: dict[str, float] = field(default_factory=dict[str, float])
    # seconds since the step loop's last heartbeat; None while no loop runs
    since_beat_s: float | None = None
    num_restarts: int = 0  # starts after the first one
    retry_after_s: float | None = None  # estimated seconds until it is ready; None if unknown
    error: str | None = None  # why it is restarting or dead; for the log and the operator
    cause: str | None = None  # the same without internal details, for clients
    # the check for requests; None until the first load is done
    request_check: RequestCheck | None = None
    # that of its answers; None until then, and where it is not known
    fingerprint: Fingerprint | None = None
    # what was compared of its kernels when it was loaded; None if nothing was
    kernel_proof: KernelProof | None = None
    # the state of each of the engines that serve as one; empty for a single one
    replicas: tuple[EngineState, ...] = ()

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"
