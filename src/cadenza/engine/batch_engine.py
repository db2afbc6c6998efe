"""`BatchEngine`: the engine's interface for servers and `AsyncEngine`; any thread may submit and
cancel, one serves. `EngineStatus`: its state. `run_steps` is the only receive-step-deliver loop:
`InProcessLink`, the engine process's `Worker` and `LLM` each pass it a source of commands."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from cadenza.engine.core import EngineCore
from cadenza.engine.new_sequences import Resumption
from cadenza.engine.open_requests import EngineLoad
from cadenza.engine.request_check import CheckedRequest, RequestCheck
from cadenza.engine.request_stats import RequestStats
from cadenza.engine.stats import EngineStats
from cadenza.engine.step_watch import OnNews
from cadenza.engine.timeouts import RequestTimeouts
from cadenza.errors import CadenzaError, QueueFullError, RunnerError
from cadenza.events import Event
from cadenza.fingerprint import Fingerprint
from cadenza.kernel_proof import KernelProof
from cadenza.request import Request
from cadenza.tenant import Tenant

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


# Called with the events of one step on the serving thread; must not block.
Emit = Callable[[list[Event]], None]

Clock = Callable[[], float]  # Seconds, monotonic

STOPPED = "the engine stopped on an error; its log has the cause"


class BatchEngine(Protocol):
    """Accepts requests on any thread; emits events on the serving thread."""

    def submit(self, given: Request | CheckedRequest) -> int:
        """Accepts a request and returns its id. Raises InvalidRequestError, QueueFullError,
        EngineUnavailableError, EngineClosedError."""
        ...

    def cancel(self, request_id: int, sample: int | None = None) -> None:
        """Events already being emitted still arrive."""
        ...

    def serve(self, emit: Emit) -> None:
        """Runs until drained or shut down; requests still open then end with an error."""
        ...

    def watch(self, on_news: OnNews | None) -> None:
        """Calls `on_news` with summaries of the steps, and when the engine is lost or ready, until
        the next call; None ends it."""
        ...

    def drain(self, within_s: float) -> None:
        """Refuses new requests; `serve` returns once all have ended or `within_s` has elapsed."""
        ...

    def shutdown(self) -> None: ...


class ServedEngine(BatchEngine, Protocol):
    """What a server needs beside that. Thread-safe; all but `wait_ready` return at once and cause
    no work in the engine."""

    @property
    def timeouts(self) -> RequestTimeouts: ...

    def status(self) -> EngineStatus: ...

    def stats(self) -> EngineStats | None:
        """The latest of the current engine; None before its first one."""
        ...

    def load(self) -> EngineLoad:
        """Cheap, because it is read for each request."""
        ...

    def refusal(self, tenant: Tenant, priority: int) -> QueueFullError | None:
        """Why a request of the tenant would not be accepted now, because of those that wait; None
        if other bounds decide. As cheap."""
        ...

    def request_stats(self) -> RequestStats: ...

    def wait_ready(self, timeout_s: float) -> None:
        """Raises CadenzaError: it could not load, or not in time."""
        ...

    def call_at_death(self, on_death: Callable[[CadenzaError], object]) -> None:
        """Calls `on_death`, on some thread, when the engine is given up after it was ready."""
        ...


def check_step_errors(core: EngineCore) -> None:
    failures, most = core.loop.num_consecutive_failures, core.limits.max_consecutive_step_errors
    if failures >= most:
        raise RunnerError(
            f"{failures} steps in a row have failed, the most that --max-consecutive-step-errors "
            f"allows; the engine's log has each cause"
        )


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Its id is one that no other request of its front end has had."""

    request_id: int
    request: Request


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Another engine began it, under this id."""

    request_id: int
    request: Request
    resumption: Resumption


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Without further events."""

    request_id: int
    sample: int | None


Command = Submit | Resume | Cancel


def run_steps(
    core: EngineCore,
    receive: Callable[[float], Sequence[Command] | None],
    step: Callable[[], list[Event]],
) -> Iterator[list[Event]]:
    """Applies the received commands, runs a step and yields its events. `receive` returns the
    commands since its last call; without any it may wait for so many seconds, without end while the
    core is idle; None ends the loop."""
    while (commands := receive(wait_s := core.launch_in_s())) is not None:
        for command in commands:
            if isinstance(command, Submit):
                core.enqueue(command.request_id, command.request)
            elif isinstance(command, Resume):
                core.resume(command.request_id, command.request, command.resumption)
            else:
                core.cancel(command.request_id, command.sample)
        if commands and wait_s:
            continue  # more may come before the next step has to be launched
        yield step()
