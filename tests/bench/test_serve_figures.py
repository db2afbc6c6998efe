"""The arithmetic of a served load: exact numbers from times given by hand."""

from itertools import pairwise

import pytest

from cadenza.bench.serve_figures import (
    CompletedRequest,
    CpuTimes,
    FailedRequest,
    Spread,
    figures_of,
    spread_of,
)
from cadenza.bench.workloads import FIRST_TOKEN_ID, ServeOptions

URL = "http://127.0.0.1:8000"
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
    found = figures_of([*ANSWERS, *FAILURES], CPU, concurrency=4)
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
    found = figures_of(FAILURES, CpuTimes(client_s=1.0, server_s=None), concurrency=None)
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


def test_a_workload_is_a_function_of_its_seed_and_keeps_its_bounds():
    options = ServeOptions(url=URL, seed=4)
    requests = options.requests(300)
    assert requests == options.requests(300)
    assert requests != ServeOptions(url=URL, seed=5).requests(300)
    assert requests[:10] == options.requests(10)
    lengths = [len(each.prompt_token_ids) for each in requests]
    assert (min(lengths) >= 16, max(lengths) <= 512) == (True, True)
    assert (min(lengths) < 40, max(lengths) > 480) == (True, True)
    outputs = [each.max_tokens for each in requests]
    assert (min(outputs), max(outputs)) == (16, 128)
    ids = {token_id for each in requests for token_id in each.prompt_token_ids}
    assert (min(ids), max(ids)) == (FIRST_TOKEN_ID, 999)
    assert all(each.after_s == 0 for each in requests)


def test_arrivals_come_at_the_rate_in_the_mean_and_not_evenly():
    requests = ServeOptions(url=URL, request_rate=50.0).requests(4000)
    times = [each.after_s for each in requests]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(80.0, rel=0.1)
    gaps = [later - sooner for sooner, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    # The standard deviation of exponential gaps is their mean.
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.15)
