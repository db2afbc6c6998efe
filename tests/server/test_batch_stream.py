"""/debug/batch/stream and /debug/batch: their events, who may see what, their bounds, and that
nothing of a prompt is in them."""

import json
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager

import httpx
import msgspec
import pytest

from cadenza.engine.step_watch import RowSummary, StepSummary
from cadenza.frontend.live_steps import MAX_VIEWERS
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.server.access import ApiKeys
from cadenza.server.limits import ServerLimits
from tests.server.harness import (
    TIMEOUT_S,
    InBackground,
    RunningServer,
    Serve,
    options,
    running_server,
)
from tests.server.scripted_engine import ScriptedEngine

PATH = "/debug/batch/stream"
ONCE = "/debug/batch"
KEYS = {"key-of-web": "web", "key-of-batch": "batch"}
SUMMARY = StepSummary(
    num_steps=4,
    seconds=0.125,
    longest_s=0.05,
    num_tokens=70,
    num_sampled=5,
    num_running=3,
    num_waiting=1,
    pages_live=4,
    pages_cached=2,
    pages_free=10,
    tenants=("web", "batch"),
    rows=(
        RowSummary(1, 0, "decode", 30, 31, 16, 4, 2, 0),
        RowSummary(2, 1, "prompt", 40, 90, 0, 0, 0, 1),
        RowSummary(3, 1, "waiting", 0, 8, 0, 1, 0, 0),
    ),
)


