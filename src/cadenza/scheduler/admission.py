"""`Admission`: whether a waiting sequence may start, given the pages that running ones still need.
Invariants: a page is reserved for at most one sequence; after `WHOLE_AFTER_PREEMPTIONS`
preemptions, a sequence is admitted only if all sequences can complete."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from cadenza.batch.sequence import Sequence
from cadenza.config import AdmissionMode
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.kv.prefix_cache import Prefix

# The fraction of the remaining output that each `--admission` reserves pages for.
RESERVED_OUTPUT: dict[AdmissionMode, float] = {
    "conservative": 1.0,
    "balanced": 0.5,
    "optimistic": 0.0,
}

# After this many preemptions, readmission reserves the full output of all sequences.
WHOLE_AFTER_PREEMPTIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Reserves pages for current tokens and `reserved_output` (0 to 1) of the remaining output;
    each preemption halves the unreserved fraction."""

    page_size: int
    reserved_output: float = RESERVED_OUTPUT["balanced"]

    def reserved_pages(self, sequence: Sequence, *, whole: bool) -> int:
        """`whole`: of its complete output."""
        # The last token's KV is never computed.
        remaining = max(0, sequence.max_num_tokens - 1 - sequence.num_tokens)
        share = 1.0
        if not whole:
            share -= (1.0 - self.reserved_output) * 0.5**sequence.num_preemptions
        return -(-(sequence.num_tokens + int(remaining * share)) // self.page_size)


@dataclass(frozen=True, slots=True)
class _Running:
    count: int
    num_pages: int
    groups: dict[int, list[Sequence]]


class Reservations:
    """The reservations of running sequences, summed once for all that are to start in a step.
    Between two calls of `forget` sequences may be appended to `running`; those in it must not
    change."""

    def __init__(self, admission: Admission, running: SequenceOf[Sequence]) -> None:
        self._admission = admission
        self._running = running
        self._sums: dict[bool, _Running] = {}

    def forget(self) -> None:
        """Running sequences have left or made progress."""
        self._sums.clear()

    def can_admit(self, candidate: Sequence, *, available: int, shared: int) -> bool:
        """Whether `available` pages cover the candidate, all reservations and the unshared pages of
        samples that will fork a running prompt or the candidate's. `shared` pages belong to others
        and are not counted; with nothing running only the candidate's count."""
        admission = self._admission
        whole = candidate.num_preemptions >= WHOLE_AFTER_PREEMPTIONS
        wanted = admission.reserved_pages(candidate, whole=whole) - shared
        if not self._running or wanted > available:
            return wanted <= available
        running = self._sum(whole=whole)
        wanted += running.num_pages
        for sequence in _coming_forks(candidate, running.groups):
            full_pages = (sequence.num_prompt_tokens - 1) // admission.page_size
            wanted += admission.reserved_pages(sequence, whole=whole) - full_pages
        return wanted <= available

    def leave(self, num_pages: int, ready: Sequence | None, *, available: int, whole: bool) -> bool:
        """Whether `available` pages cover `num_pages`, all reservations and a `ready`
        sequence's."""
        wanted = num_pages + self._sum(whole=whole).num_pages
        if ready is not None:
            wanted += self._admission.reserved_pages(ready, whole=whole)
        return wanted <= available

    def can_start(self, kv_cache: KVCacheManager, sequence: Sequence, prefix: Prefix) -> bool:
        """Whether the pool and its tenant's quota have the pages after `prefix`."""
        # Most rejections occur even if the prefix costs nothing, so its unreferenced pages are
        # counted only after that cheaper check has passed.
        available, shared = kv_cache.pool.num_available, len(prefix.page_ids)
        return (
            self.fits_quota(kv_cache, sequence, prefix)
            and self.can_admit(sequence, available=available, shared=shared)
            and self.can_admit(
                sequence, available=available, shared=shared - kv_cache.num_unheld(prefix)
            )
        )

    def fits_quota(self, kv_cache: KVCacheManager, sequence: Sequence, prefix: Prefix) -> bool:
        tenant = sequence.tenant
        if tenant.page_share == 1.0:
            return True
        own = [each for each in self._running if each.tenant.name == tenant.name]
        return Reservations(self._admission, own).can_admit(
            sequence,
            available=kv_cache.page_quotas.num_left(tenant),
            shared=kv_cache.page_quotas.num_held(tenant, prefix.page_ids),
        )

    def _sum(self, *, whole: bool) -> _Running:
        found = self._sums.get(whole) or _Running(0, 0, {})
        if found.count == len(self._running):
            return found
        num_pages, groups = found.num_pages, found.groups
        for sequence in self._running[found.count :]:
            reserved = self._admission.reserved_pages(sequence, whole=whole)
            num_pages += max(0, reserved - len(sequence.page_table))
            if sequence.siblings:
                groups[sequence.request_id] = sequence.siblings
        self._sums[whole] = _Running(len(self._running), num_pages, groups)
        return self._sums[whole]


def _coming_forks(candidate: Sequence, running: dict[int, list[Sequence]]) -> list[Sequence]:
    groups = [siblings for request, siblings in running.items() if request != candidate.request_id]
    if candidate.request_id not in running:
        groups.append(candidate.siblings)
    return [s for siblings in groups for s in siblings if s.is_fresh and s is not candidate]
