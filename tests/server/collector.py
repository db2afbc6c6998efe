"""An OpenTelemetry collector on this machine, which keeps the spans that it gets."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

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
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            may_answer.set()
            server.shutdown()
            thread.join()
