"""`DraftReturns`: what the drafts of each step gave and what they took, for the ledger.

Owns the arithmetic of one step. An accepted draft is worth a row's share of a step without drafts,
less where its sequence runs ahead of others. The drafts are charged with all time beyond a step
without: waiting for the newest tokens, drafting, verifying.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from cadenza.core.batch import Batch, BatchEntry
from cadenza.core.draft_costs import DecodeCost
from cadenza.core.draft_ledger import DraftGroup, DraftLedger
from cadenza.core.draft_plan import pace_of, worth_of

MAX_RATIO = 3.0
"""A step counts as at most this multiple of what it is predicted to take: now and then one takes
far longer, for reasons of the host."""

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
    """Milliseconds of a step: what one without drafts takes, of that whatever it holds, and what
    this one took beyond for drafts; None if it had nothing to do with any."""

    num_rows: int
    base_ms: float
    fixed_ms: float
    more_ms: float | None


@dataclass(slots=True, eq=False)
class DraftReturns:
    """Of one engine's steps, in their order."""

    ledger: DraftLedger
    _notes: dict[int, DraftNote] = field(default_factory=dict[int, DraftNote])
    """By the number of the step."""
    _newest: tuple[Batch, StepTime] | None = None
    _charged: Mapping[DraftGroup, float] = field(default_factory=dict[DraftGroup, float])
    """Weights, in the newest step that was charged to any: the one behind it waits for it, too."""

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
        time = StepTime(num_rows, cost.base_ms, cost.fixed_ms(num_rows), more_ms)
        self._newest = batch, time

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
            account.invest(spent.caught_up / time.base_ms)
        gain = left = 0.0
        if not own:
            gain = left = -more_ms / time.base_ms
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
    share_left = max(0.0, 1 - len(drafting) / time.num_rows)
    worth = (1 - share_left * time.fixed_ms / time.base_ms) / time.num_rows
    num_drafts = sum([len(entry.drafts) for entry in own])
    return [
        entry.num_accepted * worth * worth_of(entry.sequence, pace)
        - more_ms / time.base_ms * len(entry.drafts) / num_drafts
        for entry in own
    ]


def _group_of(entry: BatchEntry) -> DraftGroup:
    assert entry.sequence.drafting is not None, "it has drafts"
    return entry.sequence.drafting.group
