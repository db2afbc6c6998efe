"""Streams under disturbance: clients that leave, clients that do not read, silence, cancelling."""

import json
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from cadenza.frontend.text_frontend import TextFrontend
from cadenza.server.limits import ServerLimits
from tests.server.dialects import check_error
from tests.server.harness import (
    TIMEOUT_S,
    RunningServer,
    in_background,
    options,
    raw_post,
    running_server,
)
from tests.server.scripted_engine import ScriptedEngine

LONG = {"prompt": "the fox", "max_tokens": 200}


def wait_until(look: Callable[[], Any], within_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + within_s
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.02)


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


def test_a_client_that_leaves_in_mid_stream_frees_the_engine(
    script: tuple[int, ...], text: TextFrontend
) -> None:
    engine = ScriptedEngine(script, max_model_len=1 << 20, step_s=0.001)
    with running_server(engine, text) as server:
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


def test_a_client_that_does_not_read_is_dropped_and_others_go_on(
    script: tuple[int, ...], text: TextFrontend
) -> None:
    engine = ScriptedEngine(script, max_model_len=1 << 20, step_s=0.001)
    limits = ServerLimits(write_stall_s=0.5)
    with running_server(engine, text, options(limits=limits), 4096) as server:
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


def test_a_client_that_leaves_an_answers_end_unread_is_dropped(
    engine: ScriptedEngine, text: TextFrontend
) -> None:
    limits = ServerLimits(write_stall_s=0.3)
    with running_server(engine, text, options(limits=limits), num_sent_bytes=4096) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        # The description is larger than what kernels hold here and smaller than 64 KiB.
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert select.select([connection], [], [], TIMEOUT_S)[0], "there is no answer"
        wait_until(lambda: not server.lifecycle._front.server_state.connections)
        connection.close()


def test_silence_is_filled_with_comments(script: tuple[int, ...], text: TextFrontend) -> None:
    engine = ScriptedEngine(script)
    limits = ServerLimits(keep_alive_s=0.02)
    with running_server(engine, text, options(limits=limits)) as server:
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


def test_a_head_that_does_not_come_is_not_waited_for(
    engine: ScriptedEngine, text: TextFrontend
) -> None:
    with running_server(engine, text, options(limits=ServerLimits(head_s=0.1))) as server:
        for sent in (b"", b"GET /live HT", b"GET /live HTTP/1.1\r\nx: y\r\n"):
            assert server.raw(sent) == b""


def test_a_body_that_stands_still_is_not_waited_for(
    engine: ScriptedEngine, text: TextFrontend
) -> None:
    with running_server(engine, text, options(limits=ServerLimits(body_idle_s=0.1))) as server:
        whole = raw_post("/v1/completions", b'{"prompt": "x"}')
        assert b"body_timeout" in server.raw(whole[:-1])
