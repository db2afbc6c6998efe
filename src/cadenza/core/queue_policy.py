"""`QueuePolicy`: in which order waiting sequences start, and which running one is preempted.

It orders the sequences of each tenant; `FairShare` says which tenant is next. Pure functions of
sequences and the time; knows no pages and keeps no clock. Invariant: with every policy a sequence
comes first of its tenant's after a bounded wait, whatever arrives after it.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from cadenza.config import SchedulingPolicy
from cadenza.core.sequence import Sequence

MAX_PREEMPTIONS = 8
"""A sequence that was preempted as often is preempted only if all others were, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePolicy:
    """`fcfs` starts sequences in the order of their arrival, `shortest_first` those with the fewest
    uncached tokens first, `priority` those with the smallest priority.

    Args:
        starvation_guard_s: with `shortest_first`, a sequence that has waited as long counts as the
            shortest; with `priority`, each such time that it has waited counts like a priority
            smaller by 1.
    """

    name: SchedulingPolicy = "fcfs"
    starvation_guard_s: float = 10.0

    def ordered(
        self, waiting: Iterable[Sequence], now_s: float, num_uncached: Callable[[Sequence], int]
    ) -> list[Sequence]:
        """Waiting sequences in the order in which they start.

        `waiting` is in the order of arrival, but preempted and retried sequences come first.
        """
        if self.name == "fcfs":
            return list(waiting)
        if self.name == "priority":
            return sorted(waiting, key=lambda each: (not each.is_retried, self._aged(each)))

        def length(sequence: Sequence) -> int:
            has_waited = now_s - sequence.arrived_s >= self.starvation_guard_s
            is_first = has_waited or sequence.num_preemptions or sequence.is_retried
            return 0 if is_first else num_uncached(sequence)

        return sorted(waiting, key=lambda each: (not each.is_retried, length(each)))

    def victim(
        self,
        running: SequenceOf[Sequence],
        counter_of: Callable[[Sequence], float] = lambda _: 0.0,
    ) -> Sequence:
        """The running sequence to preempt, of a tenant with the largest counter.

        With `priority` it is the last in the order of starting, of one request's samples the one
        with the fewest tokens to compute again; otherwise the newest.
        """
        candidates = [each for each in running if each.num_preemptions < MAX_PREEMPTIONS]
        candidates = candidates or list(running)
        largest = max(map(counter_of, candidates))
        candidates = [each for each in candidates if counter_of(each) == largest]
        if self.name == "priority":
            return max(candidates, key=lambda each: (self._aged(each), -each.num_computed_tokens))
        return candidates[-1]

    def _aged(self, sequence: Sequence) -> float:
        """Orders sequences by priority and waiting time. Waiting counts alike for all, so that the
        order of two sequences never changes."""
        return sequence.arrived_s + sequence.request.priority * self.starvation_guard_s


FCFS = QueuePolicy()
