"""`StepCost` and `StepBound`: the time of steps."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.batch.step_cost import (
    BOUND_CONTEXT,
    MIN_BOUND_MS,
    MIN_PROMPT_TOKENS,
    TOLERANCE,
    MeasuredStep,
    StepBound,
    StepCost,
    StepLoad,
    derive_bound_ms,
    fit_step_cost,
    full_decode,
    num_keys,
)
from cadenza.scheduler.step_budget import PromptPart
from tests.scheduler.step_builders import COST, costs, load_of, prompt_parts

loads = st.builds(
    StepLoad,
    num_tokens=st.integers(1, 1024),
    num_logits=st.integers(0, 256),
    num_keys=st.integers(0, 10**6),
)


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


@given(costs, st.integers(1, 64), st.integers(1, 200_000))
def test_the_default_bound_is_kept_by_the_fewest_tokens_of_a_prompt(
    cost: StepCost, num_rows: int, max_model_len: int
) -> None:
    bound_ms = derive_bound_ms(cost, num_rows, max_model_len)
    assert bound_ms >= max(MIN_BOUND_MS, 2 * cost.predict_ms(full_decode(num_rows)))
    kept = cost.kept_context(bound_ms, num_rows)
    assert kept >= max(MIN_PROMPT_TOKENS, min(max_model_len, BOUND_CONTEXT))
    assert cost.granted_ms(num_rows, kept - MIN_PROMPT_TOKENS) <= bound_ms * (1 + 1e-6)
    assert cost.granted_ms(num_rows, kept) > bound_ms
    assert cost.kept_context(0.0, num_rows) == 0


def test_a_bound_that_is_derived_follows_the_costs() -> None:
    def derive_ms(cost: StepCost) -> float:
        return derive_bound_ms(cost, 8, 8192)

    slow = replace(COST, fixed_ms=60.0)
    bound = StepBound(max_ms=derive_ms(slow), cost=slow, derive_ms=derive_ms)
    before_ms, load = bound.max_ms, full_decode(8)
    for _ in range(100):
        bound.observe(load, COST.predict_ms(load))
    assert bound.max_ms == derive_ms(bound.cost) < before_ms


def test_a_bound_counts_the_steps_that_exceed_it() -> None:
    bound = StepBound(max_ms=50.0, cost=COST)
    bound.observe(StepLoad(num_tokens=1, num_logits=1), 49.0)
    bound.observe(StepLoad(num_tokens=1, num_logits=1), 51.0)
    assert bound.num_exceeded == 1


def test_steps_that_scatter_are_planned_shorter_so_that_few_exceed_the_tolerance() -> None:
    """One in twenty takes 1.6 times as long as it should; others' times are as predicted."""
    bound = StepBound(max_ms=50.0, cost=COST)
    decodes = StepLoad(num_tokens=8, num_logits=8, num_keys=800)
    planned = bound.left_ms(decodes)
    assert planned == 50.0 - COST.predict_ms(decodes)
    load = decodes.plus(100, 64, 0)
    for number in range(2000):
        bound.cost = COST
        bound.observe(load, COST.predict_ms(load) * (1.6 if number % 20 == 0 else 1.0))
    worst_ms = 1.6 * (bound.left_ms(decodes) + COST.predict_ms(decodes))
    assert 0.9 * TOLERANCE * 50.0 < worst_ms < 1.1 * TOLERANCE * 50.0
    for _ in range(2000):
        bound.cost = COST
        bound.observe(load, COST.predict_ms(load))
        bound.observe(decodes, 10 * COST.predict_ms(decodes))  # nothing is planned in it
    bound.cost = COST
    assert bound.left_ms(decodes) == planned


def test_smaller_steps_cost_a_prompt_the_share_that_is_stated() -> None:
    share = COST.prefill_share(30.0, 256)
    most = COST.most_tokens(0, 25.0)
    rate = most / 30.0
    assert share == pytest.approx(rate / (256 / (5.0 + 256 * 0.25)), rel=0.03)
    assert COST.prefill_share(1000.0, 256) == pytest.approx(1.0)
