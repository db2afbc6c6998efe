"""`Turns`: who goes next, and who makes room for whom; the queue of waiting sequences. Invariants:
`StepTurns` alone says who computes and who may start in a step, whatever they need; with every
policy a sequence comes first of its tenant's after a bounded wait."""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from cadenza.batch.sequence import Sequence, SequenceList, WaitReason
from cadenza.config import Batching, EngineLimits, SchedulingPolicy
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.scheduler.fair_share import FairShare, UnderShareTenants

# A sequence that was preempted as often is preempted only if all others were, too.
MAX_PREEMPTIONS = 8

STARVATION_GUARD_S = 10.0


@dataclass(frozen=True, slots=True)
class Queue:
    """In the order of arrival, but those that ran come first. `num_uncached`: tokens of one that
    have to be computed."""

    waiting: SequenceOf[Sequence]
    now_s: float
    num_uncached: Callable[[Sequence], int]


class TurnPolicy(Protocol):
    """Order of a tenant's starts, and which running sequence is preempted."""

    @property
    def priority_s(self) -> float:
        """Seconds of waiting that a priority smaller by 1 counts like; 0.0: it reads none."""
        ...

    def order(self, queue: Queue) -> list[Sequence]: ...

    def victim(self, running: SequenceOf[Sequence]) -> Sequence:
        """`running` is in the order of starting."""
        ...


@dataclass(frozen=True, slots=True)
class FirstComeFirstServed:
    """In the order of arrival; the newest is preempted."""

    @property
    def priority_s(self) -> float:
        return 0.0

    def order(self, queue: Queue) -> list[Sequence]:
        return list(queue.waiting)

    def victim(self, running: SequenceOf[Sequence]) -> Sequence:
        return running[-1]


@dataclass(frozen=True, slots=True)
class ShortestFirst:
    """Fewest uncached tokens first; one that has waited for `starvation_guard_s` is first."""

    starvation_guard_s: float = STARVATION_GUARD_S

    @property
    def priority_s(self) -> float:
        return 0.0

    def order(self, queue: Queue) -> list[Sequence]:
        def length(sequence: Sequence) -> int:
            has_waited = queue.now_s - sequence.arrived_s >= self.starvation_guard_s
            is_first = has_waited or sequence.num_preemptions
            return 0 if is_first else queue.num_uncached(sequence)

        return sorted(queue.waiting, key=length)

    def victim(self, running: SequenceOf[Sequence]) -> Sequence:
        return running[-1]


@dataclass(frozen=True, slots=True)
class SmallestPriorityFirst:
    """Each `starvation_guard_s` of waiting counts like a priority smaller by 1; the last in this
    order is preempted, of one request's samples the one with the fewest tokens to compute again."""

    starvation_guard_s: float = STARVATION_GUARD_S

    @property
    def priority_s(self) -> float:
        return self.starvation_guard_s

    def order(self, queue: Queue) -> list[Sequence]:
        return sorted(queue.waiting, key=self._aged)

    def victim(self, running: SequenceOf[Sequence]) -> Sequence:
        return max(running, key=lambda each: (self._aged(each), -each.num_computed_tokens))

    def _aged(self, sequence: Sequence) -> float:
        """Waiting counts alike for all, so that the order of two sequences never changes."""
        return sequence.arrived_s + sequence.request.priority * self.priority_s


FCFS = FirstComeFirstServed()

# By their names, each made from its starvation guard in seconds
POLICIES: dict[SchedulingPolicy, Callable[[float], TurnPolicy]] = {
    "fcfs": lambda _: FCFS,
    "shortest_first": ShortestFirst,
    "priority": SmallestPriorityFirst,
}


