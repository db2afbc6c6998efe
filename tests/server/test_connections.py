"""More connections than file descriptors: who gives way, who is refused, who is still served."""

import asyncio
import errno
import json
import os
import signal
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack

import pytest

from cadenza.frontend.text_frontend import TextFrontend
from cadenza.server.http import listening as module
from cadenza.server.http.listening import (
    WARN_EVERY_S,
    Acceptor,
    Address,
    Connections,
    listening,
    max_connections,
)
from cadenza.server.lifecycle.run import KEEP_ALIVE_S
from cadenza.server.limits import ServerLimits
from cadenza.server.metrics import ServedCounts
from tests.server.harness import (
    TIMEOUT_S,
    HandClock,
    RunningServer,
    Serve,
    options,
    raw_post,
    read_metrics,
    read_to_end,
    running_server,
    wait_until,
)
from tests.server.scripted_engine import ScriptedEngine
from tests.server.serve_process import ServeProcess, serve_process
from tests.server.test_serve_command import CERTIFICATE, FLAGS


def told(caplog: pytest.LogCaptureFixture) -> int:
    return caplog.text.count("that the limit of open files allows")


# --- the books ------------------------------------------------------------------------------------


def books(max_open: int) -> tuple[Connections, list[str], Callable[[str], None]]:
    """Connections by name, those that were closed for others, and what opens one."""
    kept, closed = Connections(max_open, ServedCounts(), HandClock()), list[str]()
    return kept, closed, lambda name: kept.add(name, lambda: closed.append(name))


def test_the_one_that_has_been_idle_longest_gives_way() -> None:
    kept, closed, enter = books(4)
    for name in "abcd":
        enter(name)
    kept.mark_busy("a")
    kept.mark_busy("b")
    kept.mark_idle("b", lambda: closed.append("b"))  # idle again, and now the last of those
    for name in "efg":
        enter(name)
    assert closed == ["c", "d", "b"]
    assert (kept.num_open, kept.can_accept) == (4, True)
    kept.remove("a")
    enter("h")
    assert closed == ["c", "d", "b"]


def test_while_all_are_busy_none_gives_way_and_none_is_accepted() -> None:
    kept, closed, enter = books(4)
    for name in "abcd":
        enter(name)
        kept.mark_busy(name)
    assert not kept.can_accept
    kept.remove("b")
    assert kept.can_accept
    assert not closed


def test_a_share_is_kept_for_probes() -> None:
    kept, _, enter = books(40)
    found = list[bool]()
    for number in range(40):
        enter(str(number))
        kept.mark_busy(str(number))
        found.append(kept.is_crowded)
    assert found == [False] * 30 + [True] * 10


def test_what_happens_is_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = HandClock()
    kept = Connections(1, ServedCounts(), clock)
    for number in range(1000):
        kept.add(number, lambda: None)
        clock.now_s += WARN_EVERY_S / 400
    assert told(caplog) == 3
    assert "(so far 801 closed" in caplog.text


def test_there_is_room_below_any_limit_of_open_files() -> None:
    assert module.room_within(1024) == 1024 - 64
    assert module.room_within(256) == 192
    assert module.room_within(100) == 50
    assert module.room_within(1) == 1
    assert max_connections() >= 1


# --- accepting ------------------------------------------------------------------------------------


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class Exhausted(socket.socket):
    """A listening socket for whose connections there are no descriptors, so many times."""

    num_failures = 0

    def accept(self) -> tuple[socket.socket, object]:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def accepting(
    play: Callable[[Connections, Exhausted], Awaitable[None]],
    max_open: int,
    context: ssl.SSLContext | None = None,
) -> None:
    """Plays on an event loop on which connections are accepted."""

    async def run() -> None:
        with Exhausted() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            kept = Connections(max_open, ServedCounts(), time.monotonic)
            acceptor = Acceptor(listener, kept, Echo, context, TIMEOUT_S)
            acceptor.start()
            try:
                await asyncio.wait_for(play(kept, listener), TIMEOUT_S)
            finally:
                acceptor.close()

    asyncio.run(run())


async def connect(listener: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*listener.getsockname())


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(b"x")
    return await reader.read(1)


