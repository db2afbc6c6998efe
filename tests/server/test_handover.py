"""One server takes over from another: no connection is refused, and no request is lost.

On scripted engines, both servers in this process. With two real processes, and under load: in
`tests/e2e/test_handover.py`.
"""

import asyncio
import gc
import json
import socket
import ssl
import threading
import warnings
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from cadenza.errors import ConfigError
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.server.http.listening import Address
from cadenza.server.lifecycle import handover as module
from cadenza.server.lifecycle.handover import (
    PROTOCOL,
    Commit,
    ExchangeOptions,
    Hello,
    Offer,
    ServerSockets,
    Sockets,
    Take,
    find_predecessor,
    hand_over,
    is_supported,
    opened,
    taken_over,
)
from cadenza.server.lifecycle.run import IDLE_GRACE_S
from cadenza.server.limits import ServerLimits
from tests.by_day import by_day
from tests.ports import kept_port
from tests.server.harness import (
    TIMEOUT_S,
    HandClock,
    RunningServer,
    options,
    raw_post,
    read_events,
    read_to_end,
    serving_at,
    serving_one,
    wait_until,
)
from tests.server.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.skipif(not is_supported(), reason="handing over needs Linux")

CERTIFICATE = Path(__file__).with_name("localhost.pem")
BODY = {"prompt": "the fox", "max_tokens": 9}
LIVE = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"


@dataclass(slots=True)
class Succession:
    """An address, and the servers that follow each other there."""

    address: Address
    script: tuple[int, ...]
    text: TextFrontend
    stack: ExitStack
    engines: list[ScriptedEngine] = field(default_factory=list)
    clock: HandClock = field(default_factory=HandClock)

    def serve(self, sockets: ServerSockets, **changes: Any) -> RunningServer:
        engine = ScriptedEngine(self.script)
        self.engines.append(engine)
        service = serving_one(engine, self.text, options(clock=self.clock, **changes))
        return self.stack.enter_context(serving_at(service, self.address, sockets))

    def begin(self, **changes: Any) -> RunningServer:
        return self.serve(self.stack.enter_context(opened(self.address)), **changes)

    def follow(self, **changes: Any) -> RunningServer:
        return self.serve(self.stack.enter_context(taken_over(self.address)), **changes)

    def client(self) -> httpx.Client:
        uds, is_secure = self.address.uds, self.address.is_secure
        trusted = ssl.create_default_context(cafile=CERTIFICATE) if is_secure else False
        transport = httpx.HTTPTransport(verify=trusted, uds=None if uds is None else str(uds))
        url = f"http{'s' if is_secure else ''}://127.0.0.1:{self.address.port}"
        return httpx.Client(transport=transport, base_url=url, timeout=TIMEOUT_S)

    def connect(self) -> socket.socket:
        place = ("127.0.0.1", self.address.port)
        return self.stack.enter_context(socket.create_connection(place, TIMEOUT_S))

    def complete_anew(self) -> str:
        """On a connection of its own."""
        with self.client() as client:
            return self.complete(client)

    def complete(self, client: httpx.Client) -> str:
        answer = client.post("/v1/completions", json=BODY)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]


@pytest.fixture(params=by_day(["port", "path", "tls"], ["port"]))
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Address]:
    if request.param == "path":
        yield Address(uds=tmp_path / "cadenza.sock")
        return
    certificate = CERTIFICATE if request.param == "tls" else None
    with kept_port() as port:
        yield Address(port=port, ssl_certfile=certificate, ssl_keyfile=certificate)


@pytest.fixture
def servers(address: Address, script: tuple[int, ...], text: TextFrontend) -> Iterator[Succession]:
    with ExitStack() as stack:
        yield Succession(address, script, text, stack)


on_a_port = pytest.mark.parametrize("address", ["port"], indirect=True)


def ask_live(connection: socket.socket) -> bytes:
    """The complete answer, after which the connection is idle."""
    connection.sendall(LIVE)
    answer = b""
    while not answer.endswith(b"}"):
        part = connection.recv(1 << 16)
        assert part, answer
        answer += part
    return answer


def wait_ended(server: RunningServer) -> None:
    server.thread.join(TIMEOUT_S)
    assert not server.thread.is_alive()


