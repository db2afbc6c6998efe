"""The arithmetic of a served load: exact numbers from times given by hand."""

from typing import Any

import pytest

from cadenza.bench.serve_figures import (
    CompletedRequest,
    CpuTimes,
    FailedRequest,
    LoadSetting,
    Spread,
    figures_of,
    spread_of,
)
from cadenza.bench.serve_options import LoadOptions, parse_goodput
from cadenza.bench.workloads import FIRST_TOKEN_ID, PlannedRequest

CPU = CpuTimes(client_s=0.0012, server_s=0.012)
ANSWERS = (
    CompletedRequest(
        sent_s=10.0,
        content_s=(10.5, 10.75, 11.5),
        end_s=12.5,
        num_prompt_tokens=100,
        num_output_tokens=5,
    ),
    CompletedRequest(
        sent_s=11.0, content_s=(12.0,), end_s=12.0, num_prompt_tokens=20, num_output_tokens=1
    ),
    CompletedRequest(
        sent_s=11.0, content_s=(), end_s=14.0, num_prompt_tokens=30, num_output_tokens=6
    ),
)
FAILURES = (
    FailedRequest(sent_s=9.5, end_s=9.6, reason="429"),
    FailedRequest(sent_s=12.0, end_s=15.5, reason="429"),
    FailedRequest(sent_s=12.0, end_s=13.0, reason="timeout"),
)


def test_the_figures_of_a_small_load_are_exact():
    found = figures_of([*ANSWERS, *FAILURES], CPU, LoadSetting(concurrency=4))
    assert (found.num_answers, found.errors) == (3, {"429": 2, "timeout": 1})
    assert found.duration_s == 6.0
    assert (found.num_prompt_tokens, found.num_output_tokens) == (150, 12)
    assert (found.output_tok_s, found.total_tok_s, found.requests_per_s) == (2.0, 27.0, 0.5)
    assert found.ttft == Spread(
        count=2,
        mean_s=0.75,
        p50_s=0.75,
        p95_s=pytest.approx(0.975),
        p99_s=pytest.approx(0.995),
        max_s=1.0,
    )
    assert found.itl is not None
    assert (found.itl.count, found.itl.mean_s, found.itl.max_s) == (2, 0.5, 0.75)
    assert found.tpot is not None
    assert (found.tpot.count, found.tpot.mean_s) == (1, 0.5)
    assert found.e2e is not None
    assert (found.e2e.count, found.e2e.p50_s) == (3, 2.5)
    assert found.client_us_per_token == pytest.approx(100.0)
    assert found.server_us_per_token == pytest.approx(1000.0)


def test_a_load_that_failed_altogether_has_counts_and_no_times():
    found = figures_of(FAILURES, CpuTimes(client_s=1.0, server_s=None), LoadSetting())
    assert (found.num_answers, found.output_tok_s) == (0, 0.0)
    assert found.ttft is found.itl is found.tpot is found.e2e is None
    assert found.client_us_per_token is found.server_us_per_token is None


def test_a_percentile_lies_between_the_two_nearest_values():
    found = spread_of([5.0, 1.0, 3.0, 2.0, 4.0])
    assert found is not None
    assert (found.p50_s, found.max_s) == (3.0, 5.0)
    assert (found.p95_s, found.p99_s) == (pytest.approx(4.8), pytest.approx(4.96))


def test_one_value_is_its_own_spread_and_no_values_have_none():
    one = spread_of([2.0])
    assert one == Spread(count=1, mean_s=2.0, p50_s=2.0, p95_s=2.0, p99_s=2.0, max_s=2.0)
    assert spread_of([]) is None


def drawn(count: int, *, part: int = 1, **options: Any) -> list[PlannedRequest]:
    return LoadOptions(**options).source().take(count, part)


def test_a_workload_is_a_function_of_its_seed_and_keeps_its_bounds():
    requests = drawn(300, seed=4)
    assert requests == drawn(300, seed=4)
    assert requests != drawn(300, seed=5)
    assert requests != drawn(300, part=2, seed=4)
    assert requests[:10] == drawn(10, seed=4)
    lengths = [len(each.prompt_token_ids) for each in requests]
    assert (min(lengths) >= 16, max(lengths) <= 512) == (True, True)
    assert (min(lengths) < 40, max(lengths) > 480) == (True, True)
    outputs = [each.max_tokens for each in requests]
    assert (min(outputs), max(outputs)) == (16, 128)
    ids = {token_id for each in requests for token_id in each.prompt_token_ids}
    assert (min(ids), max(ids)) == (FIRST_TOKEN_ID, 999)
    assert all(each.after_s == 0 for each in requests)


def answer(start_s: float, first_s: float, end_s: float, tokens: int) -> CompletedRequest:
    return CompletedRequest(
        sent_s=start_s + 0.25,
        due_s=start_s,
        content_s=(first_s, end_s) if tokens > 1 else (first_s,),
        end_s=end_s,
        num_prompt_tokens=1,
        num_output_tokens=tokens,
    )


def test_what_was_sent_late_is_timed_from_when_it_was_due():
    found = figures_of([answer(1.0, 2.0, 4.0, 5)], CPU, LoadSetting())
    assert found.ttft is not None
    assert found.e2e is not None
    assert found.tpot is not None
    assert found.send_lag is not None
    assert (found.ttft.mean_s, found.e2e.mean_s, found.tpot.mean_s) == (1.0, 3.0, 0.5)
    assert (found.send_lag.count, found.send_lag.mean_s, found.duration_s) == (1, 0.25, 3.0)


GOODPUTS = {
    "ttft:1000": 3,
    "ttft:999": 2,
    "tpot:500": 3,
    "tpot:499": 1,
    "e2el:3000": 3,
    "e2el:2999": 2,
    "ttft:1500,tpot:500": 3,
    "ttft:400 tpot:500": 1,
    "ttft:1000, tpot:100, e2el:900": 1,
}


@pytest.mark.parametrize("bounds", GOODPUTS)
def test_a_good_request_keeps_all_bounds_and_one_token_has_no_tpot(bounds: str):
    outcomes = [
        answer(1.0, 2.0, 4.0, 5),
        answer(0.0, 0.5, 2.0, 4),
        answer(2.0, 2.25, 2.25, 1),
        FailedRequest(sent_s=0.0, end_s=4.0, reason="429"),
    ]
    found = figures_of(outcomes, CPU, LoadSetting(goodput=parse_goodput(bounds)))
    assert found.num_good == GOODPUTS[bounds]
    assert found.good_share == GOODPUTS[bounds] / 4
    assert found.goodput_rps == GOODPUTS[bounds] / 4.0


def test_percentiles_that_are_asked_for_have_their_names():
    found = spread_of([float(each) for each in range(1001)], (10.0, 99.9))
    assert found is not None
    assert found.percentiles_s == {"10": pytest.approx(100.0), "99.9": pytest.approx(999.0)}
