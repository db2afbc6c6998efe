"""`EngineStats`: a snapshot of an engine's counters and gauges, collected by `StepMeter`.

Owns the snapshot's fields and the histogram bounds. Knows no metric names and no server.
Invariants: counters never decrease during an engine's lifetime, every step is counted once, and
snapshots are immutable.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from cadenza.config import EngineLimits
from cadenza.core.draft_ledger import DraftState
from cadenza.core.image_queue import ImageQueue
from cadenza.core.prefix_misses import MissReason, no_missed_prompts, no_misses
from cadenza.core.queue_forecast import forecast_queue
from cadenza.core.recurrent_states import RecurrentStates
from cadenza.core.scoring_queue import ScoringQueue
from cadenza.core.step_cost import StepBound
from cadenza.engine.core import EngineCore
from cadenza.engine.loop import Announce
from cadenza.engine.step_watch import StepSummary, StepWatch
from cadenza.engine.stored_pages import StoredPageCounts
from cadenza.events import CacheMissReason, Event

STEP_SECONDS_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
STEP_TOKENS_BOUNDS = tuple(float(1 << power) for power in range(15))


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A histogram. `counts[i]` is the number of values in (bounds[i - 1], bounds[i]], the last one
    that of values above all bounds; `total` is the sum of all values."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> Self:
        return cls(bounds=bounds, counts=(0,) * (len(bounds) + 1), total=0.0)

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBoundStats:
    """The bound on the time of a step. `prefill_share` is the rate of a prompt under it, as a share
    of its rate in steps of the full token budget; the counts are those of `StepBound`.
    """

    max_s: float
    prefill_share: float
    num_granted: int
    num_exceeded: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateStats:
    """The recurrent states of a model. Slots by their state are gauges, of which `slots_live` has
    the pinned ones, too; the rest are counters: snapshots made, hits that started from one, and
    snapshots dropped, for others or with their page."""

    slots_live: int = 0
    slots_cached: int = 0
    slots_free: int = 0
    num_snapshots: int = 0
    num_hits: int = 0
    num_dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageStats:
    """The images of an engine whose model sees. Slots by their state are gauges; the rest are the
    counters of `ImageCounts`, of which `encoder_s` are seconds of steps."""

    slots_live: int = 0
    slots_cached: int = 0
    slots_free: int = 0
    num_encoded: int = 0
    num_failed: int = 0
    num_slot_hits: int = 0
    num_prefix_hits: int = 0
    encoder_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringStats:
    """What an engine scores of prompts. `num_scoring` is a gauge: prompts that are being scored;
    the rest are the counters of `ScoringCounts`, of which `scoring_s` are seconds of steps."""

    num_scoring: int = 0
    num_scored: int = 0
    num_remembered: int = 0
    num_failed: int = 0
    num_preempted: int = 0
    num_tokens: int = 0
    scoring_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot. Running, waiting and page counts are gauges; all others are counters.

    `num_running` and `num_waiting` count samples, `num_prefix_queries` and `num_prefix_hits` prompt
    tokens, `num_prefix_misses` those not found, by reason, `num_prefix_waits` samples that have
    waited for a prefix that another one computed; `num_missed_prompts` and `num_differing_tokens`
    are those of `PrefixCounts`.
    `num_drafts` counts steps of sequences with drafts, `num_accepted_per_pos` accepted drafts by
    their place behind the newest token. `pages_live` includes pinned pages. `step_tokens` is the
    number of tokens per step. `draft_states` has each way of drafting by numbers of rows, once it
    was tried. `stored_pages` is None without `--prefix-cache-disk`, `states` for a
    model without recurrent state, `images` for one that sees none. `queued_s` is the time that the
    prompts which are there will take, as predicted.
    """

    num_running: int
    num_waiting: int
    pages_live: int
    pages_cached: int
    pages_free: int
    num_failed_steps: int
    num_preemptions: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_per_pos: tuple[int, ...]
    num_compiles_after_warmup: int
    step_seconds: Distribution
    step_tokens: Distribution
    queued_s: float = 0.0
    num_prefix_waits: int = 0
    num_prefix_misses: dict[MissReason, int] = field(default_factory=no_misses)
    num_missed_prompts: dict[CacheMissReason, int] = field(default_factory=no_missed_prompts)
    num_differing_tokens: int = 0
    draft_states: tuple[DraftState, ...] = ()
    step_bound: StepBoundStats | None = None
    stored_pages: StoredPageCounts | None = None
    states: StateStats | None = None
    images: ImageStats | None = None
    scoring: ScoringStats | None = None

    @property
    def kv_cache_usage(self) -> float:
        """The fraction of pages that are live or pinned, 0 to 1."""
        return self.pages_live / (self.pages_live + self.pages_cached + self.pages_free)


class Tally:
    """Accumulates a `Distribution`."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    @property
    def total(self) -> float:
        """The sum of all values."""
        return self._total

    def add(self, value: float, count: int = 1) -> None:
        """Adds `count` occurrences of `value`."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._total += value * count

    def snapshot(self) -> Distribution:
        return Distribution(bounds=self._bounds, counts=tuple(self._counts), total=self._total)


