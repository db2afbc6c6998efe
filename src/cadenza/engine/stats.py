"""`EngineStats`: a snapshot of an engine's figures by name, collected by `StepMeter`. A feature
declares its figures in its own module, and one line of `_figures` reads them. Every step is counted
once."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from cadenza.batch.step_cost import StepBound
from cadenza.engine.core import EngineCore
from cadenza.engine.loop import Announce
from cadenza.engine.route_report import forecast_queue
from cadenza.engine.step_watch import StepSummary, StepWatch
from cadenza.engine.step_works import WORK_FIGURES
from cadenza.engine.stored_pages import STORED_PAGE_FIGURES
from cadenza.events import Event
from cadenza.figures import Distribution, Figure, Reading, Tally
from cadenza.kv.prefix_misses import PREFIX_FIGURES
from cadenza.kv.recurrent_states import STATE_FIGURES

STEP_SECONDS_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
# While an engine steps: a snapshot takes a fifth of the host's time for a step of eight rows.
STATS_EVERY_S = 0.1

STEP_TOKENS_BOUNDS = tuple(float(1 << power) for power in range(15))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """By the names of `ENGINE_FIGURES`; values by labels are joined by commas. A figure that an
    engine does not have is absent."""

    numbers: dict[str, int | float] = field(default_factory=dict[str, int | float])
    by_label: dict[str, dict[str, int | float]] = field(
        default_factory=dict[str, dict[str, int | float]]
    )
    histograms: dict[str, Distribution] = field(default_factory=dict[str, Distribution])

    @classmethod
    def of(cls, readings: Iterable[tuple[str, Reading]]) -> Self:
        found = cls()
        for name, reading in readings:
            if isinstance(reading, Distribution):
                found.histograms[name] = reading
            elif isinstance(reading, int | float):
                found.numbers[name] = reading
            else:
                found.by_label[name] = dict(reading)
        return found

    def get(self, name: str) -> Reading | None:
        for values in (self.numbers, self.by_label, self.histograms):
            if name in values:
                return values[name]
        return None

    @property
    def readings(self) -> Iterator[tuple[str, Reading]]:
        yield from self.numbers.items()
        yield from self.by_label.items()
        yield from self.histograms.items()

    @property
    def kv_cache_usage(self) -> float:
        """Of pages, live or pinned: 0 to 1."""
        pages = self.by_label["pages"]
        return pages["live"] / sum(pages.values())


class StepMeter:
    """Steps an engine and collects its statistics. `count_compiles`: programs compiled since
    warm-up."""

    def __init__(
        self,
        core: EngineCore,
        clock: Callable[[], float],
        count_compiles: Callable[[], int] = lambda: 0,
    ) -> None:
        self.core = core
        self._clock = clock
        self.count_compiles = count_compiles
        self.seconds = Tally(STEP_SECONDS_BOUNDS)
        self.tokens = Tally(STEP_TOKENS_BOUNDS)
        self._waited_s = 0.0
        self._taken_s = clock()
        self._watch: StepWatch | None = None
        # How long the newest step took: the call, and the time for which it was put off while
        # another one was computed.
        self.last_s = 0.0

    def add_wait(self, seconds: float) -> None:
        """The next step is put off for so long."""
        self._waited_s += seconds

    def step(self, announce: Announce | None = None) -> list[Event]:
        scheduler = self.core.scheduler
        num_steps, num_tokens = scheduler.num_steps, scheduler.num_scheduled_tokens
        start_s = self._clock()
        events = self.core.step(announce)
        self.last_s = self._clock() - start_s + self._waited_s
        self._waited_s = 0.0
        if scheduler.num_steps > num_steps:
            self.seconds.add(self.last_s)
            self.tokens.add(scheduler.num_scheduled_tokens - num_tokens)
        if self._watch is not None and (events or scheduler.num_steps > num_steps):
            self._watch.note(events, self.last_s)
        return events

    def watch(self, first_label: int | None) -> None:
        """Summarises steps from now on; None: no more."""
        if first_label is None:
            self._watch = None
        elif self._watch is None:
            self._watch = StepWatch(self.core, self._clock, first_label)

    def summary_due_in_s(self) -> float | None:
        """None while there is nothing to summarise."""
        return None if self._watch is None else self._watch.due_in_s()

    def take_summary(self) -> StepSummary | None:
        return self._watch.take() if self.summary_due_in_s() == 0.0 and self._watch else None

    def stats(self) -> EngineStats:
        return EngineStats.of(self._readings())

    def due_stats(self, now_s: float, *, is_last: bool) -> EngineStats | None:
        """If the newest is `STATS_EVERY_S` old, or no step follows for now, so that other threads
        read figures as they were then."""
        if not is_last and now_s - self._taken_s < STATS_EVERY_S:
            return None
        self._taken_s = now_s
        return self.stats()

    def _readings(self) -> Iterator[tuple[str, Reading]]:
        for source, figures in _figures(self):
            if source is not None:
                for figure in figures:
                    found = figure.read(source)
                    if found is not None:
                        yield figure.name, found

    @property
    def queued_s(self) -> float:
        """Predicted time of the waiting prompts; by what a token has cost so far, where costs are
        not known."""
        queue = forecast_queue(self.core.scheduler)
        if queue.is_measured:
            return queue.queued_s
        return queue.num_tokens * self.seconds.total / max(1.0, self.tokens.total)


BATCH_FIGURES: tuple[Figure[StepMeter], ...] = (
    Figure(
        "num_requests_running",
        "Requests in the batch.",
        lambda meter: len(meter.core.scheduler.running),
        type="gauge",
        has_vllm_name=True,
    ),
    Figure(
        "num_requests_waiting",
        "Requests that wait for a row.",
        lambda meter: len(meter.core.scheduler.waiting),
        type="gauge",
        has_vllm_name=True,
    ),
    Figure(
        "num_preemptions",
        "Sequences that gave back their pages.",
        lambda meter: meter.core.scheduler.num_preemptions,
        has_vllm_name=True,
    ),
    Figure(
        "prefix_cache_waits",
        "Requests that waited for a prefix that another one computed.",
        lambda meter: meter.core.scheduler.kv_cache.num_prefix_waits,
        has_vllm_name=True,
    ),
    Figure(
        "iteration_tokens_total",
        "Tokens of a step.",
        lambda meter: meter.tokens.snapshot(),
        has_vllm_name=True,
        type="histogram",
    ),
    Figure(
        "queued_seconds",
        "Predicted time of the prompts that wait or are being computed, of all engines together.",
        lambda meter: meter.queued_s,
        type="gauge",
    ),
    Figure(
        "compiles_after_warmup",
        "Programs compiled after the start; must stay zero.",
        lambda meter: meter.count_compiles(),
    ),
    Figure("failed_steps", "Steps that failed.", lambda meter: meter.core.loop.num_failed_steps),
    Figure(
        "step_seconds",
        "Time of a step.",
        lambda meter: meter.seconds.snapshot(),
        type="histogram",
    ),
    Figure(
        "pages",
        "KV pages by their state.",
        lambda meter: meter.core.scheduler.kv_cache.pool.counts().by_state,
        ("state",),
        type="gauge",
    ),
)


def _bound(core: EngineCore) -> StepBound:
    bound = core.scheduler.step_bound
    assert bound is not None
    return bound


STEP_BOUND_FIGURES: tuple[Figure[EngineCore], ...] = (
    Figure(
        "max_itl_seconds",
        "The bound on a step's time.",
        lambda core: _bound(core).max_ms / 1000,
        type="gauge",
        is_added=False,
    ),
    Figure(
        "bounded_prefill_share",
        "Rate of a prompt under the bound, as a share of its rate in full steps.",
        lambda core: _bound(core).cost.prefill_share(
            _bound(core).max_ms, core.limits.max_num_batched_tokens
        ),
        type="gauge",
        is_added=False,
    ),
    Figure(
        "steps_granted",
        "Steps with prompt tokens for which the bound leaves no time.",
        lambda core: _bound(core).num_granted,
    ),
    Figure(
        "steps_over_bound",
        "Steps that took longer than the bound.",
        lambda core: _bound(core).num_exceeded,
    ),
)

DRAFTS_ON_FIGURES: tuple[Figure[EngineCore], ...] = (
    Figure(
        "drafts_on",
        "Whether drafts are made because they save time, by their source and numbers of rows; "
        "else they are only tried now and then.",
        lambda core: {f"{each.origin},{each.rows}": int(each.is_on) for each in core.draft_states},
        ("source", "rows"),
        type="gauge",
        is_added=False,
    ),
)

# All that an engine may have, as `/metrics` and the docs list them
ENGINE_FIGURES: tuple[Figure[Any], ...] = (
    *BATCH_FIGURES,
    *STEP_BOUND_FIGURES,
    *PREFIX_FIGURES,
    *STORED_PAGE_FIGURES,
    *DRAFTS_ON_FIGURES,
    *STATE_FIGURES,
    *WORK_FIGURES,
)


def _figures(meter: StepMeter) -> Iterable[tuple[Any, tuple[Figure[Any], ...]]]:
    core, scheduler = meter.core, meter.core.scheduler
    stored = core.stored_pages
    return (
        (meter, BATCH_FIGURES),
        (core if scheduler.step_bound is not None else None, STEP_BOUND_FIGURES),
        (scheduler.prefix_counts, PREFIX_FIGURES),
        (None if stored is None else stored.counts, STORED_PAGE_FIGURES),
        (core, DRAFTS_ON_FIGURES),
        (scheduler.kv_cache.states, STATE_FIGURES),
        *[work.figures for work in scheduler.works if work.figures is not None],
    )
