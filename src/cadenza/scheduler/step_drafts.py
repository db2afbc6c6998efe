"""`StepDrafts`: the drafts of a step, from the `Drafter`s that its sequences use. Invariants:
drafts take only what the step has left, and no page from others; a sequence drafts only after its
newest token, which has been read."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from math import inf
from statistics import fmean
from typing import NamedTuple, Protocol

from cadenza.batch.batch import Batch, BatchEntry
from cadenza.batch.sequence import Sequence
from cadenza.batch.step_cost import StepCost, StepLoad
from cadenza.config import EngineLimits
from cadenza.drafting.draft_ledger import DraftAccount, DraftGroup, DraftLedger, OnDrafts
from cadenza.drafting.drafts import DRAFT_FIGURES, DraftCounts, Drafting, Lookahead
from cadenza.figures import Figure
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.scheduler.draft_costs import DecodeCost, DraftCosts
from cadenza.scheduler.draft_plan import (
    DraftNumbers,
    DraftReturns,
    SpentMs,
    chance_of,
    pace_of,
    plan_drafts,
)
from cadenza.scheduler.step_budget import num_row_masks
from cadenza.scheduler.step_work import StepDuration, StepWork

WEIGHT_OF_NEWEST_WAIT = 0.2
# Steps after which look-ups are waited for whatever it costs: new text may be easier to guess.
FIRST_PROBE, LAST_PROBE = 16, 64
# Steps for which a plan without drafts holds: planning takes a tenth of a short step's time.
REPLAN_AFTER_STEPS = 4


class DraftSlot(NamedTuple):
    """An entry that computes its sequence's newest token, and how many drafts it may have."""

    entry: BatchEntry
    drafting: Drafting
    most: int


@dataclass(slots=True, eq=False, kw_only=True)
class DraftStep:
    """The step for which drafts are wanted."""

    number: int
    load: StepLoad  # without drafts
    cost: DecodeCost | None  # with so many drafts; None if not known
    room: int = 0  # drafts that it may still have
    pace: float = 1.0  # of its sequences; see `pace_of`
    wait_ms: float = 0.0  # lost before a step that is scheduled when no step is in flight
    waits_anyway: bool = False  # the next step waits for this one, with more drafts or without
    # what a second model's drafts have saved, of each group in the step; {} if not known
    accounts: Mapping[DraftGroup, DraftAccount] = field(
        default_factory=dict[DraftGroup, DraftAccount]
    )
    # what a second model took for them
    spent: Mapping[DraftGroup, SpentMs] = field(default_factory=dict[DraftGroup, SpentMs])

    def plan(
        self, wanted: SequenceOf[tuple[Sequence, int]], drafter: StepCost | None = None
    ) -> DraftNumbers:
        """Drafts for each sequence, at most as given; `drafter` is what making them costs. `cost`
        must be known."""
        assert self.cost is not None, "without a cost there is nothing to weigh"
        pace = self.pace if drafter is None else None
        chances = [chance_of(sequence, most, pace) for sequence, most in wanted]
        return plan_drafts(chances, self.load.num_logits, self.cost, drafter)


class Drafter(Protocol):
    """Proposes tokens for the sequences of a step together."""

    def is_due(self, number: int) -> bool:
        """False while drafts are not worth their time, at the step of this number."""
        ...

    def is_worth(self, sequences: SequenceOf[Sequence], step: DraftStep) -> bool:
        """Whether some drafts are worth their time before newest tokens are known; if not, none are
        due for a while."""
        ...

    def propose(self, slots: SequenceOf[DraftSlot], step: DraftStep) -> None:
        """Gives drafts to some entries, and all masks to constrained ones. Raises nothing: steps
        are right without drafts."""
        ...


