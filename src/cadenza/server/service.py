"""`Service`: the server's state, and admission of calls.

Owns the engine, the text front end, open calls, and the counts behind logs and metrics. Knows no
HTTP. Invariant: a call is admitted, or refused with an `ApiError`, before anything is tokenised.
"""

import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Protocol

from cadenza.config import EngineLimits
from cadenza.engine.batch_engine import BatchEngine
from cadenza.engine.request_check import RequestCheck
from cadenza.engine.status import EngineMonitor, EngineState
from cadenza.errors import CadenzaError, ContextLengthError, TextTooLongError
from cadenza.fingerprint import Fingerprint
from cadenza.frontend.async_engine import AsyncEngine, OutputStream
from cadenza.frontend.receipts import with_receipt
from cadenza.frontend.text_frontend import PreparedRequest, TextFrontend
from cadenza.server.access import ApiKeys, Cors
from cadenza.server.connections import Connections, most_connections
from cadenza.server.endpoints.generating import CallRequest
from cadenza.server.errors import (
    UNAVAILABLE_CODES,
    ApiError,
    connections_full,
    error_of,
    invalid_value,
    model_not_found,
    queue_full,
    request_not_found,
    unavailable,
)
from cadenza.server.ignored_names import IgnoredNames
from cadenza.server.job import Job, PromptQueue, Room
from cadenza.server.limits import BodyBudget, ServerLimits, TextWork
from cadenza.server.metrics import Metrics, ServedCounts
from cadenza.server.request_log import RequestRecord
from cadenza.server.response_store import ResponseStore, StoreBounds
from cadenza.server.schemas.unknown_members import UnknownFields
from cadenza.server.tenants import TenantFile, Tenants
from cadenza.tenant import ONE_TENANT

DEFAULT_TAG = ":latest"
"""Of a model's name without a tag, to Ollama's clients."""


class ServedEngine(BatchEngine, EngineMonitor, Protocol):
    """What a server needs of an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """A server's options.

    Args:
        model_names: the model's names; answers have the first one.
        model_aliases: further names that requests may use, which are not listed.
        metrics_keys: with which only the metrics can be read; without one, as everything else.
        metrics_port: of this machine, at which there are only the metrics and probes.
        num_dropped_log_lines: counts them, for the metrics.
        clock: seconds, monotonic.
        now: seconds since 1970.
    """

    model_names: tuple[str, ...]
    model_aliases: tuple[str, ...] = ()
    limits: ServerLimits = field(default_factory=ServerLimits)
    keys: ApiKeys = field(default_factory=ApiKeys)
    tenants: TenantFile = field(default_factory=TenantFile)
    metrics_keys: ApiKeys = field(default_factory=ApiKeys)
    metrics_port: int | None = None
    cors: Cors = field(default_factory=Cors)
    stored_responses: StoreBounds = field(default_factory=StoreBounds)
    unknown_fields: UnknownFields = "suggest"
    is_logging_requests: bool = True
    num_dropped_log_lines: Callable[[], int] = lambda: 0
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call in progress, and its tenant."""

    tenant: str
    job: Job


