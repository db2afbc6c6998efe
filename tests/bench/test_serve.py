"""`cadenza bench serve` against a scripted server: what it sends, counts, and calls a failure."""

import asyncio
import itertools
import json
import re
from typing import Any

import httpx
import pytest

from cadenza.bench.serve import ServeClient, ServerError, measure_serving
from cadenza.bench.serve_figures import CompletedRequest, FailedRequest
from cadenza.bench.workloads import PlannedRequest, ServeOptions
from cadenza.cli import main
from cadenza.errors import ConfigError
from tests.bench.scripted_server import (
    CUT,
    ERROR_FRAME,
    HANG_UP,
    NO_TEXT,
    NO_USAGE,
    NOT_JSON,
    REFUSED,
    TIMEOUT_S,
    ScriptedServer,
    running,
)
from tests.ports import refusing_port

SMALL = {"prompt_lens": (2, 9), "output_lens": (2, 6), "vocab_size": 10}


def no_report(line: str) -> None:
    assert line


def test_a_closed_loop_keeps_its_clients_busy_and_counts_what_usage_says():
    # One goes ahead to warm up; the first client's fifteen follow, then those of five clients.
    with running(ScriptedServer(together=range(16, 21))) as server:
        options = ServeOptions(
            url=server.url + "/v1/", concurrency=(1, 5), num_requests=15, **SMALL
        )  # type: ignore[arg-type]
        lines: list[str] = []
        found = measure_serving(options, lines.append)
    plans = [requests for _, requests in options.loads()]
    assert (found.model, found.num_failures) == ("scripted", 0)
    assert [load.concurrency for load in found.loads] == [1, 5]
    assert re.fullmatch(r"15 requests from 5 clients: 15 done, [\d.]+ tok/s", lines[-1])
    assert server.most_open == 5
    for load, planned in zip(found.loads, plans, strict=True):
        assert load.num_answers == 15
        assert load.num_output_tokens == sum(each.max_tokens for each in planned)
        assert load.num_prompt_tokens == sum(len(each.prompt_token_ids) for each in planned)
        assert load.itl is not None
        assert load.itl.count == sum(each.max_tokens - 1 for each in planned)
        assert load.ttft is not None
        assert load.ttft.count == 15
        assert load.cpu.server_s == 2.5
    # With one client the order is the plan's.
    sent = [(tuple(body["prompt"]), body["max_tokens"]) for body in server.bodies[1:16]]
    assert sent == [(each.prompt_token_ids, each.max_tokens) for each in plans[0]]
    assert server.bodies[0]["stream_options"] == {"include_usage": True}
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in server.bodies)
    assert server.keys == {None}


def test_arrivals_at_a_rate_overlap_and_are_all_answered():
    with running(ScriptedServer(with_metrics=False, together=range(1, 41))) as server:
        options = ServeOptions(url=server.url, request_rate=2000.0, num_requests=40, **SMALL)  # type: ignore[arg-type]
        (load,) = measure_serving(options, no_report).loads
    assert (load.concurrency, load.num_answers, load.cpu.server_s) == (None, 40, None)
    assert server.most_open == 40
    assert load.server_us_per_token is None
    assert load.client_us_per_token is not None


FAILURES = {
    REFUSED: "429",
    ERROR_FRAME: "error frame",
    CUT: "cut stream",
    NO_USAGE: "no usage",
    NOT_JSON: "not JSON",
    HANG_UP: "RemoteProtocolError",
}


def completed(server: ScriptedServer, *firsts: int, max_tokens: int = 5, **how: Any) -> list[Any]:
    """The outcomes of requests whose prompts are these tokens, one after the other."""

    async def play() -> list[Any]:
        async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as http:
            client = ServeClient(http, "scripted", **how)
            plans = [
                PlannedRequest(prompt_token_ids=(each,), max_tokens=max_tokens) for each in firsts
            ]
            return [await client.complete(plan) for plan in plans]

    return asyncio.run(play())


def test_what_goes_wrong_is_a_failure_with_its_reason_and_the_next_request_is_answered():
    with running(ScriptedServer()) as server:
        outcomes = completed(server, *(each for what in FAILURES for each in (what, 1)))
    assert [each.reason for each in outcomes[::2]] == [*FAILURES.values()]
    assert all(isinstance(each, FailedRequest) for each in outcomes[::2])
    assert all(isinstance(each, CompletedRequest) for each in outcomes[1::2])


