"""What steps with and without drafts take, learned for each number of rows, and how many drafts
follow from that."""

from dataclasses import replace

import pytest

from cadenza.batch.step_cost import StepCost, StepLoad
from cadenza.scheduler.draft_costs import (
    FIRST_DRAFTS,
    FIRST_HALF,
    FIRST_PRICE,
    FIRST_STEPS,
    FORGET_STEPS,
    MORE_DRAFTS,
    NUM_KEPT,
    REFRESH_STEPS,
    DecodeCost,
    DraftCosts,
)
from cadenza.scheduler.draft_plan import MIN_RATIO, DraftChance, plan_drafts

COST = StepCost(fixed_ms=10.0, token_ms=1.0, logit_ms=0.5, key_ms=0.01)


def rows(count: int, num_keys: int = 0, num_prompt: int = 0) -> StepLoad:
    return StepLoad(num_tokens=count + num_prompt, num_logits=count, num_keys=num_keys)


def known(num_rows: int, **times: float) -> DraftCosts:
    """After steps that took so many milliseconds: `d4=21.0` is one with four drafts."""
    costs = DraftCosts()
    for _ in range(NUM_KEPT):
        for name, ms in times.items():
            costs.observe(rows(num_rows), int(name[1:]), ms, COST)
    return costs


def draft_ms(costs: DraftCosts, load: StepLoad, num_drafts: int = 4) -> float:
    """Each of so many."""
    return costs.beside(load, COST).added_ms(num_drafts) / num_drafts


def test_before_anything_is_measured_they_are_those_of_steps_with_a_margin() -> None:
    found = DraftCosts().beside(rows(4, 400), COST)
    assert found.base_ms == pytest.approx(COST.predict_ms(rows(4, 400)))
    assert draft_ms(DraftCosts(), rows(4, 400)) == pytest.approx(FIRST_PRICE * 2.5)


def test_each_number_of_rows_has_what_was_measured_of_it() -> None:
    costs = known(1, d0=12.0, d4=14.0)
    for num_drafts, ms in [(0, 30.0), (4, 50.0)] * NUM_KEPT:
        costs.observe(rows(8), num_drafts, ms, COST)
    assert costs.beside(rows(1), COST).base_ms == pytest.approx(12.0)
    assert draft_ms(costs, rows(1)) == pytest.approx(0.5)
    assert costs.beside(rows(8), COST).base_ms == pytest.approx(30.0)
    assert draft_ms(costs, rows(8)) == pytest.approx(5.0)
    assert draft_ms(costs, rows(3)) == pytest.approx(FIRST_PRICE * 1.5)


def test_a_step_grows_with_its_context_and_with_no_prompt_beside_its_rows() -> None:
    """A prompt is computed anyway: an accepted draft saves none of it."""
    costs = DraftCosts()
    costs.observe(rows(2, 100), 0, 20.0, COST)
    assert costs.beside(rows(2, 600), COST).base_ms == pytest.approx(20.0 + 500 * 0.01)
    mixed = rows(2, 100, num_prompt=50)
    assert costs.beside(mixed, COST).base_ms == pytest.approx(20.0)


def test_drafts_beside_a_prompt_cost_what_as_many_tokens_more_do() -> None:
    """Four drafts are nearly free, and four more cost 11.4 ms: so do four behind as many tokens of
    a prompt. Behind those of a long one each costs what steps say of a token, or more."""
    costs = known(2, d0=20.0, d4=20.6, d8=32.0)
    assert costs.beside(rows(2), COST).added_ms(4) == pytest.approx(0.6)
    assert draft_ms(costs, rows(2, num_prompt=4)) == pytest.approx(11.4 / 4)
    assert draft_ms(costs, rows(2, num_prompt=50)) == pytest.approx(FIRST_PRICE * 12.0 / 8)
    flat = known(2, d0=20.0, d4=20.6)
    assert draft_ms(flat, rows(2, num_prompt=50)) == pytest.approx(1.5)


def test_many_drafts_follow_only_where_about_as_many_were_measured() -> None:
    chance = DraftChance(acceptance=1.0, most=16, num_keys=0)
    for costs, num_rows, most in (
        (DraftCosts(), 1, FIRST_DRAFTS),
        (DraftCosts(), 8, 8),
        (known(8, d0=20.0), 8, 8),
        (known(8, d0=20.0, d6=20.0), 8, MORE_DRAFTS * 6),
    ):
        cheap = replace(COST, token_ms=1e-3, logit_ms=1e-3)
        plan = plan_drafts([chance] * num_rows, num_rows, costs.beside(rows(num_rows), cheap))
        assert sum(plan.counts) == most


def test_steps_with_prompts_say_nothing_of_drafts() -> None:
    costs = DraftCosts()
    costs.observe(rows(2, 0, num_prompt=50), 0, 500.0, COST)
    costs.observe(rows(2, 0, num_prompt=50), 3, 900.0, COST)
    assert costs.beside(rows(2), COST).base_ms == pytest.approx(13.0)
    assert not costs.is_stale(rows(2))


