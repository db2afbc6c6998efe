"""A server on a thread of its own, on a free port of this machine, and raw requests to it."""

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from cadenza.engine.batch_engine import Emit, ServedEngine
from cadenza.engine.core import EngineCore
from cadenza.engine.front import EngineFront, InProcessLink
from cadenza.engine.request_check import CheckedRequest
from cadenza.events import Event
from cadenza.fingerprint import Fingerprint
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.request import Request
from cadenza.server.http.listening import Address, listening
from cadenza.server.lifecycle.handover import ServerSockets
from cadenza.server.lifecycle.run import Lifecycle, run_server
from cadenza.server.model_pool import ModelPool, PoolOptions
from cadenza.server.served_model import ModelNames, ServedModel
from cadenza.server.service import ServerOptions, Service
from tests.server.scripted_engine import ScriptedEngine

TIMEOUT_S = 180.0
MODEL = "scripted"


def options(**changes: Any) -> ServerOptions:
    return ServerOptions(**changes)


@dataclass(slots=True, eq=False)
class HandClock:
    """Seconds that pass when the test lets them."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


class InBackground:
    """A call on a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._found: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._found.append(call()))
        self._thread.start()

    def result(self) -> Any:
        self._thread.join(TIMEOUT_S)
        (found,) = self._found
        return found


def in_background(calls: Iterable[Callable[[], Any]]) -> list[InBackground]:
    return [InBackground(call) for call in calls]


class WatchedService(EngineFront):
    """An engine in this process that waits for company when it is told to: no stream is over before
    all that are to come have come. `most_running`: in one batch since `gather`."""

    def __init__(self, core: EngineCore, fingerprint: Fingerprint | None = None) -> None:
        super().__init__(InProcessLink(core, fingerprint=fingerprint))
        self.most_running = 0
        self._num_missing = 0
        self._all_came = threading.Event()
        self._all_came.set()

    def gather(self, num_requests: int) -> None:
        """Counts anew; the next requests get nothing until so many have come."""
        self.most_running, self._num_missing = 0, num_requests
        self._all_came.clear()

    def submit(self, given: Request | CheckedRequest) -> int:
        request_id = super().submit(given)
        self._num_missing -= 1
        if self._num_missing <= 0:
            self._all_came.set()
        return request_id

    def serve(self, emit: Emit) -> None:
        def watch_and_emit(events: list[Event]) -> None:
            stats = self.stats()
            assert stats is not None
            self.most_running = max(self.most_running, stats.numbers["num_requests_running"])
            assert self._all_came.wait(TIMEOUT_S), f"{self._num_missing} did not come"
            emit(events)

        super().serve(watch_and_emit)


def serving_one(
    engine: ServedEngine,
    text: TextFrontend,
    server_options: ServerOptions | None = None,
    names: tuple[str, ...] = (MODEL,),
) -> Service:
    """Of one model, which stays loaded."""
    model = ServedModel(ModelNames(listed=names), text, lambda _: engine)
    chosen = server_options or options()
    return Service(ModelPool([model], PoolOptions(), chosen.clock), chosen)


@dataclass(slots=True, eq=False)
class RunningServer:
    """Where it is, and its inside for tests that need it."""

    service: Service
    port: int
    loop: asyncio.AbstractEventLoop
    lifecycle: Lifecycle
    thread: threading.Thread
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def engine(self) -> ScriptedEngine:
        """Of a server over one."""
        engine: Any = self.service.models.first.engine
        return engine

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **settings: Any) -> httpx.Client:
        """It speaks plain HTTP: without `verify` it need not read the certificates first."""
        common = {"base_url": self.url, "timeout": TIMEOUT_S, "trust_env": False, "verify": False}
        return httpx.Client(**{**common, **settings})

    def get(self, path: str, **settings: Any) -> httpx.Response:
        with self.client() as client:
            return client.get(path, **settings)

    def post(self, path: str, body: Any = None, **settings: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, **settings)

    def posting(self, path: str, body: Any, **settings: Any) -> InBackground:
        """A post that goes on while the test does."""
        return InBackground(lambda: self.post(path, body, **settings))

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The data of a stream's frames, the last of which must be [DONE]; comments left out."""
        with self.client() as client, client.stream("POST", path, json=body) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            return list(read_events(response.iter_lines()))

    def call(self, function: Any, *arguments: Any) -> None:
        """Calls something on the server's event loop, and waits for it."""
        done = threading.Event()

        def run() -> None:
            function(*arguments)
            done.set()

        self.loop.call_soon_threadsafe(run)
        assert done.wait(TIMEOUT_S)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S)

    def raw(self, request: bytes) -> bytes:
        """What the server sends until it closes; add `connection: close`."""
        with self.connect() as connection:
            with suppress(ConnectionError):  # it may have closed already: what it said is there
                connection.sendall(request)
            return read_to_end(connection)


