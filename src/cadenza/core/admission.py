"""Admission: may a waiting sequence start, given the pages that running ones will still want?

Knows page counts, not pages. Invariant: pages promised to admitted sequences are never promised
twice, and a sequence that was preempted often is admitted only where it cannot be again.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from cadenza.core.sequence import Sequence

RESERVED_OUTPUT = 0.5

WHOLE_AFTER_PREEMPTIONS = 3
"""From this many preemptions on, everybody's whole output is reserved before readmission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Reserves for each sequence its tokens so far and a share of its remaining output.

    Args:
        page_size: tokens a page holds.
        reserved_output: share of the remaining output, 0 to 1, that is reserved on first
            admission; each preemption halves the unreserved rest.
    """

    page_size: int
    reserved_output: float = RESERVED_OUTPUT

    def can_admit(
        self, candidate: Sequence, running: Iterable[Sequence], *, available: int, shared: int
    ) -> bool:
        """True when `available` pages cover the candidate and what was promised before.

        `shared` pages of the candidate are already held by others and cost nothing. Samples that
        will share a running prompt, or the candidate's, are promised their own pages too; samples
        of one request do not wait for each other's, and nothing waits for an engine without work.
        """
        whole = candidate.num_preemptions >= WHOLE_AFTER_PREEMPTIONS
        wanted = self._reserved_pages(candidate, whole=whole) - shared
        others = list(running)
        if not others or wanted > available:
            return wanted <= available
        for sequence in others:
            reserved = self._reserved_pages(sequence, whole=whole)
            wanted += max(0, reserved - len(sequence.page_table))
        for sequence in _coming_forks(candidate, others):
            full_pages = (sequence.num_prompt_tokens - 1) // self.page_size
            wanted += self._reserved_pages(sequence, whole=whole) - full_pages
        return wanted <= available

    def _reserved_pages(self, sequence: Sequence, *, whole: bool) -> int:
        # The last token's KV is never computed.
        remaining = max(0, sequence.max_num_tokens - 1 - sequence.num_tokens)
        share = 1.0
        if not whole:
            share -= (1.0 - self.reserved_output) * 0.5**sequence.num_preemptions
        return -(-(sequence.num_tokens + int(remaining * share)) // self.page_size)


def _coming_forks(candidate: Sequence, running: list[Sequence]) -> list[Sequence]:
    """Waiting samples of the running requests and of the candidate's, unless it is one of those."""
    groups = {sequence.request_id: sequence.siblings for sequence in running}
    if candidate.request_id in groups:
        del groups[candidate.request_id]
    else:
        groups[candidate.request_id] = candidate.siblings
    return [
        s for siblings in groups.values() for s in siblings if s.is_fresh and s is not candidate
    ]
