"""`DraftCosts`: what steps with and without drafts take, learned for each number of rows."""

import pytest

from cadenza.core.draft_costs import (
    FAR_STEPS,
    FIRST_HALF,
    FIRST_PRICE,
    FIRST_STEPS,
    FORGET_STEPS,
    REFRESH_STEPS,
    DecodeCost,
    DraftCosts,
)
from cadenza.core.draft_plan import DraftChance, plan_drafts
from cadenza.core.step_cost import StepCost, StepLoad

COST = StepCost(fixed_ms=10.0, token_ms=1.0, logit_ms=0.5, key_ms=0.01)


def rows(count: int, num_keys: int = 0, num_prompt: int = 0) -> StepLoad:
    return StepLoad(num_tokens=count + num_prompt, num_logits=count, num_keys=num_keys)


def draft_ms(costs: DraftCosts, load: StepLoad, num_drafts: int = 4) -> float:
    """Each of so many."""
    return costs.beside(load, COST).added_ms(num_drafts) / num_drafts


def test_before_anything_is_measured_they_are_those_of_steps_with_a_margin() -> None:
    found = DraftCosts().beside(rows(4, 400), COST)
    assert found.base_ms == pytest.approx(COST.predict_ms(rows(4, 400)))
    assert draft_ms(DraftCosts(), rows(4, 400)) == pytest.approx(FIRST_PRICE * 2.5)


def test_each_number_of_rows_has_what_was_measured_of_it() -> None:
    costs = DraftCosts()
    for _ in range(30):
        costs.observe(rows(1), 12.0, COST)
        costs.observe_drafts(rows(1), 4, 14.0, COST)
        costs.observe(rows(8), 30.0, COST)
        costs.observe_drafts(rows(8), 4, 50.0, COST)
    assert costs.beside(rows(1), COST).base_ms == pytest.approx(12.0)
    assert draft_ms(costs, rows(1)) == pytest.approx(0.5, rel=0.1)
    assert costs.beside(rows(8), COST).base_ms == pytest.approx(30.0)
    assert draft_ms(costs, rows(8)) == pytest.approx(5.0, rel=0.1)
    assert draft_ms(costs, rows(3)) == pytest.approx(FIRST_PRICE * 1.5)


def test_a_step_grows_with_its_context_and_with_prompts_beside_its_rows() -> None:
    costs = DraftCosts()
    costs.observe(rows(2, 100), 20.0, COST)
    far = rows(2, 600)
    assert costs.beside(far, COST).base_ms == pytest.approx(20.0 + 500 * 0.01)
    mixed = rows(2, 100, num_prompt=50)
    assert costs.beside(mixed, COST).base_ms == pytest.approx(20.0 + 50 * 1.0)


def test_steps_with_prompts_say_nothing_of_drafts() -> None:
    costs = DraftCosts()
    costs.observe(rows(2, 0, num_prompt=50), 500.0, COST)
    costs.observe_drafts(rows(2, 0, num_prompt=50), 3, 900.0, COST)
    assert costs.beside(rows(2), COST).base_ms == pytest.approx(13.0)
    assert not costs.is_stale(rows(2))


def test_a_step_without_drafts_is_wanted_at_first_and_from_time_to_time() -> None:
    costs, load = DraftCosts(), rows(4)
    wanted: list[int] = []
    for number in range(200):
        is_stale = costs.is_stale(load)
        wanted += [number] * is_stale
        if is_stale:
            costs.observe(load, 20.0, COST)
        else:
            costs.observe_drafts(load, 3, 20.0, COST)
    assert wanted == [*range(FIRST_STEPS, 200, REFRESH_STEPS + 1)]
    assert len(wanted) > 3
    assert not costs.is_stale(rows(4, num_prompt=8)), "it would not be measured"


def test_a_step_that_was_much_too_slow_is_forgotten() -> None:
    costs, load = DraftCosts(), rows(1)
    costs.observe(load, 12.0, COST)
    for _ in range(5):
        costs.observe_drafts(load, 4, 5000.0, COST)
    assert draft_ms(costs, load) > 2 * 1.5
    for _ in range(300):
        costs.observe(load, 12.0, COST)
    assert draft_ms(costs, load) < 1.1 * FIRST_PRICE * 1.5
    costs.observe(load, 5000.0, COST)
    assert costs.beside(load, COST).base_ms < 2 * 11.5


def test_one_measured_time_moves_what_is_known_by_little() -> None:
    costs, load = DraftCosts(), rows(4)
    for _ in range(30):
        costs.observe(load, 20.0, COST)
        costs.observe_drafts(load, 4, 28.0, COST)
    for ms in (20.0, 10.0, 100.0):
        costs.observe(load, ms, COST)
        assert costs.beside(load, COST).base_ms == pytest.approx(20.0, rel=0.1)
    before_ms = draft_ms(costs, load)
    costs.observe_drafts(load, 4, 100.0, COST)
    assert before_ms < draft_ms(costs, load) <= 1.16 * before_ms
    for _ in range(30):
        costs.observe(load, 30.0, COST)
    assert costs.beside(load, COST).base_ms == pytest.approx(30.0, rel=0.01)


def test_a_clock_that_stands_still_gives_no_step_without_time() -> None:
    costs, load = DraftCosts(), rows(2)
    free = StepCost(fixed_ms=1e-9, token_ms=1e-9, logit_ms=1e-9, key_ms=0.0)
    for _ in range(10):
        costs.observe(load, 0.0, free)
        costs.observe_drafts(load, 2, 0.0, free)
    assert costs.beside(load, free).base_ms > 0
    plan = plan_drafts(
        [DraftChance(acceptance=0.8, most=4, num_keys=9)], 2, costs.beside(load, free)
    )
    assert plan.rate > 0


