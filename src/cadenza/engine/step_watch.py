"""`StepWatch`: what the steps of an engine do, for those who look at it while it runs, at most each
`SUMMARY_EVERY_S`; it exists only while somebody looks. Invariant: a summary has numbers and names
of tenants, nothing of any prompt, text or id of a request."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import msgspec

from cadenza.batch.sequence import Sequence, SequenceStatus, WaitReason
from cadenza.engine.core import EngineCore
from cadenza.events import Event, Token
from cadenza.scheduler.scheduler import Scheduler

SUMMARY_EVERY_S = 0.1
MAX_WAITING_ROWS = 32  # Waiting sequences that a summary lists; all are counted

# The engine has failed, or one serves again; or it was ended, and none is started for now.
EngineChange = Literal["lost", "ready", "unloaded"]

RowKind = Literal["prompt", "decode", "waiting"]

WAIT_REASONS = tuple(each.value for each in WaitReason)


class RowSummary(msgspec.Struct, frozen=True, array_like=True):
    """A sequence's progress, and what it did since the last summary."""

    label: int  # a small number, the same in all summaries of a watch
    tenant: int  # its index in the summary's `tenants`
    kind: RowKind
    computed: int  # tokens whose KV exists once the launched steps have run; `total`: known tokens
    total: int
    cached: int  # prompt tokens whose KV was found in the prefix cache
    new: int  # tokens sampled, drafts accepted and preemptions since the last summary
    drafts: int
    preempted: int
    waits_for: str | None = None  # one of `WAIT_REASONS`; None unless it waits


class StepSummary(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The steps since the last summary, and the state after them."""

    num_steps: int
    seconds: float  # that they took, with pauses between them
    longest_s: float  # the longest step
    num_tokens: int  # computed; `num_sampled`: new tokens of all streams
    num_sampled: int
    num_running: int
    num_waiting: int
    pages_live: int
    pages_cached: int
    pages_free: int
    tenants: tuple[str, ...]  # names; of each of the rows, one
    rows: tuple[RowSummary, ...]


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Summaries are wanted, with labels from `first_label` on; None: no more."""

    first_label: int | None


LiveNews = StepSummary | EngineChange
OnNews = Callable[[LiveNews], object]  # Called on the serving thread; must not block


@dataclass(slots=True, eq=False)
class _Seen:
    label: int
    num_generated: int
    num_preemptions: int


class StepWatch:
    """`note` is called after each step of `core`. The first summary is due at once."""

    def __init__(self, core: EngineCore, clock: Callable[[], float], first_label: int) -> None:
        self._core = core
        self._clock = clock
        self._next_label = first_label
        self._seen: dict[tuple[int, int], _Seen] = {}
        self._sent_at_s: float | None = None
        # Since when no summary was taken, without the time in which there was nothing to do.
        self._since_s: float | None = None
        self._has_stepped = False
        self._last_counts: tuple[int, int] | None = None
        self._num_steps = core.scheduler.num_steps
        self._num_tokens = core.scheduler.num_scheduled_tokens
        self._longest_s = 0.0
        self._num_sampled = 0
        self._accepted: dict[tuple[int, int], int] = {}

    def note(self, events: Iterable[Event], seconds: float) -> None:
        self._has_stepped = True
        if self._since_s is None:
            self._since_s = self._clock() - seconds
        self._longest_s = max(self._longest_s, seconds)
        for event in events:
            if isinstance(event, Token):
                self._num_sampled += 1
                if event.is_draft:
                    key = event.request_id, event.sample
                    self._accepted[key] = self._accepted.get(key, 0) + 1

    def due_in_s(self) -> float | None:
        """None while there is nothing new."""
        if not self._has_stepped and self._counts == self._last_counts:
            return None
        if self._sent_at_s is None:
            return 0.0
        return max(0.0, self._sent_at_s + SUMMARY_EVERY_S - self._clock())

    def take(self) -> StepSummary:
        now_s, scheduler = self._clock(), self._core.scheduler
        pages = scheduler.kv_cache.pool.counts()
        tenants: dict[str, int] = {}
        num_running, num_waiting = self._last_counts = self._counts
        summary = StepSummary(
            num_steps=scheduler.num_steps - self._num_steps,
            seconds=0.0 if self._since_s is None else now_s - self._since_s,
            longest_s=self._longest_s,
            num_tokens=scheduler.num_scheduled_tokens - self._num_tokens,
            num_sampled=self._num_sampled,
            num_running=num_running,
            num_waiting=num_waiting,
            pages_live=pages.live + pages.pinned,
            pages_cached=pages.cached,
            pages_free=pages.free,
            rows=self._rows(tenants),
            tenants=tuple(tenants),
        )
        self._sent_at_s, self._has_stepped = now_s, False
        self._since_s = None if self._core.is_idle else now_s
        self._num_steps = scheduler.num_steps
        self._num_tokens = scheduler.num_scheduled_tokens
        self._longest_s, self._num_sampled, self._accepted = 0.0, 0, {}
        return summary

    @property
    def _counts(self) -> tuple[int, int]:
        scheduler = self._core.scheduler
        return len(scheduler.running), len(scheduler.waiting)

    def _rows(self, tenants: dict[str, int]) -> tuple[RowSummary, ...]:
        scheduler = self._core.scheduler
        listed: SequenceOf[Sequence] = [
            *scheduler.running,
            *islice(scheduler.waiting, MAX_WAITING_ROWS),
        ]
        before, self._seen = self._seen, {}
        return tuple([self._row(each, before, tenants) for each in listed])

    def _row(
        self,
        sequence: Sequence,
        before: dict[tuple[int, int], _Seen],
        tenants: dict[str, int],
    ) -> RowSummary:
        key = sequence.request_id, sequence.sample
        num_generated, num_preemptions = sequence.num_generated_tokens, sequence.num_preemptions
        seen = before.get(key)
        if seen is None:
            # Of what was there before the watch, nothing is new.
            known = (num_generated, num_preemptions) if self._sent_at_s is None else (0, 0)
            seen = _Seen(self._next_label, *known)
            self._next_label += 1
        self._seen[key] = _Seen(seen.label, num_generated, num_preemptions)
        return RowSummary(
            seen.label,
            tenants.setdefault(sequence.tenant.name, len(tenants)),
            _kind_of(sequence),
            sequence.num_computed_tokens,
            sequence.num_tokens,
            sequence.num_cached_tokens or 0,
            num_generated - seen.num_generated,
            self._accepted.get(key, 0),
            num_preemptions - seen.num_preemptions,
            _wait_of(self._core.scheduler, sequence),
        )


def _wait_of(scheduler: Scheduler, sequence: Sequence) -> str | None:
    is_waiting = sequence.status is SequenceStatus.WAITING
    return scheduler.why_waits(sequence).value if is_waiting else None


def _kind_of(sequence: Sequence) -> RowKind:
    if sequence.status is SequenceStatus.WAITING:
        return "waiting"
    if sequence.num_uncomputed_tokens > 1 and not sequence.has_forced_tokens:
        return "prompt"
    return "decode"
