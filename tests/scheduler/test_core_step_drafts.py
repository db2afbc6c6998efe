"""`StepDrafts`: when a step is scheduled only behind the newest tokens."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from itertools import pairwise

from cadenza.batch.batch import Batch, BatchEntry
from cadenza.batch.sequence import Sequence
from cadenza.batch.step_cost import StepCost
from cadenza.drafting.draft_ledger import DraftGroup
from cadenza.drafting.drafts import Drafting
from cadenza.scheduler.draft_costs import FIRST_STEPS
from cadenza.scheduler.draft_plan import chance_of, pace_of
from cadenza.scheduler.step_drafts import (
    FIRST_PROBE,
    LAST_PROBE,
    REPLAN_AFTER_STEPS,
    DraftSlot,
    DraftStep,
    Probes,
    StepDrafts,
)
from cadenza.scheduler.step_work import StepDuration
from tests.scheduler.builders import scheduler_of, sequence_of

COST = StepCost(fixed_ms=4.0, token_ms=0.1, logit_ms=0.0, key_ms=0.0)


@dataclass
class Asked:
    """A drafter whose drafts are worth their time, or not; `steps` in which it was asked."""

    answer: bool
    num_rows: int = 2
    steps: list[int] = field(default_factory=list[int])

    def is_due(self, number: int) -> bool:
        return True

    def is_worth(self, sequences: SequenceOf[Sequence], step: DraftStep) -> bool:
        assert (step.load.num_tokens, step.load.num_logits) == (2, self.num_rows)
        self.steps.append(step.number)
        return self.answer

    def propose(self, slots: SequenceOf[DraftSlot], step: DraftStep) -> None:
        raise AssertionError("nothing is scheduled")


def tried(drafting: Drafting) -> Drafting:
    acceptance = drafting.acceptance
    drafting.learn(8, 1, 1)
    drafting.acceptance, drafting.num_accepted = acceptance, 0
    return drafting


class Silent:
    def propose(self, token_ids: list[int], most: int) -> list[int]:
        return []


def running_of(drafting: Drafting | None) -> list[Sequence]:
    """Two decoding sequences with a token in flight, of which one drafts."""
    found = [sequence_of(number, 8) for number in range(2)]
    for sequence in found:
        sequence.num_computed_tokens = 8
        sequence.num_pending_tokens = 1
    found[1].drafting = drafting
    return found


def drafts_of(drafter: Asked | None = None) -> StepDrafts:
    scheduler = scheduler_of()
    return StepDrafts(scheduler.limits, scheduler.kv_cache, drafter)


def test_a_second_model_is_waited_for_only_if_its_drafts_are_worth_their_time() -> None:
    for answer in (False, True):
        drafter = Asked(answer)
        drafts = drafts_of(drafter)
        running = running_of(Drafting(source=None, most=4))
        assert drafts.must_follow(running, 7, COST) is answer
        assert drafter.steps == [7]


def test_a_step_that_is_to_be_measured_without_drafts_waits_for_nobody() -> None:
    """One that waited would not be measured, and a second model is asked in every step."""
    drafts = drafts_of(Asked(answer=True))
    running = running_of(Drafting(source=None, most=4))
    with_drafts = Batch(0, num_tokens=4, num_keys=36, num_choices=4, has_drafts=True)
    with_drafts.entries += [
        BatchEntry(running[0], 0, 8, 1, 1, 0),
        BatchEntry(running[1], 1, 8, 3, 3, 0, drafts=(0, 0)),
    ]
    without = Batch(0, num_tokens=2, num_keys=18, num_choices=2)
    for _ in range(FIRST_STEPS):
        assert drafts.must_follow(running, 1, COST)
        drafts.observe(with_drafts, StepDuration(4.4, 0.1, COST, 0.0))
    assert not drafts.must_follow(running, 1, COST)
    drafts.observe(without, StepDuration(4.2, 0.1, COST, 0.0))
    assert not drafts.must_follow(running, 1, COST), "it followed one with drafts"
    drafts.observe(without, StepDuration(4.2, None, COST, 0.0))
    assert drafts.must_follow(running, 1, COST)


def test_sequences_that_look_drafts_up_are_waited_for_while_that_saves_time() -> None:
    """A step takes 4.2 ms and gives two tokens; the device idles for 1 ms before one that waits."""
    drafting = tried(Drafting(source=Silent(), most=4))
    drafts, running = drafts_of(), running_of(drafting)
    assert drafts.must_follow(running, 1, COST), "no wait has been measured"
    for _ in range(50):
        drafts.observe(Batch(0), StepDuration(4.2, 1.0, COST, 0.0))
    cases = {(0.9, 1.0): True, (0.9, 0.5): True, (0.9, 0.1): False, (0.4, 1.0): False}
    assert drafts.must_follow(running, FIRST_PROBE, COST)
    number = FIRST_PROBE + 1
    for (acceptance, found), is_worth in cases.items():
        drafting.acceptance, drafting.found = acceptance, found
        assert drafts.must_follow(running, number, COST) is is_worth, (acceptance, found)
        number += REPLAN_AFTER_STEPS
    assert drafts_of().must_follow(running, 1, None), "nothing is known of the time"
    drafting.acceptance, drafting.found = 0.9, 1.0
    assert not drafts.must_follow(running, number - 1, COST), "a no holds"
    assert drafts.must_follow(running, number, COST)
    drafting.acceptance = 0.4
    assert [n for n in range(number, 200) if drafts.must_follow(running, n, COST)] == [
        FIRST_PROBE + 32,
        FIRST_PROBE + 96,
        FIRST_PROBE + 160,
    ]
    drafting.resumes_at = 100
    assert not drafts.must_follow(running, 1000, COST)


def test_probes_become_rare_unless_drafts_are_worth_their_time() -> None:
    probes = Probes()

    def next_after(number: int) -> int:
        return next(each for each in range(number + 1, number + 1000) if probes.takes(each))

    found = [0]
    for _ in range(5):
        found.append(next_after(found[-1]))
        assert probes.takes(found[-1]), "whoever asks about the same step"
    assert [b - a for a, b in pairwise(found)] == [FIRST_PROBE, 32, LAST_PROBE, 64, 64]
    probes.note_worth()
    assert next_after(found[-1]) - found[-1] == LAST_PROBE
    assert next_after(found[-1] + LAST_PROBE) - found[-1] == LAST_PROBE + 32


def test_a_sequence_that_has_not_drafted_is_waited_for_until_its_source_is_silent() -> None:
    drafting = Drafting(source=Silent(), most=4, acceptance=0.4)
    drafts, running = drafts_of(), running_of(drafting)
    for _ in range(50):
        drafts.observe(Batch(0), StepDuration(4.2, 1.0, COST, 0.0))
    answers = list[bool]()
    for number in range(1, 7):
        answers.append(drafts.must_follow(running, number, COST))
        drafting.propose([0] * 8, 4)
    assert answers == [True] * 3 + [False] * 3


def test_a_new_sequence_is_not_waited_for_where_no_draft_would_be_made() -> None:
    dear = StepCost(fixed_ms=0.1, token_ms=4.0, logit_ms=0.0, key_ms=0.0)
    drafts, running = drafts_of(), running_of(Drafting(source=Silent(), most=4))
    for _ in range(50):
        drafts.observe(Batch(0), StepDuration(4.2, 1.0, COST, 0.0))
    assert drafts.must_follow(running, 1, COST)
    assert not drafts.must_follow(running, 2, dear)


class Zeros:
    def propose(self, token_ids: list[int], most: int) -> list[int]:
        return [0] * most


def num_proposed(
    drafts: StepDrafts, running: list[Sequence], number: int, cost: StepCost | None
) -> int:
    entries = [
        BatchEntry(each, at, each.num_computed_tokens, 1, 0, 0) for at, each in enumerate(running)
    ]
    drafts.extend(entries, 100, number, cost)
    return sum(len(entry.drafts) for entry in entries)


def proposed(
    drafts: StepDrafts, drafting: Drafting, number: int, cost: StepCost | None = COST
) -> int:
    """The drafts of one decoding sequence beside another."""
    running = running_of(drafting)
    for sequence in running:
        sequence.num_pending_tokens = 0
        sequence.num_computed_tokens -= 1
    return num_proposed(drafts, running, number, cost)


def test_no_draft_is_tried_beside_a_prompt_before_one_was_measured() -> None:
    """What it takes there is not told from what the prompt takes."""
    drafts, running = drafts_of(), running_of(Drafting(source=Zeros(), most=4, acceptance=0.95))
    for sequence in running:
        sequence.num_pending_tokens = 0
        sequence.num_computed_tokens -= 1
    running[0].num_computed_tokens = 0

    def num_drafts() -> int:
        prompt, row = BatchEntry(running[0], 0, 0, 6, 0, 0), BatchEntry(running[1], 1, 7, 1, 1, 0)
        drafts.extend([prompt, row], 100, 1, COST)
        return len(row.drafts)

    assert num_drafts() == 0
    with_drafts = Batch(0, num_tokens=4, num_keys=36, num_choices=4, has_drafts=True)
    with_drafts.entries.append(BatchEntry(running[1], 1, 7, 3, 3, 0, drafts=(0, 0)))
    drafts.observe(with_drafts, StepDuration(4.4, None, COST, 0.0))
    assert num_drafts() == 4


def test_part_of_a_prompt_is_no_row_where_drafts_are_planned_and_where_they_are_observed() -> None:
    """Beside one decoding sequence, drafts are those of a step of one row. What a prompt attends to
    is not theirs either: they would seem to cost four steps."""
    drafter = Asked(answer=True, num_rows=1)
    drafts, running = drafts_of(drafter), running_of(Drafting(source=None, most=4))
    running[0].num_computed_tokens = 2
    assert drafts.must_follow(running, 1, COST), "half a prompt is computed meanwhile"
    assert drafter.steps == [1]
    keys = replace(COST, key_ms=0.01)
    for sequence in running:
        sequence.num_pending_tokens = 0
    running[0].token_ids += [0] * 2000
    running[1].drafting = Drafting(source=Zeros(), most=4, acceptance=0.95)
    running[1].num_computed_tokens = 7
    measured = Batch(0, has_drafts=True)
    measured.add(BatchEntry(running[1], 1, 7, 3, 3, 0, drafts=(0, 0)))
    drafts.observe(measured, StepDuration(4.4, None, keys, 0.0))
    part, row = BatchEntry(running[0], 0, 1900, 6, 0, 0), BatchEntry(running[1], 1, 7, 1, 1, 0)
    drafts.extend([part, row], 100, 2, keys)
    assert len(row.drafts) == 4, "as measured of one row"
    batch = Batch(2, has_drafts=True)
    row.num_new_tokens, row.num_choices, row.num_accepted = 5, 5, 2
    batch.add(part)
    batch.add(row)
    drafts.observe(batch, StepDuration(500.0, None, keys, 0.0))
    drafts.settle(batch)
    assert drafts.ledger.account(DraftGroup("ngram"), 1).gain > 0.5
    assert not drafts.ledger.account(DraftGroup("ngram"), 2).num_observed


def test_a_sequence_has_as_many_drafts_as_are_worth_their_time() -> None:
    dear = StepCost(fixed_ms=1.0, token_ms=1.0, logit_ms=0.0, key_ms=0.0)
    for cost, acceptance, count in (
        (COST, 0.95, 4),
        (COST, 0.3, 1),
        (dear, 0.5, 0),
        (None, 0.1, 4),
    ):
        drafting = Drafting(source=Zeros(), most=4, acceptance=acceptance)
        assert proposed(drafts_of(), drafting, 1, cost) == count, (acceptance, count)
        assert drafting.is_due(8) is (count > 0)


def test_drafts_that_save_less_than_the_next_steps_wait_are_not_made() -> None:
    drafts = drafts_of()
    for _ in range(50):
        drafts.observe(Batch(0), StepDuration(4.2, 1.0, COST, 0.0))
    assert proposed(drafts, Drafting(source=Zeros(), most=4, acceptance=0.9), 1) > 0
    doubtful = tried(Drafting(source=Zeros(), most=4, acceptance=0.4))
    assert proposed(drafts, doubtful, 1) == 0
    assert doubtful.is_due(8), "it does not pause: others may make the wait worth it"
    assert proposed(drafts, doubtful, FIRST_PROBE) > 0


def test_tokens_of_a_sequence_that_is_ahead_of_others_are_worth_less() -> None:
    ahead, behind = sequence_of(0, 8), sequence_of(1, 8)
    for sequence, num_accepted in ((ahead, 20), (behind, 4)):
        sequence.token_ids += [0] * 32
        sequence.drafting = Drafting(source=Zeros(), most=4, num_accepted=num_accepted)
    pace = pace_of([ahead, behind])
    assert 40 / 36 < pace < 40 / 20
    assert chance_of(behind, 4, pace).worth == 1.0
    assert chance_of(ahead, 4, pace).worth < 0.5
    for same in (ahead, behind):
        assert chance_of(same, 4, pace_of([same])).worth == 1.0
    assert pace_of([]) == pace_of([sequence_of(2, 8)]) == 1.0


def test_drafts_of_a_sequence_far_ahead_are_not_made() -> None:
    cost = StepCost(fixed_ms=3.0, token_ms=0.5, logit_ms=0.0, key_ms=0.0)
    counts = list[int]()
    for num_accepted in (0, 56):
        drafting = tried(Drafting(source=Zeros(), most=4, acceptance=0.9))
        drafting.num_accepted = num_accepted
        running = running_of(drafting)
        for sequence in running:
            sequence.token_ids += [0] * 64
            sequence.num_computed_tokens, sequence.num_pending_tokens = 71, 0
        counts.append(num_proposed(drafts_of(), running, 1, cost))
    assert counts == [3, 0]


def test_nobody_is_waited_for_where_nobody_drafts() -> None:
    assert not drafts_of(Asked(answer=True)).must_follow(running_of(None), 0, COST)
