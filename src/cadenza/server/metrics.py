"""`/metrics`: the counts of the server and its engine, in Prometheus's format.

Owns names, labels and buckets. Every family is exported twice, as `vllm:…`, the names that existing
dashboards and autoscalers use, and as `cadenza:…`. Invariant: labels have a fixed set of values, so
that no client can add a series.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast, get_args

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from cadenza.engine.open_requests import RejectionReason, RequestStats
from cadenza.engine.stats import Distribution, EngineStats, StepBoundStats, Tally
from cadenza.engine.status import EngineMonitor, EngineStatus
from cadenza.engine.stored_pages import StoredPageCounts
from cadenza.events import FinishReason

FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
TOKEN_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15),
    *(0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
REQUEST_BOUNDS = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)
COUNT_BOUNDS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))

REJECTION_REASONS = (
    *get_args(RejectionReason),
    *("bodies_full", "connections_full", "tenant_queue_full", "rate_limited"),
)
"""The engine's, and the front end's own."""

OPEN_METRICS = "application/openmetrics-text"

_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_requests_running": ("Requests in the batch.", lambda s: s.num_running),
    "num_requests_waiting": ("Requests that wait for a row.", lambda s: s.num_waiting),
    "kv_cache_usage_perc": ("Share of KV pages that are held, 0 to 1.", lambda s: s.kv_cache_usage),
}
_COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "prefix_cache_queries": (
        "Prompt tokens looked up in the cache.",
        lambda s: s.num_prefix_queries,
    ),
    "prefix_cache_hits": ("Prompt tokens found in the cache.", lambda s: s.num_prefix_hits),
    "prefix_cache_differing_tokens": (
        "Tokens of prompts from where they differ from an earlier one of their tenant.",
        lambda s: s.num_differing_tokens,
    ),
    "prefix_cache_waits": (
        "Requests that waited for a prefix that another one computed.",
        lambda s: s.num_prefix_waits,
    ),
    "num_preemptions": ("Sequences that gave back their pages.", lambda s: s.num_preemptions),
    "spec_decode_num_drafts": ("Drafts verified.", lambda s: s.num_drafts),
    "spec_decode_num_draft_tokens": ("Tokens of drafts.", lambda s: s.num_draft_tokens),
    "spec_decode_num_accepted_tokens": (
        "Tokens of drafts that stayed.",
        lambda s: s.num_accepted_tokens,
    ),
}


class ServedCounts:
    """The server's own counts. On the event loop only."""

    def __init__(self) -> None:
        self.generation_tokens = 0
        self.ends: dict[FinishReason, int] = dict.fromkeys(get_args(FinishReason), 0)
        self.num_idle_closed = 0
        self.rejections: dict[str, int] = dict.fromkeys(REJECTION_REASONS, 0)
        self.first_token_s = Tally(FIRST_TOKEN_BOUNDS)
        self.between_tokens_s = Tally(TOKEN_BOUNDS)
        self.per_output_token_s = Tally(TOKEN_BOUNDS)
        self.request_s = Tally(REQUEST_BOUNDS)
        self.request_prompt_tokens = Tally(COUNT_BOUNDS)
        self.request_generation_tokens = Tally(COUNT_BOUNDS)

    def reject(self, reason: str) -> None:
        """Raises KeyError for a reason that is not one of `REJECTION_REASONS`."""
        self.rejections[reason] += 1


