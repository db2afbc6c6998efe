"""The figures of `cadenza bench batching`: rates, gains, bars, and what is printed of them."""

import math
from dataclasses import replace

import pytest

from cadenza.bench.workloads import PlannedRequest
from cadenza_bench.batching.bars import Bar, StepRates, ideal_gain, static_steps, waiting
from cadenza_bench.batching.figures import ModeFigures, PlayedRun, first_token_difference
from cadenza_bench.batching.plan import BatchingLoad
from cadenza_bench.batching.player import PlayedRequest
from tests.bench.batching_cases import ANSWERS, AT_ONCE, ROWS, compared, planned, small_plan

# What lengths and rates allow


def test_static_batches_take_as_many_steps_as_their_longest_answers():
    assert static_steps((2, 6, 3, 3), 2) == 9
    assert static_steps((2, 6, 3), 2) == 9
    assert ideal_gain("static", (2, 6, 3, 3), 2) == pytest.approx(9 / (14 / 2))
    assert ideal_gain("padded", (2, 6, 3, 3), 2) == pytest.approx(9 / 7)
    assert ideal_gain("sequential", (2, 6, 3, 3), 2) == pytest.approx(2.0)
    assert ideal_gain("continuous", (2, 6, 3, 3), 2) == 1.0


RATES = StepRates(prefill_tok_s=100.0, decode_step_s={1: 1.0, 2: 2.0, 4: 3.0})


def test_requests_wait_for_a_row_until_the_last_batch_begins():
    requests = planned((2, 6, 3, 3, 4))
    assert waiting("static", requests, 2) == requests[:4]
    assert waiting("sequential", requests, 2) == requests[:4]
    assert waiting("padded", requests[:4], 2) == requests[:2]
    assert waiting("static", requests, 5) == []


def test_a_step_of_rows_between_two_that_were_measured_is_interpolated():
    assert [RATES.step_s(rows) for rows in (1, 2, 3, 4)] == [1.0, 2.0, 2.5, 3.0]


def test_measured_rates_give_the_time_of_batches():
    requests = planned(ANSWERS, length=50)  # half a second for each prompt
    first = requests[:2]
    assert RATES.batch_s(first, is_padded=True) == pytest.approx(1.0 + 5 * 2.0)
    assert RATES.batch_s(first, is_padded=False) == pytest.approx(1.0 + 1 * 2.0 + 4 * 1.0)
    assert RATES.run_s("continuous", requests, 2) == pytest.approx(2.0 + (14 - 4) / 2 * 2.0)
    assert RATES.run_s("sequential", requests, 2) == pytest.approx(2.0 + 10 * 1.0)
    static_s = (1.0 + 2.0 + 4.0) + (1.0 + 2 * 2.0)
    assert RATES.allowed_gain("static", requests, 2) == pytest.approx(static_s / 12.0)


def test_prompts_that_come_together_have_their_first_tokens_one_after_the_other():
    requests = planned(ANSWERS, length=50)
    assert RATES.burst_ttft_s(requests, 1) == pytest.approx(0.5)
    assert RATES.burst_ttft_s(requests, 4) == pytest.approx((0.5 + 1.0 + 1.5 + 2.0) / 4)


def test_answers_of_whole_batches_come_when_the_longest_of_their_batch_has_ended():
    requests = planned((2, 6, 3, 3), length=50)
    first_s, second_s = 1.0 + 1 * 2.0 + 4 * 1.0, 1.0 + 2 * 2.0
    assert RATES.whole_ttft_s(requests, 2) == pytest.approx((first_s + second_s) / 2)
    assert RATES.whole_ttft_s(requests[:3], 2) == pytest.approx((2 * first_s + 2.5) / 3)


# Bars


def test_setting_a_names_both_forms_of_its_ratio_and_what_each_is_allowed():
    lens = {"num_requests": 8, "prompt_lens": (4, 4), "output_lens": (5, 5)}
    loads = tuple(BatchingLoad(clients=clients) for clients in (2, 4, 8))
    found = compared(small_plan(setting="A", loads=loads, **lens))
    assert [bar.what for bar in found.bars] == [
        "tok/s over static, 2 clients",
        "tokens a step over static, 2 clients",
        "mean TTFT, one batch of 8 against 4 clients, as published elsewhere",
        "mean TTFT, static-whole over continuous, 4 clients each",
        "tok/s over static, 4 clients",
        "tokens a step over static, 4 clients",
        "tok/s over static-whole, 8 clients",
        "tokens a step over static-whole, 8 clients",
    ]
    assert [bar.ratio for bar in found.bars if " over static" in bar.what][0:2] == [1.0, 1.0]
    published, equal = found.bars[2:4]
    figures = {(each.mode, each.load.clients): each for each in found.figures}
    base = figures["continuous", 4].runs
    for bar, clients in ((published, 8), (equal, 4)):
        over = figures["static-whole", clients].runs
        assert bar.over == [run.mean_ttft_s for run in over]
        assert bar.under == [run.mean_ttft_s for run in base]
        assert bar.required == pytest.approx(0.9 * (bar.allowed or 0.0))
    requests, rates = small_plan(**lens).requests(97), found.rates
    assert rates is not None
    first_s = rates.burst_ttft_s(requests, 4)
    assert published.allowed == pytest.approx(rates.batch_s(requests, is_padded=False) / first_s)
    assert equal.allowed == pytest.approx(rates.batch_s(requests[:4], is_padded=False) / first_s)
    assert (published.claim, equal.claim) == ("6 to 9", None)


