"""`plan_drafts`, how many drafts each sequence of a step gets, and `DraftReturns`, what they gave.

Invariants: without a gain there are no drafts. An accepted draft is worth a row's share of a step
without, less where its sequence runs ahead; drafts are charged with all time beyond such a step.
"""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

from cadenza.batch.batch import Batch, BatchEntry
from cadenza.batch.sequence import Sequence
from cadenza.batch.step_cost import StepCost
from cadenza.drafting.draft_ledger import DraftGroup, DraftLedger
from cadenza.scheduler.draft_costs import DecodeCost

# The expected rate with drafts, as a multiple of that without, from which they are tried. The
# predictions leave out that a step with drafts is read before the next is launched.
MIN_RATIO = 1.05
# What a draft that costs nothing else has to give, as a multiple of what verifying it costs: the
# rows of a batch that drafts end at different times, which is not foreseen.
MARGIN = 1.15
LEAST_GAIN = 0.01  # tokens; of a draft that is never worth its time
# How fast a token is worth less, the further its sequence is ahead of the others. With 2 the mean
# time for a token would be least; what is started together also ends only with its slowest.
STEEPNESS = 4
PRIOR_STEPS = 8  # with one token each, from which the pace of a sequence starts


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftChance:
    """Of one sequence."""

    acceptance: float  # the chance of a draft, if those before it were accepted
    most: int  # drafts
    num_keys: int  # that each attends to
    worth: float = 1.0  # of a token


def chance_of(sequence: Sequence, most: int, pace: float | None = None) -> DraftChance:
    """Of `most` drafts behind the sequence's newest token, in a step of sequences of this pace.

    A token of a sequence that is ahead of the others is worth less: their steps take longer, and
    they end later.
    """
    acceptance = 0.0 if sequence.drafting is None else sequence.drafting.acceptance
    worth = 1.0 if pace is None else worth_of(sequence, pace)
    return DraftChance(acceptance=acceptance, most=most, num_keys=sequence.num_tokens, worth=worth)


def worth_of(sequence: Sequence, pace: float) -> float:
    """Of a token of the sequence beside others of this pace; 1 unless it is ahead of them."""
    return min(1.0, (pace / _pace(sequence)) ** STEEPNESS)


def pace_of(sequences: SequenceOf[Sequence]) -> float:
    """Tokens in each step so far, of a typical one of `sequences`: the harmonic mean, since it is
    their time for a token that is to fall."""
    return len(sequences) / sum([1 / _pace(each) for each in sequences]) if sequences else 1.0


def _pace(sequence: Sequence) -> float:
    accepted = 0 if sequence.drafting is None else sequence.drafting.num_accepted
    num_tokens = sequence.num_generated_tokens + PRIOR_STEPS
    return num_tokens / max(1, num_tokens - accepted)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNumbers:
    """For each sequence, and the tokens of all, of which those of drafts count by their worth."""

    counts: list[int]
    num_tokens: float  # that the step is expected to give
    rate_without: float  # tokens a millisecond
    rate: float

    @property
    def saved_ms(self) -> float:
        """For each token that any of the sequences gets."""
        return 1 / self.rate_without - 1 / self.rate

    @property
    def saved_ms_of_step(self) -> float:
        return self.num_tokens * self.saved_ms


def plan_drafts(
    chances: SequenceOf[DraftChance],
    num_rows: int,
    target: DecodeCost,
    drafter: StepCost | None = None,
) -> DraftNumbers:
    """Takes the drafts in the order of what they are expected to give, as many as give the best
    rate.

    Args:
        num_rows: that sample a token each in the step without drafts.
        target: what the step costs.
        drafter: what drafting costs, of all sequences together; None for nothing: each draft then
            stands for itself, and has to be worth `MARGIN`.
    """
    margin, min_ratio = (MARGIN, 1.0) if drafter is None else (1.0, MIN_RATIO)
    worth = 1.0 if drafter is not None else target.saved_share(len(chances), num_rows)
    drafts = _drafts_of(chances, worth)[: target.most]
    tokens, drafting_ms, deepest = float(num_rows), 0.0, 0
    most_tokens, least_ms, best_number = tokens, target.base_ms, 0
    first_rate = best_rate = tokens / least_ms
    for number, (negative, depth, row) in enumerate(drafts, start=1):
        tokens -= negative
        if drafter is not None:
            is_deeper, deepest = depth > deepest, max(depth, deepest)
            drafting_ms += is_deeper * drafter.fixed_ms + drafter.row_ms(chances[row].num_keys)
        ms = target.base_ms + target.added_ms(number) + drafting_ms
        is_worth = tokens - most_tokens >= margin * best_rate * (ms - least_ms)
        if is_worth and tokens / ms > best_rate:
            most_tokens, least_ms, best_number, best_rate = tokens, ms, number, tokens / ms
    if best_rate < min_ratio * first_rate:
        most_tokens, best_number, best_rate = float(num_rows), 0, first_rate
    counts = [0] * len(chances)
    for _, _, row in drafts[:best_number]:
        counts[row] += 1
    return DraftNumbers(
        counts=counts, num_tokens=most_tokens, rate_without=first_rate, rate=best_rate
    )


def _drafts_of(chances: SequenceOf[DraftChance], worth: float) -> list[tuple[float, int, int]]:
    """Of each draft that may be accepted: what it is expected to give, negative, its depth and its
    row; the best first, and each behind those before it."""
    drafts: list[tuple[float, int, int]] = []
    for row, chance in enumerate(chances):
        gained = chance.worth * worth
        for depth in range(1, chance.most + 1):
            gained *= chance.acceptance
            if gained <= LEAST_GAIN:
                break
            drafts.append((-gained, depth, row))
    drafts.sort()
    return drafts


