"""`ServedModel`: one model of a server: its names, its text front end, its engine, its counts.

Owns the engine of each of the model's loads, one after the other, and the admission of requests to
it. Knows no HTTP and no other model. Invariants: a request is admitted, or refused with an
`ApiError`, before anything is tokenised; what is known of an engine (limits, fingerprint) stays
known when it has been unloaded.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from cadenza.config import EngineLimits
from cadenza.engine.batch_engine import BatchEngine
from cadenza.engine.request_check import RequestCheck
from cadenza.engine.stats import EngineStats
from cadenza.engine.status import EngineMonitor, EngineState
from cadenza.errors import CadenzaError, EngineClosedError
from cadenza.fingerprint import Fingerprint
from cadenza.frontend.async_engine import AsyncEngine, OutputStream
from cadenza.frontend.text_frontend import PreparedRequest, TextFrontend
from cadenza.server.errors import (
    UNAVAILABLE_CODES,
    ApiError,
    error_of,
    queue_full,
    unavailable,
)
from cadenza.server.job import Job, PromptQueue, Room
from cadenza.server.metrics import ServedCounts

MAX_LOAD_S = 24 * 3600.0


class ServedEngine(BatchEngine, EngineMonitor, Protocol):
    """What a server needs of an engine."""

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until it is ready. Raises CadenzaError: it could not load, or not in time."""
        ...

    def call_at_death(self, on_death: Callable[[CadenzaError], object]) -> None:
        """Has `on_death` called, on some thread, when the engine is given up after it was ready."""
        ...


