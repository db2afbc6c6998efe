"""`/metrics` in Prometheus's format; every family as `vllm:…`, which dashboards know, and as
`cadenza:…`. Invariant: labels have a fixed set of values, so that no client can add a series."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol, cast, get_args

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

from cadenza.engine.batch_engine import EngineStatus, ServedEngine
from cadenza.engine.request_stats import RejectionReason, RequestStats
from cadenza.engine.stats import ENGINE_FIGURES, EngineStats
from cadenza.events import FinishReason, WholePromptReason
from cadenza.figures import Distribution, Figure, Reading, Tally
from cadenza.frontend.sparse_prompts import WHOLE_REASONS
from cadenza.outputs import PromptUse
from cadenza.server.model_turns import ModelTurn

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

THINNED = "thinned"
PROMPT_USES = (THINNED, *WHOLE_REASONS, *get_args(WholePromptReason))
"""What came of prompts for which sparse prefill was asked for."""

OPEN_METRICS = "application/openmetrics-text"


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
        self.prompt_uses: dict[str, int] = dict.fromkeys(PROMPT_USES, 0)
        self.num_kept_tokens = 0
        self.num_skipped_tokens = 0

    def count_use(self, use: PromptUse) -> None:
        self.prompt_uses[use.whole_because or THINNED] += 1
        if use.whole_because is None:
            self.num_kept_tokens += use.num_kept_tokens
            self.num_skipped_tokens += use.num_skipped_tokens

    def reject(self, reason: str) -> None:
        """Raises KeyError for a reason that is not one of `REJECTION_REASONS`."""
        self.rejections[reason] += 1


class CountedModel(Protocol):
    """What the metrics need of a model."""

    counts: ServedCounts
    turn: ModelTurn
    num_loads: int

    @property
    def name(self) -> str: ...

    @property
    def engine(self) -> ServedEngine: ...

    def stats(self) -> EngineStats | None:
        """The engine's; None unless it runs."""
        ...


class Metrics(Collector):
    """The registry of one server; the families are made from the counts at each collection.
    `counts`: of the front end; they have the first model's name. `has_loads`: whether models are
    loaded when they are asked for."""

    def __init__(
        self,
        models: Sequence[CountedModel],
        counts: ServedCounts,
        num_dropped_log_lines: Callable[[], int],
        has_loads: bool = False,
    ) -> None:
        self._models = models
        self._counts = counts
        self._num_dropped_log_lines = num_dropped_log_lines
        self._has_loads = has_loads
        self._registry = CollectorRegistry()
        self._registry.register(self)
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

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for model in self._models:
            for family in self._of_model(model):
                found.setdefault(family.name, family)
                if found[family.name] is not family:
                    found[family.name].samples += family.samples
        yield from found.values()

    def _of_model(self, model: CountedModel) -> Iterator[Metric]:
        is_front_end = model.counts is self._counts
        scrape = _Scrape(
            counts=model.counts,
            requests=model.engine.request_stats(),
            status=model.engine.status(),
            stats=model.stats(),
            loads=model if self._has_loads else None,
            front_end=self._counts if is_front_end else None,
            num_dropped_log_lines=self._num_dropped_log_lines() if is_front_end else None,
        )
        found = [(each, each.read(scrape)) for each in SERVER_FIGURES]
        if scrape.stats is not None:
            found += [(each, scrape.stats.get(each.name)) for each in ENGINE_FIGURES]
        for prefix in ("vllm:", "cadenza:"):
            for figure, reading in found:
                if reading is not None and (figure.has_vllm_name or prefix == "cadenza:"):
                    yield _family(figure, prefix, model.name, reading)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scrape:
    counts: ServedCounts
    requests: RequestStats
    status: EngineStatus
    stats: EngineStats | None
    loads: CountedModel | None
    front_end: ServedCounts | None
    num_dropped_log_lines: int | None

    @property
    def rejections(self) -> dict[str, int]:
        of_engine = {str(name): n for name, n in self.requests.rejections.items()}
        return {name: n + of_engine.get(name, 0) for name, n in self.counts.rejections.items()}

    @property
    def replicas(self) -> dict[str, int] | None:
        """By state; None where there is one engine."""
        return {**Counter(map(str, self.status.replicas))} or None

    @property
    def num_waiting_for_model(self) -> int | None:
        return None if self.loads is None else len(self.loads.turn.waiting)


def _family(figure: Figure[Any], prefix: str, model_name: str, found: Reading) -> Metric:
    name, labels = prefix + figure.name, ("model_name", *figure.labels)
    if isinstance(found, Distribution):
        bounds = (*(str(bound) for bound in found.bounds), "+Inf")
        buckets = list(zip(bounds, accumulate(found.counts), strict=True))
        histogram = HistogramMetricFamily(name, figure.help, labels=labels)
        histogram.add_metric((model_name,), buckets, found.total)
        return histogram
    family = (GaugeMetricFamily if figure.type == "gauge" else CounterMetricFamily)(
        name, figure.help, labels=labels
    )
    if isinstance(found, Mapping):
        for values, number in found.items():
            family.add_metric((model_name, *values.split(",", len(figure.labels) - 1)), number)
    else:
        family.add_metric((model_name,), found)
    return family