class NoDelay(Echo):
    """Answers whether the connection sends without waiting for acknowledgements."""

    def data_received(self, data: bytes) -> None:
        accepted = self.transport.get_extra_info("socket")
        self.transport.write(b"%d" % accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        self.transport.close()


def test_an_answer_in_several_parts_does_not_wait_for_acknowledgements() -> None:
    async def run() -> None:
        with listening(Address(port=0)) as listener:
            kept = Connections(8, ServedCounts(), time.monotonic)
            acceptor = Acceptor(listener, kept, NoDelay, None, TIMEOUT_S)
            acceptor.start()
            try:
                reader, writer = await connect(listener)
                writer.write(b"x")
                answer = await asyncio.wait_for(reader.read(), TIMEOUT_S)
                writer.close()
                assert int(answer) > 0
            finally:
                acceptor.close()

    asyncio.run(run())


def test_new_connections_wait_in_the_queue_while_all_are_busy() -> None:
    async def play(kept: Connections, listener: Exhausted) -> None:
        for name in "ab":
            kept.mark_busy(name)
        reader, writer = await connect(listener)
        answer = asyncio.create_task(echo(reader, writer))
        await asyncio.wait({answer}, timeout=5 * module.RETRY_S)
        assert not answer.done()
        assert kept.num_open == 2
        kept.remove("a")
        assert await answer == b"x"
        writer.close()

    accepting(play, 2)


def test_without_descriptors_it_makes_room_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def play(kept: Connections, listener: Exhausted) -> None:
        closed = list[str]()
        for name in "abcdef":
            kept.add(name, lambda name=name: closed.append(name))
        listener.num_failures = 3
        reader, writer = await connect(listener)
        assert await echo(reader, writer) == b"x"
        assert closed == ["a", "b", "c"]
        assert told(caplog) == 1
        writer.close()

    accepting(play, 100)
    assert "Traceback" not in caplog.text


def test_handshakes_that_never_end_are_counted_and_give_way() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)

    async def play(kept: Connections, listener: Exhausted) -> None:
        silent = [await connect(listener) for _ in range(3)]
        assert await silent[0][0].read() == b""
        assert kept.num_open == 2
        for _, writer in silent:
            writer.close()

    accepting(play, 2, context)


def test_handshakes_that_fail_are_forgotten() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)

    async def play(kept: Connections, listener: Exhausted) -> None:
        reader, writer = await connect(listener)
        writer.write(b"this is no handshake")
        await reader.read()
        while kept.num_open:
            await asyncio.sleep(0)
        writer.close()

    accepting(play, 2, context)


# --- a server -------------------------------------------------------------------------------------

HEAD = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture
def small(engine: ScriptedEngine, text: TextFrontend) -> Iterator[RunningServer]:
    """Eight connections, two of them for probes."""
    with running_server(engine, text, options(limits=ServerLimits(max_connections=8))) as server:
        yield server


def ask_live(connection: socket.socket) -> bytes:
    connection.sendall(HEAD)
    answer = b""
    while not answer.endswith(b"}"):
        answer += connection.recv(1 << 16)
    return answer


def num_open(server: RunningServer) -> int:
    return server.service.connections.num_open


