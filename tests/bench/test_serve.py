"""`cadenza bench serve` against a scripted server: what it sends, counts, and calls a failure."""

import asyncio
import itertools
import json
import re
import time
from typing import Any

import pytest

from cadenza.bench import Clock
from cadenza.bench.datasets import Arrivals
from cadenza.bench.serve import MeasuredLoad, ServerError, capacity_rps, measure_serving
from cadenza.bench.serve_client import RequestForm, ServeClient
from cadenza.bench.serve_figures import (
    CompletedRequest,
    CpuTimes,
    FailedRequest,
    LoadSetting,
    ServeFigures,
    figures_of,
)
from cadenza.bench.serve_options import Goodput, LoadOptions, ServerAddress
from cadenza.bench.workloads import PlannedRequest
from cadenza.cli import main
from cadenza.cli.bench_report import void_reasons
from cadenza.errors import ConfigError
from tests.bench.scripted_server import (
    CUT,
    ERROR_FRAME,
    HANG_UP,
    NO_TEXT,
    NO_USAGE,
    NOT_JSON,
    REFUSED,
    ScriptedServer,
    running,
)
from tests.ports import refusing_port

SMALL: dict[str, Any] = {"prompt_lens": (2, 9), "output_lens": (2, 6), "vocab_size": 10}


# The scripted servers run in this process, answer at once, and so leave the client a large share.
ANY_SHARE = ("--max-client-share", "1")


def no_report(line: str) -> None:
    assert line


def test_a_closed_loop_keeps_its_clients_busy_and_counts_what_usage_says():
    # One goes ahead to warm up; the first client's fifteen follow, then those of five clients.
    with running(ScriptedServer(together=range(16, 21))) as server:
        options = LoadOptions(concurrency=(1, 5), num_requests=15, **SMALL)
        lines: list[str] = []
        found = measure_serving(ServerAddress(url=server.url + "/v1/"), options, lines.append)
    plans = [load.requests for load in options.loads(options.source())]
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
        options = LoadOptions(request_rate=(2000.0,), num_requests=40, **SMALL)
        (load,) = measured(server, options).loads
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
    HANG_UP: "connection closed",
}


def measured(server: ScriptedServer, options: LoadOptions) -> ServeFigures:
    return measure_serving(ServerAddress(url=server.url), options, no_report)


def completed(server: ScriptedServer, *firsts: int, max_tokens: int = 5, **how: Any) -> list[Any]:
    """The outcomes of requests whose prompts are these tokens, one after the other."""

    plans = [PlannedRequest(prompt_token_ids=(each,), max_tokens=max_tokens) for each in firsts]
    return played(server, *plans, **how)


def played(
    server: ScriptedServer, *plans: PlannedRequest, clock: Clock = time.perf_counter, **how: Any
) -> list[Any]:
    """The outcomes of these requests, one after the other."""

    async def play() -> list[Any]:
        client = ServeClient(
            ServerAddress(url=server.url), RequestForm(model="scripted", **how), clock
        )
        try:
            return [outcome for plan in plans for outcome in await client.complete(plan)]
        finally:
            client.close()

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
    assert 0 < answer.content_s[0] <= answer.content_s[1] <= answer.content_s[2] <= answer.end_s
    assert (answer.num_prompt_tokens, answer.num_output_tokens) == (1, 3)


@pytest.mark.parametrize(("first", "code"), [(5, 0), (REFUSED, 1)])
def test_the_command_prints_one_object_and_fails_when_a_request_failed(
    first: int, code: int, capsys: pytest.CaptureFixture[str]
):
    with running(ScriptedServer()) as server:
        sizes = ("--input-len", "1", "--output-len", "2:4", "--num-requests", "3")
        load = ("--concurrency", "2", "--vocab-size", str(first + 1), "--seed", "1")
        many = ("--num-requests", "60") if code else ()
        form = ("--api-key", "k", "--json", *ANY_SHARE)
        found = main(["bench", "serve", server.url, *sizes, *load, *many, *form])
    out = capsys.readouterr().out
    assert found == code
    (result,) = json.loads(out)["results"]
    assert result["num_answers"] + sum(result["errors"].values()) == (60 if code else 3)
    assert set(result["ttft"]) == {
        *("count", "mean_s", "p50_s", "p95_s", "p99_s", "max_s", "percentiles_s")
    }
    assert set(result["ttft"]["percentiles_s"]) == {"50", "95", "99"}
    assert server.keys == {"Bearer k"}
    assert '"k"' not in out


