"""What stands in the place of a device: steps that only move the clock by their predicted time, and
the servers that have them. Invariant: only `measure_server`, which times a model's steps, reads a
clock of the machine.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cadenza import EngineConfig
from cadenza.backends.base import Capability, StepHandle
from cadenza.batch.batch import Batch
from cadenza.batch.step_cost import StepBound, StepCost, StepLoad, derive_bound_ms
from cadenza.batch.step_schema import ModelInputs, StepOutput
from cadenza.cluster.router import Router
from cadenza.config import DEFAULT_MAX_NUM_SEQS, MAX_MAX_ITL_MS, EngineLimits, SchedulingPolicy
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.loop import LaunchedStep, Steps
from cadenza.engine.open_requests import EngineLoad
from cadenza.engine.process.worker import IDLE_BEAT_S
from cadenza.engine.route_report import RouteReporter
from cadenza.engine.stats import STATS_EVERY_S
from cadenza.errors import RunnerError
from cadenza.frontend.loaded_model import load_model
from cadenza.request import Request
from cadenza.scheduler.turns import POLICIES
from cadenza_bench.simulate.traffic import VOCAB_SIZE, TrafficArrival

SECRET = b"simulated"  # of the keys of all simulated engines


@dataclass(slots=True, eq=False)
class SimulatedClock:
    """Seconds since the start."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(slots=True, eq=False)
class SimulatedReplica:
    """An engine and its clock. `reporter` is None where there is nothing to choose."""

    core: EngineCore
    clock: SimulatedClock
    place: int = 0
    reporter: RouteReporter | None = None
    reported_s: float = 0.0

    @property
    def due_s(self) -> float:
        """When it launches its next step, if nothing comes before."""
        return self.clock.now_s + self.core.launch_in_s()

    @property
    def load(self) -> EngineLoad:
        scheduler = self.core.scheduler
        num_queued = sum([each.num_prompt_tokens for each in scheduler.waiting])
        num_open = len(scheduler.running) + len(scheduler.waiting)
        return EngineLoad(num_open=num_open, num_queued_tokens=num_queued)


class SimulatedGroup:
    """Engines with one router, to which each reports as often as an engine process does."""

    def __init__(self, replicas: Sequence[SimulatedReplica], router: Router | None = None) -> None:
        self.replicas = replicas
        self._router = router or Router(SECRET)
        if len(replicas) > 1:
            for place, each in enumerate(replicas):
                each.place, each.reporter = place, RouteReporter(each.core)

    def submit(self, request: Request, at_s: float) -> tuple[int, int]:
        """Sends a request that comes at `at_s`; returns the index of its engine and its id there.
        Raises QueueFullError."""
        for each in self.replicas:
            every_s = IDLE_BEAT_S if each.core.is_idle else STATS_EVERY_S
            if at_s >= each.reported_s + every_s:
                self._report(each, at_s)
        loads = {at: each.load for at, each in enumerate(self.replicas)}
        route = self._router.choose(request, loads, self.replicas[0].core.limits, at_s)
        replica = self.replicas[route.replica]
        replica.clock.now_s = max(replica.clock.now_s, at_s)
        request_id = replica.core.submit(request)
        if replica.reporter is not None:
            replica.reporter.received(request_id)
        self._router.sent(route, request_id, at_s)
        return route.replica, request_id

    def stepped(self, place: int) -> None:
        replica = self.replicas[place]
        now_s = replica.clock.now_s
        if replica.core.is_idle or now_s >= replica.reported_s + STATS_EVERY_S:
            self._report(replica, now_s)

    def _report(self, replica: SimulatedReplica, now_s: float) -> None:
        if replica.reporter is None:
            return
        replica.reported_s = now_s
        self._router.take(replica.place, replica.reporter.report(now_s), now_s)


@dataclass(slots=True, eq=False)
class Happening:
    """The next thing: `arrival` comes, or `replica` makes a step. One of them is None."""

    at_s: float
    arrival: TrafficArrival | None
    replica: SimulatedReplica | None


def happenings(
    replicas: Sequence[SimulatedReplica], traffic: Iterator[TrafficArrival]
) -> Iterator[Happening]:
    """In the order of time, until there are none; each is to be acted on before the next."""
    coming = next(traffic, None)
    while True:
        busy = [each for each in replicas if not each.core.is_idle]
        first = min(busy, key=lambda each: each.due_s, default=None)
        if coming is not None and (first is None or coming.after_s <= first.due_s):
            yield Happening(coming.after_s, coming, None)
            coming = next(traffic, None)
        elif first is not None:
            yield Happening(first.due_s, None, first)
        else:
            return


_ARRAYS = ("token_ids", "is_finite", "has_choice", "logprobs", "ranks", "top_ids", "top_logprobs")

DEFAULT_MODEL_LEN = 4096
DEFAULT_TOKEN_BUDGET = 256
QUEUED_REQS = 1024  # a server's, at least


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedServer:
    """What is simulated: an engine's limits, the cost of its steps, and their bound in
    milliseconds (None: only of their tokens)."""

    limits: EngineLimits
    cost: StepCost
    max_itl_ms: float | None
    starvation_guard_s: float = 10.0


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
    """A server whose steps cost `costs_ms`: of a step, a token, a logit row and a key. Limits that
    are not given are a context of 4,096 tokens, 256 tokens a step, and pages for full contexts in
    all rows."""
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