@contextmanager
def streaming(client: httpx.Client) -> Generator[Iterator[str]]:
    body = {**BODY, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        yield response.iter_lines()


@pytest.mark.parametrize("address", ["port", "path", "tls"], indirect=True)
def test_open_streams_finish_on_the_old_server_and_new_ones_begin_on_the_new_one(
    servers: Succession,
) -> None:
    first = servers.begin()
    whole = servers.complete_anew()
    servers.engines[0].pause()
    with servers.client() as old, servers.client() as new, streaming(old) as lines:
        wait_until(lambda: servers.engines[0].num_open == 1)
        servers.follow()
        assert servers.complete(new) == whole
        assert len(servers.engines[0].submitted) == 2
        assert len(servers.engines[1].submitted) == 1
        servers.engines[0].resume()
        events = list(read_events(lines))
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == whole
    wait_ended(first)
    assert servers.complete_anew() == whole
    if servers.address.uds is not None:
        assert servers.address.uds.is_socket()


def test_a_path_gets_the_mode_of_its_newest_server_and_the_last_one_removes_it(
    tmp_path: Path, script: tuple[int, ...], text: TextFrontend
) -> None:
    path = tmp_path / "cadenza.sock"
    with ExitStack() as stack:
        servers = Succession(Address(uds=path), script, text, stack)
        servers.begin()
        servers.follow()
        servers.address = Address(uds=path, uds_mode=0o660)
        servers.follow()
        wait_until(lambda: sum(not engine.is_shut_down for engine in servers.engines) == 1)
        assert path.is_socket()
        assert path.stat().st_mode & 0o777 == 0o660
        assert servers.complete_anew()
    assert list(tmp_path.iterdir()) == []


def test_no_request_is_lost_while_servers_follow_each_other(servers: Succession) -> None:
    """Some clients keep their connections, some open one for each request."""
    servers.begin()
    whole, is_over = servers.complete_anew(), threading.Event()
    answers: list[list[str]] = [[] for _ in range(6)]

    def ask(own: list[str], *, is_keeping: bool) -> None:
        try:
            with servers.client() as kept:
                while not is_over.is_set():
                    own.append(servers.complete(kept) if is_keeping else servers.complete_anew())
        except (httpx.TransportError, AssertionError) as error:
            own.append(f"{'kept' if is_keeping else 'fresh'}: {error!r}")

    threads = [
        threading.Thread(target=ask, args=(own,), kwargs={"is_keeping": index % 2 == 0})
        for index, own in enumerate(answers)
    ]
    for thread in threads:
        thread.start()
    for _ in range(4):
        counts = [len(own) for own in answers]
        wait_until(
            lambda counts=counts: all(len(o) > c for o, c in zip(answers, counts, strict=True))
        )
        servers.follow()
    is_over.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert {text for own in answers for text in own} == {whole}
    assert sum(bool(engine.submitted) for engine in servers.engines) > 2


@on_a_port
def test_an_answer_after_the_handover_is_the_last_of_its_connection(servers: Succession) -> None:
    servers.begin()
    with servers.connect() as idle, servers.connect() as used:
        assert b"connection: close" not in ask_live(used)
        servers.follow()
        for connection in (idle, used):
            connection.sendall(raw_post("/v1/completions", json.dumps(BODY).encode()))
            answer = read_to_end(connection)
            assert answer.startswith(b"HTTP/1.1 200"), answer
            assert b"connection: close" in answer
    assert len(servers.engines[0].submitted) == 2
    assert not servers.engines[1].submitted


@on_a_port
def test_an_answer_that_had_begun_keeps_its_connection_for_one_more(servers: Succession) -> None:
    """It has not said that it is the last, so that its client may send another request."""
    servers.begin()
    servers.engines[0].pause()
    body = json.dumps({**BODY, "stream": True}).encode()
    with servers.connect() as connection:
        connection.sendall(raw_post("/v1/completions", body))
        received = connection.recv(1 << 16)
        servers.follow()
        servers.engines[0].resume()
        while b"[DONE]" not in received or not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(1 << 16)
        assert b"connection: close" not in received
        connection.sendall(LIVE)
        answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer


@on_a_port
def test_an_answer_that_had_not_begun_says_that_it_is_the_last(servers: Succession) -> None:
    servers.begin()
    servers.engines[0].pause()
    with servers.connect() as connection:
        connection.sendall(raw_post("/v1/completions", json.dumps(BODY).encode()))
        wait_until(lambda: servers.engines[0].num_open)
        servers.follow()
        servers.engines[0].resume()
        answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer


@on_a_port
def test_idle_connections_are_kept_for_a_time_and_then_closed(servers: Succession) -> None:
    first = servers.begin()
    with servers.connect() as early, servers.connect() as late:
        for each in (early, late):
            ask_live(each)
        servers.follow()
        servers.clock.now_s += IDLE_GRACE_S - 0.1
        early.sendall(LIVE)
        assert b"connection: close" in read_to_end(early)
        assert first.thread.is_alive()
        servers.clock.now_s += 0.2
        assert read_to_end(late) == b""
        wait_ended(first)


@on_a_port
def test_the_old_server_is_ready_for_as_long_as_it_serves(servers: Succession) -> None:
    first = servers.begin()
    with servers.connect() as kept, servers.connect() as later:
        for each in (kept, later):
            ask_live(each)
        servers.engines[0].pause()
        with servers.client() as client, streaming(client):
            servers.follow()
            kept.sendall(b"GET /ready HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert read_to_end(kept).startswith(b"HTTP/1.1 200")
            first.call(first.lifecycle.ask)
            later.sendall(b"GET /ready HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert read_to_end(later).startswith(b"HTTP/1.1 503")
            servers.engines[0].resume()
        wait_ended(first)


def test_streams_that_outlast_the_drain_time_end_with_the_clean_error(servers: Succession) -> None:
    first = servers.begin(limits=ServerLimits(drain_s=0.1))
    servers.engines[0].pause()
    with servers.client() as client, streaming(client) as lines:
        wait_until(lambda: servers.engines[0].num_open)
        servers.follow()
        *_, error, done = read_events(lines)
        assert error["error"]["code"] == "draining"
        assert done == "[DONE]"
    wait_ended(first)
    assert servers.complete_anew()


@on_a_port
def test_a_draining_server_can_be_taken_over_from(servers: Succession) -> None:
    first = servers.begin()
    servers.engines[0].pause()
    with servers.client() as old, servers.client() as new, streaming(old) as lines:
        wait_until(lambda: servers.engines[0].num_open)
        first.call(first.lifecycle.ask)
        assert new.get("/ready").status_code == 503
        servers.follow()
        with servers.client() as another:
            assert another.get("/ready").status_code == 200
        servers.engines[0].resume()
        assert list(read_events(lines))[-1] == "[DONE]"
    wait_ended(first)


@on_a_port
def test_servers_that_ask_at_once_follow_each_other(servers: Succession) -> None:
    """The last one serves; each of the others has served before it."""
    servers.begin()
    barrier = threading.Barrier(3)

    def follow() -> None:
        barrier.wait(TIMEOUT_S)
        servers.follow()

    threads = [threading.Thread(target=follow) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    wait_until(lambda: sum(not engine.is_shut_down for engine in servers.engines) == 1)
    assert len(servers.engines) == 4
    assert servers.complete_anew()


@on_a_port
def test_a_server_that_has_ended_meanwhile_leaves_its_address(servers: Succession) -> None:
    first = servers.begin()
    predecessor = find_predecessor(servers.address)
    assert predecessor is not None
    first.call(first.lifecycle.ask)
    wait_ended(first)
    servers.follow()
    assert servers.complete_anew()


def test_where_nobody_serves_there_is_none_to_take_over_from(servers: Succession) -> None:
    assert find_predecessor(servers.address) is None
    with pytest.raises(ConfigError, match="name that port"):
        find_predecessor(Address(port=0))


@on_a_port
def test_an_address_whose_control_socket_is_taken_is_served_all_the_same(
    servers: Succession, caplog: pytest.LogCaptureFixture
) -> None:
    place = ("127.0.0.1", servers.address.port)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squatter:
        squatter.bind(module.control_name(place))
        servers.begin()
    assert "no other process can take over from this one" in caplog.text
    assert servers.complete_anew()


# --- the exchange ---------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Gate:
    """Whether a predecessor accepts."""

    changes: list[str] = field(default_factory=list)

    def pause(self) -> None:
        self.changes.append("pause")

    def resume(self) -> None:
        self.changes.append("resume")


Play = Callable[[Address, Gate], Awaitable[None]]


def exchanging(play: Play, exchange: ExchangeOptions) -> tuple[list[str], int | None]:
    """Plays a successor beside a predecessor that offers; what it did, and who took over."""
    gate = Gate()

    async def run() -> int | None:
        with kept_port() as port, opened(address := Address(port=port)) as sockets:
            offering = asyncio.create_task(hand_over(sockets, gate.pause, gate.resume, exchange))
            async with asyncio.timeout(TIMEOUT_S):
                await play(address, gate)
            if offering.done():
                return offering.result()
            offering.cancel()
            await asyncio.wait({offering})
            return None

    successor = asyncio.run(run())
    return gate.changes, successor


class Asker:
    """A successor, message by message."""

    def __init__(self, address: Address) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(module.control_name(("127.0.0.1", address.port)))
        self._socket.setblocking(False)

    def send(self, message: Any) -> None:
        self._socket.send(msgspec.json.encode(message))

    async def receive(self) -> bytes:
        """Empty where the predecessor has closed the connection."""
        try:
            return await asyncio.get_running_loop().sock_recv(self._socket, 4096)
        except ConnectionResetError:
            return b""

    def close(self) -> None:
        self._socket.close()


async def ask_for_sockets(asker: Asker) -> None:
    asker.send(Hello(PROTOCOL, 7))
    msgspec.json.decode(await asker.receive(), type=Offer)
    asker.send(Take())
    msgspec.json.decode(await asker.receive(), type=Sockets)


def test_a_successor_that_leaves_before_it_commits_changes_nothing() -> None:
    async def play(address: Address, gate: Gate) -> None:
        asker = Asker(address)
        await ask_for_sockets(asker)
        asker.close()
        assert await asyncio.to_thread(find_predecessor, address) is not None

    assert exchanging(play, ExchangeOptions()) == ([], None)


def test_a_successor_that_leaves_when_it_has_committed_lets_the_predecessor_resume() -> None:
    async def play(address: Address, gate: Gate) -> None:
        asker = Asker(address)
        await ask_for_sockets(asker)
        asker.send(Commit())
        asker.close()
        assert await asyncio.to_thread(find_predecessor, address) is not None

    assert exchanging(play, ExchangeOptions()) == (["pause", "resume"], None)


def test_a_successor_that_hangs_is_given_up_and_the_next_one_served() -> None:
    async def play(address: Address, gate: Gate) -> None:
        asker = Asker(address)
        await ask_for_sockets(asker)
        assert await asyncio.to_thread(find_predecessor, address) is not None
        assert await asker.receive() == b""
        asker.close()

    assert exchanging(play, ExchangeOptions(exchange_s=1.0)) == ([], None)


@pytest.mark.parametrize("packet", [b"nonsense", b'{"type":"take"}', b'{"type":"hello"}', b"{}"])
def test_a_packet_that_is_no_greeting_is_not_answered(packet: bytes) -> None:
    async def play(address: Address, gate: Gate) -> None:
        asker = Asker(address)
        asker._socket.send(packet)
        assert await asker.receive() == b""
        asker.close()
        assert await asyncio.to_thread(find_predecessor, address) is not None

    assert exchanging(play, ExchangeOptions()) == ([], None)


def test_another_version_of_the_protocol_is_refused_with_both() -> None:
    async def play(address: Address, gate: Gate) -> None:
        with pytest.raises(ConfigError, match=r"has version 8 .* this one version 1; stop it"):
            await asyncio.to_thread(find_predecessor, address)

    assert exchanging(play, ExchangeOptions(protocol=8)) == ([], None)


def test_a_process_of_another_user_gets_nothing() -> None:
    async def play(address: Address, gate: Gate) -> None:
        asker = Asker(address)
        asker.send(Hello(PROTOCOL, 7))
        assert await asker.receive() == b""
        asker.close()

    assert exchanging(play, ExchangeOptions(user_id=1 << 20)) == ([], None)


def test_a_server_of_another_user_is_not_asked() -> None:
    async def play(address: Address, gate: Gate) -> None:
        stranger = ExchangeOptions(user_id=1 << 20)
        with pytest.raises(ConfigError, match=r"is user \d+'s and this process user 1048576's"):
            await asyncio.to_thread(find_predecessor, address, stranger)

    assert exchanging(play, ExchangeOptions()) == ([], None)


@pytest.mark.parametrize("num_turns", range(6))
def test_a_server_that_ends_while_it_is_asked_leaves_no_connection_open(num_turns: int) -> None:
    async def run() -> None:
        gate = Gate()
        with kept_port() as port, opened(address := Address(port=port)) as sockets:
            offering = asyncio.create_task(hand_over(sockets, gate.pause, gate.resume))
            await asyncio.sleep(0.01)
            asker = Asker(address)
            for _ in range(num_turns):  # of the event loop
                await asyncio.sleep(0)
            offering.cancel()
            await asyncio.wait({offering})
            asker.close()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ResourceWarning)
        asyncio.run(run())
        gc.collect()
    assert told == []


def test_a_server_that_does_not_answer_is_told_after_a_time() -> None:
    with (
        kept_port() as port,
        opened(address := Address(port=port)),  # and offers nothing
        pytest.raises(ConfigError, match=r"did not answer within 0\.1 seconds"),
    ):
        find_predecessor(address, ExchangeOptions(answer_s=0.1))


def test_a_path_that_was_removed_is_said_before_anything_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "cadenza.sock"

    async def run() -> None:
        gate = Gate()
        with opened(Address(uds=path)) as sockets:
            offering = asyncio.create_task(hand_over(sockets, gate.pause, gate.resume))
            path.unlink()
            with pytest.raises(ConfigError, match="not there any more"):
                await asyncio.to_thread(taken_over(Address(uds=path)).__enter__)
            assert (gate.changes, offering.done()) == ([], False)
            offering.cancel()
            await asyncio.wait({offering})

    asyncio.run(run())