class StepMeter:
    """Steps an engine and collects its statistics.

    Args:
        clock: seconds, monotonic.
        count_compiles: returns the number of programs compiled since warm-up.
    """

    def __init__(
        self,
        core: EngineCore,
        clock: Callable[[], float],
        count_compiles: Callable[[], int] = lambda: 0,
    ) -> None:
        self._core = core
        self._clock = clock
        self._count_compiles = count_compiles
        self._seconds = Tally(STEP_SECONDS_BOUNDS)
        self._tokens = Tally(STEP_TOKENS_BOUNDS)
        self._waited_s = 0.0
        self._watch: StepWatch | None = None
        self.last_s = 0.0
        """How long the newest step took: the call, and the time for which it was put off while
        another one was computed."""

    def add_wait(self, seconds: float) -> None:
        """The next step is put off for so long."""
        self._waited_s += seconds

    def step(self, announce: Announce | None = None) -> list[Event]:
        """Calls the core's `step`; records how long it took if it scheduled a step."""
        scheduler = self._core.scheduler
        num_steps, num_tokens = scheduler.num_steps, scheduler.num_scheduled_tokens
        start_s = self._clock()
        events = self._core.step(announce)
        self.last_s = self._clock() - start_s + self._waited_s
        self._waited_s = 0.0
        if scheduler.num_steps > num_steps:
            self._seconds.add(self.last_s)
            self._tokens.add(scheduler.num_scheduled_tokens - num_tokens)
        if self._watch is not None and (events or scheduler.num_steps > num_steps):
            self._watch.note(events, self.last_s)
        return events

    def watch(self, first_label: int | None) -> None:
        """Summarises steps from now on, unless it does already; None: no more."""
        if first_label is None:
            self._watch = None
        elif self._watch is None:
            self._watch = StepWatch(self._core, self._clock, first_label)

    def summary_due_in_s(self) -> float | None:
        """Seconds until `take_summary` has one; None while there is nothing to summarise."""
        return None if self._watch is None else self._watch.due_in_s()

    def take_summary(self) -> StepSummary | None:
        """The summary that is due, if one is."""
        return self._watch.take() if self.summary_due_in_s() == 0.0 and self._watch else None

    def stats(self) -> EngineStats:
        """A snapshot of the current values."""
        scheduler = self._core.scheduler
        pages, drafts = scheduler.kv_cache.pool.counts(), scheduler.draft_counts
        stored = self._core.stored_pages
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            pages_live=pages.live + pages.pinned,
            pages_cached=pages.cached,
            pages_free=pages.free,
            num_failed_steps=self._core.num_failed_steps,
            num_preemptions=scheduler.num_preemptions,
            num_prefix_queries=scheduler.prefix_counts.num_queries,
            num_prefix_hits=scheduler.prefix_counts.num_hits,
            num_prefix_waits=scheduler.kv_cache.num_prefix_waits,
            num_prefix_misses=dict(scheduler.prefix_counts.num_misses),
            num_missed_prompts=dict(scheduler.prefix_counts.num_missed_prompts),
            num_differing_tokens=scheduler.prefix_counts.num_differing_tokens,
            num_drafts=drafts.num_drafts,
            num_draft_tokens=drafts.num_draft_tokens,
            num_accepted_tokens=drafts.num_accepted_tokens,
            num_accepted_per_pos=tuple(drafts.num_accepted_per_pos),
            num_compiles_after_warmup=self._count_compiles(),
            step_seconds=self._seconds.snapshot(),
            step_tokens=self._tokens.snapshot(),
            queued_s=self._queued_s(),
            draft_states=self._core.draft_states,
            step_bound=_bound_stats(scheduler.step_bound, self._core.limits),
            stored_pages=None if stored is None else stored.counts,
            states=_state_stats(scheduler.kv_cache.states),
            images=None if self._core.limits.images is None else _image_stats(scheduler.images),
            scoring=_scoring_stats(scheduler.scoring) if scheduler.scoring.is_used else None,
        )

    def _queued_s(self) -> float:
        """By what a token has cost so far, where it is not known what steps cost."""
        queue = forecast_queue(self._core.scheduler)
        if queue.is_measured:
            return queue.queued_s
        return queue.num_tokens * self._seconds.total / max(1.0, self._tokens.total)


def _state_stats(states: RecurrentStates | None) -> StateStats | None:
    if states is None:
        return None
    slots = states.pool.counts()
    return StateStats(
        slots_live=slots.live + slots.pinned,
        slots_cached=slots.cached,
        slots_free=slots.free,
        num_snapshots=states.num_snapshots,
        num_hits=states.num_hits,
        num_dropped=states.num_dropped,
    )


def _image_stats(images: ImageQueue) -> ImageStats:
    slots, counts = images.slot_counts(), images.counts
    return ImageStats(
        slots_live=slots.live,
        slots_cached=slots.cached,
        slots_free=slots.free,
        num_encoded=counts.num_encoded,
        num_failed=counts.num_failed,
        num_slot_hits=counts.num_slot_hits,
        num_prefix_hits=counts.num_prefix_hits,
        encoder_s=counts.encoder_ms / 1000,
    )


def _scoring_stats(scoring: ScoringQueue) -> ScoringStats:
    counts = scoring.counts
    return ScoringStats(
        num_scoring=len(scoring.sequences),
        num_scored=counts.num_scored,
        num_remembered=counts.num_remembered,
        num_failed=counts.num_failed,
        num_preempted=counts.num_preempted,
        num_tokens=counts.num_tokens,
        scoring_s=counts.scoring_ms / 1000,
    )


def _bound_stats(bound: StepBound | None, limits: EngineLimits) -> StepBoundStats | None:
    if bound is None:
        return None
    return StepBoundStats(
        max_s=bound.max_ms / 1000,
        prefill_share=bound.cost.prefill_share(bound.max_ms, limits.max_num_batched_tokens),
        num_granted=bound.num_granted,
        num_exceeded=bound.num_exceeded,
    )
