"""`BatchEngine`: the engine's interface for servers and `AsyncEngine`: one thread serves; any
thread may submit and cancel. `run_steps` is the only receive-step-deliver loop: `InProcessLink`,
the engine process's `Worker` and `LLM` each pass it a source of commands and consume its events."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from cadenza.engine.core import EngineCore
from cadenza.engine.open_requests import EngineLoad, RequestStats
from cadenza.engine.request_check import CheckedRequest
from cadenza.engine.resumption import Resumption
from cadenza.engine.stats import EngineStats
from cadenza.engine.status import EngineStatus
from cadenza.engine.step_watch import OnNews
from cadenza.engine.timeouts import RequestTimeouts
from cadenza.errors import CadenzaError, QueueFullError, RunnerError
from cadenza.events import Event
from cadenza.request import Request
from cadenza.tenant import Tenant

Emit = Callable[[list[Event]], None]
"""Called with the events of one step on the serving thread; must not block."""

Clock = Callable[[], float]
"""Seconds, monotonic."""

STOPPED = "the engine stopped on an error; its log has the cause"


class BatchEngine(Protocol):
    """Accepts requests on any thread; emits events on the serving thread."""

    def submit(self, given: Request | CheckedRequest) -> int:
        """Accepts a request and returns its id. Raises InvalidRequestError, QueueFullError,
        EngineUnavailableError, EngineClosedError."""
        ...

    def cancel(self, request_id: int, sample: int | None = None) -> None:
        """Ends a request, or one of its samples; events already being emitted still arrive."""
        ...

    def serve(self, emit: Emit) -> None:
        """Runs until drained or shut down; requests still open then end with an error."""
        ...

    def watch(self, on_news: OnNews | None) -> None:
        """Has `on_news` called with summaries of the steps, and when the engine is lost or ready,
        until the next call; None ends it. Steps that nobody watches cost nothing for it."""
        ...

    def drain(self, within_s: float) -> None:
        """Refuses new requests; `serve` returns once all have ended or `within_s` has elapsed."""
        ...

    def shutdown(self) -> None:
        """Makes `serve` return at once."""
        ...


class ServedEngine(BatchEngine, Protocol):
    """What a server needs of an engine beside that. Thread-safe; but for `wait_ready` its methods
    return immediately and cause no work in the engine."""

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

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until it is ready. Raises CadenzaError: it could not load, or not in time."""
        ...

    def call_at_death(self, on_death: Callable[[CadenzaError], object]) -> None:
        """Has `on_death` called, on some thread, when the engine is given up after it was ready."""
        ...


def check_step_errors(core: EngineCore) -> None:
    """Raises RunnerError if too many consecutive steps have failed."""
    failures, most = core.num_consecutive_failures, core.limits.max_consecutive_step_errors
    if failures >= most:
        raise RunnerError(
            f"{failures} steps in a row have failed, the most that --max-consecutive-step-errors "
            f"allows; the engine's log has each cause"
        )


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A checked request with an id that no other one has had of its front end."""

    request_id: int
    request: Request


class Resume(msgspec.Struct, frozen=True, tag=True):
    """A request that another engine began, under the id that it had there."""

    request_id: int
    request: Request
    resumption: Resumption


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Ends a request, or one of its samples, without further events."""

    request_id: int
    sample: int | None


Command = Submit | Resume | Cancel


def run_steps(
    core: EngineCore,
    receive: Callable[[float], Sequence[Command] | None],
    step: Callable[[], list[Event]],
) -> Iterator[list[Event]]:
    """Repeatedly applies the received commands, runs a step and yields its events.

    Args:
        receive: returns the commands since its last call; without any it may wait for as many
            seconds as it is given, and without end while the core is idle. None ends the loop.
        step: advances `core` by one step.
    """
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
