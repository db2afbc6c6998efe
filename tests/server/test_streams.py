"""Bodies and streams under disturbance: clients that leave, trickle, do not read or do not send;
bounds of time and bytes; silence."""

import json
import select
import socket
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from cadenza.errors import ConfigError
from cadenza.server.limits import ServerLimits
from tests.server.dialects import check_error
from tests.server.harness import (
    TIMEOUT_S,
    RunningServer,
    Serve,
    in_background,
    raw_post,
    read_metrics,
    read_to_end,
    wait_until,
)
from tests.server.scripted_engine import ScriptedEngine

LONG = {"prompt": "the fox", "max_tokens": 200}


def test_a_client_that_leaves_frees_the_engine_of_all_its_prompts(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    engine.pause()
    with server.connect() as connection:
        body = json.dumps({**LONG, "prompt": ["a", "b", "c"]}).encode()
        connection.sendall(raw_post("/v1/completions", body))
        wait_until(lambda: engine.num_open == 3)
    wait_until(lambda: not engine.num_open)
    wait_until(lambda: len(engine.cancelled) == len(engine.submitted) == 3)
    engine.resume()
    wait_until(lambda: not server.service.num_open)


def test_a_client_that_leaves_in_mid_stream_frees_the_engine(serve: Serve) -> None:
    server = serve(max_model_len=1 << 20, step_s=0.001)
    engine = server.engine
    connection = server.connect()
    body = json.dumps({**LONG, "max_tokens": 1 << 19, "stream": True}).encode()
    connection.sendall(raw_post("/v1/completions", body))
    assert connection.recv(1 << 10)
    connection.close()
    wait_until(lambda: engine.cancelled)
    assert not engine.num_open


def test_a_client_that_leaves_frees_all_that_it_sent_at_once(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    engine.pause()
    one = raw_post("/v1/completions", json.dumps({"prompt": "the fox", "max_tokens": 40}).encode())
    with server.connect() as connection:
        connection.sendall(one + b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        wait_until(lambda: engine.num_open == 1)
    wait_until(lambda: engine.num_open == 0)
    wait_until(lambda: len(engine.cancelled) == 1)


def test_a_client_that_does_not_read_is_dropped_and_others_go_on(serve: Serve) -> None:
    limits = ServerLimits(write_stall_s=0.5)
    server = serve(max_model_len=1 << 20, step_s=0.001, limits=limits, num_sent_bytes=4096)
    engine = server.engine
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    wordy = {**LONG, "max_tokens": 1 << 19, "stream": True, "logprobs": 20}
    connection.sendall(raw_post("/v1/completions", json.dumps(wordy).encode()))
    wait_until(lambda: engine.submitted)
    assert server.events("/v1/completions", {**LONG, "stream": True})[-1] == "[DONE]"
    wait_until(lambda: engine.cancelled)
    wait_until(lambda: not server.service.num_open)
    connection.close()


def test_a_client_that_leaves_an_answers_end_unread_is_dropped(serve: Serve) -> None:
    limits = ServerLimits(write_stall_s=0.3)
    server = serve(limits=limits, num_sent_bytes=4096)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    # The description is larger than what kernels hold here and smaller than 64 KiB.
    connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert select.select([connection], [], [], TIMEOUT_S)[0], "there is no answer"
    wait_until(lambda: not server.lifecycle._front.server_state.connections)
    connection.close()


def test_silence_is_filled_with_comments(serve: Serve) -> None:
    limits = ServerLimits(keep_alive_s=0.02)
    server = serve(limits=limits)
    engine = server.engine
    engine.pause()
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response,
    ):
        lines = (line for line in response.iter_lines() if line)
        assert [next(lines) for _ in range(3)] == [": keep-alive"] * 3
        engine.resume()
        assert list(lines)[-1] == "data: [DONE]"


def test_a_request_id_names_one_open_request(server: RunningServer, engine: ScriptedEngine) -> None:
    engine.pause()
    body = {**LONG, "request_id": "mine-1"}
    asking = server.posting("/v1/completions", body)
    wait_until(lambda: engine.num_open)
    check_error(server.post("/v1/completions", body), 400, "invalid_value", "request_id")
    assert server.post("/v1/requests/mine-1/cancel").status_code == 200
    assert asking.result().headers["x-request-id"] == "mine-1"
    engine.resume()


def test_many_streams_at_once_each_get_their_own(server: RunningServer) -> None:
    bodies = [
        {"prompt": "x", "max_tokens": 5 + place, "stream": True, "return_token_ids": True}
        for place in range(32)
    ]

    def ask(body: dict[str, Any]) -> int:
        events = server.events("/v1/completions", body)[:-1]
        return sum(len(choice["token_ids"]) for e in events for choice in e["choices"])

    asking = in_background(lambda body=body: ask(body) for body in bodies)
    assert [each.result() for each in asking] == [5 + place for place in range(32)]


def test_samples_of_one_prompt_come_interleaved_and_whole(server: RunningServer) -> None:
    body = {"prompt": ["x", "y"], "n": 3, "max_tokens": 6, "stream": True, "return_token_ids": True}
    events = server.events("/v1/completions", body)[:-1]
    ids: dict[int, list[int]] = {}
    ends: dict[int, int] = {}
    for event in events:
        for choice in event["choices"]:
            ids.setdefault(choice["index"], []).extend(choice["token_ids"])
            if choice["finish_reason"]:
                ends[choice["index"]] = ends.get(choice["index"], 0) + 1
    assert {index: len(found) for index, found in ids.items()} == dict.fromkeys(range(6), 6)
    assert ends == dict.fromkeys(range(6), 1)


def test_a_head_that_does_not_come_is_not_waited_for(serve: Serve) -> None:
    server = serve(limits=ServerLimits(head_s=0.1))
    for sent in (b"", b"GET /live HT", b"GET /live HTTP/1.1\r\nx: y\r\n"):
        assert server.raw(sent) == b""


def test_a_body_that_stands_still_is_not_waited_for(serve: Serve) -> None:
    server = serve(limits=ServerLimits(body_idle_s=0.1))
    whole = raw_post("/v1/completions", b'{"prompt": "x"}')
    assert b"body_timeout" in server.raw(whole[:-1])


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
    serve: Serve, body_s: float, num_bytes: int, found: bytes
) -> None:
    limits = ServerLimits(body_s=body_s, body_idle_s=TIMEOUT_S)
    server = serve(limits=limits)
    with server.connect() as connection:
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


def test_bodies_beyond_the_budget_of_all_are_a_429_at_once(serve: Serve) -> None:
    def post(num_bytes: int, *, is_chunked: bool = False) -> Any:
        content: Any = iter([padded(num_bytes)]) if is_chunked else padded(num_bytes)
        headers = {"content-type": "application/json"}
        with server.client() as client:
            return client.post("/v1/completions", content=content, headers=headers)

    server = serve(limits=BUDGET)
    engine = server.engine
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
    serve: Serve, code: bytes
) -> None:
    limits = ServerLimits(max_body_bytes=1000, max_bodies_bytes=1000, body_s=1.0)
    whole = raw_post("/v1/completions", padded(1000))
    server = serve(limits=limits)
    with server.service.bodies.holding() as try_add, server.connect() as connection:
        if code == b"bodies_full":
            assert try_add(1000)
        else:
            whole = whole.replace(b"application/json", b"text/plain")
        connection.sendall(whole[:-10])
        assert code in read_to_end(connection)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_who_sends_a_long_body_to_its_end_hears_why_it_is_refused(
    serve: Serve, is_chunked: bool
) -> None:
    """Closing while it still sends would reset its connection, and take the answer along."""
    body = b"400000\r\n" + padded(4 << 20) + b"\r\n0\r\n\r\n"
    whole = raw_post("/v1/completions", body, "connection: close")
    if is_chunked:
        whole = whole.replace(
            f"content-length: {len(body)}".encode(), b"transfer-encoding: chunked"
        )
    head_size = len(whole) - len(body)
    server = serve(limits=BUDGET)
    for _ in range(5):
        with server.connect() as connection:
            connection.sendall(whole[: head_size + 5000])
            wait_until(lambda: select.select([connection], [], [], 0)[0])
            connection.sendall(whole[head_size + 5000 :])
            assert b" 413 " in read_to_end(connection)


def test_who_never_stops_sending_is_left(serve: Serve) -> None:
    def is_left() -> bool:
        try:
            connection.sendall(b" ")
        except ConnectionError:
            return True
        return False

    limits = ServerLimits(max_body_bytes=1000, head_s=1.0)
    whole = raw_post("/v1/completions", padded(1 << 20), "connection: close")
    server = serve(limits=limits)
    with server.connect() as connection:
        connection.sendall(whole[:5000])
        assert b" 413 " in read_to_end(connection)
        wait_until(is_left)


def test_a_full_queue_is_told_before_a_body_is_read(serve: Serve) -> None:
    server = serve(max_num_queued_reqs=1)
    engine = server.engine
    with ExitStack() as connected:
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