class Service:
    """Serves one model, on one event loop."""

    def __init__(self, engine: ServedEngine, text: TextFrontend, options: ServerOptions) -> None:
        self.options = options
        self.monitor: EngineMonitor = engine
        self.text = text
        self.work = TextWork()
        self.counts = ServedCounts()
        self.tenants = Tenants(options.tenants, self.counts)
        self.bodies = BodyBudget(
            options.limits.max_bodies_bytes, lambda: self.counts.reject("bodies_full")
        )
        max_connections = options.limits.max_connections or most_connections()
        self.connections = Connections(max_connections, self.counts, options.clock)
        self.metrics = Metrics(
            options.model_names[0], self.counts, engine, options.num_dropped_log_lines
        )
        self.created = int(options.now())
        self.ignored_names = IgnoredNames()
        self.responses = ResponseStore(options.stored_responses, options.clock)
        self._engine_fingerprint: Fingerprint | None = None
        self._fingerprint: Fingerprint | None = None
        self._engine = AsyncEngine(engine, text, self.fingerprint)
        self._open: dict[str, OpenCall] = {}
        self._waiting = PromptQueue(self._room, self._error_of, self._is_restarting)
        self._request_timeout_s = engine.timeouts.total_s
        self._num_preparing = 0
        self._num_tokenizing = 0
        self._is_draining = False

    def start(self) -> None:
        """Binds to the running event loop."""
        self._engine.start()

    async def stop(self) -> None:
        """Ends the open calls, each with an error."""
        self._is_draining = True
        self.work.close()
        self._waiting.fail_all(unavailable("draining"))
        await self._engine.stop()

    def drain(self) -> None:
        """Refuses new calls from now on; open calls continue."""
        self._is_draining = True

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def engine_state(self) -> EngineState:
        """For errors: once new calls are refused, the engine is not to be blamed for its end."""
        return "draining" if self._is_draining else self.monitor.status().state

    @property
    def num_open(self) -> int:
        return len(self._open) + self._num_preparing + self._num_tokenizing

    def check_connections(self) -> None:
        """Raises ApiError (429) where the last file descriptors are reserved for probes."""
        if self.connections.is_crowded:
            self.connections.refuse()
            raise connections_full()

    def check_ready(self) -> RequestCheck:
        """The engine's check of requests. Raises ApiError (503) where it is not ready."""
        status = self.monitor.status()
        if self._is_draining:
            self.counts.reject("unavailable")
            raise unavailable("draining")
        if not status.is_ready:
            self.counts.reject("unavailable")
            raise unavailable(UNAVAILABLE_CODES[status.state], status.retry_after_s)
        assert status.request_check is not None, "an engine that is ready has been loaded"
        if status.fingerprint is not self._engine_fingerprint:
            self._engine_fingerprint = status.fingerprint
            self._fingerprint = self.text.with_forms(status.fingerprint)
        return status.request_check

    def check_model(self, model: str | None) -> str:
        """The model's name in the answer. Raises ApiError (404)."""
        names = self.model_names
        if model is None:
            return names[0]
        known = {*names, *self.options.model_aliases}
        if known.isdisjoint({model, model.removesuffix(DEFAULT_TAG), model + DEFAULT_TAG}):
            raise model_not_found(model, names)
        return model

    @property
    def system_fingerprint(self) -> str | None:
        """The digest in answers."""
        found = self.fingerprint()
        return None if found is None else found.digest

    def fingerprint(self) -> Fingerprint | None:
        """That of the engine's answers when a call was last admitted; None before, and where it is
        not known."""
        return self._fingerprint

    @property
    def model_names(self) -> tuple[str, ...]:
        """Those that are listed."""
        return self.options.model_names

    def engine_limits(self) -> EngineLimits | None:
        """None until the engine has been loaded once."""
        check = self.monitor.status().request_check
        return None if check is None else check.limits

    def check_room(self, limits: EngineLimits) -> None:
        """Raises ApiError (429) where as many requests are open as are allowed."""
        room = limits.max_num_open_reqs
        if not self.monitor.load().has_place(room - self._num_preparing):
            self.counts.reject("queue_full")
            raise queue_full(
                f"{room} requests are open, the most that --max-num-queued-reqs and "
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

    @contextmanager
    def tokenizing(self) -> Generator[None]:
        """Counts a call that only tokenises or detokenises. Raises ApiError (429)."""
        limits = self.engine_limits()
        room = 1 if limits is None else limits.max_num_open_reqs
        if self._num_tokenizing >= room:
            self.counts.reject("queue_full")
            raise queue_full(
                f"{room} calls that tokenize or detokenize are open, the most that "
                f"--max-num-queued-reqs and --max-num-seqs allow; try again when some have finished"
            )
        self._num_tokenizing += 1
        try:
            yield
        finally:
            self._num_tokenizing -= 1

    def prepare(self, call: CallRequest, tenant: str, check: RequestCheck) -> list[PreparedRequest]:
        """Makes a checked request of each of the call's prompts. Slow; safe on any thread.

        Raises InvalidRequestError.
        """
        if call.wants_receipt and self.fingerprint() is None:
            raise invalid_value("receipt needs an engine whose fingerprint is known", "receipt")
        call.check_size(check.hidden_size)
        params = call.sampling(self.text)
        most = None
        if params.truncate_prompt_tokens is None:
            most = check.limits.max_model_len - (params.max_tokens != 0)
        try:
            prepared = call.prepare(self.text, params, most)
        except TextTooLongError as error:
            raise ContextLengthError(
                prompt_length=error.length,
                max_tokens=params.max_tokens,
                max_model_len=check.limits.max_model_len,
                is_prompt_alone=True,
            ) from None
        salt = self._salt(tenant, call.cache_salt or "")
        served = self.tenants.tenant(tenant)
        found: list[PreparedRequest] = []
        for each in prepared:
            asked = with_receipt(each) if call.wants_receipt else each
            request = asked.request
            if salt or call.priority or served != ONE_TENANT:
                priority = call.priority or 0
                request = replace(request, cache_salt=salt, priority=priority, tenant=served)
            check.check(request)
            parser = call.make_parser or each.make_parser
            found.append(replace(asked, request=request, make_parser=parser, passed=check))
        return found

    def calling(self, tenant: str, limits: EngineLimits) -> AbstractContextManager[None]:
        """Counts a tenant's open call. Raises ApiError (429) where its limits allow no more."""
        return self.tenants.calling(tenant, limits.max_num_open_reqs, self.options.clock())

    def take_answer(self, tenant: str, num_tokens: int) -> None:
        """A call of the tenant has ended; its answer had so many tokens."""
        self.tenants.take_answer(tenant, num_tokens, self.options.clock())

    def submit(self, prepared: list[PreparedRequest], tenant: str, record: RequestRecord) -> Job:
        """Submits the first prompt; `opened` submits the others. Raises ApiError."""
        counts = [len(each.request.prompt_token_ids) for each in prepared]
        now_s = self.options.clock()
        self.tenants.check_rates(tenant, sum(counts), now_s)
        job = Job(
            prepared,
            self._submit_one,
            queue=self._waiting,
            timeout_s=self._request_timeout_s,
            add_open=partial(self.tenants.add_open, tenant),
        )
        try:
            job.submit_next()
        except CadenzaError as error:
            raise self._error_of(error) from error
        self.tenants.take(tenant, sum(counts), now_s)
        record.start(counts, prepared[0].request.params.n)
        return job

    @contextmanager
    def opened(self, request_id: str, tenant: str, job: Job) -> Generator[None]:
        """Registers the call under its id, and submits its further prompts in turns."""
        self._open[request_id] = OpenCall(tenant, job)
        try:
            self._waiting.add(job)
            yield
        finally:
            del self._open[request_id]
            self._waiting.discard(job)

    def _submit_one(self, prepared: PreparedRequest, on_news: Callable[[], None]) -> OutputStream:
        return self._engine.submit(prepared, kind="delta", on_news=on_news)

    def _room(self) -> Room:
        limits = self.engine_limits()
        assert limits is not None, "prompts wait only where an engine has taken some"
        return Room(limits=limits, load=self.monitor.load())

    def _is_restarting(self) -> bool:
        return self.monitor.status().state == "restarting"

    def _error_of(self, error: CadenzaError) -> ApiError:
        return error_of(error, self.engine_state)

    def check_id(self, request_id: str) -> None:
        """Raises ApiError (400) where another call has this id."""
        if request_id in self._open:
            raise invalid_value(
                f"request_id {request_id} is that of a request still open; choose another",
                "request_id",
            )

    def has_open(self, request_id: str) -> bool:
        return request_id in self._open

    def abort(self, request_id: str, tenant: str) -> None:
        """Ends a tenant's own call. Raises ApiError (404)."""
        found = self._open.get(request_id)
        if found is None or found.tenant != tenant:
            raise request_not_found()
        found.job.abort()

    def _salt(self, tenant: str, cache_salt: str) -> str:
        """Tenants and salts share no cached prefix: no call can bring about another tenant's salt.

        It is the same after a restart, as are pages that were stored.
        """
        if not tenant and not cache_salt:
            return ""
        text = f"{tenant}\0{cache_salt}".encode()
        return blake2b(text, digest_size=16).hexdigest()