def wait_until(look: Callable[[], Any], within_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + within_s
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read_metrics(server: RunningServer) -> dict[str, float]:
    """Series to values; every line must be one."""
    found: dict[str, float] = {}
    for line in server.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            matched = re.match(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", line)
            assert matched is not None, line
            found[f"{matched[1]}{{{matched[2] or ''}}}"] = float(matched[3])
    return found


def read_events(lines: Iterator[str]) -> Iterator[Any]:
    for line in lines:
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                yield data
                return
            yield json.loads(data)
        else:
            assert not line or line.startswith(":"), line
    raise AssertionError("the stream ended without [DONE]")


def read_to_end(connection: socket.socket) -> bytes:
    parts: list[bytes] = []
    while True:
        try:
            part = connection.recv(1 << 16)
        except ConnectionResetError:
            part = b""
        if not part:
            return b"".join(parts)
        parts.append(part)


def raw_post(path: str, body: bytes, *headers: str) -> bytes:
    head = [
        f"POST {path} HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *headers,
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


@contextmanager
def running_server(
    engine: ServedEngine,
    text: TextFrontend,
    server_options: ServerOptions | None = None,
    num_sent_bytes: int | None = None,
    names: tuple[str, ...] = (MODEL,),
) -> Generator[RunningServer]:
    """Serves until the block ends; the kernel takes `num_sent_bytes` or so that nobody reads."""
    address = Address(port=0)
    with listening(address) as bound:
        if num_sent_bytes is not None:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_sent_bytes)
        service = serving_one(engine, text, server_options, names)
        with serving_at(service, address, ServerSockets(bound=bound)) as server:
            yield server


@dataclass(frozen=True, slots=True)
class Serve:
    """Starts servers over scripted engines, which end with the test. Fields of `ServerOptions` are
    the server's, others the engine's."""

    script: tuple[int, ...]
    text: TextFrontend
    started: ExitStack

    def __call__(
        self, *, num_sent_bytes: int | None = None, names: tuple[str, ...] = (MODEL,), **fields: Any
    ) -> RunningServer:
        own = {key: fields.pop(key) for key in ServerOptions.__slots__ if key in fields}
        engine = ScriptedEngine(self.script, **fields)
        server = running_server(engine, self.text, options(**own), num_sent_bytes, names)
        return self.started.enter_context(server)


@contextmanager
def serving_at(
    service: Service, address: Address, sockets: ServerSockets
) -> Generator[RunningServer]:
    """Serves until the block ends, or until another server has taken over."""
    started = threading.Event()
    found: list[tuple[asyncio.AbstractEventLoop, Lifecycle]] = []

    def on_start(lifecycle: Lifecycle) -> None:
        lifecycle.listen(sockets)
        found.append((asyncio.get_running_loop(), lifecycle))
        started.set()

    port = 0 if address.uds is not None else sockets.bound.getsockname()[1]
    thread = threading.Thread(target=lambda: asyncio.run(run_server(service, address, on_start)))
    thread.start()
    while not started.wait(0.1):
        assert thread.is_alive(), "the server did not start"
    loop, lifecycle = found[0]
    try:
        yield RunningServer(service, port, loop, lifecycle, thread)
    finally:
        if thread.is_alive():
            with suppress(RuntimeError):  # it may be about to end
                loop.call_soon_threadsafe(lifecycle.drain)
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "the server did not end"
