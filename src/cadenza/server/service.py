"""`Service`: the server's state, and admission of calls.

Owns the models, the tenants' use of them, open calls, and the counts behind logs and metrics. Knows
no HTTP. Invariant: a call is admitted, or refused with an `ApiError`, before anything is tokenised.
"""

import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b

from cadenza.engine.request_check import RequestCheck
from cadenza.errors import CadenzaError, ContextLengthError, TextTooLongError
from cadenza.frontend.receipts import with_receipt
from cadenza.frontend.text_frontend import PreparedRequest
from cadenza.server.access import ApiKeys, Cors
from cadenza.server.connections import Connections, most_connections
from cadenza.server.endpoints.generating import CallRequest
from cadenza.server.errors import connections_full, invalid_value, queue_full, request_not_found
from cadenza.server.ignored_names import IgnoredNames
from cadenza.server.job import Job
from cadenza.server.limits import BodyBudget, ServerLimits, TextWork
from cadenza.server.metrics import Metrics
from cadenza.server.model_pool import ModelPool
from cadenza.server.request_log import RequestRecord
from cadenza.server.response_store import ResponseStore, StoreBounds
from cadenza.server.schemas.unknown_members import UnknownFields
from cadenza.server.served_model import ServedModel
from cadenza.server.tenants import TenantFile, Tenants
from cadenza.tenant import ONE_TENANT


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """A server's options.

    Args:
        metrics_keys: with which only the metrics can be read; without one, as everything else.
        metrics_port: of this machine, at which there are only the metrics and probes.
        num_dropped_log_lines: counts them, for the metrics.
        clock: seconds, monotonic.
        now: seconds since 1970.
    """

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
    """Serves models, on one event loop."""

    def __init__(self, models: ModelPool, options: ServerOptions) -> None:
        self.options = options
        self.models = models
        self.work = TextWork()
        self.counts = models.first.counts
        """Also of what belongs to no model, or is refused before its model is known."""
        self.tenants = Tenants(options.tenants, self.counts)
        self.bodies = BodyBudget(
            options.limits.max_bodies_bytes, lambda: self.counts.reject("bodies_full")
        )
        max_connections = options.limits.max_connections or most_connections()
        self.connections = Connections(max_connections, self.counts, options.clock)
        self.metrics = Metrics(
            models.models,
            self.counts,
            options.num_dropped_log_lines,
            models.loads_of if models.switches else None,
        )
        self.created = int(options.now())
        self.ignored_names = IgnoredNames()
        self.responses = ResponseStore(options.stored_responses, options.clock)
        self._open: dict[str, OpenCall] = {}
        self._num_tokenizing = 0
        self._is_draining = False

    def start(self) -> None:
        """Binds to the running event loop."""
        self.models.start()

    async def stop(self) -> None:
        """Ends the open calls, each with an error."""
        self.drain()
        self.work.close()
        await self.models.stop()

    def drain(self) -> None:
        """Refuses new calls from now on; open calls continue."""
        self._is_draining = True
        self.models.drain()

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def num_open(self) -> int:
        return self.models.num_calls + self._num_tokenizing

    def check_connections(self) -> None:
        """Raises ApiError (429) where the last file descriptors are reserved for probes."""
        if self.connections.is_crowded:
            self.connections.refuse()
            raise connections_full()

    @contextmanager
    def tokenizing(self) -> Generator[None]:
        """Counts a call that only tokenises or detokenises. Raises ApiError (429)."""
        limits = self.models.first.limits
        room = 1 if limits is None else limits.max_num_open_reqs
        if self._num_tokenizing >= room:
            self.counts.reject("queue_full")
            raise queue_full(
                message=f"{room} calls that tokenize or detokenize are open, the most that "
                f"--max-num-queued-reqs and --max-num-seqs allow; try again when some have finished"
            )
        self._num_tokenizing += 1
        try:
            yield
        finally:
            self._num_tokenizing -= 1

    def prepare(
        self, call: CallRequest, model: ServedModel, tenant: str, check: RequestCheck
    ) -> list[PreparedRequest]:
        """Makes a checked request of each of the call's prompts. Slow; safe on any thread.

        Raises InvalidRequestError.
        """
        if call.wants_receipt and model.fingerprint() is None:
            raise invalid_value("receipt needs an engine whose fingerprint is known", "receipt")
        call.check_size(check.hidden_size)
        params = call.sampling(model.text)
        most = None
        if params.truncate_prompt_tokens is None:
            most = check.limits.max_model_len - (params.max_tokens != 0)
        try:
            prepared = call.prepare(model.text, params, most)
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

    def calling(self, tenant: str, num_places: int) -> AbstractContextManager[None]:
        """Counts a tenant's open call, of `num_places` in all. Raises ApiError (429) where the
        tenant's limits allow no more."""
        return self.tenants.calling(tenant, num_places, self.options.clock())

    def take_answer(self, tenant: str, num_tokens: int) -> None:
        """A call of the tenant has ended; its answer had so many tokens."""
        self.tenants.take_answer(tenant, num_tokens, self.options.clock())

    def submit(
        self,
        prepared: list[PreparedRequest],
        model: ServedModel,
        tenant: str,
        record: RequestRecord,
    ) -> Job:
        """Submits the first prompt; `opened` submits the others. Raises ApiError."""
        counts = [len(each.request.prompt_token_ids) for each in prepared]
        now_s = self.options.clock()
        self.tenants.check_rates(tenant, sum(counts), now_s)
        job = model.make_job(prepared, partial(self.tenants.add_open, tenant))
        try:
            job.submit_next()
        except CadenzaError as error:
            raise model.error_of(error) from error
        self.tenants.take(tenant, sum(counts), now_s)
        record.start(counts, prepared[0].request.params.n)
        return job

    @contextmanager
    def opened(self, request_id: str, model: ServedModel, tenant: str, job: Job) -> Generator[None]:
        """Registers the call under its id, and submits its further prompts in turns."""
        self._open[request_id] = OpenCall(tenant, job)
        try:
            with model.submitting(job):
                yield
        finally:
            del self._open[request_id]

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
