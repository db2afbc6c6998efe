"""Reading bodies: their time in all, and the bytes of all of them together."""

import json
import select
import socket
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from cadenza.errors import ConfigError
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.server.limits import ServerLimits
from tests.server.harness import (
    TIMEOUT_S,
    RunningServer,
    options,
    raw_post,
    read_to_end,
    running_server,
)
from tests.server.scripted_engine import ScriptedEngine
from tests.server.test_metrics_and_log import read_metrics
from tests.server.test_streams import wait_until

BUDGET = ServerLimits(max_body_bytes=1000, max_bodies_bytes=2500)


def padded(num_bytes: int) -> bytes:
    """A good body of this size."""
    body = json.dumps({"prompt": "the fox", "max_tokens": 2}).encode()
    return body + b" " * (num_bytes - len(body))


def trickle(connection: socket.socket, rest: bytes) -> bytes:
    """Sends a byte after the other until there is an answer, which is read to its end."""
    left = iter(rest)
    while not select.select([connection], [], [], 0.02)[0]:
        byte = next(left, None)
        if byte is not None:
            with suppress(ConnectionError):  # it may just have been closed: what was said is there
                connection.sendall(bytes([byte]))
    return read_to_end(connection)


@pytest.mark.parametrize(
    ("body_s", "num_bytes", "found"), [(0.3, 60_000, b"body_timeout"), (60.0, 60, b" 200 ")]
)
def test_a_body_that_trickles_has_so_much_time_in_all(
    engine: ScriptedEngine, text: TextFrontend, body_s: float, num_bytes: int, found: bytes
) -> None:
    limits = ServerLimits(body_s=body_s, body_idle_s=TIMEOUT_S)
    with (
        running_server(engine, text, options(limits=limits)) as server,
        server.connect() as connection,
    ):
        whole = raw_post("/v1/completions", padded(num_bytes), "connection: close")
        connection.sendall(whole[:-num_bytes])
        assert found in trickle(connection, whole[-num_bytes:])


@contextmanager
def half_sent(server: RunningServer, num_bytes: int) -> Generator[socket.socket]:
    """A connection on which all but the last byte of a body was sent, and read."""
    before = server.service.bodies.num_bytes
    with server.connect() as connection:
        connection.sendall(raw_post("/v1/completions", padded(num_bytes))[:-1])
        wait_until(lambda: server.service.bodies.num_bytes == before + num_bytes - 1)
        yield connection


def test_bodies_beyond_the_budget_of_all_are_a_429_at_once(
    engine: ScriptedEngine, text: TextFrontend
) -> None:
    def post(num_bytes: int, *, is_chunked: bool = False) -> Any:
        content: Any = iter([padded(num_bytes)]) if is_chunked else padded(num_bytes)
        headers = {"content-type": "application/json"}
        with server.client() as client:
            return client.post("/v1/completions", content=content, headers=headers)

    with running_server(engine, text, options(limits=BUDGET)) as server:
        with half_sent(server, 1000) as first, half_sent(server, 1000):
            for is_chunked in (False, True):
                answer = post(600, is_chunked=is_chunked)
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (429, "bodies_full")
                assert error["type"] == "rate_limit_error"
                assert answer.headers["retry-after"] == "1"
                assert ("connection" in answer.headers) == is_chunked
            assert server.service.bodies.num_bytes == 1998
            assert post(400).status_code == 200
            first.sendall(b" ")
            assert b" 200 " in first.recv(1 << 16)
            wait_until(lambda: server.service.bodies.num_bytes == 999)
            assert post(600).status_code == 200
        wait_until(lambda: server.service.bodies.num_bytes == 0)
        found = read_metrics(server)
        for prefix in ("vllm:", "cadenza:"):
            labels = 'model_name="scripted",reason="bodies_full"'
            assert found[f"{prefix}admission_rejections_total{{{labels}}}"] == 2
    assert len(engine.submitted) == 3


@pytest.mark.parametrize("code", [b"bodies_full", b"unsupported_media_type"])
def test_the_rest_of_a_body_that_was_refused_is_not_waited_for_without_end(
    engine: ScriptedEngine, text: TextFrontend, code: bytes
) -> None:
    limits = ServerLimits(max_body_bytes=1000, max_bodies_bytes=1000, body_s=1.0)
    whole = raw_post("/v1/completions", padded(1000))
    with (
        running_server(engine, text, options(limits=limits)) as server,
        server.service.bodies.holding() as try_add,
        server.connect() as connection,
    ):
        if code == b"bodies_full":
            assert try_add(1000)
        else:
            whole = whole.replace(b"application/json", b"text/plain")
        connection.sendall(whole[:-10])
        assert code in read_to_end(connection)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_who_sends_a_long_body_to_its_end_hears_why_it_is_refused(
    engine: ScriptedEngine, text: TextFrontend, is_chunked: bool
) -> None:
    """Closing while it still sends would reset its connection, and take the answer along."""
    body = b"400000\r\n" + padded(4 << 20) + b"\r\n0\r\n\r\n"
    whole = raw_post("/v1/completions", body, "connection: close")
    if is_chunked:
        whole = whole.replace(
            f"content-length: {len(body)}".encode(), b"transfer-encoding: chunked"
        )
    head_size = len(whole) - len(body)
    with running_server(engine, text, options(limits=BUDGET)) as server:
        for _ in range(5):
            with server.connect() as connection:
                connection.sendall(whole[: head_size + 5000])
                wait_until(lambda: select.select([connection], [], [], 0)[0])
                connection.sendall(whole[head_size + 5000 :])
                assert b" 413 " in read_to_end(connection)


def test_who_never_stops_sending_is_left(engine: ScriptedEngine, text: TextFrontend) -> None:
    def is_left() -> bool:
        try:
            connection.sendall(b" ")
        except ConnectionError:
            return True
        return False

    limits = ServerLimits(max_body_bytes=1000, head_s=1.0)
    whole = raw_post("/v1/completions", padded(1 << 20), "connection: close")
    with (
        running_server(engine, text, options(limits=limits)) as server,
        server.connect() as connection,
    ):
        connection.sendall(whole[:5000])
        assert b" 413 " in read_to_end(connection)
        wait_until(is_left)


def test_a_full_queue_is_told_before_a_body_is_read(
    script: tuple[int, ...], text: TextFrontend
) -> None:
    engine = ScriptedEngine(script, max_num_queued_reqs=1)
    with running_server(engine, text) as server, ExitStack() as connected:
        connection, *others = [connected.enter_context(server.connect()) for _ in range(6)]
        engine.pause()
        for other in others:
            other.sendall(raw_post("/v1/completions", b'{"prompt": "a"}'))
        wait_until(lambda: engine.num_open == 5)
        connection.sendall(raw_post("/v1/completions", padded(1000))[:-1])
        assert b" 429 " in connection.recv(1 << 16)
        engine.resume()
        for other in others:
            assert b" 200 " in other.recv(1 << 16)


def test_a_budget_below_one_body_cannot_work() -> None:
    with pytest.raises(ConfigError, match="max-bodies-bytes"):
        ServerLimits(max_bodies_bytes=1000)
