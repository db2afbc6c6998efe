"""What clients meet at Ray's ingress: HAProxy, Serve's HTTP server, and our front end behind them.

Which layer keeps which bound stands in docs/many-machines.md; each is tried here. On a Ray cluster
of three nodes on this machine, which takes 1.6 GB.
"""

import importlib.util
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from cadenza.server.limits import ServerLimits
from tests.cluster.ray_app import WITHIN_S, RayApp

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install '.[ray]'"
    ),
]

# HAProxy gives up clients that are silent so long (RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S).
CLIENT_S = 3
MAX_CONNECTIONS = 100
ENVIRON = {
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(CLIENT_S),
    "RAY_SERVE_HAPROXY_MAXCONN": str(MAX_CONNECTIONS),
}
NUM_ROWS, NUM_QUEUED = 8, 8
MODEL = "bundled"
JSON = {"content-type": "application/json"}
SHORT = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
LONG = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def ray_app() -> Iterator[RayApp]:
    flags = {"max_num_seqs": NUM_ROWS, "max_num_queued_reqs": NUM_QUEUED, "request_timeout": 60}
    app = RayApp(ENVIRON, replicas=1, **flags)
    try:
        app.wait_ready(1)
        yield app
    finally:
        app.close()


@pytest.fixture(scope="module")
def http(ray_app: RayApp) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=ray_app.url, timeout=WITHIN_S, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def client(ray_app: RayApp) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{ray_app.url}/v1", api_key="none", max_retries=0, timeout=WITHIN_S
    ) as client:
        yield client


def said(ray_app: RayApp, sent: bytes) -> tuple[bytes, float]:
    """What comes back for these bytes until the connection closes, and after how many seconds."""
    start_s, received = time.monotonic(), b""
    with socket.create_connection(("127.0.0.1", ray_app.port), timeout=WITHIN_S) as connection:
        connection.sendall(sent)
        try:
            while more := connection.recv(1 << 16):
                received += more
        except ConnectionError:
            pass
    return received, time.monotonic() - start_s


def test_a_large_head_is_refused_by_haproxy_and_a_smaller_one_passes(http: httpx.Client) -> None:
    assert http.get("/health", headers={"x-note": "a" * 8_000}).status_code == 200
    assert http.get("/health", headers={"x-note": "a" * 20_000}).status_code == 400
    many = {f"x-note-{index}": "a" for index in range(150)}
    assert http.get("/health", headers=many).status_code == 400


