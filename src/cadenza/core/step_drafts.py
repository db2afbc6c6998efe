"""`StepDrafts`: the drafts of a step, from sequences' own sources and from a `Drafter`.

Owns which sequences of a step may draft, and how its room for drafts is shared. Knows pages; no
rows and no arrays. Invariants: drafts take only what the step has left over, and no page from
others; a sequence drafts only behind its newest token, which has been read.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import NamedTuple, Protocol

from cadenza.config import EngineLimits
from cadenza.core.batch import Batch, BatchEntry
from cadenza.core.constraint import Lookahead
from cadenza.core.draft_costs import DecodeCost, DraftCosts
from cadenza.core.draft_plan import DraftChance, plan_drafts
from cadenza.core.drafts import Drafting
from cadenza.core.kv_cache_manager import KVCacheManager
from cadenza.core.sequence import Sequence
from cadenza.core.step_budget import num_row_masks
from cadenza.core.step_cost import StepCost, StepLoad, num_keys

Share = tuple[Sequence, int]
"""A sequence and the number of its tokens that a step computes."""


class Proposal(NamedTuple):
    """Drafts of a sequence. Of a constrained one `masks` are what may follow: at first, and behind
    each draft.
    """

    tokens: tuple[int, ...] = ()
    masks: tuple[bytes, ...] = ()


NO_DRAFTS = Proposal()

Drafts = dict[Sequence, Proposal]

WEIGHT_OF_NEWEST_WAIT = 0.2
STEEPNESS = 4
"""How fast a token is worth less, the further its sequence is ahead of the others. With 2 the mean
time for a token would be least; what is started together also ends only with its slowest."""
PRIOR_STEPS = 8
"""Steps with one token each, from which the pace of a sequence starts."""
FIRST_PROBE, LAST_PROBE = 16, 64
"""After so many steps the sequences that look drafts up are waited for, whatever it costs: what
follows may be easier to guess than what came before."""

NO_HOLDS = 4
"""Steps for which a plan without drafts holds: planning takes a tenth of a short step's time."""


class DraftWish(NamedTuple):
    """A sequence that computes its newest token in the step, and how many drafts it may have
    behind it, for which it has pages.
    """

    sequence: Sequence
    most: int


class DraftStep(NamedTuple):
    """The step for which drafts are wanted: its number, its load without drafts, and what it costs
    with so many; None if that is not known.
    """

    number: int
    load: StepLoad
    cost: DecodeCost | None


class Drafter(Protocol):
    """Proposes tokens for the sequences of a step together, with a model of its own."""

    def is_due(self, number: int) -> bool:
        """False while drafts are not worth their time, at the step of this number."""
        ...

    def is_worth(self, sequences: SequenceOf[Sequence], step: DraftStep) -> bool:
        """Whether drafts of some of the sequences are worth their time, as far as that is known
        before their newest tokens are; if not, none are due for a while.
        """
        ...

    def propose(self, wishes: SequenceOf[DraftWish], step: DraftStep) -> Drafts:
        """Drafts of some of the sequences. Raises nothing: a step is as right without drafts."""
        ...


@dataclass(slots=True)
class Probes:
    """Which steps try drafts although they are not known to save time: fewer and fewer, while they
    do not.
    """

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