@dataclass(frozen=True, slots=True)
class Turn:
    """Running sequences that compute, and waiting ones that may start. `joins`: these start beside
    the running ones, as long as the budget lasts; else as many as there are rows and pages for."""

    running: SequenceOf[Sequence]
    waiting: Iterable[Sequence] = ()
    joins: bool = False

    @staticmethod
    def split(running: Iterable[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Those with one token to compute, or forced ones after it, and those with several."""
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in running:
            num_uncomputed = sequence.num_uncomputed_tokens
            if num_uncomputed == 1 or sequence.has_forced_tokens:
                decodes.append(sequence)
            elif num_uncomputed:
                prompts.append(sequence)
        return decodes, prompts


IsBeingRead = Callable[[Sequence], bool]


def continuous_turn(
    running: SequenceOf[Sequence], ordered: Iterable[Sequence], is_being_read: IsBeingRead
) -> Turn:
    """Waiting sequences start at any time, unless their pages are being read."""
    ready = (each for each in ordered if not is_being_read(each))
    return Turn(running, _startable(ready), joins=True)


def static_turn(
    running: SequenceOf[Sequence], ordered: Iterable[Sequence], is_being_read: IsBeingRead
) -> Turn:
    """Waiting sequences start when all that ran have ended; later only samples of a running request
    whose prompt is computed."""

    def batch() -> Iterator[Sequence]:
        is_new, waiting = not running, list(ordered)
        are_read = [is_being_read(each) for each in waiting]
        if is_new and any(are_read):
            return
        for sequence in _startable(waiting):
            if is_new or sequence.fork_source is not None:
                yield sequence

    return Turn(running, batch())


TURNS: dict[Batching, Callable[[SequenceOf[Sequence], Iterable[Sequence], IsBeingRead], Turn]] = {
    "continuous": continuous_turn,
    "static": static_turn,
}


def _startable(ordered: Iterable[Sequence]) -> Iterator[Sequence]:
    for sequence in ordered:
        if sequence.num_pending_tokens:
            return
        yield sequence


@dataclass(frozen=True, slots=True)
class StepTurns:
    """Who computes in one step, and who may start in it. Sequences of a failed step are retried one
    at a time, and no other starts while one of them waits."""

    # the one that is to be computed next, alone. None if no step has failed, or if steps in flight
    # or a sample's prompt have to be read before.
    retried: Sequence | None
    # gives waiting sequences that could start if there was room, in their order
    startable: Callable[[], Iterable[Sequence]]
    ordinary: Turn  # the turn of all others

    def turns(self, passed: Sequence | None = None) -> Iterator[Turn]:
        """The first in which something is computed is the step: that of `retried` alone, unless
        others must end before it can start, or it is `passed`."""
        retried = self.retried
        if retried is not None and retried is not passed:
            if retried.row is not None:
                yield Turn((retried,))
                return
            yield Turn((), (retried,))
        yield self.ordinary


class Turns:
    """The waiting sequences of one scheduler, and whose turn it is."""

    def __init__(
        self,
        limits: EngineLimits,
        kv_cache: KVCacheManager,
        fair_share: FairShare,
        policy: TurnPolicy = FCFS,
        batching: Batching = "continuous",
    ) -> None:
        self.waiting = SequenceList()
        # Those with a reason to wait, since the newest step was planned
        self._held_back: list[Sequence] = []
        # Those of failed steps; some may have sampled or ended since
        self._retried: list[Sequence] = []
        self.fair_share = fair_share
        self.under_share = UnderShareTenants(limits)
        self._kv_cache = kv_cache
        self._policy = policy
        self._turn_of = TURNS[batching]

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self.fair_share.join(sequence.tenant)
        self.under_share.open(sequence.tenant)

    def put_back(self, sequence: Sequence) -> None:
        """Before all others."""
        self.waiting.appendleft(sequence)
        self.fair_share.join(sequence.tenant)

    def leave(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        sequence.wait_reason = None
        self.fair_share.leave(sequence.tenant)

    def hold_back(self, sequence: Sequence, reason: WaitReason) -> None:
        sequence.wait_reason = reason
        self._held_back.append(sequence)

    @property
    def is_retrying(self) -> bool:
        return any(each.row is None for each in self._retried)

    def may_start(self, *, has_row: bool) -> bool:
        """In a free row or in place of a running one."""
        return bool(self.waiting) and (
            has_row or self.under_share.has_any(self.fair_share.waiting_names)
        )

    def retry(self, sequence: Sequence) -> None:
        """Until it has sampled, its steps are its own."""
        sequence.is_retried = True
        self._retried.append(sequence)

    def of_step(self, running: SequenceOf[Sequence], now_s: float) -> StepTurns:
        if self._retried:
            self._retried = [each for each in self._retried if _is_to_be_retried(each)]
        for sequence in self._held_back:
            sequence.wait_reason = None
        self._held_back.clear()

        def is_being_read(sequence: Sequence) -> bool:
            is_read = self._kv_cache.is_being_read(sequence, now_s)
            if is_read:
                self.hold_back(sequence, WaitReason.DISK)
            return is_read

        def startable() -> Iterator[Sequence]:
            return _startable(each for each in self._ordered(now_s) if not is_being_read(each))

        ordinary = self._turn_of(running, self._ordered(now_s), is_being_read)
        return StepTurns(self._next_retried(), startable, ordinary)

    def _next_retried(self) -> Sequence | None:
        if not self._retried:
            return None
        for sequence in self._retried:
            if sequence.row is not None:
                return sequence
        for sequence in self.waiting:
            is_ready = not (sequence.num_pending_tokens or sequence.is_expecting_source)
            if sequence.is_retried and is_ready:
                return sequence
        return None

    def _ordered(self, now_s: float) -> Iterator[Sequence]:
        """None while one of them is to be retried. Nothing is sorted before the first is asked
        for."""
        if self.is_retrying:
            return
        queue = Queue(self.waiting, now_s, self._kv_cache.num_uncached_tokens)
        yield from self.fair_share.in_turns(self._policy.order(queue))

    def victim(self, running: SequenceOf[Sequence]) -> Sequence:
        """Of a tenant that has had the most service."""
        counter_of = self.fair_share.counter_of
        candidates = [each for each in running if each.num_preemptions < MAX_PREEMPTIONS]
        candidates = candidates or list(running)
        largest = max(map(counter_of, candidates))
        return self._policy.victim([each for each in candidates if counter_of(each) == largest])

    def check_invariants(self, running: SequenceOf[Sequence]) -> None:
        self.fair_share.check_invariants(self.waiting)
        self.under_share.check_invariants([*self.waiting, *running])
        retried = {each for each in (*self.waiting, *running) if each.is_retried}
        assert retried <= set(self._retried), "a sequence is retried that nobody computes alone"


def _is_to_be_retried(sequence: Sequence) -> bool:
    return sequence.is_retried and not sequence.is_finished