@contextmanager
def stream(server: RunningServer, key: str | None = None) -> Generator[Iterator[str]]:
    """The lines of a stream."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with server.client(headers=headers) as client, client.stream("GET", PATH) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        yield response.iter_lines()


def next_event(lines: Iterator[str]) -> tuple[str, dict]:
    kept = list[str]()
    for line in lines:
        if not line and kept:
            break
        if line:
            kept.append(line)
    name, data = kept
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def tell(server: RunningServer, engine: ScriptedEngine, news: StepSummary | str) -> None:
    assert engine.watched.wait(TIMEOUT_S)
    assert engine.on_news is not None
    engine.on_news(news)


@pytest.fixture
def keyed(engine: ScriptedEngine, text: TextFrontend) -> Iterator[RunningServer]:
    """With a tenant for each of `KEYS`."""
    with running_server(engine, text, options(keys=ApiKeys((), KEYS))) as running:
        yield running


def test_a_stream_begins_with_hello_and_goes_on_with_steps_and_engine_events(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    own = msgspec.structs.replace(SUMMARY, tenants=("", "other"))
    with stream(server) as lines:
        hello = {"v": 1, "rows": 4, "pages": 16, "page_size": 16, "model": "scripted"}
        assert next_event(lines) == ("hello", hello)
        tell(server, engine, own)
        name, step = next_event(lines)
        assert name == "step"
        assert step.pop("t") >= 0
        assert step == {
            "tokens": 70,
            "steps": 4,
            "waiting": 1,
            "running": 3,
            "pages": {"live": 4, "cached": 2, "free": 10},
            "tok_s": 40.0,
            "gap_ms": 50.0,
            "rows": [
                {
                    "id": 1,
                    "kind": "decode",
                    "computed": 30,
                    "total": 31,
                    "cached": 16,
                    "new": 4,
                    "drafts": 2,
                    "preempted": 0,
                    "waits_for": None,
                }
            ],
            "others": {
                "rows": 2,
                "computed": 40,
                "total": 98,
                "cached": 0,
                "new": 1,
                "drafts": 0,
                "preempted": 1,
            },
        }
        for state in ("lost", "ready"):
            tell(server, engine, state)
            assert next_event(lines) == ("engine", {"state": state})


def test_a_tenant_sees_its_own_rows_and_the_sum_of_the_others(
    keyed: RunningServer, engine: ScriptedEngine
) -> None:
    with stream(keyed, "key-of-web") as web, stream(keyed, "key-of-batch") as batch:
        for lines in (web, batch):
            assert next_event(lines)[0] == "hello"
        tell(keyed, engine, SUMMARY)
        of_web, of_batch = next_event(web)[1], next_event(batch)[1]
        assert [row["id"] for row in of_web["rows"]] == [1]
        assert of_web["others"]["rows"] == 2
        assert [row["id"] for row in of_batch["rows"]] == [2, 3]
        assert of_batch["others"]["computed"] == 30
        tell(keyed, engine, msgspec.structs.replace(SUMMARY, tenants=("x",), rows=()))
        assert next_event(web)[1]["others"] is None


def test_a_stream_needs_a_key_as_everything_else(keyed: RunningServer) -> None:
    assert keyed.get(PATH).status_code == 401


def test_a_second_viewer_gets_what_the_first_one_saw(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    with stream(server) as first:
        next_event(first)
        tell(server, engine, SUMMARY)
        next_event(first)
        with stream(server) as second:
            assert next_event(second)[0] == "hello"
            assert next_event(second)[1]["steps"] == 4


def test_a_viewer_too_many_is_refused_and_the_engine_is_not_watched_once_all_have_left(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    with ExitStack() as stack:
        viewers = [stack.enter_context(stream(server)) for _ in range(MAX_VIEWERS)]
        assert {next_event(lines)[0] for lines in viewers} == {"hello"}
        refused = server.get(PATH)
        assert refused.status_code == 429
        assert "8 viewers watch the batch already" in refused.json()["error"]["message"]
    with httpx.Client(base_url=server.url, trust_env=False, timeout=TIMEOUT_S) as client:
        while engine.on_news is not None:  # a disconnect is seen when it is seen
            client.get("/live")


def test_comments_keep_a_silent_stream_alive(serve: Serve) -> None:
    limits = ServerLimits(keep_alive_s=0.01)
    server = serve(limits=limits)
    with stream(server) as lines:
        next_event(lines)
        assert next(line for line in lines if line) == ": keep-alive"


def test_a_server_that_drains_ends_the_stream(server: RunningServer) -> None:
    with stream(server) as lines:
        next_event(lines)
        server.call(server.lifecycle.drain)
        assert [line for line in lines if line] == []


def test_a_restarting_engine_is_lost_for_who_comes_then(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    engine.state = "restarting"
    with stream(server) as lines:
        assert [next_event(lines)[0], next_event(lines)] == ["hello", ("engine", {"state": "lost"})]


@pytest.mark.parametrize(
    ("query", "status"), [("?model=scripted", 200), ("?model=other", 404), ("?of=x", 400)]
)
def test_a_query_may_name_the_model_and_nothing_else(
    scripted: RunningServer, query: str, status: int
) -> None:
    with scripted.client() as client:
        assert client.head(PATH + query).status_code == status


def test_one_answer_has_the_values_of_a_step_event(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    with stream(server) as lines:
        next_event(lines)
        tell(server, engine, SUMMARY)
        step = next_event(lines)[1]
        assert server.get(ONCE).json() == step
    assert step["others"]["rows"] == 3


def test_one_answer_waits_for_a_step_where_rows_run_and_ends_its_watch(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    asked = InBackground(lambda: server.get(ONCE))
    tell(server, engine, msgspec.structs.replace(SUMMARY, num_steps=0, seconds=0.0))
    tell(server, engine, SUMMARY)
    assert asked.result().json()["tok_s"] == 40.0
    assert engine.on_news is None


def test_one_answer_of_an_idle_engine_has_no_rows(bundled: RunningServer) -> None:
    answer = bundled.get(ONCE).json()
    assert (answer["running"], answer["waiting"], answer["rows"]) == (0, 0, [])
    assert answer["pages"]["free"] > 0
    assert answer["pages"]["live"] == 0


@pytest.mark.parametrize(("news", "code"), [("lost", "engine_restarting"), (None, "draining")])
def test_one_answer_is_a_503_where_the_engine_is_lost_or_the_server_drains_meanwhile(
    server: RunningServer, engine: ScriptedEngine, news: str | None, code: str
) -> None:
    asked = InBackground(lambda: server.get(ONCE))
    assert engine.watched.wait(TIMEOUT_S)
    if news is None:
        server.call(server.lifecycle.drain)
    else:
        tell(server, engine, news)
    answer = asked.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)
    assert "retry-after" in answer.headers


def test_one_answer_is_a_503_at_once_where_the_engine_restarts(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    engine.state = "restarting"
    assert server.get(ONCE).json()["error"]["code"] == "engine_restarting"
    assert not engine.watched.is_set()


def test_one_answer_needs_a_key_and_has_a_tenants_own_rows(
    keyed: RunningServer, engine: ScriptedEngine
) -> None:
    assert keyed.get(ONCE).status_code == 401
    headers = {"authorization": "Bearer key-of-web"}
    asked = InBackground(lambda: keyed.get(ONCE, headers=headers))
    tell(keyed, engine, SUMMARY)
    answer = asked.result().json()
    assert [row["id"] for row in answer["rows"]] == [1]
    assert answer["others"]["rows"] == 2


def test_nothing_of_a_prompt_an_answer_or_an_id_is_in_the_stream(bundled: RunningServer) -> None:
    mark = "marzipan-4711"
    body = {"prompt": f"{mark} {mark}", "max_tokens": 40, "ignore_eos": True, "user": mark}
    told, steps = "", list[dict]()
    with stream(bundled) as lines:
        next_event(lines)
        body |= {"request_id": mark, "cache_salt": mark}
        answer = bundled.post("/v1/completions", body).json()
        num_tokens = answer["usage"]["total_tokens"] - 1  # the last one is never computed
        while sum(step["tokens"] for step in steps) < num_tokens:
            name, step = next_event(lines)
            told += json.dumps(step)
            steps.append(step)
            assert name == "step"
    assert mark not in told
    assert answer["choices"][0]["text"][:20] not in told
    assert {name for step in steps for name in step} == {
        *("t", "tokens", "steps", "waiting", "running", "pages", "tok_s", "gap_ms", "rows"),
        "others",
    }