def test_times_are_the_clocks_at_the_arrival_of_each_piece():
    readings = itertools.count()
    with running(ScriptedServer()) as server:
        (answer,) = completed(server, 1, max_tokens=3, clock=lambda: float(next(readings)))
    assert answer.sent_s == 0.0
    assert len(answer.content_s) == 3
    assert 0 < answer.content_s[0] <= answer.content_s[1] <= answer.content_s[2] < answer.end_s
    assert (answer.num_prompt_tokens, answer.num_output_tokens) == (1, 3)


@pytest.mark.parametrize(("first", "code"), [(5, 0), (REFUSED, 1)])
def test_the_command_prints_one_object_and_fails_when_a_request_failed(
    first: int, code: int, capsys: pytest.CaptureFixture[str]
):
    with running(ScriptedServer()) as server:
        sizes = ("--input-len", "1", "--output-len", "2:4", "--num-requests", "3")
        load = ("--concurrency", "2", "--vocab-size", str(first + 1), "--seed", "1")
        many = ("--num-requests", "60") if code else ()
        found = main(
            ["bench", "serve", server.url, *sizes, *load, *many, "--api-key", "k", "--json"]
        )
    out = capsys.readouterr().out
    assert found == code
    (result,) = json.loads(out)["results"]
    assert result["num_answers"] + sum(result["errors"].values()) == (60 if code else 3)
    assert set(result["ttft"]) == {"count", "mean_s", "p50_s", "p95_s", "p99_s", "max_s"}
    assert server.keys == {"Bearer k"}
    assert '"k"' not in out


def test_the_command_prints_a_table_for_people(capsys: pytest.CaptureFixture[str]):
    with running(ScriptedServer()) as server:
        assert main(["bench", "serve", server.url, "--concurrency", "2", "--output-len", "2"]) == 0
    out = capsys.readouterr().out
    assert "scripted" in out
    assert "TTFT" in out
    assert "…" not in out


def test_no_prompt_is_sent_twice():
    with running(ScriptedServer()) as server:
        options = ServeOptions(url=server.url, concurrency=(1, 2), num_requests=9)
        measure_serving(options, no_report)
    sent = {tuple(body["prompt"]) for body in server.bodies}
    assert len(sent) == len(server.bodies) == 1 + 9 + 9


def test_a_server_that_is_not_there_or_serves_nothing_is_named():
    nothing = pytest.raises(ServerError, match="does not list its models")
    with running(ScriptedServer(models=[])) as server, nothing:
        measure_serving(ServeOptions(url=server.url), no_report)
    with refusing_port() as port, pytest.raises(ServerError, match="is a server running there"):
        measure_serving(ServeOptions(url=f"http://127.0.0.1:{port}"), no_report)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--concurrency", "0"), "--concurrency 0"),
        (("--concurrency", "x"), "'--concurrency': 'x'"),
        (("--input-len", "5:2"), "--input-len 5:2"),
        (("--output-len", "a:b"), "'--output-len': 'a:b'"),
        (("--request-rate", "0"), "--request-rate 0"),
        (("--vocab-size", "3"), "--vocab-size 3"),
        (("--num-requests", "0"), "--num-requests 0"),
    ],
)
def test_flags_that_cannot_work_are_refused_before_anything_is_sent(
    flags: tuple[str, str], named: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["bench", "serve", "http://127.0.0.1:9", *flags]) == 2
    assert named in capsys.readouterr().err


def test_a_text_that_is_no_url_is_refused():
    with pytest.raises(ConfigError, match="is not a URL"):
        ServeOptions(url="127.0.0.1:8000")


@pytest.mark.parametrize(("time_tokens", "num_times"), [(True, 3), (False, 0)])
def test_tokens_without_text_are_timed_if_asked_for(time_tokens: bool, num_times: int):
    with running(ScriptedServer()) as server:
        (outcome,) = completed(server, NO_TEXT, max_tokens=3, time_tokens=time_tokens)
    assert len(outcome.content_s) == num_times
    assert server.bodies[0].get("return_token_ids", False) is time_tokens
