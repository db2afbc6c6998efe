"""`cadenza bench simulate`: the engine's own core over a device that only takes time.

Scheduler, admission, pages, prefix cache and the overlapped loop are those of a server; the device
computes nothing, and the clock moves by the predicted time of each step. Owns the device, the
clock and the figures. Invariant: a simulation is a function of its options: it reads no clock of
the machine.
"""

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from cadenza import EngineConfig, EngineCore, Finished, Request, SamplingParams, Token
from cadenza.backends.base import Capability, StepHandle
from cadenza.bench.serve_figures import Spread, spread_of
from cadenza.bench.simulated_group import (
    SimulatedClock,
    SimulatedGroup,
    SimulatedReplica,
    happenings,
)
from cadenza.bench.traffic import VOCAB_SIZE, TrafficArrival, TrafficOptions
from cadenza.cluster.router import Router
from cadenza.config import DEFAULT_MAX_NUM_SEQS, MAX_MAX_ITL_MS, EngineLimits, SchedulingPolicy
from cadenza.core.batch import Batch
from cadenza.core.step_cost import StepBound, StepCost, StepLoad, derive_bound_ms
from cadenza.core.step_schema import ModelInputs, StepOutput
from cadenza.core.turns import POLICIES
from cadenza.engine.core import CoreOptions
from cadenza.engine.loop import LaunchedStep, Steps
from cadenza.errors import QueueFullError, RunnerError
from cadenza.events import Started
from cadenza.frontend.loaded_model import load_model
from cadenza.tenant import Tenant

_ARRAYS = ("token_ids", "is_finite", "has_choice", "logprobs", "ranks", "top_ids", "top_logprobs")
REPORT_EVERY = 1000
"""Requests that end between two reports of progress."""

OnProgress = Callable[[int, int], object]
"""Called with how many requests have ended, and how many there are."""

DEFAULT_MODEL_LEN = 4096
DEFAULT_TOKEN_BUDGET = 256
QUEUED_REQS = 1024
"""A server's, at least."""
HISTOGRAM_BASE = 1.01
"""Gaps between tokens are counted in classes that are 1 % apart."""


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A launched step; reading it moves the clock to its end."""

    clock: SimulatedClock
    end_s: float
    output: StepOutput

    def result(self) -> StepOutput:
        self.clock.now_s = max(self.clock.now_s, self.end_s)
        return self.output


class SimulatedSteps:
    """The `Steps` of a core: they follow one another, and each takes as long as `predict_ms` says.
    Every token is the same."""

    def __init__(
        self, limits: EngineLimits, predict_ms: Callable[[StepLoad], float], clock: SimulatedClock
    ) -> None:
        self._predict_ms = predict_ms
        self._clock = clock
        self._free_s = 0.0
        self._whole = _constant_output(limits.max_num_seqs)
        self._outputs: dict[int, StepOutput] = {}

    @property
    def has_late_masks(self) -> bool:
        return False

    def launch(self, batch: Batch, now_s: float, *, masks_follow: bool) -> LaunchedStep:
        assert not masks_follow, "a simulated request has no constraint"
        load = batch.load
        self._free_s = max(now_s, self._free_s) + self._predict_ms(load) / 1000
        step = SimulatedStep(self._clock, self._free_s, self.output(batch))
        return LaunchedStep(batch, load.num_logits, step, now_s)

    def choose(self, step: LaunchedStep) -> None:
        raise RunnerError(f"step {step.batch.step_id} has no constraint: it is simulated")

    def read(self, step: LaunchedStep) -> StepOutput:
        return step.handle.result()

    def reset(self) -> None:
        raise RunnerError("a simulated step cannot fail")

    def output(self, batch: Batch) -> StepOutput:
        """What the batch samples."""
        count = batch.load.num_logits
        if count not in self._outputs:  # views
            first = {name: getattr(self._whole, name)[:count] for name in _ARRAYS}
            self._outputs[count] = StepOutput(**first)
        return self._outputs[count]


class NoDevice:
    """The `Runner` of a core whose steps are simulated."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits

    @property
    def name(self) -> str:
        return "simulated"

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset()

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    @property
    def hidden_size(self) -> None:
        return None

    @property
    def token_buckets(self) -> tuple[int, ...]:
        return (self._limits.max_num_batched_tokens,)

    def warmup(self) -> None:
        """Does nothing: there are no programs to compile."""

    def launch(self, inputs: ModelInputs) -> StepHandle:
        raise RunnerError(f"step {inputs.step_id} was given to a device that there is not")

    def reset(self) -> None:
        """Does nothing: there is no KV."""

    def close(self) -> None:
        """Does nothing: there is no memory to free."""


