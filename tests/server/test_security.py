"""Who gets in: keys over every route and trick, tenants, and one policy for each route."""

import re
from collections.abc import Iterator

import pytest

from cadenza.errors import ConfigError
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.server.access import ApiKeys, is_open_to_others, read_keys
from cadenza.server.openapi import EVERYWHERE, describe_api
from cadenza.server.operations.pages import UI_PATHS
from cadenza.server.routes import OPEN_PATHS, ROUTES, dialect_of
from tests.server.harness import RunningServer, Serve, options, running_server
from tests.server.scripted_engine import ScriptedEngine

KEYS = ("first-key", "second-key")
CLOSED = [route for route in ROUTES if route.policy == "key"]


@pytest.fixture(scope="module")
def locked(script: tuple[int, ...], text: TextFrontend) -> Iterator[RunningServer]:
    engine = ScriptedEngine(script)
    with running_server(engine, text, options(keys=ApiKeys(KEYS))) as running:
        yield running


def statuses(answers: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers)]


def test_only_probes_and_the_page_are_open() -> None:
    """A new route is closed, or somebody has to change this line."""
    assert {"/health", "/live", "/ready", "/ping", "/", "/docs", *UI_PATHS} == OPEN_PATHS


@pytest.mark.parametrize("route", CLOSED, ids=lambda route: route.name)
def test_no_closed_route_lets_anybody_in(locked: RunningServer, route) -> None:
    path = route.path.replace("{id}", "x").replace("{id:path}", "x")
    with locked.client() as client:
        for key in (None, "wrong-key", "first-key\tx", "FIRST-KEY"):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            for method in {route.method, "GET", "POST", "OPTIONS", "HEAD", "DELETE"}:
                assert client.request(method, path, headers=headers).status_code == 401
        right = {"authorization": f"Bearer {KEYS[1]}"}
        # One answer never ends.
        with client.stream(route.method, path, headers=right) as answer:
            assert answer.status_code != 401


@pytest.mark.parametrize(
    "target",
    [
        "//v1/models",
        "/v1//models",
        "/V1/MODELS",
        "/%76%31/models",
        "/v1/%6dodels",
        "/live/%2e%2e/v1/models",
        "/live/../v1/models",
        "/live%2f..%2fv1/models",
        "/v1/models?/live",
        "/v1/models#/live",
        "/v1/models;/live",
        "http://127.0.0.1/v1/models",
        "http://x/live/../v1/models",
    ],
)
@pytest.mark.parametrize("host", ["x", "x/live", "x?/live", "x#/live", "x@/live", "live"])
def test_no_spelling_of_path_or_host_gets_around_the_key(
    locked: RunningServer, target: str, host: str
) -> None:
    request = f"GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
    found = statuses(locked.raw(request.encode()))
    assert found
    assert all(status >= 400 for status in found)


def test_a_line_end_in_a_host_smuggles_nothing(locked: RunningServer) -> None:
    request = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\nGET /v1/models HTTP/1.1\r\nhost: x\r\n"
    assert statuses(locked.raw(request + b"connection: close\r\n\r\n")) == [200, 401]


def test_two_authorization_headers_are_none(locked: RunningServer) -> None:
    request = (
        "GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        f"authorization: Bearer {KEYS[0]}\r\nauthorization: Bearer wrong-key\r\n\r\n"
    )
    assert statuses(locked.raw(request.encode())) == [401]


def test_probes_answer_without_a_key(locked: RunningServer) -> None:
    for path in OPEN_PATHS:
        assert locked.get(path).status_code == 200


def test_tenants_and_salts_share_no_prefix(serve: Serve) -> None:
    server = serve(keys=ApiKeys(KEYS))
    engine = server.engine
    for key, salt in ((0, None), (1, None), (0, "a"), (1, "a"), (0, None)):
        headers = {"authorization": f"Bearer {KEYS[key]}"}
        body = {"prompt": "x", "max_tokens": 1, "cache_salt": salt}
        assert server.post("/v1/completions", body, headers=headers).status_code == 200
    salts = [request.cache_salt for request in engine.submitted]
    assert len(set(salts)) == 4
    assert salts[0] == salts[4]
    assert not any(KEYS[0] in salt or salt == "a" for salt in salts)


@pytest.mark.parametrize(
    ("path", "field"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")]
)
def test_a_calls_priority_is_that_of_its_requests(
    server: RunningServer, path: str, field: str
) -> None:
    """An engine that does not order by it says so."""
    refused = server.post(path, {field: "x", "priority": 3})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
    assert server.post(path, {field: "x", "priority": 0}).status_code == 200


def test_a_request_of_another_tenant_cannot_be_cancelled(serve: Serve) -> None:
    server = serve(step_s=0.01, keys=ApiKeys(KEYS))
    own, other = ({"authorization": f"Bearer {key}"} for key in KEYS)
    body = {"prompt": "x", "max_tokens": 200, "stream": True, "request_id": "mine-1"}
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json=body, headers=own) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        path = "/v1/requests/mine-1/cancel"
        assert server.post(path, headers=other).status_code == 404
        assert server.post(path, headers=own).status_code == 200
        assert list(lines)[-2] == "data: [DONE]"


def test_keys_are_read_from_files_and_weak_ones_refused(tmp_path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nfirst-key\n\n  # theirs\nsecond#key\n#none\n")
    assert read_keys(["third-key"], file) == ["third-key", "first-key", "second#key"]
    file.write_text("second-key # theirs\n")
    with pytest.raises(ConfigError):  # and never a key cut short
        ApiKeys(read_keys([], file))
    with pytest.raises(ConfigError):
        ApiKeys(["short"])
    with pytest.raises(ConfigError):
        ApiKeys(["has a blank in it"])
    with pytest.raises(ConfigError):
        read_keys([], tmp_path / "nowhere")
    with pytest.raises(ConfigError):
        ApiKeys(read_keys([""], None))


def test_the_description_has_every_route_and_status() -> None:
    described = describe_api(ROUTES, dialect_of, needs_key=True)
    for route in ROUTES:
        operation = described["paths"][route.path.replace(":path}", "}")][route.method.lower()]
        told = {int(status) for status in operation["responses"]}
        assert told == {200, *EVERYWHERE, *route.statuses}
        is_json = route.answers.name in described["components"]["schemas"]
        assert is_json or route.answers.name in ("Metrics", "BatchEvents")
        assert bool(operation["security"]) == (route.policy == "key")


@pytest.mark.parametrize(
    ("keys", "host", "is_open"),
    [
        ((), "127.0.0.1", False),
        ((), "127.9.0.1", False),
        ((), "localhost", False),
        ((), "::1", False),
        ((), "0.0.0.0", True),
        ((), "::", True),
        ((), "192.168.1.2", True),
        ((), "my-server", True),
        (("long-enough",), "0.0.0.0", False),
    ],
)
def test_a_start_without_a_key_at_another_address_is_told(
    keys: tuple[str, ...], host: str, is_open: bool
) -> None:
    assert is_open_to_others(ApiKeys(keys), host) == is_open