def is_closed(connection: socket.socket) -> bool:
    """By now."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(TIMEOUT_S)


def test_idle_connections_give_way_to_new_ones_and_every_new_one_is_served(
    small: RunningServer,
) -> None:
    with ExitStack() as stack:
        silent, kept_alive = stack.enter_context(small.connect()), list[socket.socket]()
        wait_until(lambda: num_open(small) == 1)
        for _ in range(12):
            connection = stack.enter_context(small.connect())
            assert ask_live(connection).startswith(b"HTTP/1.1 200")
            kept_alive.append(connection)
            assert num_open(small) <= 8
        assert read_to_end(silent) == b""
        assert [is_closed(each) for each in kept_alive] == [True] * 4 + [False] * 8
        metrics = read_metrics(small)
    # The scrape's own connection closed one more.
    assert metrics['cadenza:idle_connections_closed_total{model_name="scripted"}'] == 6


@pytest.mark.parametrize("header", ["connection: keep-alive", "connection: close"])
def test_a_slow_reader_of_its_last_answer_is_not_closed_for_others(
    serve: Serve, header: str
) -> None:
    limits = ServerLimits(max_connections=4)
    request = f"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n{header}\r\n\r\n".encode()
    server = serve(limits=limits, num_sent_bytes=4096)
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        s.settimeout(TIMEOUT_S)
        s.connect(("127.0.0.1", server.port))
        s.sendall(request)
        answer = s.recv(1)
        for _ in range(8):
            assert server.get("/live").status_code == 200
        with ExitStack() as stack:
            others = [stack.enter_context(server.connect()) for _ in range(8)]
            assert [read_to_end(other) for other in others[:4]] == [b""] * 4
            length = len(server.get("/openapi.json").content)
            while len(answer.partition(b"\r\n\r\n")[2]) < length:
                part = s.recv(1 << 16)
                assert part, "it was cut"
                answer += part
            others += [stack.enter_context(server.connect()) for _ in range(4)]
            s.settimeout(KEEP_ALIVE_S / 2)
            assert read_to_end(s) == b"", "it is idle now, and was not closed for others"


def test_beyond_what_there_is_room_for_requests_are_refused_and_probes_answered(
    small: RunningServer, engine: ScriptedEngine
) -> None:
    engine.pause()
    body = json.dumps({"prompt": "x", "max_tokens": 3}).encode()
    with ExitStack() as stack:
        waiting = [stack.enter_context(small.connect()) for _ in range(6)]
        for connection in waiting:
            connection.sendall(raw_post("/v1/completions", body, "connection: close"))
        wait_until(lambda: engine.num_open == 6)
        for _ in range(20):
            answer = small.post("/v1/completions", {"prompt": "x"})
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert answer.json()["error"]["code"] == "connections_full"
            assert small.get("/live").status_code == 200
            assert small.get("/ready").status_code == 200
        refused = 'admission_rejections_total{model_name="scripted",reason="connections_full"}'
        assert read_metrics(small)[f"cadenza:{refused}"] == 20
        engine.resume()
        answers = [read_to_end(connection) for connection in waiting]
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
    assert small.post("/v1/completions", {"prompt": "x"}).status_code == 200


def test_books_are_empty_when_everybody_has_left(
    small: RunningServer, engine: ScriptedEngine
) -> None:
    engine.pause()
    whole = raw_post("/v1/completions", json.dumps({"prompt": "x"}).encode())
    for request in (b"", HEAD, b"GET /li", whole, whole[:-3], b"nonsense\r\n\r\n", HEAD * 3):
        with small.connect() as connection:
            connection.sendall(request)
            wait_until(lambda: num_open(small) == 1)
        wait_until(lambda: num_open(small) == 0)


# --- the command ----------------------------------------------------------------------------------

LIMITED = ("sh", "-c", 'ulimit -n 256; exec "$@"', "sh")
NUM_SILENT = 300


def open_silently(serving: ServeProcess, stack: ExitStack) -> list[socket.socket]:
    address = ("127.0.0.1", int(serving.url.rpartition(":")[2]))
    return [
        stack.enter_context(socket.create_connection(address, TIMEOUT_S)) for _ in range(NUM_SILENT)
    ]


@pytest.mark.soak
def test_more_idle_sockets_than_descriptors_keep_neither_clients_nor_the_engine() -> None:
    start_s = time.monotonic()
    with serve_process(*FLAGS, before=LIMITED) as serving, ExitStack() as stack:
        serving.wait_ready()
        engine = serving.engine_pid()
        silent = open_silently(serving, stack)
        for _ in range(10):
            assert serving.status("/live") == 200
        assert serving.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
        os.kill(engine, signal.SIGKILL)
        silent += open_silently(serving, stack)
        assert serving.engine_pid(num_starts=2) != engine
        serving.wait_ready()
        assert serving.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
        assert len(silent) == 2 * NUM_SILENT
        num_told = serving.log.count("that the limit of open files allows")
        assert 1 <= num_told <= 1 + (time.monotonic() - start_s) / WARN_EVERY_S
        assert "Traceback" not in serving.log
        serving.terminate()
        assert serving.wait() == 0