def test_the_command_prints_a_table_for_people(capsys: pytest.CaptureFixture[str]):
    with running(ScriptedServer()) as server:
        flags = ("--concurrency", "2", "--output-len", "2", *ANY_SHARE)
        assert main(["bench", "serve", server.url, *flags]) == 0
    out = capsys.readouterr().out
    assert "scripted" in out
    assert "TTFT" in out
    assert "…" not in out


def test_no_prompt_is_sent_twice():
    with running(ScriptedServer()) as server:
        measured(server, LoadOptions(concurrency=(1, 2), num_requests=9))
    sent = {tuple(body["prompt"]) for body in server.bodies}
    assert len(sent) == len(server.bodies) == 1 + 9 + 9


def test_a_server_that_is_not_there_or_serves_nothing_is_named():
    nothing = pytest.raises(ServerError, match="does not list its models")
    with running(ScriptedServer(models=[])) as server, nothing:
        measured(server, LoadOptions())
    with refusing_port() as port, pytest.raises(ServerError, match="is the server there"):
        measured(ScriptedServer(url=f"http://127.0.0.1:{port}"), LoadOptions())


def test_a_text_that_is_no_url_is_refused():
    with pytest.raises(ConfigError, match="is no URL"):
        ServerAddress(url="127.0.0.1:8000")


@pytest.mark.parametrize(("time_tokens", "num_times"), [(True, 3), (False, 0)])
def test_tokens_without_text_are_timed_if_asked_for(time_tokens: bool, num_times: int):
    with running(ScriptedServer()) as server:
        (outcome,) = completed(server, NO_TEXT, max_tokens=3, time_tokens=time_tokens)
    assert len(outcome.content_s) == num_times
    assert server.bodies[0].get("return_token_ids", False) is time_tokens


def test_connections_are_kept_between_requests_and_a_dropped_one_is_replaced():
    with running(ScriptedServer(keeps_connections=True)) as server:
        assert len(completed(server, 1, 2, 3)) == 3
    assert server.num_connections == 1
    with running(ScriptedServer(keeps_connections=True, drops_kept=True)) as server:
        outcomes = completed(server, 1, 2, 3)
    assert all(isinstance(each, CompletedRequest) for each in outcomes)
    assert server.num_connections == 3


def busy_after_the_first(line: str) -> None:
    """Keeps the client from its sockets for a tenth of a second when the first answer is read."""
    if ": 1 done" in line:
        until_s = time.perf_counter() + 0.1
        while time.perf_counter() < until_s:
            pass


def test_a_busy_client_delays_what_is_due_which_its_latencies_contain_and_voids_the_load():
    with running(ScriptedServer()) as server:
        options = LoadOptions(request_rate=(100.0,), num_requests=40, **SMALL)
        address = ServerAddress(url=server.url)
        found = measure_serving(address, options, busy_after_the_first)
    ((load,), (outcomes,)) = found.loads, found.timelines
    late_s = [each.sent_s - each.due_s for each in outcomes if each.due_s is not None]
    assert len(late_s) == 40
    assert max(late_s) > 0.05
    for each, late in zip(outcomes, late_s, strict=True):
        assert isinstance(each, CompletedRequest)
        assert each.ttft_s is not None
        assert min(each.ttft_s, each.e2e_s) > late >= 0
    assert load.send_lag is not None
    assert load.send_lag.max_s == max(late_s)
    assert load.client is not None
    assert load.client.longest_busy_s > 0.1
    assert load.client.lag_share > 0.05
    (reason,) = void_reasons([("", load)], 0.05)
    assert reason.startswith("100/s: this client took ")
    assert void_reasons([("", load)], 1.0) == []