@dataclass(slots=True)
class Probes:
    """Steps that try drafts not known to save time: fewer and fewer, while they do not."""

    _at: int = FIRST_PROBE
    _every: int = FIRST_PROBE
    _newest: int = -1

    def are_due(self, number: int) -> bool:
        """Whether the step of this number is one, or was taken."""
        return number >= self._at or number == self._newest

    def takes(self, number: int) -> bool:
        """Whether the step of this number is one, now or when it was asked before."""
        if number >= self._at:
            self._newest = number
            self._every = min(2 * self._every, LAST_PROBE)
            self._at = number + self._every
        return number == self._newest

    def note_worth(self) -> None:
        """Drafts were worth their time in a step that was none."""
        self._every = FIRST_PROBE


class SourceDrafter:
    """The `Drafter` of sequences that have a source of their own, which takes no time."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self._replan_at = 0
        self._probes = Probes()

    def is_due(self, number: int) -> bool:
        return number >= self._replan_at or self._probes.are_due(number)

    def is_worth(self, sequences: SequenceOf[Sequence], step: DraftStep) -> bool:
        """Whether they are expected to save as much time as the device idles for them."""
        if step.cost is None or self._probes.takes(step.number):
            return True
        drafting = [each.drafting for each in sequences if each.drafting]
        plan = step.plan([(each, each.drafting.most) for each in sequences if each.drafting])
        is_worth = plan.saved_ms_of_step * fmean([each.found for each in drafting]) >= step.wait_ms
        if is_worth or (any(plan.counts) and any(each.is_untried for each in drafting)):
            return True
        self._replan_at = step.number + REPLAN_AFTER_STEPS
        return False

    def propose(self, slots: SequenceOf[DraftSlot], step: DraftStep) -> None:
        found = [
            (slot, drafts)
            for slot in slots
            if (drafts := slot.drafting.propose(slot.entry.sequence.token_ids, slot.most))
        ]
        planned = list(zip(found, self._counts(found, step), strict=False))
        # Others that are accepted as often only have no turn in this step.
        least = min(
            [slot.drafting.acceptance for (slot, _), count in planned if count], default=inf
        )
        for (slot, drafts), count in planned:
            if count:
                self._set_drafts(slot, drafts[: min(count, step.room)])
                step.room -= len(slot.entry.drafts)
            elif slot.drafting.acceptance < least:
                slot.drafting.pause(slot.entry.end)

    def _counts(
        self, found: SequenceOf[tuple[DraftSlot, tuple[int, ...]]], step: DraftStep
    ) -> list[int]:
        """Drafts worth their time, of each entry; [] for none at all, since the next step waits for
        a step with drafts."""
        wanted = [(slot.entry.sequence, len(drafts)) for slot, drafts in found]
        if step.cost is None or not found:
            return [most for _, most in wanted]
        plan = step.plan(wanted)
        is_worth = any(plan.counts) and plan.saved_ms_of_step >= step.wait_ms
        is_untried = any(slot.drafting.is_untried for slot, _ in found)
        is_probe = self._probes.takes(step.number) or is_untried
        if is_worth and not is_probe:
            self._probes.note_worth()
        return plan.counts if is_worth or is_probe or step.waits_anyway else []

    def _set_drafts(self, slot: DraftSlot, drafts: tuple[int, ...]) -> None:
        """As many of `drafts` as there are pages for and as the sequence's constraint allows."""
        entry, sequence = slot.entry, slot.entry.sequence
        drafts = drafts[: self._kv_cache.grow_behind(sequence, entry.end, len(drafts))]
        if sequence.constraint is None or not drafts:
            entry.drafts = drafts
            return
        ahead = Lookahead(sequence.constraint)
        count = ahead.take_all(drafts)
        if not count:
            slot.drafting.note_none(entry.end)
        entry.drafts, entry.masks = drafts[:count], tuple(ahead.masks)


