"""Spans of calls for an OpenTelemetry collector, under vLLM's names and the GenAI conventions; no
text. Imported only with a collector. Invariants: a call neither waits for a collector nor fails
with it; spans beyond the bounded queue are dropped."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

import cadenza
from cadenza.engine.request_check import CheckedRequest
from cadenza.engine.request_stats import RequestTimes
from cadenza.errors import ConfigError, show
from cadenza.frontend.prepared_request import PreparedRequest
from cadenza.request import Request
from cadenza.server.calls.record import RequestRecord
from cadenza.server.http.exchange import Exchange

logger = logging.getLogger(__name__)

Attributes = dict[str, AttributeValue]

DEFAULT_PATH = "/v1/traces"
CLOSE_S = 2.0  # how long the end of the server waits for the last spans to be sent
MAX_PROMPTS = 16  # of a call with more prompts only the first ones have spans of their own

OPERATIONS = {
    "completions": "text_completion",
    "ollama_generate": "text_completion",
    "embeddings": "embeddings",
    "ollama_embed": "embeddings",
    "ollama_embeddings": "embeddings",
    "rerank": "embeddings",
}
"""By the endpoint; the others chat."""
_CLIENT_ERROR, _SERVER_ERROR = 400, 500
_CONTEXT = TraceContextTextMapPropagator()


def traces_url(endpoint: str) -> str:
    """Where spans are posted. Raises ConfigError."""
    parts = urlsplit(endpoint)
    if parts.scheme == "grpc":
        raise ConfigError(
            f"--otlp-traces-endpoint {show(endpoint)}: spans are sent by OTLP over HTTP, which "
            f"collectors take at port 4318; give http://HOST:4318{DEFAULT_PATH}"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--otlp-traces-endpoint {show(endpoint)} must be a URL such as "
            f"http://HOST:4318{DEFAULT_PATH}"
        )
    return urlunsplit(parts._replace(path=DEFAULT_PATH)) if parts.path in ("", "/") else endpoint


class SpanExport:
    """Sends spans to the collector at `endpoint`, by OTLP over HTTP, on a thread of its own. The
    `OTEL_*` variables of OpenTelemetry's SDK hold: for headers, certificates, compression, the
    sampler, the resource, the queue's size (2,048 spans) and how often it is sent (each 5 s)."""

    def __init__(
        self,
        endpoint: str,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`clock` and `now` as in `ServerOptions`. Raises ConfigError."""
        url = traces_url(endpoint)
        # A collector that is not there is reported once, below, not by each part of the SDK.
        is_debugging = logger.isEnabledFor(logging.DEBUG)
        level = logging.DEBUG if is_debugging else logging.CRITICAL + 1
        logging.getLogger("opentelemetry").setLevel(level)
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        exporter = _ReportingExporter(OTLPSpanExporter(endpoint=url), url)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("cadenza", cadenza.__version__)
        self._clock = clock
        self._now = now

    def begin(self, exchange: Exchange) -> "SpansOfCall":
        """Of a call that has just arrived; a `traceparent` header says of which trace it is."""
        names = ("traceparent", "tracestate")
        found = {name: exchange.header(name.encode()) for name in names}
        carrier = {name: value.decode("latin-1") for name, value in found.items() if value}
        return SpansOfCall(self._tracer, carrier, self._now() - self._clock())

    def close(self) -> None:
        """Sends the last spans, within `CLOSE_S`."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class SpansOfCall:
    """One call's spans; `unix_s` is the time at which the clock of its times was at zero."""

    def __init__(self, tracer: Tracer, carrier: dict[str, str], unix_s: float) -> None:
        self._tracer = tracer
        self._carrier = carrier
        self._unix_s = unix_s
        self._model: str | None = None
        self._requests: list[CheckedRequest] = []

    def take(self, prepared: Sequence[PreparedRequest], model: str) -> None:
        """The call's prompts, whose times the engine fills in."""
        self._model = model
        first = prepared[:MAX_PROMPTS]
        self._requests = [each.checked for each in first if each.checked is not None]

    def end(self, record: RequestRecord) -> None:
        end_s = record.clock()
        root = self._tracer.start_span(
            "llm_request",
            context=_CONTEXT.extract(self._carrier),
            kind=SpanKind.SERVER,
            attributes=self._attributes(record, end_s),
            start_time=self._unix_ns(record.arrived_s),
        )
        if root.is_recording():
            for index, each in enumerate(self._requests):
                self._end_prompt(root, record.arrived_s, each.times, index)
        if record.status >= _SERVER_ERROR:
            root.set_status(StatusCode.ERROR)
        root.end(self._unix_ns(end_s))

    def _end_prompt(self, root: Span, arrived_s: float, times: RequestTimes, index: int) -> None:
        context = set_span_in_context(root)
        for name, start_s, end_s in _phases(arrived_s, times):
            span = self._tracer.start_span(
                name,
                context=context,
                attributes={"cadenza.prompt.index": index},
                start_time=self._unix_ns(start_s),
            )
            for lost_s, resumed_s in times.pauses:
                if start_s <= lost_s < end_s:
                    span.add_event("engine_lost", timestamp=self._unix_ns(lost_s))
                    span.add_event(
                        "engine_resumed",
                        {"cadenza.pause_s": resumed_s - lost_s},
                        self._unix_ns(resumed_s),
                    )
            span.end(self._unix_ns(end_s))

    def _attributes(self, record: RequestRecord, end_s: float) -> Attributes:
        usage = record.usage
        found: Attributes = {
            "gen_ai.operation.name": OPERATIONS.get(record.endpoint, "chat"),
            "gen_ai.provider.name": "cadenza",
            "gen_ai.request.id": record.request_id,
            "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
            "gen_ai.usage.completion_tokens": usage.completion_tokens,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": sum(usage.cached.values()),
            "gen_ai.usage.num_sequences": len(record.ends),
            "gen_ai.response.finish_reasons": sorted(set(record.ends.values())),
            "gen_ai.latency.e2e": end_s - record.arrived_s,
            "http.response.status_code": record.status,
        }
        first_s = record.times().first_s
        if first_s is not None:
            found["gen_ai.latency.time_to_first_token"] = first_s
        if record.status >= _CLIENT_ERROR:
            found["error.type"] = str(record.status)
        if self._model is not None:
            found["gen_ai.request.model"] = found["gen_ai.response.model"] = self._model
        if self._requests:
            found |= _asked(self._requests[0].request)
        if len(self._requests) == 1:
            found |= _latencies(record.arrived_s, self._requests[0].times)
        return found

    def _unix_ns(self, clock_s: float) -> int:
        return round((self._unix_s + clock_s) * 1e9)


def _phases(arrived_s: float, times: RequestTimes) -> Iterator[tuple[str, float, float]]:
    """With start and end. The first lasts until the engine accepts it: reading, tokenising, loading
    a model, waiting for others."""
    if times.accepted_s is None or times.ended_s is None:
        return
    yield "arrival", arrived_s, times.accepted_s
    start_s, end_s = times.accepted_s, times.ended_s
    ends = (("queue", times.started_s), ("prefill", times.first_token_s), ("decode", end_s))
    for name, at_s in ends:
        yield name, start_s, end_s if at_s is None else at_s
        if at_s is None:
            return
        start_s = at_s


def _latencies(arrived_s: float, times: RequestTimes) -> Attributes:
    took = {name: end_s - start_s for name, start_s, end_s in _phases(arrived_s, times)}
    found: Attributes = {
        f"gen_ai.latency.time_in_{name}": took[phase]
        for phase, name in (
            ("queue", "queue"),
            ("prefill", "model_prefill"),
            ("decode", "model_decode"),
        )
        if phase in took
    }
    if "prefill" in took:
        found["gen_ai.latency.time_in_model_inference"] = took["prefill"] + took.get("decode", 0.0)
    return found


def _asked(request: Request) -> Attributes:
    params = request.params
    found: Attributes = {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.n": params.n,
    }
    if params.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = params.max_tokens
    if params.seed is not None:
        found["gen_ai.request.seed"] = str(params.seed)  # of 64 bits without a sign
    return {} if request.pooling is not None else found


def _resource() -> Resource:
    """What sends the spans, as the environment names it, else as cadenza."""
    named: dict[str, AttributeValue] = {"service.version": cadenza.__version__}
    listed = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if not os.environ.get("OTEL_SERVICE_NAME") and "service.name=" not in listed:
        named["service.name"] = "cadenza"
    return Resource.create(named)


class _ReportingExporter(SpanExporter):
    def __init__(self, inner: SpanExporter, url: str) -> None:
        self._inner = inner
        self._url = url
        self._num_lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._num_lost:
                logger.info("spans are sent to %s again; %d were lost", self._url, self._num_lost)
            self._num_lost = 0
            return result
        if not self._num_lost:
            logger.warning(
                "spans cannot be sent to %s; requests go on without (--log-level debug says why)",
                self._url,
            )
        self._num_lost += len(spans)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()