def test_a_large_body_is_refused_by_the_front_end_with_its_own_words(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", content=b"{" + b" " * (5 << 20), headers=JSON)
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_bytes_that_are_no_http_end_at_haproxy(ray_app: RayApp) -> None:
    received, seconds = said(ray_app, b"\x16\x03\x01 nothing of this is HTTP\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 400")
    assert seconds < CLIENT_S


def test_a_head_that_stops_is_given_up_by_haproxy(ray_app: RayApp) -> None:
    received, seconds = said(ray_app, b"GET /health HTTP/1.1\r\nhost: a\r\nx-note: ")
    assert received == b"" or received.startswith(b"HTTP/1.1 408")
    assert CLIENT_S - 1 < seconds < 3 * CLIENT_S


def test_a_body_that_stops_is_given_up_by_haproxy(ray_app: RayApp) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{"
    received, seconds = said(ray_app, head)
    assert b" 200 " not in received[:20]
    assert CLIENT_S - 1 < seconds < 4 * CLIENT_S


def trickled(ray_app: RayApp, head: bytes, pause_s: float, within_s: float) -> tuple[bytes, float]:
    """What comes back for a head whose last part comes byte by byte, until the connection closes or
    the time is over, and after how many seconds."""
    start_s, received = time.monotonic(), b""
    with socket.create_connection(("127.0.0.1", ray_app.port)) as connection:
        connection.settimeout(pause_s)
        connection.sendall(head)
        while time.monotonic() - start_s < within_s:
            try:
                connection.sendall(b"a")
                more = connection.recv(1 << 16)
            except TimeoutError:
                continue
            except ConnectionError:
                break
            received += more
            if not more:
                break
    return received, time.monotonic() - start_s


def test_a_head_that_comes_byte_by_byte_is_not_bounded(ray_app: RayApp) -> None:
    """As docs/many-machines.md says: nothing there bounds the time of a whole head."""
    head = b"GET /health HTTP/1.1\r\nhost: a\r\nx-note: "
    received, seconds = trickled(ray_app, head, 0.5, 4 * CLIENT_S)
    assert received == b""
    assert seconds >= 4 * CLIENT_S


def test_a_body_that_comes_byte_by_byte_is_ended_by_the_front_end(ray_app: RayApp) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        b"content-length: 100000\r\n\r\n{"
    )
    received, seconds = trickled(ray_app, head, 1.0, 200.0)
    assert b"the body took more than 120 s" in received
    assert ServerLimits().body_s - 5 < seconds < ServerLimits().body_s + 30


def test_a_client_that_reads_nothing_is_given_up_by_haproxy(ray_app: RayApp) -> None:
    asked = {**LONG, "n": NUM_ROWS, "logprobs": 20, "stream": True}
    body = json.dumps(asked).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    length = f"content-length: {len(body)}\r\n\r\n".encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", ray_app.port))
        connection.settimeout(WITHIN_S)
        connection.sendall(head + length + body)
        wait_until(lambda: ray_app.metric("vllm:num_requests_running"))
        wait_until(lambda: not ray_app.metric("vllm:num_requests_running"))
        time.sleep(3 * CLIENT_S)
        received = b""
        try:
            while more := connection.recv(1 << 20):
                received += more
        except ConnectionError:
            pass
    assert b"[DONE]" not in received


def wait_until(look: Callable[[], object]) -> None:
    end_s = time.monotonic() + WITHIN_S
    while not look():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_a_client_that_waits_for_a_long_answer_is_not_given_up(http: httpx.Client) -> None:
    def ask(index: int) -> tuple[int, float]:
        start_s = time.monotonic()
        answer = http.post("/v1/completions", json={**LONG, "n": 6, "seed": index})
        return answer.status_code, time.monotonic() - start_s

    with ThreadPoolExecutor(NUM_ROWS) as pool:
        found = list(pool.map(ask, range(NUM_ROWS)))
    assert [status for status, _ in found] == [200] * NUM_ROWS
    assert max(seconds for _, seconds in found) > CLIENT_S


def test_above_our_limits_callers_get_429_and_nobody_waits_in_silence(http: httpx.Client) -> None:
    def ask(index: int) -> int:
        return http.post("/v1/completions", json={**LONG, "seed": index}).status_code

    count = 2 * (NUM_ROWS + NUM_QUEUED)
    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(ask, range(count)))
    assert found.count(200) >= NUM_ROWS + NUM_QUEUED
    assert found.count(429) == count - found.count(200) > 0


def test_connections_above_haproxys_number_wait_and_are_served_when_others_close(
    ray_app: RayApp,
) -> None:
    """They wait in the kernel, or are refused; those that are open go on."""
    address = ("127.0.0.1", ray_app.port)
    held = [socket.create_connection(address, timeout=30) for _ in range(MAX_CONNECTIONS)]
    try:
        start_s = time.monotonic()
        received, _ = said(ray_app, b"GET /health HTTP/1.0\r\nhost: a\r\n\r\n")
        waited_s = time.monotonic() - start_s
    finally:
        for each in held:
            each.close()
    assert received == b"" or b" 200 " in received[:20]
    assert waited_s < 4 * CLIENT_S
    received, _ = said(ray_app, b"GET /health HTTP/1.0\r\nhost: a\r\n\r\n")
    assert b" 200 " in received[:20]


def test_an_answer_has_one_request_id(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json=SHORT, headers={"x-request-id": "own-1"})
    assert answer.headers.get_list("x-request-id") == ["own-1"]
    answer = http.post("/v1/completions", json=SHORT)
    assert len(answer.headers.get_list("x-request-id")) == 1


def test_openai_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, **SHORT)
    assert whole.choices[0].text.strip().startswith("Paris")
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 4
    chunks = list(client.completions.create(model=MODEL, stream=True, **SHORT))
    assert "".join(each.choices[0].text for each in chunks if each.choices) == (
        whole.choices[0].text
    )
    several = client.completions.create(model=MODEL, n=2, **SHORT)
    assert [each.text for each in several.choices] == [whole.choices[0].text] * 2


def test_openai_chat(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked)
    text = whole.choices[0].message.content
    assert text
    with client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == text
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.system_fingerprint


def test_openai_models_and_structured_output(client: openai.OpenAI) -> None:
    assert [each.id for each in client.models.list().data] == [MODEL]
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer"}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "12 + 30 ="}],
        max_tokens=40,
        temperature=0,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "sum", "schema": schema, "strict": True},
        },
    )
    assert isinstance(json.loads(answer.choices[0].message.content or "")["sum"], int)


def test_openai_errors_keep_their_kinds_and_words(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="other-model"):
        client.completions.create(model="other-model", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=MODEL, prompt="a", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model=MODEL, prompt="a " * 100_000)
    with pytest.raises(openai.NotFoundError):
        client.post("/nothing", cast_to=object)


def test_a_stream_that_its_client_leaves_is_cancelled(
    ray_app: RayApp, client: openai.OpenAI
) -> None:
    before = ray_app.metric("vllm:generation_tokens_total")
    stream = client.completions.create(
        model=MODEL,
        prompt="Once upon a time",
        max_tokens=900,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: not ray_app.metric("vllm:num_requests_running"))
    assert ray_app.metric("vllm:generation_tokens_total") - before < 900