class StepDrafts(StepWork):
    """`drafter`: of sequences without their own source; `on_drafts`: called when drafts begin or
    cease to pay."""

    def __init__(
        self,
        limits: EngineLimits,
        kv_cache: KVCacheManager,
        drafter: Drafter | None,
        on_drafts: OnDrafts | None = None,
    ) -> None:
        self.ledger = DraftLedger(on_drafts)
        self.counts = DraftCounts()
        self._max_num_tokens = limits.max_num_batched_tokens
        self._sources = SourceDrafter(kv_cache)
        self._drafter = drafter
        self._costs = DraftCosts()
        self._returns = DraftReturns(self.ledger)
        self._wait_ms = 0.0

    @property
    def figures(self) -> tuple[DraftCounts, tuple[Figure[DraftCounts], ...]]:
        return self.counts, DRAFT_FIGURES

    def observe(self, batch: Batch, duration: StepDuration) -> None:
        measured_ms, idle_ms, cost, _ = duration
        if cost is None:
            return
        base = _base_of(batch)
        num_drafts = batch.num_choices - base.num_logits
        self._observe_drafts(batch, base, measured_ms, cost, idle_ms)
        if batch.num_prompt_rows or batch.has_quanta:
            return  # rows of logits that do not decode, or work items take time
        if num_drafts or idle_ms is None:
            self._costs.observe(base, num_drafts, measured_ms, cost, idle_ms or 0.0)

    def _observe_drafts(
        self,
        batch: Batch,
        base: StepLoad,
        measured_ms: float,
        cost: StepCost,
        idle_ms: float | None,
    ) -> None:
        """`base` is the load of the step without its drafts."""
        known = self._costs.beside(base, cost)
        if idle_ms is not None:
            # Where steps that overlap wait for the host, one that does not is shorter.
            wait_ms = max(0.0, idle_ms - max(0.0, known.base_ms - measured_ms))
            self._wait_ms += WEIGHT_OF_NEWEST_WAIT * (wait_ms - self._wait_ms)
        waited_ms = idle_ms
        if idle_ms is None:
            waited_ms = self._returns.note(batch.step_id).spent_ms or None
        if batch.num_prompt_rows or batch.has_quanta or not self._costs.has_base(base):
            # What the step would take without drafts is not known well enough.
            measured_ms = known.base_ms + known.added_ms(batch.num_choices - base.num_logits)
        self._returns.observe(batch, base.num_logits, known, measured_ms, waited_ms)

    def settle(self, batch: Batch) -> None:
        for entry in batch.entries if batch.has_drafts else ():
            if entry.drafts:
                self.counts.add(len(entry.drafts), entry.num_accepted)
        self._returns.settle(batch)

    def _may_draft(self, drafting: Drafting, num_rows: int) -> bool:
        account = self.ledger.account(drafting.group, num_rows)
        return account.may_draft or drafting.credit.is_enough(num_rows)

    def must_follow(
        self, running: SequenceOf[Sequence], number: int, cost: StepCost | None
    ) -> bool:
        """Whether the step waits until none is in flight: drafts follow the newest tokens. Ask once
        a step: it counts probes."""
        if not any(each.drafting is not None for each in running):
            return False
        has_source: list[Sequence] = []
        has_none: list[Sequence] = []
        load = _load_of([(each.num_computed_tokens + 1, 1, _decodes(each)) for each in running])
        for sequence in running:
            drafting = sequence.drafting
            if drafting is None or not drafting.is_due(sequence.num_tokens):
                continue
            if not self._may_draft(drafting, load.num_logits):
                continue
            if sequence.constraint is not None and not num_row_masks(running):
                continue
            if drafting.source is None:
                if _decodes(sequence):
                    has_none.append(sequence)
            elif sequence.num_pending_tokens:
                has_source.append(sequence)
        asked = ((self._drafter, has_none), (self._sources, has_source))
        due = [
            (drafter, own) for drafter, own in asked if drafter and own and drafter.is_due(number)
        ]
        if not due:
            return False
        if self._costs.is_stale(load):
            return False  # a step that waited would not be measured
        step = self._step(number, load, running, cost)
        for drafter, own in due:
            if drafter.is_worth(own, step):
                groups = [each.drafting.group for each in own if each.drafting]
                self._returns.note(number).waited_for = tuple(groups)
                return True
        return False

    def extend(
        self, entries: SequenceOf[BatchEntry], num_rows: int, number: int, cost: StepCost | None
    ) -> None:
        """Gives drafts to entries that sample, of which `num_rows` may have logits. None in a step
        whose masks follow its launch. `cost`: None if not known."""
        if not any(entry.sequence.drafting is not None for entry in entries):
            return
        if any(_has_undecided_mask(entry.sequence) for entry in entries):
            return
        room = self._max_num_tokens - sum([entry.num_new_tokens for entry in entries])
        room = min(room, num_rows)
        load = _load_of([(each.end, each.num_new_tokens, each.samples) for each in entries])
        slots = [
            slot
            for slot in _slots(entries, room)
            if cost is None or self._may_draft(slot.drafting, load.num_logits)
        ]
        if not slots or self._costs.is_stale(load):
            return
        has_prompts = load.num_tokens > load.num_logits
        if has_prompts and cost is not None and not self._costs.has_drafts(load):
            return  # what they cost is not known, and would not be measured
        step = self._step(number, load, [entry.sequence for entry in entries], cost)
        step.room = room
        drafter = self._drafter if self._drafter and self._drafter.is_due(number) else None
        has_source = [slot for slot in slots if slot.drafting.source is not None]
        has_none = [slot for slot in slots if slot.drafting.source is None]
        step.waits_anyway = drafter is not None and bool(has_none)
        self._sources.propose(has_source, step)
        if drafter is not None and has_none:
            groups = {slot.drafting.group for slot in has_none}
            step.accounts = {each: self.ledger.account(each, load.num_logits) for each in groups}
            drafter.propose(has_none, step)
            self._returns.note(number).spent = step.spent

    def _step(
        self, number: int, load: StepLoad, sequences: SequenceOf[Sequence], cost: StepCost | None
    ) -> DraftStep:
        return DraftStep(
            number=number,
            load=load,
            cost=None if cost is None else self._costs.beside(load, cost),
            pace=pace_of(sequences),
            wait_ms=self._wait_ms,
        )