class StepDrafts:
    """`drafter` is None if each sequence that drafts has a source of its own."""

    def __init__(
        self, limits: EngineLimits, kv_cache: KVCacheManager, drafter: Drafter | None
    ) -> None:
        self._limits = limits
        self._kv_cache = kv_cache
        self._drafter = drafter
        self._costs = DraftCosts()
        self._asks_at = 0
        self._probes = Probes()
        self._wait_ms = 0.0
        """What is lost before a step that is scheduled when no step is in flight."""

    def observe(
        self, batch: Batch, measured_ms: float, cost: StepCost, idle_ms: float | None
    ) -> None:
        """A step took `measured_ms`, after `idle_ms` if it waited for the newest tokens.

        Learns what waiting costs, and what steps with and without drafts cost.
        """
        num_drafts, base = 0, batch.load
        if batch.has_drafts:
            num_drafts = sum([len(entry.drafts) for entry in batch.entries])
            base = StepLoad(
                num_tokens=base.num_tokens - num_drafts,
                num_logits=base.num_logits - num_drafts,
                num_keys=base.num_keys - sum(map(_keys_of_drafts, batch.entries)),
            )
        if idle_ms is not None:
            # Where steps that overlap wait for the host, one that does not is shorter.
            base_ms = self._costs.beside(base, cost).base_ms
            wait_ms = max(0.0, idle_ms - max(0.0, base_ms - measured_ms))
            self._wait_ms += WEIGHT_OF_NEWEST_WAIT * (wait_ms - self._wait_ms)
        if batch.num_prompt_rows:
            return  # not all rows of logits are those of decoding rows
        if num_drafts:
            self._costs.observe_drafts(base, num_drafts, measured_ms, cost)
        elif idle_ms is None:
            self._costs.observe(base, measured_ms, cost)

    def _step_of(self, number: int, load: StepLoad, cost: StepCost | None) -> DraftStep:
        return DraftStep(number, load, None if cost is None else self._costs.beside(load, cost))

    def decide_wait(
        self, running: SequenceOf[Sequence], number: int, cost: StepCost | None
    ) -> bool:
        """Whether the step of this number is to be scheduled only when no step is in flight: its
        drafts follow the newest tokens, and a `Drafter` runs beside no step.

        To be asked once for a step: it counts probes, and notes until when a no holds.
        """
        has_masks = num_row_masks(running) > 0
        looking_up: list[Sequence] = []
        together: list[Sequence] = []
        for sequence in running:
            drafting = sequence.drafting
            if drafting is None or not (has_masks or sequence.constraint is None):
                continue
            if not drafting.is_due(sequence.num_tokens):
                continue
            if drafting.source is not None:
                if sequence.num_pending_tokens > 0:
                    looking_up.append(sequence)
            elif sequence.num_tokens - sequence.num_computed_tokens <= 1:
                together.append(sequence)
        if not looking_up and not together:
            return False
        if not together and cost is not None and not self._asks(number):
            return False
        load = _load_of([(each, 1) for each in running])
        if self._costs.is_stale(load):
            return False  # a step that waited would not be measured
        step = self._step_of(number, load, cost)
        drafter = self._drafter
        if together and drafter and drafter.is_due(number) and drafter.is_worth(together, step):
            return True
        return bool(looking_up) and self._is_worth_waiting(looking_up, running, step)

    def _asks(self, number: int) -> bool:
        """Whether it is asked at the step of this number if drafts that are looked up are worth
        waiting for: not just after they were not."""
        return number >= self._asks_at or self._probes.are_due(number)

    def _is_worth_waiting(
        self, sequences: list[Sequence], running: SequenceOf[Sequence], step: DraftStep
    ) -> bool:
        """Whether the time that drafts of these sequences are expected to save is worth that in
        which the device idles."""
        if step.cost is None or self._probes.takes(step.number):
            return True
        if not self._asks(step.number):
            return False
        pace = pace_of(running)
        chances = [chance_of(each, each.drafting.most, pace) for each in sequences if each.drafting]
        plan = plan_drafts(chances, step.load.num_logits, step.cost)
        found = fmean([each.drafting.found for each in sequences if each.drafting])
        is_worth = plan.saved_ms_of_step * found >= self._wait_ms
        if not is_worth and not (_has_untried(sequences) and any(plan.counts)):
            self._asks_at = step.number + NO_HOLDS
            return False
        return True

    def propose(
        self, entries: list[BatchEntry], num_rows: int, number: int, cost: StepCost | None
    ) -> None:
        shares = [(entry.sequence, entry.num_new_tokens) for entry in entries]
        found = self._proposed(shares, num_rows, number, cost)
        for entry in entries if found else ():
            entry.drafts, entry.masks = found.get(entry.sequence, NO_DRAFTS)

    def _proposed(
        self, shares: list[Share], num_rows: int, number: int, cost: StepCost | None
    ) -> Drafts:
        """Drafts of the sequences that sample in the step of this number, of which `num_rows` may
        have logits.

        There are none in a step whose masks follow its launch: those of drafts cannot. `cost`: what
        steps cost; None if it is not known.
        """
        found: Drafts = {}
        if any(_has_undecided_mask(sequence) for sequence, _ in shares):
            return found
        num_masks = num_row_masks([sequence for sequence, _ in shares])
        room = self._limits.max_num_batched_tokens - sum([count for _, count in shares])
        room = min(room, num_rows)
        able = _able(shares, room, num_masks)
        if not able:
            return found
        load = _load_of(shares)
        if self._costs.is_stale(load):
            return found
        together: list[Sequence] = []
        looked_up: dict[Sequence, tuple[int, ...]] = {}
        for sequence, drafting, most in able:
            if drafting.source is None:
                together.append(sequence)
            elif drafts := drafting.propose(sequence.token_ids, most):
                looked_up[sequence] = drafts
        if not looked_up and not together:
            return found
        step = self._step_of(number, load, cost)
        drafter = self._drafter if together else None
        if drafter is not None and not drafter.is_due(number):
            drafter = None
        if looked_up:
            pace = pace_of([sequence for sequence, _ in shares])
            found = self._worth(looked_up, room, step, pace, waits_anyway=drafter is not None)
            room -= sum(len(each.tokens) for each in found.values())
        if drafter is None:
            return found
        wishes = self._wishes(together, room, num_masks)
        if not wishes:
            return found
        return found | drafter.propose(wishes, step)

    def _worth(
        self,
        looked_up: dict[Sequence, tuple[int, ...]],
        room: int,
        step: DraftStep,
        pace: float,
        *,
        waits_anyway: bool,
    ) -> Drafts:
        """As many of the drafts as are worth their time and as there is room for.

        The step behind one with drafts waits for it to be read, unless it `waits_anyway`.
        """
        found: Drafts = {}
        counts = [len(drafts) for drafts in looked_up.values()]
        if step.cost is not None:
            chances = [
                chance_of(sequence, len(drafts), pace) for sequence, drafts in looked_up.items()
            ]
            plan = plan_drafts(chances, step.load.num_logits, step.cost)
            is_worth = any(plan.counts) and plan.saved_ms_of_step >= self._wait_ms
            is_probe = self._probes.takes(step.number) or _has_untried(list(looked_up))
            if is_worth and not is_probe:
                self._probes.note_worth()
            if not (is_worth or is_probe or waits_anyway):
                return found
            counts = plan.counts
        least = _least_acceptance(looked_up, counts)
        for (sequence, drafts), count in zip(looked_up.items(), counts, strict=True):
            assert sequence.drafting is not None
            if not count:
                if sequence.drafting.acceptance < least:
                    sequence.drafting.pause(len(sequence.token_ids))
            elif room > 0:
                found[sequence] = self._fitting(
                    sequence, len(sequence.token_ids), drafts[: min(count, room)]
                )
                room -= len(found[sequence].tokens)
        return found

    def _wishes(self, sequences: list[Sequence], room: int, num_masks: int) -> list[DraftWish]:
        """Each has an equal share of the room, and pages for as many drafts; of a constrained one
        there are at most `num_masks`."""
        most = max(1, room // len(sequences))
        wishes: list[DraftWish] = []
        for sequence in sequences[: max(0, room)]:
            assert sequence.drafting is not None
            end = len(sequence.token_ids)
            count = min(most, sequence.drafting.most, sequence.max_num_tokens - end - 1)
            if sequence.constraint is not None:
                count = min(count, num_masks)
            count = self._reach(sequence, end, count)
            if count > 0:
                wishes.append(DraftWish(sequence, count))
        return wishes

    def _fitting(self, sequence: Sequence, end: int, drafts: tuple[int, ...]) -> Proposal:
        """As many of `drafts` as there are pages for and as the sequence's constraint allows."""
        drafts = drafts[: self._reach(sequence, end, len(drafts))]
        if sequence.constraint is None or not drafts:
            return Proposal(drafts)
        ahead = Lookahead(sequence.constraint)
        count = ahead.take_all(drafts)
        if not count and sequence.drafting is not None:
            sequence.drafting.note_none(end)
        return Proposal(drafts[:count], tuple(ahead.masks))

    def _reach(self, sequence: Sequence, end: int, count: int) -> int:
        """As many of `count` drafts behind `end` tokens as there are pages for."""
        if not count or self._kv_cache.try_grow(sequence, end + count):
            return count
        return len(sequence.page_table) * self._limits.page_size - end


def _able(shares: list[Share], room: int, num_masks: int) -> list[tuple[Sequence, Drafting, int]]:
    """Sequences that may have drafts behind their newest token, and how many each."""
    found: list[tuple[Sequence, Drafting, int]] = []
    for sequence, count in shares:
        drafting, end = sequence.drafting, sequence.num_computed_tokens + count
        # At its end, all its tokens are known: none is still on the device.
        if drafting is None or end != len(sequence.token_ids) or sequence.is_retried:
            continue
        if not drafting.is_due(end):
            continue
        # A `Drafter` needs one new token, behind pages that are the sequence's own.
        if drafting.source is None and not (count == 1 and sequence.page_copy is None):
            continue
        most = min(room, sequence.max_num_tokens - end - 1)
        if sequence.constraint is not None:
            most = min(most, num_masks)
        if most > 0:
            found.append((sequence, drafting, most))
    return found


def chance_of(sequence: Sequence, most: int, pace: float | None = None) -> DraftChance:
    """Of `most` drafts behind the sequence's newest token, in a step of sequences of this pace.

    A token of a sequence that is ahead of the others is worth less: their steps take longer, and
    they end later.
    """
    acceptance = 0.0 if sequence.drafting is None else sequence.drafting.acceptance
    worth = 1.0 if pace is None else min(1.0, (pace / _pace(sequence)) ** STEEPNESS)
    return DraftChance(acceptance=acceptance, most=most, num_keys=sequence.num_tokens, worth=worth)


def pace_of(sequences: SequenceOf[Sequence]) -> float:
    """Tokens in each step so far, of a typical one of `sequences`: the harmonic mean, since it is
    their time for a token that is to fall."""
    return len(sequences) / sum([1 / _pace(each) for each in sequences]) if sequences else 1.0


def _pace(sequence: Sequence) -> float:
    """Tokens in each step of a sequence so far; starts at 1."""
    accepted = 0 if sequence.drafting is None else sequence.drafting.num_accepted
    num_tokens = sequence.num_generated_tokens + PRIOR_STEPS
    return num_tokens / max(1, num_tokens - accepted)


def _least_acceptance(sequences: Iterable[Sequence], counts: list[int]) -> float:
    """Of those that draft: others that are accepted as often only have no turn in this step."""
    drafting = zip(sequences, counts, strict=True)
    return min(
        [each.drafting.acceptance for each, count in drafting if each.drafting and count],
        default=inf,
    )


def _has_untried(sequences: list[Sequence]) -> bool:
    """Whether one of them is to be waited for although it is not known that this saves time."""
    return any(each.drafting is not None and each.drafting.is_untried for each in sequences)


def _keys_of_drafts(entry: BatchEntry) -> int:
    return num_keys(entry.end - len(entry.drafts), len(entry.drafts))


def _has_undecided_mask(sequence: Sequence) -> bool:
    """Whether what the sequence may sample next depends on a token that is not read."""
    return sequence.constraint is not None and sequence.num_pending_tokens > 0


def _load_of(shares: list[Share]) -> StepLoad:
    """Of a step without drafts, each of whose sequences samples."""
    return StepLoad(
        num_tokens=sum([count for _, count in shares]),
        num_logits=len(shares),
        num_keys=sum([sequence.num_computed_tokens for sequence, _ in shares]),
    )
