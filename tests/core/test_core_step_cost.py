"""`StepCost`, `PromptBudget` and `share_among_prompts`: the time of steps, and who gets it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.core.step_cost import (
    MIN_PROMPT_TOKENS,
    MeasuredStep,
    PromptBudget,
    PromptPart,
    StepBound,
    StepCost,
    StepLoad,
    fit_step_cost,
    num_keys,
    share_among_prompts,
)

COST = StepCost(fixed_ms=5.0, token_ms=0.25, logit_ms=0.2, key_ms=0.0001)

costs = st.builds(
    StepCost,
    fixed_ms=st.floats(0.01, 100),
    token_ms=st.floats(0.001, 5),
    logit_ms=st.floats(1e-9, 5),
    key_ms=st.floats(1e-9, 0.01),
)
loads = st.builds(
    StepLoad,
    num_tokens=st.integers(1, 1024),
    num_logits=st.integers(0, 256),
    num_keys=st.integers(0, 10**6),
)
prompt_parts = st.builds(
    PromptPart,
    start=st.integers(0, 10_000),
    num_left=st.integers(1, 10_000),
    has_logits=st.booleans(),
    is_first=st.booleans(),
)


def load_of(part: PromptPart, count: int) -> StepLoad:
    return StepLoad().plus(part.start, count, count if part.has_logits else 0)


def measured(load: StepLoad) -> MeasuredStep:
    return MeasuredStep(load=load, ms=COST.predict_ms(load))


def test_keys_are_counted_as_each_token_attends_to_itself_and_all_before() -> None:
    assert num_keys(0, 3) == 1 + 2 + 3
    assert num_keys(10, 2) == 11 + 12


def test_four_exact_measurements_give_the_cost_back() -> None:
    one = StepLoad().plus(0, 1, 1)
    fitted = fit_step_cost(
        one_row=measured(one),
        all_rows=measured(StepLoad(num_tokens=16, num_logits=16, num_keys=16)),
        chunk=measured(StepLoad().plus(0, 64, 0)),
        far_chunk=measured(StepLoad().plus(2048, 64, 0)),
    )
    for load in (one, StepLoad().plus(100, 200, 0), StepLoad(num_tokens=8, num_logits=8)):
        assert fitted.predict_ms(load) == pytest.approx(COST.predict_ms(load), rel=0.02)


def test_measurements_that_contradict_each_other_give_positive_costs() -> None:
    fitted = fit_step_cost(
        one_row=MeasuredStep(load=StepLoad().plus(0, 1, 1), ms=9.0),
        all_rows=MeasuredStep(load=StepLoad(num_tokens=4, num_logits=4, num_keys=4), ms=3.0),
        chunk=MeasuredStep(load=StepLoad().plus(0, 64, 0), ms=5.0),
        far_chunk=MeasuredStep(load=StepLoad().plus(2048, 64, 0), ms=4.0),
    )
    assert min(fitted.fixed_ms, fitted.token_ms, fitted.logit_ms, fitted.key_ms) > 0


@given(costs, loads, st.floats(1e-6, 1e6))
def test_a_correction_moves_the_prediction_towards_the_measurement(
    cost: StepCost, load: StepLoad, measured_ms: float
) -> None:
    before = cost.predict_ms(load)
    corrected = cost.corrected(load, measured_ms)
    after = corrected.predict_ms(load)
    slack = 1e-9 * before
    assert min(before, measured_ms) - slack <= after <= max(before, measured_ms) + slack
    assert min(corrected.fixed_ms, corrected.token_ms, corrected.key_ms) > 0


def test_corrections_follow_a_machine_that_became_slower() -> None:
    slow = replace(COST, fixed_ms=10.0, token_ms=0.5, logit_ms=0.4, key_ms=0.0002)
    cost = COST
    steps = [StepLoad().plus(500, 8, 8), StepLoad().plus(0, 120, 1), StepLoad().plus(4000, 40, 1)]
    for _ in range(300):
        for load in steps:
            cost = cost.corrected(load, slow.predict_ms(load))
    for load in steps:
        assert cost.predict_ms(load) == pytest.approx(slow.predict_ms(load), rel=0.1)


@given(costs, prompt_parts, st.floats(0, 1000))
def test_the_most_tokens_use_up_the_time_and_no_more(
    cost: StepCost, part: PromptPart, left_ms: float
) -> None:
    most = int(cost.most_tokens(part.start, left_ms, has_logits=part.has_logits))
    fixed = cost.fixed_ms
    assert cost.predict_ms(load_of(part, most)) - fixed <= left_ms * (1 + 1e-6) + 1e-6
    assert cost.predict_ms(load_of(part, most + 2)) - fixed > left_ms


@given(costs, st.lists(prompt_parts, min_size=1, max_size=5), st.data())
def test_prompts_keep_to_tokens_and_time_and_always_progress(
    cost: StepCost, parts: list[PromptPart], data: st.DataObject
) -> None:
    num_tokens = data.draw(st.integers(1, 512))
    left_ms = data.draw(st.floats(-50, 500))
    budget = PromptBudget(num_tokens=num_tokens, left_ms=left_ms, cost=cost)
    counts = share_among_prompts(parts, budget)
    assert all(0 <= n <= part.num_left for n, part in zip(counts, parts, strict=True))
    assert 0 < sum(counts) <= num_tokens
    used_ms = sum(
        cost.predict_ms(load_of(part, n)) - cost.fixed_ms
        for n, part in zip(counts, parts, strict=True)
    )
    if sum(counts) > MIN_PROMPT_TOKENS:
        grant = sum(
            cost.predict_ms(load_of(part, MIN_PROMPT_TOKENS)) - cost.fixed_ms for part in parts
        )
        assert used_ms <= max(left_ms, 0.0) + grant + 1e-6
    wanted = sum(part.num_left for part in parts)
    assert sum(counts) >= min(MIN_PROMPT_TOKENS, num_tokens, wanted), "the grant was not given"


def test_two_prompts_do_not_both_use_the_time_of_one_step() -> None:
    parts = [PromptPart(start=0, num_left=4000), PromptPart(start=0, num_left=3000)]
    budget = PromptBudget(num_tokens=1000, left_ms=50.0, cost=COST)
    counts = share_among_prompts(parts, budget)
    assert (
        sum(
            COST.predict_ms(load_of(part, n)) - COST.fixed_ms
            for n, part in zip(counts, parts, strict=True)
        )
        <= 50.0
    )
    assert sum(counts) > 150


def test_the_shortest_gets_up_to_half_and_the_oldest_the_rest() -> None:
    def counts(*num_left: int, num_tokens: int = 100) -> list[int]:
        parts = [PromptPart(start=0, num_left=n) for n in num_left]
        return share_among_prompts(parts, PromptBudget(num_tokens=num_tokens))

    assert counts(1000, 30) == [70, 30]
    assert counts(1000, 80) == [50, 50]
    assert counts(30, 1000) == [30, 70]
    assert counts(1000, 80, 70) == [50, 0, 50]
    assert counts(20, 500, 10) == [20, 70, 10]
    assert counts(5, 5, num_tokens=4) == [4, 0]


@given(costs, st.lists(prompt_parts, min_size=2, max_size=5), st.data())
def test_the_oldest_prompt_beside_those_that_are_first_goes_on(
    cost: StepCost, parts: list[PromptPart], data: st.DataObject
) -> None:
    num_tokens, left_ms = data.draw(st.integers(1, 512)), data.draw(st.floats(-50, 500))
    budget = PromptBudget(num_tokens=num_tokens, left_ms=left_ms, cost=cost)
    counts = share_among_prompts(parts, budget)
    assert all(count <= part.num_left for count, part in zip(counts, parts, strict=True))
    others = [count for count, part in zip(counts, parts, strict=True) if not part.is_first]
    if 0 < len(others) < len(parts):
        assert others[0] >= 1


def test_without_time_a_prompt_gets_the_grant_and_no_more() -> None:
    budget = PromptBudget(num_tokens=256, left_ms=-10.0, cost=COST)
    assert share_among_prompts([PromptPart(start=0, num_left=500)], budget) == [MIN_PROMPT_TOKENS]


def test_a_bound_counts_the_steps_that_exceed_it() -> None:
    bound = StepBound(max_ms=50.0, cost=COST)
    bound.observe(StepLoad(num_tokens=1, num_logits=1), 49.0)
    bound.observe(StepLoad(num_tokens=1, num_logits=1), 51.0)
    assert bound.num_exceeded == 1


def test_smaller_steps_cost_a_prompt_the_share_that_is_stated() -> None:
    share = COST.prefill_share(30.0, 256)
    most = COST.most_tokens(0, 25.0)
    rate = most / 30.0
    assert share == pytest.approx(rate / (256 / (5.0 + 256 * 0.25)), rel=0.03)
    assert COST.prefill_share(1000.0, 256) == pytest.approx(1.0)


@given(
    num_tokens=st.integers(1, 300),
    lengths=st.lists(st.tuples(st.integers(1, 900), st.booleans()), min_size=2, max_size=5),
)
def test_prompts_that_come_first_leave_something_for_the_oldest_of_the_others(
    num_tokens: int, lengths: list[tuple[int, bool]]
) -> None:
    parts = [PromptPart(start=0, num_left=count, is_first=first) for count, first in lengths]
    counts = share_among_prompts(parts, PromptBudget(num_tokens=num_tokens))
    assert sum(counts) == min(num_tokens, sum(count for count, _ in lengths))
    others = [count for count, part in zip(counts, parts, strict=True) if not part.is_first]
    if others:
        assert others[0] >= 1
    if others and any(part.is_first for part in parts):
        firsts = sum(part.num_left for part in parts if part.is_first)
        assert sum(counts) - sum(others) >= min(firsts, num_tokens - max(1, num_tokens // 16))