def test_settings_b_and_c_ask_for_a_share_of_the_ideal_while_requests_wait():
    found = compared(small_plan(setting="C", loads=(AT_ONCE,)))
    least, *bars = found.bars
    assert [bar.what for bar in bars] == [
        "tok/s over padded, while requests wait",
        "tokens a step over padded, while requests wait",
    ]
    for bar in bars:
        assert bar.ideal == least.ratio
        assert bar.required == pytest.approx(0.9 * least.ratio)
    found = compared(small_plan(setting="B", loads=(AT_ONCE,)))
    assert [bar.what for bar in found.bars] == [
        "tok/s over static, while requests wait",
        "tokens a step over static, while requests wait",
    ]
    assert found.bars[0].ratios == found.bars[1].ratios  # a second is a step


def test_a_bar_is_the_ratio_of_its_medians_and_met_as_shown_or_within_the_noise():
    two = Bar(what="a ratio", over=(2.0, 1.0), under=(2.0, 0.8), required=1.08)
    assert (two.value, two.base, two.ratio) == (1.5, 1.4, 1.5 / 1.4)
    assert (two.ratios, two.error, two.verdict, two.is_met) == ([1.0, 1.25], 0.0, "miss", False)
    assert replace(two, required=1.073).verdict == "pass"  # 1.07, as both are shown
    three = Bar(what="a ratio", over=(1.0, 1.25, 1.5), under=(1.0, 1.0, 1.0), required=1.253)
    assert three.error == pytest.approx(2 * 1.4826 * 0.25 / math.sqrt(3))
    assert three.verdict == "pass"
    assert replace(three, required=1.5).verdict == "pass within noise"
    assert replace(three, required=1.5).is_met
    assert replace(three, required=1.7).verdict == "miss"
    disturbed = replace(three, over=(0.55, 1.17, 1.15), required=1.39)
    assert disturbed.verdict == "miss"


# Figures


def played(
    times: list[float], due_s: float = 0.0, tokens: list[int] | None = None, started: int = 0
) -> PlayedRequest:
    return PlayedRequest(
        index=0,
        due_s=due_s,
        planned=PlannedRequest(prompt_token_ids=(1, 2), max_tokens=len(times)),
        token_ids=tokens or [5] * len(times),
        content_s=times,
        start_s=started,
        start_step=started,
    )


def test_figures_pool_the_times_of_requests_and_take_medians_of_rates():
    run = PlayedRun(
        mode="static",
        load=AT_ONCE,
        round=1,
        requests=[played([1, 2, 4]), played([3, 5], 2.0, started=2)],
        num_steps=10,
    )
    figures = ModeFigures(mode="static", load=AT_ONCE, runs=[run])
    assert figures.ttft is not None
    assert figures.itl is not None
    assert figures.tpot is not None
    assert figures.e2e is not None
    assert (figures.ttft.mean_s, figures.e2e.mean_s) == (1.0, 3.5)
    assert (figures.itl.count, figures.itl.mean_s) == (3, pytest.approx(5 / 3))
    assert figures.tpot.mean_s == pytest.approx((1.5 + 2) / 2)
    assert figures.tok_s == 1.0
    assert run.tokens_a_step == 0.5
    assert (run.full_tok_s, run.full_tokens_a_step) == (1.0, 1.0)  # two tokens by the second one
    assert (figures.full_tok_s, figures.full_tokens_a_step) == (None, None)
    full = replace(figures, has_waits=True)
    assert (full.full_tok_s, full.full_tokens_a_step) == (1.0, 1.0)
    long = replace(run, requests=[played([1, 9])])
    assert replace(figures, runs=[long, run]).middle_run is run
    assert replace(figures, runs=[long, run, long]).middle_run is long
    whole = replace(figures, is_whole=True)
    assert (whole.itl, whole.tpot) == (None, None)


def test_a_gain_is_the_ratio_of_the_two_figures_that_are_shown():
    plan = small_plan(repeats=3)
    for each in compared(plan).figures:
        ours = each.continuous
        assert (ours is None) == (each.mode == "continuous")
        assert each.has_waits == each.load.is_saturated
        if ours is None:
            assert (each.gain, each.step_gain, each.full_gain, each.gains) == (None, None, None, [])
            continue
        assert (ours.mode, ours.load) == ("continuous", each.load)
        assert each.gain == ours.tok_s / each.tok_s
        assert each.step_gain == each.num_steps / ours.num_steps
        if each.load.is_saturated:
            assert ours.full_tok_s is not None
            assert each.full_tok_s is not None
            assert each.full_gain == ours.full_tok_s / each.full_tok_s
        else:
            assert (each.full_gain, each.ideal_gain, each.allowed_gain) == (None, None, None)


@pytest.mark.parametrize("num_requests", [1, ROWS])
def test_requests_that_all_get_a_row_at_once_have_no_figures_of_waiting(num_requests: int):
    """A window that holds only first prefills would make continuous batching the slowest mode."""
    found = compared(small_plan(num_requests=num_requests, loads=(AT_ONCE,)))
    for each in found.figures:
        assert (each.full_tok_s, each.full_gain, each.ideal_gain) == (None, None, None)
        expected = 1.0 if each.mode in ("continuous", "static", "static-whole") else None
        if each.gain is not None and expected is not None:
            assert each.gain == expected


def test_the_first_token_that_differs_is_named():
    runs = [
        PlayedRun(
            mode=mode, load=AT_ONCE, round=1, requests=[played([1, 2], tokens=tokens)], num_steps=2
        )
        for mode, tokens in (("continuous", [5, 6]), ("static", [5, 6]), ("padded", [5, 7]))
    ]
    assert first_token_difference(runs[:2]) is None
    found = first_token_difference(runs)
    assert found is not None
    assert (found.mode, found.position, found.found, found.expected) == ("padded", 1, 7, 6)