def _histogram(name: str, help: str, read: Callable[[_Scrape], Reading | None]) -> Figure[_Scrape]:
    return Figure(name, help, read, type="histogram")


_LIKE_VLLM: tuple[Figure[_Scrape], ...] = (
    Figure("prompt_tokens", "Tokens of prompts.", lambda of: of.counts.request_prompt_tokens.total),
    Figure("generation_tokens", "Generated tokens.", lambda of: of.counts.generation_tokens),
    Figure(
        "request_success",
        "Answers by how they ended.",
        lambda of: {str(name): n for name, n in of.counts.ends.items()},
        ("finished_reason",),
    ),
    _histogram(
        "time_to_first_token_seconds",
        "From a request to its first token.",
        lambda of: of.counts.first_token_s.snapshot(),
    ),
    _histogram(
        "inter_token_latency_seconds",
        "Between the tokens of a stream.",
        lambda of: of.counts.between_tokens_s.snapshot(),
    ),
    _histogram(
        "request_time_per_output_token_seconds",
        "A request's mean time for a token after the first.",
        lambda of: of.counts.per_output_token_s.snapshot(),
    ),
    _histogram(
        "e2e_request_latency_seconds",
        "From a request to its end.",
        lambda of: of.counts.request_s.snapshot(),
    ),
    _histogram(
        "request_prompt_tokens",
        "Tokens of a prompt.",
        lambda of: of.counts.request_prompt_tokens.snapshot(),
    ),
    _histogram(
        "request_generation_tokens",
        "Tokens of an answer.",
        lambda of: of.counts.request_generation_tokens.snapshot(),
    ),
    Figure("admission_rejections", "Requests turned away.", lambda of: of.rejections, ("reason",)),
    _histogram(
        "request_queue_time_seconds",
        "From acceptance to a row.",
        lambda of: of.requests.queue_seconds,
    ),
    _histogram(
        "request_prefill_time_seconds",
        "From there to the first token.",
        lambda of: of.requests.prefill_seconds,
    ),
    _histogram(
        "request_decode_time_seconds",
        "From the first token to the end.",
        lambda of: of.requests.decode_seconds,
    ),
    Figure(
        "kv_cache_usage_perc",
        "Share of KV pages that are held, 0 to 1.",
        lambda of: of.stats and of.stats.kv_cache_usage,
        type="gauge",
    ),
)
SERVER_FIGURES: tuple[Figure[_Scrape], ...] = (
    *(replace(each, has_vllm_name=True) for each in _LIKE_VLLM),
    Figure(
        "startup_seconds",
        "Seconds of each phase of the last start.",
        lambda of: of.status.startup_s,
        ("phase",),
        type="gauge",
    ),
    Figure("engine_restarts", "Starts after the first.", lambda of: of.status.num_restarts),
    Figure(
        "replicas",
        "Engines that serve as one, by state.",
        lambda of: of.replicas,
        ("state",),
        type="gauge",
    ),
    Figure(
        "requests_resumed",
        "Requests that another engine went on with.",
        lambda of: of.requests.num_resumed,
    ),
    _histogram(
        "resume_seconds",
        "From the loss of an engine to the next token of a request that ran in it.",
        lambda of: of.requests.resume_seconds,
    ),
    Figure(
        "idle_connections_closed",
        "Idle connections closed for new ones.",
        lambda of: of.front_end and of.front_end.num_idle_closed,
    ),
    Figure(
        "log_lines_dropped",
        "Log lines that stderr did not take.",
        lambda of: of.num_dropped_log_lines,
    ),
    Figure(
        "model_loaded",
        "Whether the model is loaded.",
        lambda of: None if of.loads is None else of.loads.turn.is_loaded,
        type="gauge",
    ),
    Figure(
        "model_loads",
        "Loads of the model.",
        lambda of: None if of.loads is None else of.loads.num_loads,
    ),
    Figure(
        "requests_waiting_for_model",
        "Requests that wait for the model to be loaded.",
        lambda of: of.num_waiting_for_model,
        type="gauge",
    ),
    Figure(
        "spec_prefill_prompts",
        "Prompts for which sparse prefill was asked for, by whether they were thinned out, or why "
        "not.",
        lambda of: of.counts.prompt_uses,
        ("outcome",),
    ),
    Figure(
        "spec_prefill_kept_tokens",
        "Tokens of thinned prompts that were kept.",
        lambda of: of.counts.num_kept_tokens,
    ),
    Figure(
        "spec_prefill_skipped_tokens",
        "Tokens of thinned prompts that were left out.",
        lambda of: of.counts.num_skipped_tokens,
    ),
)
