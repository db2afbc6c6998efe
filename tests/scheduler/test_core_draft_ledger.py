"""`DraftLedger`: what drafts may cost in all, whatever they gain; `DraftReturns`: what a step's
drafts gained."""

from dataclasses import dataclass

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
    """What the drafts gained in all, each of a step if it drafts; how many accounts there were.

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


COST = DecodeCost.linear(10.0, 1.0)


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence of a step: its drafts, how many were accepted, and whether its request asks."""

    drafts: int = 0
    accepted: int = 0
    is_asked: bool = False


def after(
    rows: list[Row],
    measured_ms: float,
    waited_ms: float | None = 0.0,
    note: DraftNote | None = None,
) -> tuple[DraftLedger, float]:
    """After one step of 10 ms, and 1 ms for each draft, that took so long: the ledger, and what
    sequences have saved of their own."""
    ledger, batch = DraftLedger(), Batch(7)
    returns = DraftReturns(ledger)
    for at, row in enumerate(rows):
        sequence = sequence_of(at, 8)
        sequence.drafting = Drafting(source=None, most=4, is_asked=row.is_asked)
        drafts = (0,) * row.drafts
        batch.add(BatchEntry(sequence, at, 8, 1, 1, 0, drafts=drafts, num_accepted=row.accepted))
    kept = returns.note(7)
    if note is not None:
        kept.waited_for, kept.spent = note.waited_for, note.spent
    returns.observe(batch, len(rows), COST, measured_ms, waited_ms)
    returns.settle(batch)
    drafting = [each.sequence.drafting for each in batch.entries]
    return ledger, sum(each.credit.steps for each in drafting if each)


@pytest.mark.parametrize(
    ("rows", "measured_ms", "waited_ms", "gain"),
    [
        ([Row(2, 1), Row(2, 1), Row(2), Row(2, 2)], 12.0, 0.0, 4 / 4 - 0.2),
        ([Row(2, 2)], 12.0, 1.0, 2 - 0.3),
        ([Row(2, 2), Row(), Row(), Row()], 10.0, 0.0, 2 / 4 * (1 - 0.75 * 0.6)),
        ([Row(2)], 1010.0, 0.0, -(MAX_RATIO * 12.0 - 10.0) / 10.0),
        ([Row(), Row()], 15.0, None, 0.0),
    ],
    ids=[
        "an accepted draft is worth a row's share of a step",
        "the wait before it is charged",
        "of 10 ms 6 are fixed where four rows cost as four drafts: a quarter of it counts",
        "a step that took far too long counts as a multiple of what was expected",
        "a step that has nothing to do with drafts is not charged",
    ],
)
def test_a_step_is_worth_what_its_accepted_drafts_save_less_what_it_took_beyond_one_without(
    rows: list[Row], measured_ms: float, waited_ms: float | None, gain: float
) -> None:
    ledger, own = after(rows, measured_ms, waited_ms)
    account = ledger.account(MODEL, len(rows))
    assert 2 * account.gain == pytest.approx(gain)
    assert account.credit + own == pytest.approx(FIRST_CREDIT + SHARE + gain)


def gains(rows: list[Row], note: DraftNote | None = None) -> tuple[float, float]:
    """Of those who ask and of the others, in a step that took 4 ms more than one without."""
    ledger, _ = after([*rows, *[Row()] * (4 - len(rows))], 14.0, 0.0, note)
    return 2 * ledger.account(ASKED, 4).gain, 2 * ledger.account(MODEL, 4).gain


def test_the_time_of_a_step_is_charged_by_drafts_or_else_to_those_waited_for() -> None:
    asked = Row(is_asked=True)
    assert gains([Row(3, is_asked=True), Row(1)]) == pytest.approx((-0.3, -0.1))
    waited = DraftNote((ASKED, MODEL, MODEL, MODEL))
    assert gains([asked], waited) == pytest.approx((-0.1, -0.3))
    account = after([Row()], 10.0, 0.5, DraftNote((MODEL,)))[0].account(MODEL, 1)
    assert account.credit == pytest.approx(FIRST_CREDIT + SHARE - 0.05)
    assert account.num_observed == 1


def test_what_a_second_model_took_is_charged_to_those_for_whom_it_was() -> None:
    """What it computed of prompts is paid, and says nothing of its drafts."""
    note = DraftNote(spent={ASKED: SpentMs(3.0, 1.0)})
    ledger, _ = after([Row(1, is_asked=True), Row(), Row(), Row()], 14.0, 0.0, note)
    asked = ledger.account(ASKED, 4)
    assert 2 * asked.gain == pytest.approx(-(14.0 - 10.0 - 1.0) / 10.0)
    assert asked.credit == pytest.approx(RESERVE - 1.0 + SHARE - 0.1 - 0.3)
    assert not ledger.account(MODEL, 4).is_known
    note = DraftNote(spent={MODEL: SpentMs(8.0, 6.0)})
    ledger, own = after([Row(2, 2)], 11.0, 9.0, note)
    account, gain = ledger.account(MODEL, 1), 2 - 0.4
    assert 2 * account.gain == pytest.approx(gain), "1 ms more, 1 ms of waiting, 2 of drafting"
    assert own == pytest.approx(gain)
    assert account.credit == pytest.approx(FIRST_CREDIT + SHARE - 0.6)


def test_notes_of_steps_that_are_never_read_are_forgotten() -> None:
    returns = DraftReturns(DraftLedger())
    for number in range(100):
        returns.note(number)
    assert len(returns._notes) <= 6
