"""Drafts never cost more than a few per cent of the time, and good ones keep what they gain: in the
modelled time of `tests.engine.modelled`."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cadenza.drafting.draft_ledger import RESERVE, SHARE
from cadenza.engine.stats import StepMeter
from tests.by_day import by_day
from tests.engine.modelled import (
    Accepts,
    Case,
    Machine,
    Phase,
    Play,
    Some,
    best_ratio,
    rate_ratio,
    stream_ratios,
)

LEAST_RATIO = 0.97


def never(_: int) -> float:
    return 0.0


def always(_: int) -> float:
    return 1.0


def at_first(num_tokens: int) -> float:
    return 0.95 if num_tokens < 50 else 0.0


def in_turns(num_tokens: int) -> float:
    """Right as long as it takes to be trusted, then wrong."""
    return 0.9 * (num_tokens // 40 % 2)


def spikes(num_tokens: int) -> float:
    """Of all times: now and then everything takes three times as long for a while."""
    return 3.0 if num_tokens % 160 < 20 else 1.0


DEAR, CHEAP = Machine(), Machine(read_ms=1.0, token_ms=0.05)
ONE = (Phase(num_rows=1, num_streams=8, length=100),)
LOADS: dict[str, tuple[Phase, ...]] = {
    "1 row": ONE,
    "4 rows": (Phase(num_rows=4, num_streams=32, length=100),),
    "8 rows, short": (Phase(num_rows=8, num_streams=160, length=30),),
    "32 rows": (Phase(num_rows=32, num_streams=256, length=60),),
    "1 row, 16, 1": (
        Phase(num_rows=1, num_streams=3, length=100),
        Phase(num_rows=16, num_streams=48, length=60),
        Phase(num_rows=1, num_streams=3, length=100),
    ),
    "1 row, long prompts": (Phase(num_rows=1, num_streams=8, length=80, num_prompt=300),),
}
HOPELESS: dict[str, tuple[Accepts, Machine | None, Machine]] = {
    "look-up, always wrong": (never, None, Machine()),
    "look-up, wrong and dear": (never, None, Machine(num_free=1, token_ms=4.0, believed=0.1)),
    "as large as the target": (always, DEAR, Machine()),
    "as large, taken for small": (always, replace(DEAR, believed=0.1), Machine()),
    "as large, always wrong": (never, replace(DEAR, believed=0.1), Machine()),
    "small, always wrong": (never, CHEAP, Machine()),
    "small, right at first": (at_first, CHEAP, Machine()),
    "look-up, in turns": (in_turns, None, Machine()),
    "noise": (never, CHEAP, Machine(noise=0.1)),
}
BY_DAY = {
    ("look-up, always wrong", "1 row"),
    ("look-up, wrong and dear", "1 row, 16, 1"),
    ("as large, always wrong", "4 rows"),
    ("small, right at first", "8 rows, short"),
    ("noise", "1 row, long prompts"),
}
CASES = [(drafts, load) for drafts in HOPELESS for load in LOADS]


def hopeless(drafts: str, load: str) -> Case:
    accepts, drafter, target = HOPELESS[drafts]
    return Case(seed=1, phases=LOADS[load], accepts=accepts, drafter=drafter, target=target)


@pytest.mark.parametrize("case", by_day(CASES, BY_DAY), ids=" with ".join)
def test_drafts_that_do_not_pay_cost_next_to_nothing(case: tuple[str, str]) -> None:
    assert rate_ratio(hopeless(*case)) >= LEAST_RATIO


def test_a_machine_that_is_slow_now_and_then_costs_no_more() -> None:
    assert rate_ratio(replace(hopeless("small, always wrong", "1 row"), scale=spikes)) >= 0.96


MACHINES = st.builds(
    Machine,
    num_free=st.integers(1, 12),
    token_ms=st.floats(0.05, 3.0),
    host_ms=st.floats(0.05, 2.0),
    believed=st.floats(0.2, 2.0),
)
DRAFTERS = st.none() | st.builds(
    Machine, read_ms=st.floats(0.3, 12.0), token_ms=st.floats(0.01, 1.0)
)


def anything(
    target: Machine,
    drafter: Machine | None,
    num_rows: int,
    length: int,
    chances: list[float],
    asking: tuple[int, float] | None,
) -> Case:
    """Also where one of several requests asks for drafts."""
    num_streams = num_rows * 500 // length

    def accepts(num_tokens: int) -> float:
        return chances[num_tokens // 150 % len(chances)]

    return Case(
        seed=num_rows,
        phases=(Phase(num_rows=num_rows, num_streams=num_streams, length=length),),
        accepts=accepts,
        target=target,
        drafter=drafter,
        some=None if asking is None else Some(every=asking[0], accepts=lambda _: asking[1]),
    )


ANYTHING = st.builds(
    anything,
    MACHINES,
    DRAFTERS,
    st.integers(1, 8),
    st.integers(20, 100),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4),
    st.none() | st.tuples(st.integers(1, 4), st.floats(0.0, 1.0)),
)
DEAR_BESIDE_PROMPTS = anything(
    Machine(num_free=10, token_ms=2.5, host_ms=1.0, believed=0.67),
    None,
    8,
    67,
    [1.0, 0.0, 0.2],
    (1, 0.844),
)
"""Drafts are nearly free beside 8 rows, but beside a prompt each costs a quarter of a step."""
DEAR_TO_CATCH_UP = anything(
    Machine(num_free=6, token_ms=0.21, host_ms=1.465, believed=1.07),
    Machine(read_ms=5.06, token_ms=0.92),
    3,
    72,
    [0.0],
    None,
)
"""A prompt is taken to cost the second model next to nothing, and takes it ten steps."""
DEAR_TO_CATCH_UP_AGAIN = anything(
    Machine(num_free=5, token_ms=2.722, host_ms=0.32, believed=1.621),
    Machine(read_ms=2.1, token_ms=0.92),
    3,
    75,
    [0.0],
    None,
)
"""Likewise; what it took the first time is to be believed the second time."""


@given(ANYTHING)
@example(DEAR_BESIDE_PROMPTS)
@example(DEAR_TO_CATCH_UP)
@example(DEAR_TO_CATCH_UP_AGAIN)
@settings(max_examples=4)
def test_whatever_the_costs_and_however_acceptance_changes_no_more_is_lost(case: Case) -> None:
    num_rows = case.phases[0].num_rows
    without_ms = Play(case, has_drafts=False).run()
    most_ms = (1 + SHARE) * without_ms + (RESERVE + 4) * case.target.step_ms(num_rows)
    assert Play(case, has_drafts=True).run() <= most_ms


@pytest.mark.parametrize(
    "case",
    by_day(
        [(chance, drafter) for chance in (0.6, 0.8, 0.95) for drafter in (None, CHEAP)],
        [(0.8, None)],
    ),
)
def test_good_drafts_keep_what_the_best_number_of_them_would_gain(
    case: tuple[float, Machine | None],
) -> None:
    acceptance, drafter = case
    played = Case(seed=2, phases=ONE, accepts=lambda _: acceptance, drafter=drafter)
    best = best_ratio(played)
    assert best > 1.3
    assert rate_ratio(played) >= 0.95 * best


ONE_OF_EIGHT = Case(
    seed=1,
    phases=(Phase(num_rows=1, num_streams=24, length=100),),
    accepts=never,
    drafter=CHEAP,
    some=Some(every=8, accepts=lambda _: 0.9),
)


def test_a_request_that_asks_gets_its_gain_beside_others_whose_drafts_never_stay() -> None:
    """Where all streams draft so well, the best number of drafts gives 2.6 times the rate."""
    assert ONE_OF_EIGHT.some is not None
    asking, others = stream_ratios(ONE_OF_EIGHT)
    some = replace(ONE_OF_EIGHT.some, asks=False)
    unasked, beside = stream_ratios(replace(ONE_OF_EIGHT, some=some))
    assert asking > 2.3
    assert unasked < 0.8 * asking, "on one account with the others, whose failures end its drafts"
    assert others > max(0.992, beside), "its trials are not at their cost"


@pytest.mark.parametrize("num_prompt", by_day([8, 100, 300], [100]))
def test_to_ask_is_no_worse_than_to_be_silent_beside_others_whose_drafts_pay(
    num_prompt: int,
) -> None:
    """What they saved pays for the first prompts of requests that ask."""
    phases = (replace(ONE_OF_EIGHT.phases[0], num_prompt=num_prompt),)
    case = replace(ONE_OF_EIGHT, phases=phases, accepts=lambda _: 0.9)
    assert case.some is not None
    asking, others = stream_ratios(case)
    unasked, beside = stream_ratios(replace(case, some=replace(case.some, asks=False)))
    assert asking > 0.97 * unasked > 2
    assert others > 0.97 * beside


def test_requests_that_ask_in_vain_lose_no_more_and_cost_the_others_nothing() -> None:
    case = replace(ONE_OF_EIGHT, accepts=lambda _: 0.9, some=Some(every=2, accepts=never))
    asking, others = stream_ratios(case)
    assert asking > 0.98
    assert others > 2.3
    assert rate_ratio(replace(case, accepts=never)) >= 0.985


def test_where_all_requests_ask_drafts_are_as_where_none_does() -> None:
    for chance in (0.0, 0.8):
        silent = Case(seed=4, phases=LOADS["4 rows"], accepts=lambda _, c=chance: c, drafter=CHEAP)
        asking = replace(silent, some=Some(every=1, accepts=silent.accepts))
        assert Play(asking, has_drafts=True).run() == Play(silent, has_drafts=True).run()


def test_drafts_that_become_good_are_found() -> None:
    """In the second half of the tokens all are right: at best a half of the time and a sixth."""
    case = Case(seed=3, phases=ONE, accepts=lambda num_tokens: num_tokens >= 400, drafter=CHEAP)
    assert 1.15 < rate_ratio(case) < 1.7


def test_the_same_drafts_without_a_bound_are_caught() -> None:
    """The negative control: drafts that are made whatever they cost."""
    case = hopeless("as large, always wrong", "1 row")
    without_ms = Play(case, has_drafts=False).run()
    assert without_ms / Play(case, has_drafts=True, is_forced=True).run() < 0.5


def test_that_drafts_do_not_pay_is_told_by_the_log_and_the_statistics(
    caplog: pytest.LogCaptureFixture,
) -> None:
    play = Play(hopeless("small, always wrong", "1 row"), has_drafts=True)
    with caplog.at_level("INFO"):
        play.run()
    assert caplog.text.count("drafts by draft_model are off at 1 rows: they cost ") == 1
    stats = StepMeter(play.engine, play.time.seconds).stats()
    assert stats.by_label["drafts_on"] == {"draft_model,1": 0}
    assert play.engine.draft_states[0].gain < 0
