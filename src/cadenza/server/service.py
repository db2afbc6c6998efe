"""`Service`: the server's state: models, tenants' use, open calls, and the counts of logs and
metrics."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cadenza.frontend.receipts import ReceiptSeal
from cadenza.media.fetching import AllowedHosts, MediaFetcher
from cadenza.server.access import ApiKeys, Cors, Hosts
from cadenza.server.calls.record import CallTrace
from cadenza.server.errors import connections_full, invalid_value, queue_full, request_not_found
from cadenza.server.fields.body import IgnoredNames, UnknownFields
from cadenza.server.http.exchange import Exchange
from cadenza.server.http.listening import Connections, max_connections
from cadenza.server.limits import BodyBudget, CallImages, ServerLimits, TextWork
from cadenza.server.metrics import Metrics
from cadenza.server.model_pool import ModelPool
from cadenza.server.response_store import ResponseStore, StoreBounds
from cadenza.server.served_model import OpenCall
from cadenza.server.tenants import TenantFile, Tenants


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """A server's options."""

    limits: ServerLimits = field(default_factory=ServerLimits)
    keys: ApiKeys = field(default_factory=ApiKeys)
    tenants: TenantFile = field(default_factory=TenantFile)
    # good for the metrics alone; without one they need what all else does
    metrics_keys: ApiKeys = field(default_factory=ApiKeys)
    metrics_port: int | None = None  # of this machine: only the metrics and probes
    cors: Cors = field(default_factory=Cors)
    hosts: Hosts = field(default_factory=Hosts)
    has_ui: bool = True
    # of images at remote URLs
    fetcher: MediaFetcher = field(default_factory=lambda: MediaFetcher(AllowedHosts(())))
    stored_responses: StoreBounds = field(default_factory=StoreBounds)
    unknown_fields: UnknownFields = "suggest"
    is_logging_requests: bool = True
    begin_trace: Callable[[Exchange], CallTrace] | None = None  # of a call that has just arrived
    num_dropped_log_lines: Callable[[], int] = lambda: 0
    clock: Callable[[], float] = time.monotonic  # seconds, monotonic
    now: Callable[[], float] = time.time  # seconds since 1970


class Service:
    """Serves models, on one event loop."""

    def __init__(self, models: ModelPool, options: ServerOptions) -> None:
        self.options = options
        self.models = models
        sees = any(model.text.prompts.takes_images for model in models.models)
        self.limits = options.limits.for_images() if sees else options.limits
        self.work = TextWork()
        self.counts = models.first.counts
        """Also of what belongs to no model, or is refused before its model is known."""
        self.tenants = Tenants(options.tenants, self.counts, options.clock)
        self.bodies = BodyBudget(
            options.limits.max_bodies_bytes, lambda: self.counts.reject("bodies_full")
        )
        self.images = CallImages(options.fetcher, self.bodies)
        max_open = options.limits.max_connections or max_connections()
        self.connections = Connections(max_open, self.counts, options.clock)
        self.metrics = Metrics(
            models.models, self.counts, options.num_dropped_log_lines, models.switches
        )
        self.created = int(options.now())
        self.ignored_names = IgnoredNames()
        self.seal = ReceiptSeal()
        self.responses = ResponseStore(options.stored_responses, options.clock)
        self._open: dict[str, OpenCall] = {}
        self._num_tokenizing = 0
        self._is_draining = False

    def start(self) -> None:
        self.models.start()

    async def stop(self) -> None:
        self.drain()
        self.work.close()
        await self.images.close()
        await self.models.stop()

    def drain(self) -> None:
        self._is_draining = True
        self.models.drain()
        self.end_watching()

    def end_watching(self) -> None:
        """Ends the streams of all who watch a batch."""
        for model in self.models.models:
            model.live.close()

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def num_open(self) -> int:
        return self.models.num_calls + self._num_tokenizing

    def check_connections(self) -> None:
        """Raises ApiError (429) where only the connections reserved for probes are left."""
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

    @contextmanager
    def opened(self, request_id: str, call: OpenCall) -> Generator[None]:
        """Registers a call under its id, under which it can be ended."""
        self._open[request_id] = call
        try:
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
        if found is None or found.use.tenant.name != tenant:
            raise request_not_found()
        found.abort()
