"""CORS: the preflights that browsers send, and that a page can read every answer, errors too.

`SDK_HEADERS` are what headless Chromium 156 asked for with the openai package 6.49 for JavaScript.
"""

from collections.abc import Iterator

import httpx
import pytest

from cadenza.errors import ConfigError
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.server.access import ApiKeys, Cors
from cadenza.server.limits import ServerLimits
from tests.server.harness import (
    RunningServer,
    Serve,
    in_background,
    options,
    read_events,
    running_server,
    wait_until,
)
from tests.server.scripted_engine import ScriptedEngine

PAGE = "http://127.0.0.1:5173"
KEY = "right-key"
CHAT = "/v1/chat/completions"
COMPLETION = {"prompt": "the fox", "max_tokens": 2}
SDK_HEADERS = (
    "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,"
    "x-stainless-package-version,x-stainless-retry-count,x-stainless-runtime,"
    "x-stainless-runtime-version"
)
ALWAYS_READABLE = {"content-type", "content-length", "cache-control"}
NO_USE_TO_A_PAGE = {"date", "vary", "connection", "transfer-encoding", "x-accel-buffering"}


@pytest.fixture(scope="module")
def locked(script: tuple[int, ...], text: TextFrontend) -> Iterator[RunningServer]:
    settings = options(
        keys=ApiKeys([KEY]),
        cors=Cors([PAGE, "https://good.example"]),
        limits=ServerLimits(max_body_bytes=1000),
    )
    with running_server(ScriptedEngine(script), text, settings) as running:
        yield running


def preflight(
    server: RunningServer, asked: str | None, *, origin: str = PAGE, **more: str
) -> httpx.Response:
    headers = {"origin": origin, "access-control-request-method": "POST", **more}
    if asked is not None:
        headers["access-control-request-headers"] = asked
    with server.client() as client:
        return client.options(CHAT, headers=headers)


def allowed_headers(answer: httpx.Response) -> set[str]:
    return set(answer.headers.get("access-control-allow-headers", "").split(", "))


@pytest.mark.parametrize(
    "asked",
    [
        SDK_HEADERS,
        f"{SDK_HEADERS},openai-beta,x-stainless-helper-method",
        "x-a-header-that-nobody-has-thought-of-yet",
        "X-Upper-Case, x!#$%&'*+.^_`|~1",
        "authorization,, content-type,",
        ",".join(f"x-header-{place}" for place in range(500)),
    ],
)
def test_a_preflight_allows_the_headers_that_are_asked_for(
    locked: RunningServer, asked: str
) -> None:
    answer = preflight(locked, asked)
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert set(answer.headers["access-control-allow-methods"].split(", ")) == {
        "GET",
        "POST",
        "DELETE",
    }
    assert allowed_headers(answer) == {
        name.strip().lower() for name in asked.split(",") if name.strip()
    }
    assert int(answer.headers["access-control-max-age"]) > 0
    varies = set(", ".join(answer.headers.get_list("vary")).split(", "))
    assert varies == {"origin", "access-control-request-method", "access-control-request-headers"}


def test_header_lines_of_a_preflight_are_read_as_one_list(locked: RunningServer) -> None:
    request = (
        f"OPTIONS {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\norigin: {PAGE}\r\n"
        "access-control-request-method: POST\r\n"
        "access-control-request-headers: authorization\r\n"
        "access-control-request-headers: x-two, x-three\r\n\r\n"
    )
    answer = locked.raw(request.encode())
    assert answer.startswith(b"HTTP/1.1 204 ")
    assert b"\r\naccess-control-allow-headers: authorization, x-two, x-three\r\n" in answer


def test_a_preflight_that_asks_for_no_header_is_told_of_none(locked: RunningServer) -> None:
    answer = preflight(locked, None)
    assert answer.status_code == 204
    assert "access-control-allow-headers" not in answer.headers


