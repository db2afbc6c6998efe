"""`/metrics`: the counts of the server and its engine, in Prometheus's format.

Owns names, labels and buckets. Every family is exported twice, as `vllm:…`, the names that existing
dashboards and autoscalers use, and as `cadenza:…`. Invariant: labels have a fixed set of values, so
that no client can add a series.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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

from cadenza.engine.open_requests import RejectionReason, RequestStats
from cadenza.engine.stats import Distribution, EngineStats, Tally
from cadenza.engine.status import EngineMonitor, EngineStatus
from cadenza.events import FinishReason, WholePromptReason
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
        """Counts a prompt for which sparse prefill was asked for."""
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
    def engine(self) -> EngineMonitor: ...

    def stats(self) -> EngineStats | None:
        """The engine's; None unless it runs."""
        ...


class Metrics(Collector):
    """The registry of one server; the families are made from the counts at each collection.

    Args:
        counts: of the front end; they have the first model's name.
        has_loads: whether models are loaded when they are asked for.
    """

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
        for prefix, rows in (("vllm:", _ROWS), ("cadenza:", (*_ROWS, *_OWN_ROWS))):
            for row in rows:
                found = row.read(scrape)
                if found is not None:
                    yield row.family(prefix, model.name, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scrape:
    """What is known of a model and its engine; families of what is None are left out."""

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

    @property
    def accepted_per_pos(self) -> dict[str, int] | None:
        s = self.stats
        return s and {str(place): n for place, n in enumerate(s.num_accepted_per_pos)}

    @property
    def drafts_on(self) -> dict[tuple[str, str], int] | None:
        s = self.stats
        return s and {(each.origin, each.rows): int(each.is_on) for each in s.draft_states}

    @property
    def pages(self) -> dict[str, int] | None:
        s = self.stats
        return s and {"live": s.pages_live, "cached": s.pages_cached, "free": s.pages_free}

    @property
    def state_slots(self) -> dict[str, int] | None:
        s = self.stats and self.stats.states
        return s and {"live": s.slots_live, "cached": s.slots_cached, "free": s.slots_free}

    @property
    def image_slots(self) -> dict[str, int] | None:
        s = self.stats and self.stats.images
        return s and {"live": s.slots_live, "cached": s.slots_cached, "free": s.slots_free}

    @property
    def image_hits(self) -> dict[str, int] | None:
        s = self.stats and self.stats.images
        return s and {"slots": s.num_slot_hits, "prefix_cache": s.num_prefix_hits}


GAUGE = GaugeMetricFamily


@dataclass(frozen=True, slots=True)
class _Row:
    """A family. `path` leads to its value in a `_Scrape`: a number, a histogram, or numbers by the
    values of `label`, of one or of several."""

    name: str
    path: str
    help: str
    label: str | tuple[str, ...] | None = None
    kind: type[CounterMetricFamily | GaugeMetricFamily] = CounterMetricFamily

    def read(self, scrape: _Scrape) -> Any:
        found: Any = scrape
        for name in self.path.split("."):
            found = None if found is None else getattr(found, name)
        return found.snapshot() if isinstance(found, Tally) else found

    def family(self, prefix: str, model_name: str, found: Any) -> Metric:
        """With the model's name on each series."""
        name, labels = prefix + self.name, ("model_name",)
        if isinstance(found, Distribution):
            bounds = (*(str(bound) for bound in found.bounds), "+Inf")
            buckets = list(zip(bounds, accumulate(found.counts), strict=True))
            family = HistogramMetricFamily(name, self.help, labels=labels)
            family.add_metric((model_name,), buckets, found.total)
        elif self.label is None:
            family = self.kind(name, self.help, labels=labels)
            family.add_metric((model_name,), found)
        else:
            family = self.kind(name, self.help, labels=(*labels, *_tuple_of(self.label)))
            by_label: Mapping[str | tuple[str, ...], float] = found
            for value, number in by_label.items():
                family.add_metric((model_name, *_tuple_of(value)), number)
        return family


def _tuple_of(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


_ROWS = (
    _Row("prompt_tokens", "counts.request_prompt_tokens.total", "Tokens of prompts."),
    _Row("generation_tokens", "counts.generation_tokens", "Generated tokens."),
    _Row("request_success", "counts.ends", "Answers by how they ended.", "finished_reason"),
    _Row(
        "time_to_first_token_seconds", "counts.first_token_s", "From a request to its first token."
    ),
    _Row(
        "inter_token_latency_seconds", "counts.between_tokens_s", "Between the tokens of a stream."
    ),
    _Row(
        "request_time_per_output_token_seconds",
        "counts.per_output_token_s",
        "A request's mean time for a token after the first.",
    ),
    _Row("e2e_request_latency_seconds", "counts.request_s", "From a request to its end."),
    _Row("request_prompt_tokens", "counts.request_prompt_tokens", "Tokens of a prompt."),
    _Row("request_generation_tokens", "counts.request_generation_tokens", "Tokens of an answer."),
    _Row("admission_rejections", "rejections", "Requests turned away.", "reason"),
    _Row("request_queue_time_seconds", "requests.queue_seconds", "From acceptance to a row."),
    _Row(
        "request_prefill_time_seconds", "requests.prefill_seconds", "From there to the first token."
    ),
    _Row(
        "request_decode_time_seconds", "requests.decode_seconds", "From the first token to the end."
    ),
    _Row("num_requests_running", "stats.num_running", "Requests in the batch.", kind=GAUGE),
    _Row("num_requests_waiting", "stats.num_waiting", "Requests that wait for a row.", kind=GAUGE),
    _Row(
        "kv_cache_usage_perc",
        "stats.kv_cache_usage",
        "Share of KV pages that are held, 0 to 1.",
        kind=GAUGE,
    ),
    _Row(
        "prefix_cache_queries", "stats.num_prefix_queries", "Prompt tokens looked up in the cache."
    ),
    _Row("prefix_cache_hits", "stats.num_prefix_hits", "Prompt tokens found in the cache."),
    _Row(
        "prefix_cache_differing_tokens",
        "stats.num_differing_tokens",
        "Tokens of prompts from where they differ from an earlier one of their tenant.",
    ),
    _Row(
        "prefix_cache_waits",
        "stats.num_prefix_waits",
        "Requests that waited for a prefix that another one computed.",
    ),
    _Row("num_preemptions", "stats.num_preemptions", "Sequences that gave back their pages."),
    _Row("spec_decode_num_drafts", "stats.num_drafts", "Drafts verified."),
    _Row("spec_decode_num_draft_tokens", "stats.num_draft_tokens", "Tokens of drafts."),
    _Row(
        "spec_decode_num_accepted_tokens",
        "stats.num_accepted_tokens",
        "Tokens of drafts that stayed.",
    ),
    _Row(
        "prefix_cache_misses",
        "stats.num_prefix_misses",
        "Prompt tokens looked up and not found.",
        "reason",
    ),
    _Row(
        "prefix_cache_missed_prompts",
        "stats.num_missed_prompts",
        "Prompts that were not found whole, by why the look-up ended.",
        "reason",
    ),
    _Row(
        "spec_decode_num_accepted_tokens_per_pos",
        "accepted_per_pos",
        "Tokens of drafts that stayed, by their place in the draft.",
        "position",
    ),
    _Row("iteration_tokens_total", "stats.step_tokens", "Tokens of a step."),
)
_OWN_ROWS = (
    _Row(
        "startup_seconds",
        "status.startup_s",
        "Seconds of each phase of the last start.",
        "phase",
        GAUGE,
    ),
    _Row("engine_restarts", "status.num_restarts", "Starts after the first."),
    _Row("replicas", "replicas", "Engines that serve as one, by state.", "state", GAUGE),
    _Row(
        "queued_seconds",
        "stats.queued_s",
        "Predicted time of the prompts that wait or are being computed, of all engines together.",
        kind=GAUGE,
    ),
    _Row("requests_resumed", "requests.num_resumed", "Requests that another engine went on with."),
    _Row(
        "resume_seconds",
        "requests.resume_seconds",
        "From the loss of an engine to the next token of a request that ran in it.",
    ),
    _Row(
        "idle_connections_closed",
        "front_end.num_idle_closed",
        "Idle connections closed for new ones.",
    ),
    _Row("log_lines_dropped", "num_dropped_log_lines", "Log lines that stderr did not take."),
    _Row("model_loaded", "loads.turn.is_loaded", "Whether the model is loaded.", kind=GAUGE),
    _Row("model_loads", "loads.num_loads", "Loads of the model."),
    _Row(
        "requests_waiting_for_model",
        "num_waiting_for_model",
        "Requests that wait for the model to be loaded.",
        kind=GAUGE,
    ),
    _Row(
        "compiles_after_warmup",
        "stats.num_compiles_after_warmup",
        "Programs compiled after the start; must stay zero.",
    ),
    _Row("failed_steps", "stats.num_failed_steps", "Steps that failed."),
    _Row("step_seconds", "stats.step_seconds", "Time of a step."),
    _Row("max_itl_seconds", "stats.step_bound.max_s", "The bound on a step's time.", kind=GAUGE),
    _Row(
        "bounded_prefill_share",
        "stats.step_bound.prefill_share",
        "Rate of a prompt under the bound, as a share of its rate in full steps.",
        kind=GAUGE,
    ),
    _Row(
        "steps_granted",
        "stats.step_bound.num_granted",
        "Steps with prompt tokens for which the bound leaves no time.",
    ),
    _Row(
        "steps_over_bound",
        "stats.step_bound.num_exceeded",
        "Steps that took longer than the bound.",
    ),
    _Row(
        "prefix_cache_disk_pages_read",
        "stats.stored_pages.num_read",
        "KV pages that came from the disk.",
    ),
    _Row(
        "prefix_cache_disk_page_bytes_read",
        "stats.stored_pages.num_read_bytes",
        "Bytes of KV pages that came from the disk.",
    ),
    _Row(
        "prefix_cache_disk_pages_written",
        "stats.stored_pages.num_written",
        "KV pages that went to the disk.",
    ),
    _Row(
        "prefix_cache_disk_page_bytes_written",
        "stats.stored_pages.num_written_bytes",
        "Bytes of KV pages that went to the disk.",
    ),
    _Row(
        "prefix_cache_disk_misses",
        "stats.stored_pages.misses",
        "KV pages looked for on the disk and not taken.",
        "reason",
    ),
    _Row(
        "drafts_on",
        "drafts_on",
        "Whether drafts are made because they save time, by their source and numbers of rows; "
        "else they are only tried now and then.",
        ("source", "rows"),
        GAUGE,
    ),
    _Row(
        "spec_prefill_prompts",
        "counts.prompt_uses",
        "Prompts for which sparse prefill was asked for, by whether they were thinned out, or why "
        "not.",
        "outcome",
    ),
    _Row(
        "spec_prefill_kept_tokens",
        "counts.num_kept_tokens",
        "Tokens of thinned prompts that were kept.",
    ),
    _Row(
        "spec_prefill_skipped_tokens",
        "counts.num_skipped_tokens",
        "Tokens of thinned prompts that were left out.",
    ),
    _Row(
        "spec_prefill_scoring",
        "stats.scoring.num_scoring",
        "Prompts that are being scored.",
        None,
        GAUGE,
    ),
    _Row("spec_prefill_scored", "stats.scoring.num_scored", "Prompts scored."),
    _Row(
        "spec_prefill_scored_before",
        "stats.scoring.num_remembered",
        "Samples whose prompt had been scored before.",
    ),
    _Row(
        "spec_prefill_scorings_failed",
        "stats.scoring.num_failed",
        "Prompts that were computed whole because their scoring failed.",
    ),
    _Row(
        "spec_prefill_scorings_preempted",
        "stats.scoring.num_preempted",
        "Scorings that began again because what ran needed their pages.",
    ),
    _Row(
        "spec_prefill_scored_tokens",
        "stats.scoring.num_tokens",
        "Tokens that the draft model computed to score prompts.",
    ),
    _Row(
        "spec_prefill_scoring_seconds",
        "stats.scoring.scoring_s",
        "Seconds of steps for scoring prompts.",
    ),
    _Row("pages", "pages", "KV pages by their state.", "state", GAUGE),
    _Row(
        "state_slots",
        "state_slots",
        "Slots of recurrent states by their state; cached ones are snapshots.",
        "state",
        GAUGE,
    ),
    _Row("state_snapshots", "stats.states.num_snapshots", "Snapshots of recurrent states made."),
    _Row(
        "state_snapshot_hits",
        "stats.states.num_hits",
        "Sequences that started from a snapshot of a recurrent state.",
    ),
    _Row(
        "state_snapshots_dropped",
        "stats.states.num_dropped",
        "Snapshots that made room for others, or whose page did.",
    ),
    _Row(
        "image_slots",
        "image_slots",
        "Slots of embeddings of images, one for each token of them, by their state.",
        "state",
        GAUGE,
    ),
    _Row("images_encoded", "stats.images.num_encoded", "Images, or tiles of them, encoded."),
    _Row(
        "images_given_up",
        "stats.images.num_failed",
        "Images whose encoding was begun and lost, with a failed step or its last request.",
    ),
    _Row(
        "image_hits",
        "image_hits",
        "Images that a request found encoded, or whose tokens were all in the prefix cache.",
        "place",
    ),
    _Row(
        "image_encoder_seconds", "stats.images.encoder_s", "Seconds of steps for encoding images."
    ),
)
"""Under `cadenza:` only."""
