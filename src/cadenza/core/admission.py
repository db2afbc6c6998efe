"""`Admission`: whether a waiting sequence may start, given the pages running ones still need.

Knows page counts, not pages. Invariant: a page is reserved for at most one sequence. After
`WHOLE_AFTER_PREEMPTIONS` preemptions, a sequence is admitted only if all sequences can complete.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from cadenza.config import AdmissionMode
from cadenza.core.sequence import Sequence

RESERVED_OUTPUT: dict[AdmissionMode, float] = {
    "conservative": 1.0,
    "balanced": 0.5,
    "optimistic": 0.0,
}
"""The fraction of the remaining output that each `--admission` reserves pages for."""

WHOLE_AFTER_PREEMPTIONS = 3
"""After this many preemptions, readmission reserves the full output of all sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Reserves pages for each sequence's current tokens and a share of its remaining output.

    Args:
        page_size: tokens per page.
        reserved_output: fraction (0 to 1) of the remaining output reserved on first admission;
            each preemption halves the unreserved fraction.
    """

    page_size: int
    reserved_output: float = RESERVED_OUTPUT["balanced"]

    def can_admit(
        self, candidate: Sequence, running: Iterable[Sequence], *, available: int, shared: int
    ) -> bool:
        """True if `available` pages cover the candidate and all existing reservations.

        `shared` pages of the candidate are referenced by other sequences and are not counted. Also
        reserved are the unshared pages of samples that will fork a running prompt or the
        candidate's, except those of its own request if that is running. If nothing is running,
        only the candidate's pages are counted.
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
    """Fresh samples of running requests and of the candidate's, unless that request is running."""
    groups = {sequence.request_id: sequence.siblings for sequence in running}
    if candidate.request_id in groups:
        del groups[candidate.request_id]
    else:
        groups[candidate.request_id] = candidate.siblings
    return [
        s for siblings in groups.values() for s in siblings if s.is_fresh and s is not candidate
    ]