@pytest.mark.parametrize("asked", ["a b", "x:1", "näme", "(x)", 'a"b', "good, b@d", "*,{}"])
def test_what_can_be_no_header_name_is_not_reflected(locked: RunningServer, asked: str) -> None:
    headers = {
        "origin": PAGE.encode(),
        "access-control-request-method": b"POST",
        "access-control-request-headers": asked.encode(),
    }
    with locked.client() as client:
        answer = client.options(CHAT, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_header"
    assert "access-control-allow-headers" not in answer.headers


def test_a_private_network_is_allowed_where_it_is_asked_for(locked: RunningServer) -> None:
    name = "access-control-allow-private-network"
    asking = {"access-control-request-private-network": "true"}
    assert preflight(locked, SDK_HEADERS, **asking).headers[name] == "true"
    assert name not in preflight(locked, SDK_HEADERS).headers
    assert (
        name not in preflight(locked, SDK_HEADERS, origin="https://bad.example", **asking).headers
    )


@pytest.mark.parametrize(
    "origin", ["https://bad.example", "http://good.example", "https://good.example:8443", "null"]
)
def test_an_origin_that_is_not_allowed_gets_no_cors_headers(
    locked: RunningServer, origin: str
) -> None:
    answers = [
        preflight(locked, SDK_HEADERS, origin=origin),
        locked.get("/live", headers={"origin": origin}),
    ]
    assert [answer.status_code for answer in answers] == [401, 200]
    for answer in answers:
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert answer.headers["vary"] == "origin"


def test_an_answer_without_an_origin_says_that_it_varies(locked: RunningServer) -> None:
    answer = locked.get("/live")
    assert answer.headers["vary"] == "origin"
    assert "access-control-allow-origin" not in answer.headers


def test_without_allowed_origins_there_are_no_cors_headers(scripted: RunningServer) -> None:
    answers = [preflight(scripted, SDK_HEADERS), scripted.get("/live", headers={"origin": PAGE})]
    assert [answer.status_code for answer in answers] == [405, 200]
    for answer in answers:
        assert not [name for name in answer.headers if name.startswith("access-control")]


def check_readable(answer: httpx.Response) -> None:
    """By a script of `PAGE`: the answer, and each header that could be of use to it."""
    assert answer.headers["access-control-allow-origin"] == PAGE
    exposed = set(answer.headers["access-control-expose-headers"].split(", "))
    own = {name for name in answer.headers if not name.startswith("access-control-")}
    assert own - ALWAYS_READABLE - NO_USE_TO_A_PAGE <= exposed
    assert "x-request-id" in own


@pytest.mark.parametrize(
    ("status", "method", "path", "request_options"),
    [
        (200, "GET", "/v1/models", {}),
        (200, "POST", "/v1/completions", {"json": COMPLETION}),
        (400, "POST", "/v1/completions", {"json": {**COMPLETION, "temperature": -1}}),
        (400, "GET", "/live?" + "x" * 9000, {}),
        (401, "POST", CHAT, {"json": {}, "headers": {"authorization": "Bearer wrong-key"}}),
        (404, "GET", "/nothing", {}),
        (405, "GET", CHAT, {}),
        (413, "POST", CHAT, {"json": "x" * 1001}),
        (415, "POST", CHAT, {"content": b"x", "headers": {"content-type": "text/plain"}}),
    ],
)
def test_a_page_can_read_every_answer(
    locked: RunningServer, status: int, method: str, path: str, request_options: dict
) -> None:
    given = {"origin": PAGE, "authorization": f"Bearer {KEY}"} | request_options.get("headers", {})
    with locked.client() as client:
        answer = client.request(method, path, **{**request_options, "headers": given})
    assert answer.status_code == status
    check_readable(answer)


def test_a_page_can_read_a_stream(locked: RunningServer) -> None:
    headers = {"origin": PAGE, "authorization": f"Bearer {KEY}"}
    body = {**COMPLETION, "stream": True}
    with (
        locked.client() as client,
        client.stream("POST", "/v1/completions", json=body, headers=headers) as answer,
    ):
        check_readable(answer)
        assert list(read_events(answer.iter_lines()))[-1] == "[DONE]"


def test_a_page_can_read_that_it_should_try_again(serve: Serve) -> None:
    headers = {"origin": PAGE}
    server = serve(max_num_queued_reqs=1, cors=Cors(["*"]))
    engine = server.engine

    def post() -> httpx.Response:
        return server.post("/v1/completions", COMPLETION, headers=headers)

    engine.pause()
    posts = in_background([post] * 5)
    wait_until(lambda: engine.num_open == 5)
    full = post()
    engine.resume()
    assert [each.result().status_code for each in posts] == [200] * 5
    engine.failing = "not_finite"
    failed = post()
    engine.state = "restarting"
    restarting = post()
    assert [each.status_code for each in (full, failed, restarting)] == [429, 500, 503]
    for answer in (full, failed, restarting):
        check_readable(answer)


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("https://Good.Example", "https://good.example"),
        ("https://good.example:443", "https://good.example"),
        ("http://localhost:80", "http://localhost"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
        ("null", "null"),
        ("*", "https://any.example"),
        ("*", "null"),
    ],
)
def test_an_origin_is_compared_as_browsers_send_it(given: str, sent: str) -> None:
    headers = dict(Cors([given]).response_headers([(b"origin", sent.encode())]))
    assert headers["access-control-allow-origin"] == sent


@pytest.mark.parametrize(
    "given",
    ["good.example", "https://good.example/", "https://a.example/b", "['https://a']", "", "a,b"],
)
def test_an_origin_that_no_browser_sends_is_refused_at_start(given: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-origins"):
        Cors([given])


def test_two_origins_in_one_request_are_none() -> None:
    cors = Cors(["*"])
    twice = [(b"origin", b"https://a.example"), (b"origin", b"https://b.example")]
    assert dict(cors.response_headers(twice)) == {"vary": "origin"}
