"""`DraftLedger`: what drafts may cost in all, whatever they gain; `DraftReturns`: what a step's
drafts gained."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.batch.batch import Batch, BatchEntry
from cadenza.drafting.draft_ledger import (
    FIRST_CREDIT,
    MAX_CAPITAL,
    MAX_CREDIT,
    MAX_PATIENCE,
    MOVED_CREDIT,
    RESERVE,
    SHARE,
    DraftAccount,
    DraftGroup,
    DraftLedger,
    DraftState,
    OwnCredit,
)
from cadenza.drafting.drafts import Drafting
from cadenza.scheduler.draft_costs import DecodeCost
from cadenza.scheduler.draft_plan import MAX_RATIO, DraftNote, DraftReturns, SpentMs
from tests.scheduler.builders import sequence_of

MODEL, NGRAM = DraftGroup("model"), DraftGroup("ngram")
ASKED = DraftGroup("model", is_asked=True)
MOST_LOST = 2.0
Step = tuple[int, float, DraftGroup]
STEPS = st.tuples(
    st.sampled_from([1, 2, 4, 16]),
    st.floats(-MOST_LOST, 3.0),
    st.sampled_from([MODEL, ASKED]),
)


def play(steps: list[Step], ledger: DraftLedger) -> tuple[float, int]:
    """What the drafts gained in all, each of a step if it drafts, and how many accounts there were.

    Each number of rows has one sequence of each group, of which one may draft in each step.
    """
    total, own = 0.0, {(num_rows, group): OwnCredit() for num_rows, _, group in steps}
    groups = {group for _, group in own}
    for num_rows, gain, group in steps:
        credit = own[num_rows, group]
        ledger.accrue(groups, num_rows)
        account = ledger.account(group, num_rows)
        if account.may_draft or credit.is_enough(num_rows):
            total += gain
            account.observe(gain, credit.take(gain, num_rows))
            ledger.note(group, num_rows)
    return total, len(own)


@given(st.lists(STEPS, max_size=60), st.integers(1, 40))
def test_what_drafts_cost_in_all_is_bounded_whatever_they_gain(
    steps: list[Step], times: int
) -> None:
    total, num_accounts = play(steps * times, DraftLedger())
    most = SHARE * len(steps) * times + RESERVE + num_accounts * MOST_LOST
    assert total >= -most - 1e-6


def test_the_bound_is_kept_where_drafts_begin_to_fail_after_they_saved_much() -> None:
    """They may lose again what they saved of late, and no more."""
    for num_good in (1, 10, 200):
        ledger = DraftLedger()
        good = play([(1, 1.0, MODEL)] * num_good, ledger)[0]
        bad = play([(1, -0.5, MODEL)] * 2000, ledger)[0]
        assert good == num_good
        assert bad >= -MAX_CREDIT - SHARE * 2000 - 0.5 - 2
        assert bad <= -0.5


@dataclass(slots=True, eq=False)
class Unbounded(DraftAccount):
    """Always may draft."""

    @property
    def may_draft(self) -> bool:
        return True


def test_an_account_without_a_bound_is_caught() -> None:
    account, total = Unbounded(credit=FIRST_CREDIT), 0.0
    for _ in range(1000):
        account.accrue()
        if account.may_draft:
            account.observe(-0.5, -0.5)
            total -= 0.5
    assert total < -SHARE * 1000 - RESERVE - 0.5


def test_trials_that_never_pay_become_rare() -> None:
    account, trials = DraftAccount(), list[int]()
    for number in range(2000):
        account.accrue()
        if account.may_draft:
            account.observe(-0.5, -0.5)
            trials.append(number)
    assert trials[-1] - trials[-2] == pytest.approx(0.5 * MAX_PATIENCE / SHARE, abs=1)
    assert len(trials) < 2000 * SHARE / 0.5


def test_a_trial_that_pays_opens_the_account_again() -> None:
    account = DraftAccount()
    for _ in range(4):
        account.observe(-0.5, -0.5)
    assert not account.may_draft
    while not account.may_draft:
        account.accrue()
    for _ in range(3):
        assert account.may_draft
        account.observe(1.5, 1.5)
    assert account.credit > 3.0


def test_credit_and_capital_have_their_bounds() -> None:
    account = DraftAccount()
    for _ in range(100):
        account.observe(2.0, 2.0)
        account.accrue()
    assert account.credit == MAX_CREDIT
    assert account.capital == MAX_CAPITAL


def test_what_a_second_model_lacks_is_computed_of_what_drafts_saved_or_is_saved_up_for() -> None:
    account = DraftAccount(credit=2.0)
    assert account.may_invest(2.0)
    assert not account.may_invest(20.0)
    for _ in range(int(19 / SHARE)):
        account.accrue()
    assert account.may_invest(20.0), "the credit goes up to what was wanted"
    account.invest(20.0)
    assert account.credit < 1.5
    for _ in range(20):
        account.observe(1.0, 1.0)
    assert account.credit == MAX_CREDIT
    assert account.may_invest(20.0)
    capital = account.capital
    account.invest(10.0)
    assert (account.capital, account.credit) == (capital - 10.0, MAX_CREDIT)


def test_a_sequence_whose_own_drafts_saved_goes_on_although_others_lost() -> None:
    own = OwnCredit()
    assert own.take(-0.25, 4) == -0.25
    assert not own.is_enough(4)
    assert own.take(0.75, 4) == pytest.approx(0.25), "two tokens' time are its own"
    assert own.is_enough(4)
    assert own.take(-0.3, 4) == pytest.approx(0.0)
    assert not own.is_enough(4)
    assert own.take(-0.3, 4) == pytest.approx(-0.1)


def test_other_numbers_of_rows_start_from_what_the_nearest_met() -> None:
    ledger = DraftLedger()
    for num_rows, gain in ((1, 1.0), *[(32, -0.5)] * 4):
        ledger.account(MODEL, num_rows).observe(gain, gain)
    few, many = ledger.account(MODEL, 2), ledger.account(MODEL, 16)
    assert few.may_draft
    assert few.credit == MOVED_CREDIT
    assert ledger.account(MODEL, 1).credit == FIRST_CREDIT + 1.0 - 2 * MOVED_CREDIT
    assert not many.may_draft
    assert ledger.account(NGRAM, 16).may_draft, "nothing is known of another source"
    assert ledger.account(MODEL, 3) is ledger.account(MODEL, 4) is not few


def test_it_is_told_once_when_drafts_cease_to_pay_and_once_when_they_begin_again() -> None:
    told = list[DraftState]()
    ledger = DraftLedger(told.append)
    play([(7, -0.5, MODEL)] * 600, ledger)
    assert [(each.origin, each.rows, each.is_on) for each in told] == [("model", "5-8", False)]
    assert told[0].gain < 0
    play([(7, 0.5, MODEL)] * 600, ledger)
    assert [each.is_on for each in told] == [False, True]
    ledger.account(NGRAM, 1)
    assert ledger.states == (told[-1]._replace(gain=pytest.approx(0.5)),), "one that was used"


def test_a_step_has_one_share_which_those_who_ask_have_first() -> None:
    """Half of it after trials of theirs that did not pay; the rest is for the others."""
    ledger = DraftLedger()
    asked, others = ledger.account(ASKED, 1), ledger.account(MODEL, 1)
    assert asked.credit + others.credit == RESERVE, "one reserve for all"

    def accrued() -> tuple[float, float]:
        before = asked.credit, others.credit
        ledger.accrue([MODEL, ASKED, MODEL], 1)
        return asked.credit - before[0], others.credit - before[1]

    assert accrued() == pytest.approx((SHARE, 0.0))
    for _ in range(MAX_PATIENCE):
        asked.observe(-0.5, -0.5)
    assert accrued() == pytest.approx((SHARE / MAX_PATIENCE, SHARE * (1 - 1 / MAX_PATIENCE)))
    for _ in range(20):
        asked.observe(1.0, 1.0)
    assert accrued() == pytest.approx((0.0, SHARE)), "they have enough"
    before = others.credit
    ledger.accrue([MODEL, NGRAM], 1)
    assert others.credit - before == pytest.approx(SHARE), "each source has its own"


def known(ledger: DraftLedger, group: DraftGroup, gain: float, times: int) -> DraftAccount:
    """The account of one row, after so many steps with drafts."""
    account = ledger.account(group, 1)
    for _ in range(times):
        account.observe(gain, gain)
        ledger.note(group, 1)
    return account


def test_what_one_group_saved_pays_for_what_another_lacks_until_its_drafts_do_not_pay() -> None:
    ledger = DraftLedger()
    others = known(ledger, MODEL, 1.0, 40)
    asked, capital = ledger.account(ASKED, 1), others.capital
    assert asked.may_invest(20.0)
    asked.invest(20.0)
    assert others.capital == capital - 20.0
    assert (others.credit, asked.credit) == (MAX_CREDIT, RESERVE - FIRST_CREDIT)
    for _ in range(MAX_PATIENCE):
        assert asked.may_draft
        asked.observe(-1.0, -1.0)
    in_all = others.capital + asked.credit
    assert in_all == pytest.approx(capital - 20.0 + RESERVE - FIRST_CREDIT - MAX_PATIENCE)
    asked.observe(-1.0, -1.0)
    assert not asked.may_draft
    assert not asked.may_invest(1.0)


def test_a_group_whose_drafts_do_not_pay_lends_nothing() -> None:
    ledger = DraftLedger()
    others = known(ledger, MODEL, 1.0, 40)
    known(ledger, MODEL, -1.0, 5)
    assert others.capital > 20 > others.gain
    asked = ledger.account(ASKED, 1)
    assert not asked.may_invest(20.0)
    asked.invest(20.0)
    assert asked.credit == RESERVE - FIRST_CREDIT - 20.0


def test_a_source_is_on_while_drafts_of_any_group_pay() -> None:
    told = list[DraftState]()
    ledger = DraftLedger(told.append)
    others = known(ledger, MODEL, -0.5, 8)
    assert [each.is_on for each in told] == [False]
    asked = known(ledger, ASKED, -0.5, 1)
    assert [each.is_on for each in told] == [False], "one trial says nothing"
    known(ledger, ASKED, 0.5, 4)
    assert [each.is_on for each in told] == [False, True]
    assert ledger.states == (DraftState("model", "1", True, asked.gain),)
    known(ledger, MODEL, 0.5, 12)
    known(ledger, ASKED, -0.5, 20)
    assert [each.is_on for each in told] == [False, True], "those of the others still pay"
    assert others.is_on
    known(ledger, MODEL, -0.5, 40)
    assert [each.is_on for each in told] == [False, True, False]
    assert ledger.states == (DraftState("model", "1", False, max(asked.gain, others.gain)),)


@dataclass(slots=True, eq=False)
class Steps:
    """Steps of `num_rows` rows; the first ones have drafts, of which so many are accepted."""

    num_rows: int
    accepted: tuple[int, ...]
    ledger: DraftLedger = field(default_factory=DraftLedger)
    number: int = 0

    def gain(self, more_ms: float, *, waited_ms: float | None = 0.0, count: int = 2) -> float:
        """Of the account, after one step."""
        cost = DecodeCost.linear(10.0, 1.0)
        returns, batch = DraftReturns(self.ledger), Batch(self.number)
        for at in range(self.num_rows):
            sequence = sequence_of(at, 8)
            sequence.drafting = Drafting(source=None, most=4)
            entry = BatchEntry(sequence, at, 8, 1, 1, 0)
            if at < len(self.accepted):
                entry.drafts, entry.num_accepted = (0,) * count, self.accepted[at]
            batch.add(entry)
        returns.observe(batch, self.num_rows, cost, 10.0 + more_ms, waited_ms)
        account = self.ledger.account(MODEL, self.num_rows)
        account.num_observed = 0
        account.gain = 0.0
        returns.settle(batch)
        return 2 * account.gain


def test_an_accepted_draft_is_worth_a_rows_share_of_a_step() -> None:
    assert Steps(4, (1, 1, 0, 2)).gain(2.0) == pytest.approx(4 / 4 - 0.2)
    assert Steps(1, (2,)).gain(2.0, waited_ms=1.0) == pytest.approx(2 - 0.3)


def test_drafts_of_few_rows_save_no_part_of_what_a_step_costs_whatever_it_holds() -> None:
    """Of 10 ms 6 are fixed where four rows cost as much as four drafts; a quarter of it counts."""
    assert Steps(4, (2,)).gain(0.0) == pytest.approx(2 / 4 * (1 - 0.75 * 0.6))


def test_a_step_that_waited_in_vain_is_charged_to_the_source_it_waited_for() -> None:
    ledger = DraftLedger()
    returns, batch = DraftReturns(ledger), Batch(7)
    sequence = sequence_of(0, 8)
    sequence.drafting = Drafting(source=None, most=4)
    batch.add(BatchEntry(sequence, 0, 8, 1, 1, 0))
    returns.note(7).waited_for = (MODEL,)
    returns.observe(batch, 1, DecodeCost.linear(10.0, 1.0), 10.0, 0.5)
    returns.settle(batch)
    account = ledger.account(MODEL, 1)
    assert account.credit == pytest.approx(FIRST_CREDIT + SHARE - 0.05)
    assert account.num_observed == 1


def mixed_step(
    note: DraftNote, measured_ms: float, drafts: tuple[int, int] = (0, 0)
) -> tuple[DraftAccount, DraftAccount]:
    """The accounts of those who ask and of others, after a step of 10 ms of one and of three
    sequences, of which the first of each had so many drafts."""
    ledger = DraftLedger()
    returns, batch = DraftReturns(ledger), Batch(7)
    for at in range(4):
        sequence = sequence_of(at, 8)
        sequence.drafting = Drafting(source=None, most=4, is_asked=at == 0)
        count = drafts[at] if at < 2 else 0
        batch.add(BatchEntry(sequence, at, 8, 1, 1, 0, drafts=(0,) * count))
    kept = returns.note(7)
    kept.waited_for, kept.spent = note.waited_for, note.spent
    returns.observe(batch, 4, DecodeCost.linear(10.0, 1.0), measured_ms, 0.0)
    returns.settle(batch)
    return ledger.account(ASKED, 4), ledger.account(MODEL, 4)


def test_the_time_of_drafts_of_several_groups_is_charged_by_their_number() -> None:
    asked, others = mixed_step(DraftNote(), 14.0, (3, 1))
    assert (asked.gain, others.gain) == pytest.approx((-0.3 / 2, -0.1 / 2))


def test_a_step_that_waited_in_vain_is_charged_by_the_number_of_sequences_waited_for() -> None:
    asked, others = mixed_step(DraftNote((ASKED, MODEL, MODEL, MODEL)), 14.0)
    assert (asked.gain, others.gain) == pytest.approx((-0.1 / 2, -0.3 / 2))


def test_what_a_second_model_took_is_charged_to_those_for_whom_it_was() -> None:
    note = DraftNote(spent={ASKED: SpentMs(3.0, 1.0)})
    asked, others = mixed_step(note, 14.0, (1, 0))
    assert asked.gain == pytest.approx(-(14.0 - 10.0 - 1.0) / 10.0 / 2)
    assert asked.credit == pytest.approx(RESERVE - 1.0 + SHARE - 0.1 - 0.3)
    assert not others.is_known


def test_a_step_that_has_nothing_to_do_with_drafts_is_not_charged() -> None:
    steps = Steps(2, ())
    assert steps.gain(5.0, waited_ms=None) == 0.0
    assert steps.ledger.account(MODEL, 2).credit == pytest.approx(FIRST_CREDIT + SHARE)


def test_what_a_second_model_computed_of_prompts_is_paid_and_says_nothing_of_its_drafts() -> None:
    ledger = DraftLedger()
    returns, batch = DraftReturns(ledger), Batch(3)
    sequence = sequence_of(0, 8)
    sequence.drafting = Drafting(source=None, most=4)
    batch.add(BatchEntry(sequence, 0, 8, 1, 1, 0, drafts=(0, 0), num_accepted=2))
    note = returns.note(3)
    note.spent = {MODEL: SpentMs(8.0, 6.0)}
    returns.observe(batch, 1, DecodeCost.linear(10.0, 1.0), 11.0, 9.0)
    returns.settle(batch)
    account = ledger.account(MODEL, 1)
    assert account.gain == pytest.approx((2 - 0.4) / 2), "1 ms more, 1 ms of waiting, 2 of drafting"
    own = sequence.drafting.credit.steps
    assert own == pytest.approx(1.6)
    assert account.credit == pytest.approx(FIRST_CREDIT + SHARE - 0.6)


def test_a_step_that_took_far_too_long_counts_as_a_multiple_of_what_was_expected() -> None:
    assert Steps(1, (0,)).gain(1000.0) == pytest.approx(-(MAX_RATIO * 12.0 - 10.0) / 10.0)


def test_notes_of_steps_that_are_never_read_are_forgotten() -> None:
    returns, rng = DraftReturns(DraftLedger()), random.Random(1)
    for number in range(100):
        returns.note(number).spent = {MODEL: SpentMs(rng.random(), 0.0)}
    assert len(returns._notes) <= 6