def test_a_void_load_is_said_and_makes_the_command_fail(capsys: pytest.CaptureFixture[str]):
    flags = ("--concurrency", "2", "--output-len", "2", "--max-client-share", "1e-9")
    with running(ScriptedServer()) as server:
        assert main(["bench", "serve", server.url, *flags]) == 1
        assert "void: 2 clients: this client took" in capsys.readouterr().out
        assert main(["bench", "serve", server.url, *flags, "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["void"]) == 1


def test_a_conversation_sends_each_turn_with_the_answers_before_it():
    with running(ScriptedServer()) as server:
        options = LoadOptions(
            dataset="multi-turn",
            num_turns=3,
            concurrency=(1,),
            num_requests=2,
            num_warmups=0,
            **SMALL,
        )
        (load,) = measured(server, options).loads
    assert load.num_answers == 6
    turns = [body["messages"] for body in server.bodies]
    assert [len(messages) for messages in turns] == [1, 3, 5, 1, 3, 5]
    first, second, third = turns[:3]
    assert third[:3] == second
    assert second[0] == first[0]
    assert {each["role"] for each in third[::2]} == {"user"}
    assert third[1] == {"role": "assistant", "content": "a" * server.bodies[0]["max_tokens"]}


def test_probes_are_sent_beside_the_load_and_timed_apart():
    with running(ScriptedServer(delay_s=0.002)) as server:
        options = LoadOptions(
            concurrency=(2,), num_requests=6, probe_request_rate=500.0, num_warmups=0, **SMALL
        )
        (load,) = measured(server, options).loads
    probes = [body for body in server.bodies if body["prompt"] == "Hi"]
    assert {body["max_tokens"] for body in probes} == {1}
    assert load.num_answers == 6 == len(server.bodies) - len(probes)
    assert load.probe is not None
    assert 0 < load.probe.count <= len(probes)


def test_a_sweep_takes_its_rates_between_one_client_and_many():
    with running(ScriptedServer(delay_s=0.002)) as server:
        options = LoadOptions(concurrency=(2, 6), num_requests=12, sweep=2, **SMALL)
        found = measured(server, options)
    one, many, *swept = found.loads
    assert (one.concurrency, many.concurrency) == (1, 6)
    low, high = one.requests_per_s, many.requests_per_s
    rates = [load.arrivals.rate for load in swept if load.arrivals is not None]
    assert rates == pytest.approx([(low + high) / 2, high])
    assert found.capacity_rps in {None, *rates}


def test_the_capacity_is_the_highest_rate_at_which_answers_keep_up_or_are_good():
    def at(rate: float, *, ttft_s: float, goodput: Goodput | None = None) -> MeasuredLoad:
        """A hundred requests at an even rate, each of them longer than the one before it."""
        outcomes = [
            CompletedRequest(
                sent_s=each / rate,
                content_s=(each / rate + ttft_s * each,),
                end_s=each / rate + ttft_s * each,
                num_prompt_tokens=1,
                num_output_tokens=1,
            )
            for each in range(100)
        ]
        setting = LoadSetting(arrivals=Arrivals(rate=rate), goodput=goodput)
        cpu = CpuTimes(client_s=0.0, server_s=None)
        return MeasuredLoad(figures=figures_of(outcomes, cpu, setting), outcomes=outcomes)

    # The second falls behind by a tenth of the interval with each request.
    loads = [at(10.0, ttft_s=0.0005), at(20.0, ttft_s=0.005), at(30.0, ttft_s=0.0)]
    assert capacity_rps(loads[:2]) == 10.0
    assert capacity_rps(loads) == 30.0
    assert capacity_rps(loads[1:2]) is None
    bound = Goodput(ttft_ms=46.0)
    good = [at(rate, ttft_s=ttft, goodput=bound) for rate, ttft in ((10, 0.0005), (20, 0.00053))]
    assert [load.figures.num_good for load in good] == [93, 87]
    assert capacity_rps(good) == 10.0


def test_a_server_that_keeps_up_does_so_however_long_its_last_answers_take():
    """Answers of two seconds at 20 requests a second: within a fifth of the time after the last
    arrival nothing arrives, and requests are still answered."""
    outcomes = [
        CompletedRequest(
            sent_s=each / 20,
            content_s=(each / 20 + 0.1,),
            end_s=each / 20 + 2.0,
            num_prompt_tokens=1,
            num_output_tokens=2,
        )
        for each in range(192)
    ]
    setting = LoadSetting(arrivals=Arrivals(rate=20.0))
    figures = figures_of(outcomes, CpuTimes(client_s=0.0, server_s=None), setting)
    assert figures.requests_per_s < 0.95 * 20
    assert capacity_rps([MeasuredLoad(figures=figures, outcomes=outcomes)]) == 20.0


def test_processor_time_is_for_each_token_of_answers_and_of_probes():
    outcome = CompletedRequest(
        sent_s=0.0, content_s=(0.5,), end_s=1.0, num_prompt_tokens=1, num_output_tokens=6
    )
    cpu = CpuTimes(client_s=0.008, server_s=0.08, num_probe_tokens=2)
    figures = figures_of([outcome], cpu, LoadSetting())
    assert figures.client_us_per_token == pytest.approx(1000.0)
    assert figures.server_us_per_token == pytest.approx(10_000.0)