def _slots(entries: SequenceOf[BatchEntry], room: int) -> list[DraftSlot]:
    found: list[DraftSlot] = []
    num_masks = num_row_masks([entry.sequence for entry in entries])
    for entry in entries:
        sequence, drafting, end = entry.sequence, entry.sequence.drafting, entry.end
        # At its end, all its tokens are known: none is still on the device.
        if drafting is None or end != len(sequence.token_ids) or sequence.is_retried:
            continue
        if not drafting.is_due(end):
            continue
        # A second model needs one new token, after pages that are the sequence's own.
        is_alone = entry.num_new_tokens == 1 and sequence.page_copy is None
        if drafting.source is None and not is_alone:
            continue
        most = min(room, sequence.max_num_tokens - end - 1)
        if sequence.constraint is not None:
            most = min(most, num_masks)
        if most > 0:
            found.append(DraftSlot(entry, drafting, most))
    return found


def _has_undecided_mask(sequence: Sequence) -> bool:
    return sequence.constraint is not None and sequence.num_pending_tokens > 0


def _decodes(sequence: Sequence) -> bool:
    return sequence.num_tokens - sequence.num_computed_tokens <= 1


def _base_of(batch: Batch) -> StepLoad:
    """What a launched step would have been without its drafts."""
    if batch.num_tokens == batch.num_choices and not batch.has_drafts:
        return batch.load
    ends = [(each.end - len(each.drafts), each) for each in batch.entries]
    return _load_of([(end, end - each.start, each.num_choices > 0) for end, each in ends])


def _load_of(shares: SequenceOf[tuple[int, int, bool]]) -> StepLoad:
    """Of entries that compute so many tokens up to an end, and whether they then sample. Only those
    are rows: what a prompt's part costs says nothing of drafts."""
    ends = [end for end, _, samples in shares if samples]
    return StepLoad(
        num_tokens=sum([count for _, count, _ in shares]),
        num_logits=len(ends),
        num_keys=sum(ends),
    )
