"""What every call of the engine keeps, whatever its API: who may make it, what is refused before
and by the engine, failures, leaving, cancelling, tenants, the line of the log."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cadenza.errors import QueueFullError
from cadenza.events import ErrorKind
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.server.access import ApiKeys
from cadenza.server.errors import UNAVAILABLE_CODES
from cadenza.server.limits import ServerLimits
from cadenza.server.tenants import TenantFile, TenantLimits
from cadenza.tenant import Tenant
from tests.server.bodies import GENERATING, NEEDED, PATHS
from tests.server.dialects import (
    DIALECTS,
    check_error,
    ending,
    events_of,
    joined,
    stream,
    streaming,
    told_error,
)
from tests.server.harness import RunningServer, Serve, options, raw_post, running_server, wait_until
from tests.server.scripted_engine import ScriptedEngine

KEY = "right-key"
each_call = pytest.mark.parametrize("name", GENERATING)
each_dialect = pytest.mark.parametrize("name", DIALECTS)


def asked(name: str, **fields: Any) -> dict[str, Any]:
    return {**NEEDED[name], **fields}


@pytest.fixture(scope="module")
def guarded(script: tuple[int, ...], text: TextFrontend) -> Iterator[RunningServer]:
    """With a key of the tenant `web`, and a small bound of bodies."""
    web = TenantLimits(tenant=Tenant(name="web", weight=4.0))
    file = TenantFile(named={"web": web}, keys={KEY: "web"})
    limits = ServerLimits(max_body_bytes=1000)
    settings = options(keys=ApiKeys((), file.keys), tenants=file, limits=limits)
    with running_server(ScriptedEngine(script), text, settings) as running:
        yield running


JSON, XML = {"content-type": "application/json"}, {"content-type": "text/xml"}
LARGE = b" " * 2000
REFUSED: list[tuple[dict[str, Any], int, str, str | None]] = [
    *(
        ({"headers": headers}, 401, "invalid_api_key", None)
        for headers in (
            *({}, {"x-api-key": "wrong-key"}, {"authorization": "Bearer wrong-key"}),
            *({"authorization": f"Basic {KEY}"}, {"authorization": "Bearer"}),
        )
    ),
    ({"body": {"model": "gpt"}}, 404, "model_not_found", "model"),
    ({"method": "GET"}, 405, "method_not_allowed", None),
    ({"content": LARGE, "headers": JSON}, 413, "content_too_large", None),
    ({"parts": [LARGE[:700], LARGE[700:]], "headers": JSON}, 413, "content_too_large", None),
    ({"content": b"{}", "headers": XML}, 415, "unsupported_media_type", None),
    ({"content": b"{", "headers": JSON}, 400, "invalid_json", None),
    ({"body": {"priority": 10**400}}, 400, "invalid_value", "priority"),
]
"""What of a request is changed, the status, the code and the field of its answer."""


@each_call
def test_what_no_call_may_be_is_refused_before_the_engine(
    guarded: RunningServer, name: str
) -> None:
    num_submitted = len(guarded.engine.submitted)
    for changes, status, code, param in REFUSED:
        sent = dict(changes)
        own, method = sent.pop("headers", {}), sent.pop("method", "POST")
        headers = own if status == 401 else {"x-api-key": KEY, **own}
        if "parts" in sent:
            sent["content"] = iter(sent.pop("parts"))
        elif "content" not in sent:
            sent["json"] = asked(name, **sent.pop("body", {}))
        with guarded.client() as client:
            answer = client.request(method, PATHS[name], headers=headers, **sent)
        check_error(answer, status, code, param, name=name)
        assert (status == 401) == ("www-authenticate" in answer.headers)
        assert answer.headers.get("allow") == ("POST" if status == 405 else None)
    assert len(guarded.engine.submitted) == num_submitted


@each_call
@pytest.mark.parametrize("key", [{"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}], ids=str)
def test_a_keys_tenant_is_that_of_its_requests(
    guarded: RunningServer, name: str, key: dict[str, str]
) -> None:
    assert guarded.post(PATHS[name], asked(name), headers=key).status_code == 200
    assert guarded.engine.submitted[-1].tenant == Tenant(name="web", weight=4.0)


def test_a_full_queue_is_a_429_at_once(serve: Serve) -> None:
    server = serve(max_num_queued_reqs=1)
    engine = server.engine
    engine.pause()
    posts = [server.posting(PATHS["completions"], asked("completions")) for _ in range(5)]
    wait_until(lambda: engine.num_open == 5)
    for name in GENERATING:
        answer = server.post(PATHS[name], asked(name))
        check_error(answer, 429, "queue_full", name=name)
        assert answer.headers["retry-after"] == "1"
    assert f'reason="queue_full"}} {len(GENERATING)}.0' in server.get("/metrics").text
    engine.resume()
    assert [post.result().status_code for post in posts] == [200] * 5


@each_call
def test_what_would_start_too_late_is_a_429_with_the_time_before_anything_is_computed(
    server: RunningServer, engine: ScriptedEngine, name: str
) -> None:
    engine.late = QueueFullError("it would start in about 71.2 seconds", retry_after_s=71.2)
    bodies = [asked(name), *([asked(name, stream=True)] if name in DIALECTS else [])]
    for body in bodies:
        answer = server.post(PATHS[name], body)
        check_error(answer, 429, "queue_full", None, "start in about 71.2 seconds", name=name)
        assert answer.headers["retry-after"] == "72"
    assert not engine.submitted
    assert f'reason="queue_too_long"}} {len(bodies)}.0' in server.get("/metrics").text
    engine.late = None
    assert server.post(PATHS[name], asked(name)).status_code == 200


@pytest.mark.parametrize(("state", "code"), UNAVAILABLE_CODES.items())
def test_while_the_engine_is_not_ready_it_is_a_503(
    server: RunningServer, engine: ScriptedEngine, state: Any, code: str
) -> None:
    engine.state = state
    answers = [(name, server.post(PATHS[name], asked(name))) for name in GENERATING]
    answers += [("probe", server.get(path)) for path in ("/ready", "/health", "/ping")]
    for name, answer in [*answers, ("probe", server.post("/ping"))]:
        check_error(answer, 503, code, name=name)
        assert int(answer.headers["retry-after"]) > 0
    assert server.get("/live").status_code == 200


FAILURES: list[tuple[ErrorKind, int, str, str | None, str]] = [
    ("not_finite", 500, "server_error", "false", "numbers"),
    ("step_failed", 500, "step_failed", None, "the server's log"),
    ("engine_lost", 503, "engine_restarting", None, "try again soon"),
    ("engine_failed", 500, "engine_failed", "false", "do not send it again"),
    ("queue_timeout", 504, "deadline_exceeded", None, "61.5 seconds in the queue"),
    ("request_timeout", 504, "deadline_exceeded", None, "took 602 seconds"),
]


@each_call
def test_a_failure_of_the_engine_has_its_own_answer_whole_and_streamed(
    server: RunningServer, engine: ScriptedEngine, name: str
) -> None:
    for kind, status, code, retry, words in FAILURES:
        engine.failing = kind
        answer = server.post(PATHS[name], asked(name))
        check_error(answer, status, code, None, words, name=name)
        assert answer.headers.get("x-should-retry") == retry
        assert ("retry-after" in answer.headers) == (status == 503)
        assert "secret words" not in answer.text
        if name in DIALECTS:
            *_, last = events_of(stream(server, name, asked(name)))
            assert told_error(name, last).message == told_error(name, answer.json()).message
            assert name != "responses" or last["response"]["status"] == "failed"


@each_call
def test_a_client_that_leaves_frees_the_engine(
    server: RunningServer, engine: ScriptedEngine, name: str
) -> None:
    bodies = [asked(name), *([asked(name, stream=True)] if name in DIALECTS else [])]
    for body in bodies:
        engine.pause()
        with server.connect() as connection:
            connection.sendall(raw_post(PATHS[name], json.dumps(body).encode()))
            wait_until(lambda: engine.num_open)
        wait_until(lambda: not engine.num_open)
        engine.resume()
        wait_until(lambda: not server.service.num_open)
    assert len(engine.cancelled) == len(engine.submitted)
    ended = 'vllm:request_success_total{finished_reason="abort",model_name="scripted"} '
    wait_until(lambda: f"{ended}{len(engine.cancelled)}" in server.get("/metrics").text)
    assert server.post(PATHS[name], asked(name)).status_code == 200


@each_call
def test_a_cancelled_call_ends_with_what_it_has(
    server: RunningServer, engine: ScriptedEngine, name: str
) -> None:
    """Only what generates has something."""
    for is_stream in (False, True) if name in DIALECTS else (False,):
        engine.pause()
        body = streaming(name, asked(name)) if is_stream else asked(name)
        asking = server.posting(PATHS[name], body, headers={"x-request-id": "mine-1"})
        wait_until(lambda: engine.num_open)
        cancelled = server.post("/v1/requests/mine-1/cancel")
        assert cancelled.json() == {"id": "mine-1", "object": "request", "cancelled": True}
        answer = asking.result()
        engine.resume()
        if name in DIALECTS:
            whole = joined(name, answer.content) if is_stream else answer.json()
            assert ending(name, whole).reason == "abort"
        else:
            check_error(answer, 400, "cancelled", name=name)
        assert server.post("/v1/requests/mine-1/cancel").status_code == 404


@each_call
def test_a_call_is_one_line_of_the_log_with_its_counts(
    server: RunningServer, lines: list[dict], name: str
) -> None:
    answer = server.post(PATHS[name], asked(name)).json()
    wait_until(lambda: lines)
    (line,) = lines
    assert (line["endpoint"], line["status"]) == (GENERATING[name].name, 200)
    assert "fox" not in json.dumps(line)
    assert line["total_tokens"] == line["prompt_tokens"] + line["completion_tokens"]
    if name in DIALECTS:
        end = ending(name, answer)
        assert line["finish_reason"] == end.reason
        counts = (line["prompt_tokens"], line["completion_tokens"])
        assert counts == (end.num_prompt_tokens, end.num_tokens)
        assert 0 < line["ttft_ms"] <= line["latency_ms"]
        assert line["prompt_tps"] > 0
    else:
        assert (line["finish_reason"], line["completion_tokens"]) == ("stop", 0)
        assert line["ttft_ms"] is None
        assert line["prompt_tps"] >= line["total_tps"] > 0
        usage = answer.get("usage", answer)
        assert line["prompt_tokens"] == usage.get("prompt_tokens", usage.get("prompt_eval_count"))