class CountedModel(Protocol):
    """What the metrics need of a model."""

    counts: ServedCounts

    @property
    def name(self) -> str: ...

    @property
    def monitor(self) -> EngineMonitor: ...

    def stats(self) -> EngineStats | None:
        """The engine's; None unless it runs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoads:
    """Of a model that is loaded when it is asked for: whether it is, and how often it was; and the
    requests that wait for it."""

    is_loaded: bool
    num_loads: int
    num_waiting: int


LoadsOf = Callable[[CountedModel], ModelLoads]


class Metrics:
    """The registry of one server.

    Args:
        counts: of the front end; they have the first model's name.
        loads_of: reads the loads of a model; None where the models stay loaded.
    """

    def __init__(
        self,
        models: Sequence[CountedModel],
        counts: ServedCounts,
        num_dropped_log_lines: Callable[[], int],
        loads_of: LoadsOf | None = None,
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Served(models, counts, num_dropped_log_lines, loads_of))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition text and its media type: OpenMetrics where an Accept header names it."""
        types = (each.partition(";")[0].strip().lower() for each in accept.split(","))
        if OPEN_METRICS in types:
            made = cast(Callable[[Collector], bytes], openmetrics.generate_latest)  # pyright: ignore[reportUnknownMemberType]  untyped
            return made(self._registry), openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class _Served(Collector):
    """Makes the families from the counts at each collection."""

    def __init__(
        self,
        models: Sequence[CountedModel],
        counts: ServedCounts,
        num_dropped_log_lines: Callable[[], int],
        loads_of: LoadsOf | None,
    ) -> None:
        self._models = models
        self._counts = counts
        self._num_dropped_log_lines = num_dropped_log_lines
        self._loads_of = loads_of

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for model in self._models:
            for family in self._of_model(model):
                found.setdefault(family.name, family)
                if found[family.name] is not family:
                    found[family.name].samples += family.samples
        yield from found.values()

    def _of_model(self, model: CountedModel) -> Iterator[Metric]:
        monitor, stats = model.monitor, model.stats()
        for prefix in ("vllm:", "cadenza:"):
            families = _Families(prefix, model.name)
            yield from families.of_counts(model.counts)
            yield from families.of_requests(monitor.request_stats(), model.counts)
            if stats is not None:
                yield from families.of_engine(stats)
        own = _Families("cadenza:", model.name)
        yield from own.of_status(monitor.status())
        yield from own.of_resumes(monitor.request_stats())
        if model.counts is self._counts:
            yield from own.of_front_end(self._counts, self._num_dropped_log_lines())
        if self._loads_of is not None:
            yield from own.of_loads(self._loads_of(model))
        if stats is not None:
            yield from own.of_steps(stats)


