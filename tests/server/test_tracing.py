"""Spans of requests: what a collector gets, of which trace they are, and that neither a collector
that is not there nor an engine that is lost changes an answer."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from cadenza.errors import ConfigError
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.server.calls.record import RequestRecord
from cadenza.server.metrics import ServedCounts
from cadenza.server.operations.tracing import (
    SpanExport,
    SpansOfCall,
    _ReportingExporter,
    traces_url,
)
from tests.ports import kept_port
from tests.server.harness import RunningServer, options, running_server
from tests.server.scripted_engine import ScriptedEngine
from tests.server.serve_process import serve_process

WAIT_S = 60.0


@dataclass(slots=True, eq=False)
class Collector:
    """`requests` are bodies as they came; while it is paused none is answered."""

    url: str
    may_answer: threading.Event
    requests: list[bytes] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def spans(self) -> list[Any]:
        found: list[Any] = []
        for each in self.requests:
            for resource in ExportTraceServiceRequest.FromString(each).resource_spans:
                for scope in resource.scope_spans:
                    found += scope.spans
        return found

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans() if span.name == name]


def attributes(span: Any) -> dict[str, Any]:
    """Their plain values; of a list its items."""
    return {each.key: _value(each.value) for each in span.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def collecting() -> Generator[Collector]:
    may_answer = threading.Event()
    may_answer.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            may_answer.wait(WAIT_S)
            collector.paths.append(self.path)
            collector.requests.append(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}", may_answer)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield collector
        finally:
            may_answer.set()
            server.shutdown()
            thread.join()


BODY = {"prompt": "marzipan marzipan", "max_tokens": 3, "temperature": 0.5, "top_p": 0.25}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"
PHASES = ["arrival", "queue", "prefill", "decode"]


@contextmanager
def traced(engine: ScriptedEngine, text: TextFrontend, url: str) -> Generator[RunningServer]:
    """A server whose spans have been sent when the block ends."""
    export = SpanExport(url)
    try:
        with running_server(engine, text, options(begin_trace=export.begin)) as server:
            yield server
    finally:
        export.close()


def post(collector: Collector, engine: ScriptedEngine, text: TextFrontend, **asked: Any) -> Any:
    """The answer to `BODY`, when its spans are there."""
    with traced(engine, text, collector.url) as server:
        return server.post("/v1/completions", {**BODY, **asked.pop("body", {})}, **asked)


def test_a_request_has_a_span_with_vllms_attributes_and_one_for_each_phase(
    engine: ScriptedEngine, text: TextFrontend
) -> None:
    before_ns = time.time_ns()
    with collecting() as collector:
        answer = post(collector, engine, text, body={"request_id": "mine"}).json()
        assert collector.paths == ["/v1/traces"]
        assert b"marzipan" not in collector.requests[0]
        (root,) = collector.named("llm_request")
        phases = [span for span in collector.spans() if span.name != "llm_request"]
    found = attributes(root)
    latencies = {name: found.pop(name) for name in [*found] if ".latency." in name}
    num_tokens = answer["usage"]["prompt_tokens"]
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "cadenza",
        "gen_ai.request.id": "mine",
        "gen_ai.request.model": "scripted",
        "gen_ai.response.model": "scripted",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.usage.prompt_tokens": num_tokens,
        "gen_ai.usage.completion_tokens": 3,
        "gen_ai.usage.input_tokens": num_tokens,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.response.finish_reasons": ["length"],
        "http.response.status_code": 200,
    }
    assert set(latencies) == {
        f"gen_ai.latency.{name}"
        for name in (
            *("e2e", "time_to_first_token", "time_in_queue", "time_in_model_prefill"),
            *("time_in_model_decode", "time_in_model_inference"),
        )
    }
    assert min(latencies.values()) >= 0.0
    assert latencies["gen_ai.latency.e2e"] == max(latencies.values())
    assert [span.name for span in phases] == PHASES
    assert {span.parent_span_id for span in phases} == {root.span_id}
    assert {span.trace_id for span in phases} == {root.trace_id}
    times = [root.start_time_unix_nano, *(span.end_time_unix_nano for span in phases)]
    assert times == sorted(times)
    assert [span.start_time_unix_nano for span in phases] == times[:-1]
    assert before_ns <= times[0] + 1_000_000  # the two clocks are read one after the other
    assert times[-1] <= root.end_time_unix_nano <= time.time_ns() + 1_000_000


def test_each_prompt_of_a_call_has_phases(engine: ScriptedEngine, text: TextFrontend) -> None:
    with collecting() as collector:
        post(collector, engine, text, body={"prompt": ["a", "b"]})
        (root,) = collector.named("llm_request")
        indices = [attributes(each)["cadenza.prompt.index"] for each in collector.named("prefill")]
    assert indices == [0, 1]
    assert "gen_ai.latency.time_in_queue" not in attributes(root)
    assert attributes(root)["gen_ai.usage.num_sequences"] == 2


def test_a_traceparent_makes_the_request_a_part_of_its_trace(
    engine: ScriptedEngine, text: TextFrontend
) -> None:
    with collecting() as collector:
        headers = {"traceparent": f"{PARENT}-01", "tracestate": "vendor=1"}
        post(collector, engine, text, headers=headers)
        (root,) = collector.named("llm_request")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == tuple(PARENT.split("-")[1:])
    assert root.trace_state == "vendor=1"


@pytest.mark.parametrize(
    ("header", "num_spans"), [(f"{PARENT}-00", 0), ("00-nonsense", 5), ("\x80", 5)]
)
def test_a_trace_that_is_not_sampled_has_no_spans_and_nonsense_is_no_parent(
    engine: ScriptedEngine, text: TextFrontend, header: str, num_spans: int
) -> None:
    with collecting() as collector:
        raw = header.encode("latin-1")
        assert post(collector, engine, text, headers={"traceparent": raw}).status_code == 200
        assert len(collector.spans()) == num_spans
        assert all(not span.parent_span_id for span in collector.named("llm_request"))


def test_a_request_that_never_starts_has_no_further_phases(
    engine: ScriptedEngine, text: TextFrontend
) -> None:
    engine.pause()
    with collecting() as collector:
        with traced(engine, text, collector.url) as server:
            asked = server.posting("/v1/completions", {**BODY, "request_id": "mine"})
            while not engine.num_open:
                server.get("/live")
            server.post("/v1/requests/mine/cancel")
            assert asked.result().json()["choices"][0]["finish_reason"] == "abort"
        names = [span.name for span in collector.spans()]
        (root,) = collector.named("llm_request")
    assert names == ["arrival", "queue", "llm_request"]
    assert attributes(root)["gen_ai.response.finish_reasons"] == ["abort"]


@pytest.mark.parametrize(("failing", "status", "code"), [(False, 404, 0), (True, 500, 2)])
def test_a_request_that_fails_has_the_status_and_only_a_servers_fault_is_an_error(
    engine: ScriptedEngine, text: TextFrontend, failing: bool, status: int, code: int
) -> None:
    engine.failing = "step_failed" if failing else None
    with collecting() as collector:
        answer = post(collector, engine, text, body={} if failing else {"model": "other"})
        (root,) = collector.named("llm_request")
    assert answer.status_code == status
    found = attributes(root)
    assert (found["http.response.status_code"], found["error.type"]) == (status, str(status))
    assert root.status.code == code


def test_a_collector_that_refuses_changes_no_answer(
    engine: ScriptedEngine, text: TextFrontend, scripted: RunningServer
) -> None:
    with kept_port() as port, traced(engine, text, f"http://127.0.0.1:{port}") as server:
        said = [server.post("/v1/completions", BODY).json() for _ in range(4)]
    expected = scripted.post("/v1/completions", BODY).json()
    assert [each["choices"] for each in said] == [expected["choices"]] * 4


class FlakyExporter(SpanExporter):
    """Each export ends with the next result."""

    def __init__(self, results: Sequence[SpanExportResult]) -> None:
        self._results = iter(results)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return next(self._results)

    def shutdown(self) -> None:
        pass


def test_a_collector_that_is_away_is_logged_once_and_so_is_its_return(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lost, sent = SpanExportResult.FAILURE, SpanExportResult.SUCCESS
    results = [sent, lost, lost, lost, sent, sent]
    exporter = _ReportingExporter(FlakyExporter(results), "http://host/v1/traces")
    span = TracerProvider().get_tracer("test").start_span("a")
    with caplog.at_level(logging.INFO, "cadenza.server.operations.tracing"):
        assert [exporter.export([span, span]) for _ in results] == results
    assert [record.getMessage() for record in caplog.records] == [
        "spans cannot be sent to http://host/v1/traces; requests go on without (--log-level debug "
        "says why)",
        "spans are sent to http://host/v1/traces again; 6 were lost",
    ]


def test_a_collector_that_does_not_answer_holds_no_more_than_the_queue() -> None:
    with collecting() as collector:
        collector.may_answer.clear()
        export = SpanExport(collector.url)
        for _ in range(4000):
            record = RequestRecord(
                request_id="a",
                endpoint="chat",
                counts=ServedCounts(),
                clock=time.monotonic,
                is_logged=False,
                trace=SpansOfCall(export._tracer, {}, 0.0),
            )
            record.end("error")
        collector.may_answer.set()
        export.close()
        assert 512 <= len(collector.named("llm_request")) <= 2048 + 512


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://host:4318", "http://host:4318/v1/traces"),
        ("https://host/", "https://host/v1/traces"),
        ("http://host:4318/own", "http://host:4318/own"),
    ],
)
def test_an_address_without_a_path_gets_that_of_the_protocol(given: str, url: str) -> None:
    assert traces_url(given) == url


@pytest.mark.parametrize("given", ["grpc://host:4317", "host:4318", "http://", "ftp://host"])
def test_another_address_is_refused_with_one_that_works(given: str) -> None:
    with pytest.raises(ConfigError, match="http://HOST:4318/v1/traces"):
        traces_url(given)


def test_opentelemetry_is_imported_only_where_spans_are_asked_for() -> None:
    code = "import sys, cadenza.cli.serve, cadenza.server.lifecycle.run, cadenza.server.generation"
    said = subprocess.run(
        [sys.executable, "-c", f"{code}; print('opentelemetry' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == "False\n"


@pytest.mark.slow
def test_a_stream_that_outlives_its_engine_has_whole_spans_with_the_pause() -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}
    flags = ("--max-num-seqs", "2", "--max-model-len", "512")
    with collecting() as collector:
        endpoint = ("--otlp-traces-endpoint", collector.url)
        with serve_process(*flags, *endpoint, OTEL_SERVICE_NAME="mine") as server:
            server.wait_ready()
            with server.streaming(body) as lines:
                next(lines)
                os.kill(server.engine_pid(), signal.SIGKILL)
                assert [*lines][-1] == "data: [DONE]"
            server.terminate()
            assert server.wait() == 0
        assert b"mine" in collector.requests[0]
        (root,), (decode,) = collector.named("llm_request"), collector.named("decode")
        assert [span.name for span in collector.spans()] == [*PHASES, "llm_request"]
    assert attributes(root)["gen_ai.usage.completion_tokens"] == 400
    lost, resumed = decode.events
    assert (lost.name, resumed.name) == ("engine_lost", "engine_resumed")
    pause_s = attributes(resumed)["cadenza.pause_s"]
    assert pause_s == pytest.approx((resumed.time_unix_nano - lost.time_unix_nano) / 1e9, abs=1e-3)
    assert decode.start_time_unix_nano <= lost.time_unix_nano < resumed.time_unix_nano
    assert resumed.time_unix_nano <= decode.end_time_unix_nano