# A step counts as at most this multiple of what it is predicted to take: now and then one takes
# far longer, for reasons of the host.
MAX_RATIO = 3.0

NUM_KEPT_NOTES = 4


class SpentMs(NamedTuple):
    """Milliseconds that a second model took before a step for the drafts of a group, and how many
    of these for what it lacked of the sequences."""

    total: float
    caught_up: float


@dataclass(slots=True)
class DraftNote:
    """Of one step: the group of each sequence for whose drafts it waited, and what a second model
    took before it."""

    waited_for: tuple[DraftGroup, ...] = ()
    spent: Mapping[DraftGroup, SpentMs] = field(default_factory=dict[DraftGroup, SpentMs])

    @property
    def spent_ms(self) -> float:
        return sum([each.total for each in self.spent.values()])


class StepTime(NamedTuple):
    """What a step costs with drafts and without, and the milliseconds that this one took beyond
    for drafts; None if it had nothing to do with any."""

    num_rows: int
    cost: DecodeCost
    more_ms: float | None


@dataclass(slots=True, eq=False)
class DraftReturns:
    """Of one engine's steps, in their order."""

    ledger: DraftLedger
    # by the number of the step
    _notes: dict[int, DraftNote] = field(default_factory=dict[int, DraftNote])
    _newest: tuple[Batch, StepTime] | None = None
    # weights, in the newest step that was charged to any: the one behind it waits for it, too
    _charged: Mapping[DraftGroup, float] = field(default_factory=dict[DraftGroup, float])

    def note(self, number: int) -> DraftNote:
        """Of the step of this number; what is noted of others long before is forgotten."""
        for old in [each for each in self._notes if each < number - NUM_KEPT_NOTES]:
            del self._notes[old]
        return self._notes.setdefault(number, DraftNote())

    def observe(
        self,
        batch: Batch,
        num_rows: int,
        cost: DecodeCost,
        measured_ms: float,
        waited_ms: float | None,
    ) -> None:
        """A step took `measured_ms` after it waited for `waited_ms`, None if for nothing; `settle`
        follows."""
        more_ms = None
        if batch.has_drafts or waited_ms is not None:
            expected_ms = cost.base_ms + cost.added_ms(sum([len(e.drafts) for e in batch.entries]))
            more_ms = min(measured_ms, MAX_RATIO * expected_ms) - cost.base_ms + (waited_ms or 0.0)
        self._newest = batch, StepTime(num_rows, cost, more_ms)

    def settle(self, batch: Batch) -> None:
        """The step was applied: enters it."""
        note = self._notes.pop(batch.step_id, DraftNote())
        newest, self._newest = self._newest, None
        if newest is None or newest[0] is not batch or not newest[1].num_rows:
            return
        time = newest[1]
        present = {each.sequence.drafting.group for each in batch.entries if each.sequence.drafting}
        self.ledger.accrue(present, time.num_rows)
        if time.more_ms is None:
            self._charged = {}
            return
        drafting = [entry for entry in batch.entries if entry.drafts]
        self._charged = self._weights(drafting, note)
        for group in {**self._charged, **note.spent}:
            self._enter(group, drafting, note, time)

    def _weights(self, drafting: list[BatchEntry], note: DraftNote) -> Mapping[DraftGroup, float]:
        """By which groups are charged with the time of a step that no second model took."""
        drafts: Counter[DraftGroup] = Counter()
        for entry in drafting:
            drafts[_group_of(entry)] += len(entry.drafts)
        spent = {group: each.total for group, each in note.spent.items() if each.total}
        return drafts or spent or Counter(note.waited_for) or self._charged

    def _enter(
        self, group: DraftGroup, drafting: list[BatchEntry], note: DraftNote, time: StepTime
    ) -> None:
        assert time.more_ms is not None
        own = [entry for entry in drafting if _group_of(entry) == group]
        more_ms = time.more_ms - note.spent_ms
        more_ms *= self._charged.get(group, 0.0) / sum(self._charged.values())
        account = self.ledger.account(group, time.num_rows)
        if group in note.spent:
            spent = note.spent[group]
            more_ms += spent.total - spent.caught_up
            account.invest(spent.caught_up / time.cost.base_ms)
        gain = left = 0.0
        if not own:
            gain = left = -more_ms / time.cost.base_ms
        for entry, each in zip(own, _gains(own, drafting, more_ms, time), strict=True):
            gain += each
            assert entry.sequence.drafting is not None
            left += entry.sequence.drafting.credit.take(each, time.num_rows)
        account.observe(gain, left)
        self.ledger.note(group, time.num_rows)


def _gains(
    own: list[BatchEntry], drafting: list[BatchEntry], more_ms: float, time: StepTime
) -> list[float]:
    """Of each entry, in steps."""
    pace = pace_of([entry.sequence for entry in drafting])
    worth = time.cost.saved_share(len(drafting), time.num_rows) / time.num_rows
    num_drafts = sum([len(entry.drafts) for entry in own])
    return [
        entry.num_accepted * worth * worth_of(entry.sequence, pace)
        - more_ms / time.cost.base_ms * len(entry.drafts) / num_drafts
        for entry in own
    ]


def _group_of(entry: BatchEntry) -> DraftGroup:
    assert entry.sequence.drafting is not None, "it has drafts"
    return entry.sequence.drafting.group