def _constant_output(count: int) -> StepOutput:
    return StepOutput(
        token_ids=np.ones(count, np.int32),
        is_finite=np.ones(count, np.bool_),
        has_choice=np.ones(count, np.bool_),
        logprobs=np.zeros(count, np.float32),
        ranks=np.ones(count, np.int32),
        top_ids=np.zeros((count, 0), np.int32),
        top_logprobs=np.zeros((count, 0), np.float32),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedServer:
    """What is simulated: an engine's limits, the cost of its steps, and their bound in
    milliseconds (None: only of their tokens)."""

    limits: EngineLimits
    cost: StepCost
    max_itl_ms: float | None
    starvation_guard_s: float = 10.0


@dataclass(slots=True, eq=False)
class GapCounts:
    """Times between tokens, in classes that are 1 % apart: millions of them need no memory."""

    counts: Counter[int] = field(default_factory=Counter[int])
    total_s: float = 0.0
    max_s: float = 0.0

    def add(self, gap_s: float) -> None:
        self.counts[round(math.log(max(gap_s, 1e-9), HISTOGRAM_BASE))] += 1
        self.total_s += gap_s
        self.max_s = max(self.max_s, gap_s)

    def spread(self) -> Spread | None:
        """Within 0.5 % of that of the times themselves; None without any."""
        count = self.counts.total()
        if not count:
            return None
        p50, p95, p99 = (self._percentile(share * count) for share in (0.5, 0.95, 0.99))
        mean_s = self.total_s / count
        return Spread(count=count, mean_s=mean_s, p50_s=p50, p95_s=p95, p99_s=p99, max_s=self.max_s)

    def _percentile(self, place: float) -> float:
        seen = 0
        for key in sorted(self.counts):
            seen += self.counts[key]
            if seen >= place:
                return min(HISTOGRAM_BASE**key, self.max_s)
        return self.max_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantFigures:
    """One tenant's requests; `per_token_s` is the mean time of a request for each of its tokens."""

    tenant: str
    num_answers: int
    num_output_tokens: int
    ttft: Spread | None
    per_token_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFigures:
    """One policy's figures.

    Args:
        waiting: from arrival to the first step.
        good_share: requests within both limits, as a share of all.
        num_rejected: refused because the queue was full.
        cached_share: prompt tokens found in the prefix cache.
        fairness: Jain's index of the tenants' `per_token_s`: 1 where all are alike, 1 / tenants
            where one has all the delay.
    """

    policy: SchedulingPolicy
    num_answers: int
    num_rejected: int
    duration_s: float
    num_output_tokens: int
    ttft: Spread | None
    itl: Spread | None
    waiting: Spread | None
    good_share: float
    num_preemptions: int
    cached_share: float
    fairness: float
    tenants: tuple[TenantFigures, ...]

    @property
    def output_tok_s(self) -> float:
        return self.num_output_tokens / self.duration_s if self.duration_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The figures of all policies, and what was simulated."""

    server: SimulatedServer
    results: tuple[PolicyFigures, ...]


@dataclass(slots=True, eq=False)
class _Open:
    arrival: TrafficArrival
    last_s: float
    ttft_s: float = 0.0
    num_tokens: int = 0


@dataclass(slots=True, eq=False)
class _TenantRecord:
    ttfts_s: "array[float]" = field(default_factory=lambda: array("d"))
    num_tokens: int = 0
    per_token_s: float = 0.0


@dataclass(slots=True, eq=False)
class SimulationRecord:
    """What clients saw, from the events of the engines; `place` is of the one that is read."""

    options: TrafficOptions
    place: int = 0
    open: dict[tuple[int, int], _Open] = field(default_factory=dict[tuple[int, int], _Open])
    tenants: dict[int, _TenantRecord] = field(default_factory=dict[int, _TenantRecord])
    waits_s: "array[float]" = field(default_factory=lambda: array("d"))
    gaps: GapCounts = field(default_factory=GapCounts)
    num_good: int = 0
    num_rejected: int = 0
    num_answers: int = 0

    @property
    def num_ended(self) -> int:
        return self.num_answers + self.num_rejected

    def take(self, event: object, now_s: float) -> None:
        if isinstance(event, Token):
            request = self.open[self.place, event.request_id]
            if request.num_tokens:
                self.gaps.add(now_s - request.last_s)
            else:
                request.ttft_s = now_s - request.arrival.after_s
            request.last_s = now_s
            request.num_tokens += 1
        elif isinstance(event, Finished):
            self._end(event, now_s)
        elif isinstance(event, Started):
            self.waits_s.append(now_s - self.open[self.place, event.request_id].arrival.after_s)

    def _end(self, event: Finished, now_s: float) -> None:
        request = self.open.pop((self.place, event.request_id))
        if event.finish_reason != "length":
            raise RunnerError(f"a simulated request ended by {event.finish_reason}: {event.error}")
        arrival, count = request.arrival, request.num_tokens
        tenant = self.tenants.setdefault(arrival.tenant, _TenantRecord())
        tenant.ttfts_s.append(request.ttft_s)
        tenant.num_tokens += count
        tenant.per_token_s += (now_s - arrival.after_s) / count
        self.num_answers += 1
        decode_s = request.last_s - arrival.after_s - request.ttft_s
        is_even = decode_s <= self.options.max_tpot_ms / 1000 * max(1, count - 1)
        self.num_good += request.ttft_s <= self.options.max_ttft_s and is_even


def simulate(
    server: SimulatedServer,
    options: TrafficOptions,
    policy: SchedulingPolicy,
    on_progress: OnProgress = lambda _, __: None,
) -> PolicyFigures:
    """Plays the traffic under one policy until all requests have ended."""
    clocks = [SimulatedClock() for _ in range(options.replicas)]
    replicas = [
        SimulatedReplica(make_simulated_core(server, policy, clock), clock) for clock in clocks
    ]
    record = SimulationRecord(options)
    num_reported = 0
    arrivals = options.traffic(server.limits.max_model_len)
    for _ in play_traffic(replicas, arrivals, policy, record):
        if record.num_ended >= num_reported + REPORT_EVERY:
            num_reported = record.num_ended
            on_progress(num_reported, options.num_requests)
    return _figures(record, replicas, policy)


def make_simulated_core(
    server: SimulatedServer,
    policy: SchedulingPolicy,
    clock: SimulatedClock,
    steps: Steps | None = None,
) -> EngineCore:
    """A server's core; `steps` may be given in place of those that only take time."""
    bound = None
    if server.max_itl_ms is not None:
        bound = StepBound(max_ms=server.max_itl_ms, cost=server.cost)
    options = CoreOptions(
        policy=POLICIES[policy](server.starvation_guard_s),
        step_bound=bound,
        clock=clock,
        secret=b"simulated",
    )
    steps = steps or SimulatedSteps(server.limits, server.cost.predict_ms, clock)
    return EngineCore(NoDevice(server.limits), server.limits, options, steps)


def play_traffic(
    replicas: Sequence[SimulatedReplica],
    traffic: Iterator[TrafficArrival],
    policy: SchedulingPolicy,
    record: SimulationRecord,
    router: Router | None = None,
) -> Iterator[float]:
    """Submits each request when it arrives and steps the engines; yields the time of each step.
    `router` may be another one than that of `EngineGroup`."""
    group = SimulatedGroup(replicas, router)
    places = {id(each): at for at, each in enumerate(replicas)}
    tenants = [Tenant(name=f"tenant-{at}") for at in range(record.options.num_tenants)]
    for each in happenings(replicas, traffic):
        if each.arrival is not None:
            request = _request_of(each.arrival, policy, tenants[each.arrival.tenant])
            _submit(group, request, each.arrival, record)
        elif each.replica is not None:
            record.place = places[id(each.replica)]
            each.replica.clock.now_s = each.at_s
            for event in each.replica.core.step():
                record.take(event, each.replica.clock.now_s)
            group.stepped(record.place)
            yield each.replica.clock.now_s


def _request_of(arrival: TrafficArrival, policy: SchedulingPolicy, tenant: Tenant) -> Request:
    return Request(
        prompt_token_ids=arrival.prompt_token_ids,
        params=SamplingParams(temperature=0.0, max_tokens=arrival.max_tokens, ignore_eos=True),
        priority=arrival.priority if policy == "priority" else 0,
        tenant=tenant,
    )


def _submit(
    group: SimulatedGroup, request: Request, arrival: TrafficArrival, record: SimulationRecord
) -> None:
    try:
        place, request_id = group.submit(request, arrival.after_s)
    except QueueFullError:
        record.num_rejected += 1
    else:
        record.open[place, request_id] = _Open(arrival, arrival.after_s)


def _figures(
    record: SimulationRecord, replicas: Sequence[SimulatedReplica], policy: SchedulingPolicy
) -> PolicyFigures:
    schedulers = [each.core.scheduler for each in replicas]
    tenants = [_tenant_figures(at, each) for at, each in sorted(record.tenants.items())]
    delays = [each.per_token_s for each in tenants]
    squares = len(delays) * sum(delay * delay for delay in delays)
    queries = sum(each.prefix_counts.num_queries for each in schedulers)
    hits = sum(each.prefix_counts.num_hits for each in schedulers)
    return PolicyFigures(
        policy=policy,
        num_answers=record.num_answers,
        num_rejected=record.num_rejected,
        duration_s=max(each.clock.now_s for each in replicas),
        num_output_tokens=sum(each.num_output_tokens for each in tenants),
        ttft=spread_of([ttft for each in record.tenants.values() for ttft in each.ttfts_s]),
        itl=record.gaps.spread(),
        waiting=spread_of(record.waits_s),
        good_share=record.num_good / record.num_ended,
        num_preemptions=sum(each.num_preemptions for each in schedulers),
        cached_share=hits / queries if queries else 0.0,
        fairness=sum(delays) ** 2 / squares if squares else 1.0,
        tenants=tuple(tenants),
    )


def _tenant_figures(tenant: int, record: _TenantRecord) -> TenantFigures:
    count = len(record.ttfts_s)
    return TenantFigures(
        tenant=f"tenant-{tenant}",
        num_answers=count,
        num_output_tokens=record.num_tokens,
        ttft=spread_of(record.ttfts_s),
        per_token_s=record.per_token_s / count,
    )


def measure_server(model: str | Path | None, config: EngineConfig) -> SimulatedServer:
    """The server that a model would have with these options; loads it to time its steps."""
    with_bound = replace(config, max_itl_ms=MAX_MAX_ITL_MS)
    loaded = load_model(model, with_bound)
    try:
        bound = loaded.core.scheduler.step_bound
        assert bound is not None, "a number bounds the steps"
        return _server(loaded.core.limits, bound.cost, config)
    finally:
        loaded.close()


def given_server(costs_ms: tuple[float, ...], config: EngineConfig) -> SimulatedServer:
    """A server whose steps cost `costs_ms`: of a step, a token, a logit row and a key.

    Limits that are not given are a context of 4,096 tokens, 256 tokens a step, and pages for full
    contexts in all rows.
    """
    rows = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    length = config.max_model_len or DEFAULT_MODEL_LEN
    limits = EngineLimits(
        max_num_seqs=rows,
        max_num_batched_tokens=config.max_num_batched_tokens or max(rows, DEFAULT_TOKEN_BUDGET),
        max_model_len=length,
        page_size=config.page_size,
        num_pages=config.num_pages or rows * -(-length // config.page_size),
        max_num_queued_reqs=config.max_num_queued_reqs or QUEUED_REQS,
        enable_prefix_caching=config.enable_prefix_caching,
        prefix_cache_memory_share=config.prefix_cache_memory_share,
    )
    fixed_ms, token_ms, logit_ms, key_ms = costs_ms
    cost = StepCost(fixed_ms=fixed_ms, token_ms=token_ms, logit_ms=logit_ms, key_ms=key_ms)
    return _server(limits, cost, config)


def _server(limits: EngineLimits, cost: StepCost, config: EngineConfig) -> SimulatedServer:
    server = SimulatedServer(
        limits=limits, cost=cost, max_itl_ms=None, starvation_guard_s=config.starvation_guard
    )
    if config.max_itl_ms == "none":
        return server
    if config.max_itl_ms == "auto":
        bound_ms = derive_bound_ms(cost, limits.max_num_seqs, limits.max_model_len)
        return replace(server, max_itl_ms=bound_ms)
    return replace(server, max_itl_ms=float(config.max_itl_ms))


def simulate_all(
    server: SimulatedServer, options: TrafficOptions, on_progress: OnProgress
) -> Simulated:
    """The same traffic under each policy; the progress is that of all of them."""
    total = options.num_requests * len(options.policies)
    results: list[PolicyFigures] = []
    for index, policy in enumerate(options.policies):
        before = index * options.num_requests

        def on_each(done: int, _: int, before: int = before) -> None:
            on_progress(before + done, total)

        results.append(simulate(server, options, policy, on_each))
    return Simulated(server=server, results=tuple(results))
