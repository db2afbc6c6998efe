"""`Starts`: which waiting sequences start in a step, and why the others wait. Invariants: one that
lacks room of its own keeps all later ones waiting (`ENDS_STARTS`), so that room stays for it; one
that lacks its tenant's quota those of the tenant."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cadenza.batch.sequence import RunningRows, Sequence, WaitReason
from cadenza.events import Started
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.kv.prefix_cache import Prefix
from cadenza.kv.prefix_misses import PrefixCounts, misses_of
from cadenza.scheduler.admission import Reservations
from cadenza.scheduler.step_budget import PromptPart, PromptShares, StepBudget
from cadenza.scheduler.step_work import StepWork
from cadenza.scheduler.turns import Turns

ENDS_STARTS = frozenset({WaitReason.ROW, WaitReason.PAGES, WaitReason.STEP})

# Prompts partially computed at once, unless preemption adds some; tenants under their share have as
# many more.
MAX_PARTIAL_PREFILLS = 2


@dataclass(slots=True, eq=False, kw_only=True)
class Starts:
    """`started`: requests that have started, for the next step that computes anything."""

    rows: RunningRows
    turns: Turns
    kv_cache: KVCacheManager
    reservations: Reservations
    works: tuple[StepWork, ...]
    counts: PrefixCounts | None
    preempt: Callable[[Sequence], None]
    started: list[Started] = field(default_factory=list[Started])

    def part_of(self, sequence: Sequence, start: int) -> PromptPart:
        part = PromptPart(
            start=start,
            num_left=sequence.num_tokens - start,
            has_logits=sequence.needs_prompt_rows,
            is_first=self.turns.under_share.is_under_share(sequence.tenant.name),
            spans=sequence.prompt.spans,
        )
        for work in self.works:
            part = work.limit(part, sequence)
        return part

    def start_all(self, waiting: Iterable[Sequence]) -> list[Sequence]:
        started: list[Sequence] = []
        for sequence in waiting:
            reason = self._try_start_any(sequence)
            if reason is None:
                started.append(sequence)
                continue
            self.turns.hold_back(sequence, reason)
            if reason in ENDS_STARTS:
                break
        return started

    def start_beside(
        self, waiting: Iterable[Sequence], shares: PromptShares, budget: StepBudget
    ) -> list[Sequence]:
        """While rows and pages remain, and the next one would compute something in this step."""
        started: list[Sequence] = []
        full: set[str] = set()
        for sequence in waiting:
            name = sequence.tenant.name
            is_first = self.turns.under_share.is_under_share(name)
            if not (self.rows.has_free or is_first) or not shares.has_tokens:
                break
            if name in full:
                reason = WaitReason.QUOTA
            else:
                reason = self._try_start_beside(sequence, shares, budget, is_first=is_first)
            if reason is None:
                started.append(sequence)
                continue
            self.turns.hold_back(sequence, reason)
            if reason in ENDS_STARTS:
                break
            if reason is WaitReason.QUOTA:
                full.add(name)
        return started

    def _try_start_any(self, sequence: Sequence) -> WaitReason | None:
        if sequence.is_expecting_source:
            return WaitReason.SAMPLE
        prefix = self.kv_cache.find_prefix(sequence)
        if reason := self._held_by_work(sequence, prefix):
            return reason
        if not self.rows.has_free:
            return WaitReason.ROW
        return None if self._try_start(sequence, prefix) else WaitReason.PAGES

    def _try_start_beside(
        self, sequence: Sequence, shares: PromptShares, budget: StepBudget, *, is_first: bool
    ) -> WaitReason | None:
        if sequence.is_expecting_source:
            return WaitReason.SAMPLE
        for work in self.works:
            if reason := work.wait_reason(sequence):
                return reason
        if self.kv_cache.is_prefix_coming(sequence):
            return WaitReason.PREFIX
        if (
            budget.lacks_rows(sequence)
            or shares.num_cut(are_first=is_first) >= MAX_PARTIAL_PREFILLS
        ):
            return WaitReason.STEP
        prefix = self.kv_cache.find_prefix(sequence)
        if reason := self._held_by_work(sequence, prefix):
            return reason
        if not self.reservations.fits_quota(self.kv_cache, sequence, prefix):
            return WaitReason.QUOTA
        if not shares.add(self.part_of(sequence, prefix.num_tokens)):
            return WaitReason.STEP
        return self._start_or_displace(sequence, prefix)

    def _held_by_work(self, sequence: Sequence, prefix: Prefix) -> WaitReason | None:
        for work in self.works:
            if reason := work.wait_reason_behind(sequence, prefix):
                return reason
        return None

    def _start_or_displace(self, sequence: Sequence, prefix: Prefix) -> WaitReason | None:
        """In place of sequences of tenants above their share if need be."""
        while not (self.rows.has_free and self._try_start(sequence, prefix)):
            has_row = self.rows.has_free
            preemptable = self.turns.under_share.preemptable_for(
                sequence, self.rows, lacks_row=not has_row
            )
            # Pages of a preempted one are free once the steps in flight have been read.
            if not preemptable or (has_row and self.kv_cache.has_pinned):
                return WaitReason.PAGES if has_row else WaitReason.ROW
            self.preempt(self.turns.victim(preemptable))
            prefix = self.kv_cache.find_prefix(sequence)
        return None

    def _try_start(self, sequence: Sequence, prefix: Prefix) -> bool:
        if not self.reservations.can_start(self.kv_cache, sequence, prefix):
            return False
        is_new, counts = sequence.num_cached_tokens is None, self.counts
        is_counted = is_new and counts is not None and not prefix.is_fork
        misses = misses_of(self.kv_cache, sequence, prefix) if is_counted else None
        if not self.kv_cache.try_adopt(sequence, prefix):
            return False
        if is_new:
            sequence.num_cached_tokens = prefix.num_cached_tokens
        if misses is not None and counts is not None:
            by_reason, sequence.cache_miss = misses
            counts.add(sequence, by_reason)
        for work in self.works:
            work.start(sequence, prefix)
        self._note_start(sequence, prefix)
        self.turns.leave(sequence)
        self.rows.append(sequence)
        return True

    def _note_start(self, sequence: Sequence, prefix: Prefix) -> None:
        if sequence.has_started:
            return
        if not any(each.has_started for each in sequence.siblings):
            self.started.append(_started_event(sequence))
        sequence.has_started = True
        num_left = sequence.num_prompt_tokens - prefix.num_tokens
        self.turns.fair_share.charge_prompt(sequence, max(0, num_left))


def _started_event(sequence: Sequence) -> Started:
    return Started(
        request_id=sequence.request_id,
        kept=None if sequence.prompt.kept is None else sequence.prompt.kept.mask,
        whole_because=sequence.prompt.whole_reason,
    )