class _Families:
    """Families under one prefix, with the model's name on each series."""

    def __init__(self, prefix: str, model_name: str) -> None:
        self._prefix = prefix
        self._model_name = model_name

    def of_counts(self, counts: ServedCounts) -> Iterator[Metric]:
        yield self._counter(
            "prompt_tokens", "Tokens of prompts.", counts.request_prompt_tokens.total
        )
        yield self._counter("generation_tokens", "Generated tokens.", counts.generation_tokens)
        yield self._by(
            "request_success", "Answers by how they ended.", "finished_reason", counts.ends.items()
        )
        for name, help, tally in (
            (
                "time_to_first_token_seconds",
                "From a request to its first token.",
                counts.first_token_s,
            ),
            (
                "inter_token_latency_seconds",
                "Between the tokens of a stream.",
                counts.between_tokens_s,
            ),
            (
                "request_time_per_output_token_seconds",
                "A request's mean time for a token after the first.",
                counts.per_output_token_s,
            ),
            ("e2e_request_latency_seconds", "From a request to its end.", counts.request_s),
            ("request_prompt_tokens", "Tokens of a prompt.", counts.request_prompt_tokens),
            (
                "request_generation_tokens",
                "Tokens of an answer.",
                counts.request_generation_tokens,
            ),
        ):
            yield self._histogram(name, help, tally.snapshot())

    def of_requests(self, stats: RequestStats, counts: ServedCounts) -> Iterator[Metric]:
        rejections = dict(counts.rejections)
        for reason, count in stats.rejections.items():
            rejections[reason] += count
        yield self._by(
            "admission_rejections", "Requests turned away.", "reason", rejections.items()
        )
        for name, help, found in (
            ("request_queue_time_seconds", "From acceptance to a row.", stats.queue_seconds),
            (
                "request_prefill_time_seconds",
                "From there to the first token.",
                stats.prefill_seconds,
            ),
            (
                "request_decode_time_seconds",
                "From the first token to the end.",
                stats.decode_seconds,
            ),
        ):
            yield self._histogram(name, help, found)

    def of_engine(self, stats: EngineStats) -> Iterator[Metric]:
        for name, (help, value) in _GAUGES.items():
            yield self._gauge(name, help, value(stats))
        for name, (help, value) in _COUNTERS.items():
            yield self._counter(name, help, value(stats))
        yield self._by(
            "prefix_cache_misses",
            "Prompt tokens looked up and not found.",
            "reason",
            stats.num_prefix_misses.items(),
        )
        yield self._by(
            "prefix_cache_missed_prompts",
            "Prompts that were not found whole, by why the look-up ended.",
            "reason",
            stats.num_missed_prompts.items(),
        )
        yield self._by(
            "spec_decode_num_accepted_tokens_per_pos",
            "Tokens of drafts that stayed, by their place in the draft.",
            "position",
            [(str(place), count) for place, count in enumerate(stats.num_accepted_per_pos)],
        )
        yield self._histogram("iteration_tokens_total", "Tokens of a step.", stats.step_tokens)

    def of_status(self, status: EngineStatus) -> Iterator[Metric]:
        yield self._by(
            "startup_seconds",
            "Seconds of each phase of the last start.",
            "phase",
            status.startup_s.items(),
            kind=GaugeMetricFamily,
        )
        yield self._counter("engine_restarts", "Starts after the first.", status.num_restarts)

    def of_loads(self, loads: ModelLoads) -> Iterator[Metric]:
        yield self._gauge("model_loaded", "Whether the model is loaded.", loads.is_loaded)
        yield self._counter("model_loads", "Loads of the model.", loads.num_loads)
        yield self._gauge(
            "requests_waiting_for_model",
            "Requests that wait for the model to be loaded.",
            loads.num_waiting,
        )

    def of_resumes(self, stats: RequestStats) -> Iterator[Metric]:
        yield self._counter(
            "requests_resumed", "Requests that a restarted engine went on with.", stats.num_resumed
        )
        yield self._histogram(
            "resume_seconds",
            "From the loss of an engine to the next token of a request that ran in it.",
            stats.resume_seconds,
        )

    def of_front_end(self, counts: ServedCounts, num_dropped_lines: int) -> Iterator[Metric]:
        yield self._counter(
            "idle_connections_closed",
            "Idle connections closed for new ones.",
            counts.num_idle_closed,
        )
        yield self._counter(
            "log_lines_dropped", "Log lines that stderr did not take.", num_dropped_lines
        )

    def of_steps(self, stats: EngineStats) -> Iterator[Metric]:
        compiles = stats.num_compiles_after_warmup
        yield self._counter(
            "compiles_after_warmup", "Programs compiled after the start; must stay zero.", compiles
        )
        yield self._counter("failed_steps", "Steps that failed.", stats.num_failed_steps)
        yield self._histogram("step_seconds", "Time of a step.", stats.step_seconds)
        if stats.step_bound is not None:
            yield from self._of_bound(stats.step_bound)
        if stats.stored_pages is not None:
            yield from self._of_stored(stats.stored_pages)
        pages = {
            "live": stats.pages_live,
            "cached": stats.pages_cached,
            "free": stats.pages_free,
        }
        yield self._by(
            "pages", "KV pages by their state.", "state", pages.items(), kind=GaugeMetricFamily
        )

    def _of_stored(self, counts: StoredPageCounts) -> Iterator[Metric]:
        for name, help, value in (
            ("pages_read", "KV pages that came from the disk.", counts.num_read),
            (
                "page_bytes_read",
                "Bytes of KV pages that came from the disk.",
                counts.num_read_bytes,
            ),
            ("pages_written", "KV pages that went to the disk.", counts.num_written),
            (
                "page_bytes_written",
                "Bytes of KV pages that went to the disk.",
                counts.num_written_bytes,
            ),
        ):
            yield self._counter(f"prefix_cache_disk_{name}", help, value)
        yield self._by(
            "prefix_cache_disk_misses",
            "KV pages looked for on the disk and not taken.",
            "reason",
            counts.misses.items(),
        )

    def _of_bound(self, bound: StepBoundStats) -> Iterator[Metric]:
        yield self._gauge("max_itl_seconds", "The bound on a step's time.", bound.max_s)
        yield self._gauge(
            "bounded_prefill_share",
            "Rate of a prompt under the bound, as a share of its rate in full steps.",
            bound.prefill_share,
        )
        yield self._counter(
            "steps_granted",
            "Steps with prompt tokens for which the bound leaves no time.",
            bound.num_granted,
        )
        yield self._counter(
            "steps_over_bound", "Steps that took longer than the bound.", bound.num_exceeded
        )

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, help, labels=("model_name",))
        family.add_metric((self._model_name,), value)
        return family

    def _counter(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(self._prefix + name, help, labels=("model_name",))
        family.add_metric((self._model_name,), value)
        return family

    def _by(
        self,
        name: str,
        help: str,
        label: str,
        values: Iterable[tuple[str, float]],
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily] = CounterMetricFamily,
    ) -> Metric:
        family = kind(self._prefix + name, help, labels=("model_name", label))
        for value, count in values:
            family.add_metric((self._model_name, value), count)
        return family

    def _histogram(self, name: str, help: str, found: Distribution) -> Metric:
        family = HistogramMetricFamily(self._prefix + name, help, labels=("model_name",))
        buckets: list[tuple[str, float]] = []
        below = 0
        for bound, count in zip((*found.bounds, float("inf")), found.counts, strict=True):
            below += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), below))
        family.add_metric((self._model_name,), buckets, found.total)
        return family