def test_a_step_without_drafts_is_wanted_at_first_and_from_time_to_time() -> None:
    costs, load = DraftCosts(), rows(4)
    wanted: list[int] = []
    for number in range(600):
        is_stale = costs.is_stale(load)
        wanted += [number] * is_stale
        costs.observe(load, 0 if is_stale else 3, 20.0, COST)
    assert wanted == [*range(FIRST_STEPS, 600, REFRESH_STEPS + 1)]
    assert len(wanted) > 3
    assert not costs.is_stale(rows(4, num_prompt=8)), "it would not be measured"


def test_the_time_for_drafting_counts_until_a_step_without_drafts_is_wanted() -> None:
    costs, load = known(4, d0=20.0), rows(4)
    number = 0
    while not costs.is_stale(load):
        costs.observe(load, 3, 20.0, COST, waited_ms=60.0)
        number += 1
    assert number == REFRESH_STEPS / 4


@pytest.mark.parametrize("num_drafts", [0, 4])
def test_one_time_that_was_far_too_long_changes_little(num_drafts: int) -> None:
    costs = known(4, d0=20.0, d4=28.0)
    costs.observe(rows(4), num_drafts, 5000.0, COST)
    assert costs.beside(rows(4), COST).base_ms == pytest.approx(20.0)
    assert draft_ms(costs, rows(4)) == pytest.approx(2.0)


def test_a_step_with_drafts_that_was_much_too_slow_is_forgotten() -> None:
    costs = DraftCosts()
    costs.observe(rows(1), 0, 12.0, COST)
    costs.observe(rows(1), 4, 5000.0, COST)
    assert draft_ms(costs, rows(1)) > 100
    for _ in range(FORGET_STEPS + 1):
        costs.observe(rows(1), 0, 12.0, COST)
    assert draft_ms(costs, rows(1)) == pytest.approx(FIRST_PRICE * 1.5)


def test_steps_that_all_take_longer_than_known_are_believed_soon() -> None:
    """Where a step is measured only now and then, drafts would seem dear for as long."""
    costs, load = known(4, d0=20.0, d4=22.0), rows(4)
    for _ in range(REFRESH_STEPS - 1):
        assert not costs.is_stale(load)
        costs.observe(load, 4, 32.0, COST)
    num_without = 0
    while costs.is_stale(load):
        costs.observe(load, 0, 30.0, COST)
        num_without += 1
    assert num_without == NUM_KEPT // 2 + 1
    assert costs.beside(load, COST).base_ms == pytest.approx(30.0)
    assert draft_ms(costs, load) < 1.5


def test_a_clock_that_stands_still_gives_no_step_without_time() -> None:
    costs, load = DraftCosts(), rows(2)
    free = StepCost(fixed_ms=1e-9, token_ms=1e-9, logit_ms=1e-9, key_ms=0.0)
    for num_drafts in [0, 2] * 10:
        costs.observe(load, num_drafts, 0.0, free)
    cost = costs.beside(load, free)
    assert cost.base_ms > 0
    assert plan_drafts([DraftChance(acceptance=0.8, most=4, num_keys=9)], 2, cost).rate > 0


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
    cost = known(4, d0=20.0, d4=21.2, d8=32.0).beside(rows(4), COST)
    expected = {0: 0.0, 2: FIRST_HALF * 1.2, 4: 1.2, 6: 6.6, 8: 12.0}
    expected[10] = 12.0 + 2 * FIRST_PRICE * 1.5
    assert cost.base_ms == pytest.approx(20.0)
    assert {count: cost.added_ms(count) for count in expected} == pytest.approx(expected)


def test_fewer_drafts_cost_no_more_than_more_of_them() -> None:
    cost = known(4, d0=20.0, d2=60.0, d6=24.0).beside(rows(4), COST)
    assert cost.added_ms(2) == cost.added_ms(6) == pytest.approx(4.0)


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


def target_cost(num_rows: int) -> DecodeCost:
    return DecodeCost.linear(5.0 + 0.2 * num_rows, 0.2)


QUARTER = StepCost(fixed_ms=1.2, token_ms=0.03, logit_ms=0.03, key_ms=0.0)


def expected_rate(acceptance: float, rows: int, count: int) -> float:
    tokens = rows * sum(acceptance**depth for depth in range(count + 1))
    ms = 5.0 + rows * 0.2 + count * (rows * 0.2 + 1.2 + rows * 0.06)
    return tokens / ms


def test_a_plan_is_the_best_of_all_equal_numbers_of_drafts() -> None:
    for acceptance in (0.3, 0.6, 0.8, 0.93):
        chance = DraftChance(acceptance=acceptance, most=5, num_keys=10)
        for rows in (1, 2, 4, 8):
            plan = plan_drafts([chance] * rows, rows, target_cost(rows), QUARTER)
            rates = [expected_rate(acceptance, rows, count) for count in range(6)]
            best = max(rates)
            if best < MIN_RATIO * rates[0]:
                assert plan.counts == [0] * rows
            else:
                assert plan.rate == pytest.approx(best)
                assert plan.counts == [rates.index(best)] * rows
                assert plan.saved_ms == pytest.approx(1 / rates[0] - 1 / best)