def test_a_row_that_drafts_beside_rows_that_do_not_saves_no_part_of_what_any_step_costs() -> None:
    """Four rows take 14 ms: a token more saves 3.5 ms if all draft, and 1.6 ms if one does."""
    cost = DecodeCost.linear(14.0, 1.0)

    def counts(num_drafting: int, acceptance: float) -> list[int]:
        chance = DraftChance(acceptance=acceptance, most=1, num_keys=0)
        return plan_drafts([chance] * num_drafting, 4, cost).counts

    assert counts(4, 0.34) == [1] * 4
    assert counts(4, 0.31) == [0] * 4
    assert counts(1, 0.73) == [1]
    assert counts(1, 0.69) == [0]


def test_more_drafts_may_cost_more_each() -> None:
    """As where a step waits for the weights until it computes for as long."""
    costs = DraftCosts()
    for _ in range(30):
        costs.observe(rows(4), 20.0, COST)
        costs.observe_drafts(rows(4), 4, 21.2, COST)
        costs.observe_drafts(rows(4), 8, 32.0, COST)
    cost = costs.beside(rows(4), COST)
    assert cost.base_ms == pytest.approx(20.0)
    assert cost.added_ms(0) == 0
    assert cost.added_ms(2) == pytest.approx(FIRST_HALF * 1.2, rel=0.2)
    assert cost.added_ms(4) == pytest.approx(1.2, rel=0.2)
    assert cost.added_ms(6) == pytest.approx(6.6, rel=0.1)
    assert cost.added_ms(8) == pytest.approx(12.0, rel=0.1)
    assert cost.added_ms(10) == pytest.approx(12.0 + 2 * FIRST_PRICE * 1.5, rel=0.1)


@pytest.mark.parametrize("counts", [(0.0,), (0.0, 2.0), (0.0, 0.5, 2.25, 2.5), (0.0, 3.0, 9.0)])
def test_what_several_numbers_of_drafts_cost_is_what_each_does(counts: tuple[float, ...]) -> None:
    cost = DecodeCost(10.0, counts, tuple(count**1.5 for count in counts), 3.0)
    for most in (0, 1, 2, 6, 12):
        each = [cost.added_ms(number) for number in range(most + 1)]
        assert cost.added_up_to(most) == pytest.approx(each)


def test_drafts_are_taken_up_to_where_they_become_dear() -> None:
    """The rate is 4 / 50 without drafts, 6.4 / 53 with one each, and 7.84 / 74 with two."""
    chance = DraftChance(acceptance=0.6, most=5, num_keys=0)
    bent = DecodeCost(50.0, (0.0, 4.0, 8.0), (0.0, 3.0, 24.0), 6.0)
    plan = plan_drafts([chance] * 4, 4, bent)
    assert plan.counts == [1] * 4
    assert plan.rate == pytest.approx(6.4 / 53)
    assert plan.rate_without == pytest.approx(4 / 50)


def test_drafts_are_taken_beyond_a_few_that_do_not_pay_themselves() -> None:
    """The first costs a third of the step, and those behind it little."""
    chance = DraftChance(acceptance=0.8, most=2, num_keys=0)
    jump = DecodeCost(60.0, (0.0, 1.0, 8.0), (0.0, 20.0, 24.0), 6.0)
    assert plan_drafts([chance] * 8, 8, jump).counts == [1] * 8
    assert plan_drafts([chance], 8, jump).counts == [0]


def test_few_drafts_among_many_rows_go_to_those_that_accept_most() -> None:
    bent = DecodeCost(50.0, (0.0, 3.0), (0.0, 1.0), 20.0)
    chances = [
        DraftChance(acceptance=each, most=2, num_keys=0) for each in (0.5, 0.9, 0.1, 0.7, 0.3)
    ]
    assert plan_drafts(chances, 5, bent).counts == [0, 2, 0, 1, 0]


def test_steps_that_all_take_longer_than_known_are_believed_soon() -> None:
    """Where a step is measured only now and then, drafts would seem dear for as long."""
    costs, load = DraftCosts(), rows(4)
    for _ in range(30):
        costs.observe(load, 20.0, COST)
        costs.observe_drafts(load, 4, 22.0, COST)
    for _ in range(FAR_STEPS):
        assert not costs.is_stale(load)
        costs.observe_drafts(load, 4, 32.0, COST)
    num_without = 0
    while costs.is_stale(load):
        costs.observe(load, 30.0, COST)
        num_without += 1
    assert num_without == FAR_STEPS
    assert costs.beside(load, COST).base_ms == pytest.approx(30.0)
    assert draft_ms(costs, load) < 1.5


def test_what_other_numbers_of_drafts_cost_is_forgotten() -> None:
    costs, load = DraftCosts(), rows(4)
    costs.observe(load, 20.0, COST)
    for _ in range(3):
        costs.observe_drafts(load, 12, 60.0, COST)
    assert costs.beside(load, COST).added_ms(12) > 30.0
    for _ in range(FORGET_STEPS):
        costs.observe_drafts(load, 4, 26.0, COST)
    assert costs.beside(load, COST).added_ms(12) > 30.0
    costs.observe_drafts(load, 4, 26.0, COST)
    assert costs.beside(load, COST).added_ms(12) < 25.0


def test_fewer_drafts_cost_no_more_than_more_of_them() -> None:
    costs, load = DraftCosts(), rows(4)
    for _ in range(10):
        costs.observe(load, 20.0, COST)
        costs.observe_drafts(load, 6, 24.0, COST)
    costs.observe_drafts(load, 2, 60.0, COST)
    cost = costs.beside(load, COST)
    assert cost.added_ms(2) <= cost.added_ms(6) == pytest.approx(4.0, rel=0.3)