MakeEngine = Callable[[EngineLimits | None], ServedEngine]
"""Makes the engine of a model's next load, with the sizes that an earlier one had, if there was
one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNames:
    """A model's names: answers have the first one, requests may also use the aliases, which are not
    listed."""

    listed: tuple[str, ...]
    aliases: tuple[str, ...] = ()

    @property
    def first(self) -> str:
        return self.listed[0]

    @property
    def accepted(self) -> tuple[str, ...]:
        return (*self.listed, *self.aliases)


class ServedModel:
    """On one event loop."""

    def __init__(self, names: ModelNames, text: TextFrontend, make_engine: MakeEngine) -> None:
        self.names = names
        self.text = text
        self.counts = ServedCounts()
        self.is_refusing = False
        """The server is shutting down."""
        self._make_engine = make_engine
        self._engine = make_engine(None)
        self._serving: AsyncEngine | None = None
        self._is_spent = False
        self._keeps_limits = True
        self._known: RequestCheck | None = None
        self._engine_fingerprint: Fingerprint | None = None
        self._fingerprint: Fingerprint | None = None
        self._waiting = PromptQueue(self._room, self.error_of, self._is_restarting)
        self._num_preparing = 0

    @property
    def name(self) -> str:
        return self.names.first

    @property
    def monitor(self) -> EngineMonitor:
        """Of the engine that is loaded, or was loaded last."""
        return self._engine

    @property
    def request_check(self) -> RequestCheck | None:
        """The engine's check of requests; None until it has been loaded once."""
        return self._engine.status().request_check or self._known

    @property
    def limits(self) -> EngineLimits | None:
        check = self.request_check
        return None if check is None else check.limits

    @property
    def engine_state(self) -> EngineState:
        """For errors: once new calls are refused, the engine is not to be blamed for its end."""
        return "draining" if self.is_refusing else self._engine.status().state

    def stats(self) -> EngineStats | None:
        """The engine's; None unless it runs."""
        return None if self._serving is None else self._engine.stats()

    def start(self) -> None:
        """Starts the engine, which then loads. On the event loop to which its streams belong."""
        assert self._serving is None, "it is stopped before it is started again"
        if self._is_spent:
            self._engine = self._make_engine(self.limits if self._keeps_limits else None)
        self._is_spent = self._keeps_limits = True
        self._serving = AsyncEngine(self._engine, self.text, self.fingerprint)
        self._serving.start()

    def wait_ready(self) -> None:
        """Blocks until the engine that was started is ready. Raises CadenzaError: it cannot be."""
        self._engine.wait_ready(MAX_LOAD_S)

    def call_at_death(self, on_death: Callable[[CadenzaError], object]) -> None:
        """Has `on_death` called, on some thread, when the engine is given up after it was ready."""
        self._engine.call_at_death(on_death)

    def forget_limits(self) -> None:
        """The next load chooses its sizes anew."""
        self._keeps_limits = False

    async def stop(self) -> None:
        """Ends the open requests, each with an error, and the engine, whose memory is then free."""
        self._known = self.request_check
        self._waiting.fail_all(unavailable("draining"))
        serving, self._serving = self._serving, None
        if serving is not None:
            await serving.stop()

    def check_accepting(self) -> None:
        """Raises ApiError (503) where the server is shutting down. Calls that came before go on."""
        if self.is_refusing:
            self.counts.reject("unavailable")
            raise unavailable("draining")

    def check_ready(self) -> RequestCheck:
        """The engine's check of requests. Raises ApiError (503) where it is not ready."""
        status = self._engine.status()
        if not status.is_ready:
            self.counts.reject("unavailable")
            raise unavailable(UNAVAILABLE_CODES[status.state], status.retry_after_s)
        assert status.request_check is not None, "an engine that is ready has been loaded"
        if status.fingerprint is not self._engine_fingerprint:
            self._engine_fingerprint = status.fingerprint
            self._fingerprint = self.text.with_forms(status.fingerprint)
        return status.request_check

    def fingerprint(self) -> Fingerprint | None:
        """That of the engine's answers when a call was last admitted; None before, and where it is
        not known."""
        return self._fingerprint

    @property
    def system_fingerprint(self) -> str | None:
        """The digest in answers."""
        return None if self._fingerprint is None else self._fingerprint.digest

    def check_room(self, limits: EngineLimits) -> None:
        """Raises ApiError (429) where as many requests are open as are allowed."""
        room = limits.max_num_open_reqs
        if not self._engine.load().has_place(room - self._num_preparing):
            self.counts.reject("queue_full")
            raise queue_full(
                message=f"{room} requests are open, the most that --max-num-queued-reqs and "
                f"--max-num-seqs allow; try again when some have finished"
            )

    @contextmanager
    def preparing(self, limits: EngineLimits) -> Generator[None]:
        """Counts a call that is being tokenised. Raises ApiError (429) when there are too many."""
        self.check_room(limits)
        self._num_preparing += 1
        try:
            yield
        finally:
            self._num_preparing -= 1

    def make_job(self, prepared: Sequence[PreparedRequest], add_open: Callable[[int], None]) -> Job:
        """A call's job, of which nothing is submitted yet; `add_open` is that of `Job`."""
        return Job(
            prepared,
            self._submit,
            queue=self._waiting,
            timeout_s=self._engine.timeouts.total_s,
            add_open=add_open,
        )

    @contextmanager
    def submitting(self, job: Job) -> Generator[None]:
        """Submits the job's further prompts in turns with those of other calls."""
        try:
            self._waiting.add(job)
            yield
        finally:
            self._waiting.discard(job)

    def error_of(self, error: CadenzaError) -> ApiError:
        return error_of(error, self.engine_state)

    def _submit(self, prepared: PreparedRequest, on_news: Callable[[], None]) -> OutputStream:
        if self._serving is None:  # the server stopped it while the prompt was tokenised
            raise EngineClosedError(f"{self.name} is stopped")
        return self._serving.submit(prepared, kind="delta", on_news=on_news)

    def _room(self) -> Room:
        limits = self.limits
        assert limits is not None, "prompts wait only where an engine has taken some"
        return Room(limits=limits, load=self._engine.load())

    def _is_restarting(self) -> bool:
        return self._engine.status().state == "restarting"
