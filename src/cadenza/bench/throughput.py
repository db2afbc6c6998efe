"""Decode and prefill tokens per second through `EngineCore`, repeated, against their bounds, and
the time that is left. Invariant: no two prompts of a benchmark are alike, so nothing is ever found
in the prefix cache."""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cadenza import EngineConfig, EngineCore
from cadenza.backends import BACKENDS, Backends, find_backend
from cadenza.backends.base import Instruments, ProductDType
from cadenza.bench import OnStatus
from cadenza.bench.machine import (
    Cost,
    Limit,
    ModelCost,
    Prompts,
    Roofline,
    RooflineProbe,
    describe_machine,
)
from cadenza.bench.runs import (
    DecodeTask,
    StepProfile,
    Timed,
    calls_of_a_step,
    run_decode,
    run_prefill,
    step_profile,
    text_ids,
    touched_bytes,
)
from cadenza.bench.workloads import WARM_TOKENS, Workload, fitting_context
from cadenza.checkpoint.tensor_formats import held_formats
from cadenza.config import MAX_NUM_SEQS_BOUND
from cadenza.errors import ConfigError
from cadenza.frontend.loaded_model import LoadedModel, load_model
from cadenza.loading.build import describe_backend, find_configured
from cadenza.loading.engine_plan import EnginePlan


@dataclass(slots=True, eq=False, kw_only=True)
class RemainingTime:
    """The time that is left; `add` each repeat when it has been made."""

    workload: Workload
    token_budget: int
    _step_s: dict[int, float] = field(default_factory=dict[int, float])
    _prompt_token_s: float = 0.0
    _num_done: int = 0
    _taken_s: float = 0.0
    _said_s: float = 0.0

    def add(self, rows: int, took_s: float, *, decode_tok_s: float, prefill_tok_s: float) -> None:
        self._step_s[rows] = rows / decode_tok_s
        self._prompt_token_s = 1 / prefill_tok_s
        self._num_done += 1
        self._taken_s += took_s
        self._said_s += self._repeat_s(rows, self.workload.output_len)

    @property
    def seconds(self) -> float | None:
        """None before the first repeat."""
        if not self._num_done:
            return None
        left = self._left(self.workload.concurrency)
        return left * self._taken_s / self._said_s

    def _left(self, concurrency: Sequence[int]) -> float:
        workload = self.workload
        num_done, left_s = self._num_done, 0.0
        for rows in concurrency:
            done = min(num_done, workload.repeats)
            num_done -= done
            left_s += (workload.repeats - done) * self._repeat_s(rows, workload.output_len)
            if not done:  # its warm-up is to come, too
                left_s += self._repeat_s(rows, min(WARM_TOKENS, workload.output_len))
        return left_s

    def _repeat_s(self, rows: int, output_len: int) -> float:
        num_prompts = rows + self.workload.num_prefill_prompts(rows, self.token_budget)
        prompts_s = num_prompts * self.workload.input_len * self._prompt_token_s
        return prompts_s + output_len * self._decode_step_s(rows)

    def _decode_step_s(self, rows: int) -> float:
        near = max((each for each in self._step_s if each <= rows), default=min(self._step_s))
        return self._step_s[near] + max(0, rows - near) * self._prompt_token_s


def about(seconds: float) -> str:
    """Say 5 s, 40 s, 3 min."""
    if seconds < 90:
        return f"{max(5, 5 * round(seconds / 5))} s"
    return f"{round(seconds / 60)} min"


PROBE_REPEATS = 3  # passes of the roofline's measurement before and after each run

_SETTINGS = ("input_len", "output_len", "repeats", "sampling")


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedRun:
    """A run, and the roofline measured just before and after it; None where none is known."""

    run: Timed
    roofline: Roofline | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Every repeat of one type of run; `cost` is that of `num_tokens` tokens. A run's bound uses
    the roofline measured around it, since memory bandwidth changes."""

    runs: tuple[RatedRun, ...]
    cost: Cost | None
    num_tokens: int
    profile: StepProfile | None = None

    @property
    def tok_s(self) -> float:
        return statistics.median(self.tok_s_runs)

    @property
    def bound_tok_s(self) -> float | None:
        bounds = self._bound_runs
        return None if bounds is None else statistics.median(bounds)

    @property
    def share_of_bound(self) -> float | None:
        """Of the two medians."""
        bound = self.bound_tok_s
        return None if bound is None else self.tok_s / bound

    @property
    def tok_s_runs(self) -> list[float]:
        return [each.run.tokens_per_s for each in self.runs]

    @property
    def share_runs(self) -> list[float] | None:
        bounds = self._bound_runs
        if bounds is None:
            return None
        return [rate / bound for rate, bound in zip(self.tok_s_runs, bounds, strict=True)]

    @property
    def limit(self) -> Limit | None:
        cost, rooflines = self.cost, self.rooflines
        return None if cost is None or not rooflines else cost.limit(Roofline.median_of(rooflines))

    @property
    def rooflines(self) -> list[Roofline]:
        return [each.roofline for each in self.runs if each.roofline is not None]

    @property
    def _bound_runs(self) -> list[float] | None:
        cost, rooflines = self.cost, self.rooflines
        if cost is None or not rooflines:
            return None
        return [self.num_tokens / cost.bound_s(each) for each in rooflines]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencyResult:
    """The rates at one concurrency."""

    concurrency: int
    decode: Rate
    prefill: Rate

    @property
    def rooflines(self) -> list[Roofline]:
        return [*self.decode.rooflines, *self.prefill.rooflines]

    @property
    def profiles(self) -> dict[str, StepProfile]:
        rates = {"decode": self.decode, "prefill": self.prefill}
        return {kind: rate.profile for kind, rate in rates.items() if rate.profile is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Results at all concurrencies, with machine and setting; no roofline where none is known."""

    machine: dict[str, object]
    workload: dict[str, object]
    roofline: Roofline | None
    results: tuple[ConcurrencyResult, ...]


def engine_config(
    config: EngineConfig, workload: Workload, default_token_budget: int, trained: int
) -> EngineConfig:
    """With enough rows and, unless given, a fitting context. Raises ConfigError where a run fits
    neither that nor the model's `trained` positions."""
    budget = config.max_num_batched_tokens or default_token_budget
    filling = 2 * -(-budget // workload.input_len) + 1  # a step's prompts, and the next one's
    rows = max(config.max_num_seqs or 1, workload.most_rows, min(filling, budget))
    tokens = max(workload.most_tokens(each, budget) for each in workload.concurrency)
    return replace(
        config,
        max_num_seqs=min(rows, MAX_NUM_SEQS_BOUND),
        max_model_len=fitting_context(workload.input_len + tokens, config.max_model_len, trained),
    )


def _ignore(_: object) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputWatch:
    """Called with what is being measured, and with what is known of a `Throughput` so far."""

    report: OnStatus = _ignore
    on_machine: Callable[[Mapping[str, object]], None] = _ignore
    on_workload: Callable[[Mapping[str, object]], None] = _ignore
    on_result: Callable[[ConcurrencyResult], None] = _ignore


def measure_throughput(
    model: str | Path | None,
    config: EngineConfig,
    workload: Workload,
    watch: ThroughputWatch,
    backends: Backends = BACKENDS,
) -> Throughput:
    """The roofline is measured around each run on a CPU. Raises CheckpointError, ConfigError,
    DeviceUnavailableError, RunnerError."""
    checkpoint = find_configured(model, config, backends)
    traits = describe_backend(config, checkpoint, backends)
    if workload.profile and traits.ops != "native":
        raise ConfigError(f"--profile needs the native ops; this engine runs the {traits.ops} ops")
    trained = checkpoint.outline.max_position_embeddings
    fitted = engine_config(config, workload, traits.max_num_batched_tokens, trained)
    instruments = find_backend(config.backend, backends).open_instruments(traits.ops)
    machine = describe_machine(instruments)
    watch.on_machine(machine)
    watch.report("loading the model")
    loaded = load_model(model, fitted, backends=backends)
    try:
        described = _describe(model, workload, loaded.plan, fitted)
        watch.on_workload(described)
        watch.report("measuring the machine")
        budget = loaded.core.limits.max_num_batched_tokens
        runs = _Runs(
            core=loaded.core,
            workload=workload,
            remaining=RemainingTime(workload=workload, token_budget=budget),
            bound=_bound_of(loaded, instruments),
            random=random.Random(fitted.seed),  # noqa: S311 - prompts, not secrets
            expert_counter=instruments if _counts_experts(loaded) else None,
        )
        results: list[ConcurrencyResult] = []
        for rows in workload.concurrency:
            result = runs.measure(rows, watch.report)
            if workload.profile:
                watch.report(f"{rows} rows: profiling")
                result = runs.add_profiles(result, instruments)
            results.append(result)
            watch.on_result(result)
    finally:
        loaded.close()
    rooflines = [one for each in results for one in each.rooflines]
    return Throughput(
        machine=machine,
        workload=described,
        roofline=Roofline.median_of(rooflines) if rooflines else None,
        results=tuple(results),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    cost: ModelCost
    probe: RooflineProbe


def _bound_of(loaded: LoadedModel, instruments: Instruments | None) -> _Bound | None:
    """None unless rates are measured: of the processor, or of a card's tensor cores and memory."""
    plan, checkpoint = loaded.plan, loaded.checkpoint
    _, _, device = plan.traits.name.partition(":")
    dtype: ProductDType = "int8" if plan.is_quantised else plan.dtype
    is_card = plan.traits.ops == "cuda" and dtype != "float32"
    if not is_card and (device != "cpu" or plan.traits.device_memory_bytes is not None):
        return None
    cost = ModelCost.of(
        checkpoint.config,
        plan.dtype,
        plan.quantization,
        held_formats(checkpoint.config, checkpoint.weights),
        kv_cache_dtype=plan.kv_cache_dtype,
    )
    probe = RooflineProbe(instruments, dtype)
    return _Bound(cost=cost, probe=probe)


def _counts_experts(loaded: LoadedModel) -> bool:
    return loaded.plan.traits.ops == "native" and loaded.checkpoint.config.experts is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    """The runs on one engine."""

    core: EngineCore
    workload: Workload
    remaining: RemainingTime
    bound: _Bound | None
    random: random.Random
    expert_counter: Instruments | None

    def measure(self, rows: int, report: OnStatus) -> ConcurrencyResult:
        workload, budget = self.workload, self.core.limits.max_num_batched_tokens
        where = "1 row" if rows == 1 else f"{rows} rows"
        report(f"{where}: warming up{self._left_text()}")
        self._decode(rows, min(WARM_TOKENS, workload.output_len))
        self._prefill(rows)
        decode: list[RatedRun] = []
        prefill: list[RatedRun] = []
        for repeat in range(workload.repeats):
            report(f"{where}: run {repeat + 1} of {workload.repeats}{self._left_text()}")
            start_s = time.perf_counter()
            decode.append(
                self._rate(lambda: self._decode(rows, workload.output_len, self.expert_counter))
            )
            prefill.append(self._rate(lambda: self._prefill(rows)))
            self.remaining.add(
                rows,
                time.perf_counter() - start_s,
                decode_tok_s=decode[-1].run.tokens_per_s,
                prefill_tok_s=prefill[-1].run.tokens_per_s,
            )
        cost = None if self.bound is None else self.bound.cost
        prompts = Prompts(
            count=workload.num_prefill_prompts(rows, budget),
            length=workload.input_len,
            token_budget=budget,
        )
        return ConcurrencyResult(
            concurrency=rows,
            decode=Rate(
                runs=tuple(decode),
                cost=cost
                and cost.decode_step(
                    rows, decode[0].run.context, touched_bytes([each.run for each in decode])
                ),
                num_tokens=rows,
            ),
            prefill=Rate(
                runs=tuple(prefill),
                cost=cost and cost.prefill(prompts),
                num_tokens=prompts.num_tokens,
            ),
        )

    def add_profiles(
        self, result: ConcurrencyResult, profiler: Instruments | None
    ) -> ConcurrencyResult:
        """Of one more run of each kind."""
        decode = self._decode(result.concurrency, self.workload.output_len, profiler)
        prefill = self._prefill(result.concurrency, profiler)
        calls = calls_of_a_step(prefill.ops)
        return replace(
            result,
            decode=replace(result.decode, profile=step_profile(decode, calls)),
            prefill=replace(result.prefill, profile=step_profile(prefill, calls)),
        )

    def _left_text(self) -> str:
        seconds = self.remaining.seconds
        return "" if seconds is None else f", about {about(seconds)} left"

    def _rate(self, run: Callable[[], Timed]) -> RatedRun:
        if self.bound is None:
            return RatedRun(run=run(), roofline=None)
        before = self.bound.probe.measure(PROBE_REPEATS)
        timed = run()
        after = self.bound.probe.measure(PROBE_REPEATS)
        return RatedRun(run=timed, roofline=Roofline.median_of([before, after]))

    def _decode(self, rows: int, output_len: int, profiler: Instruments | None = None) -> Timed:
        task = DecodeTask(
            prompts=self._prompts(rows),
            output_len=output_len,
            max_tokens=self.workload.most_tokens(rows, self.core.limits.max_num_batched_tokens),
            num_sampled=self.workload.num_sampled(rows),
        )
        return run_decode(self.core, task, time.perf_counter, profiler)

    def _prefill(self, rows: int, profiler: Instruments | None = None) -> Timed:
        budget = self.core.limits.max_num_batched_tokens
        prompts = self._prompts(self.workload.num_prefill_prompts(rows, budget))
        return run_prefill(self.core, prompts, time.perf_counter, profiler)

    def _prompts(self, count: int) -> list[tuple[int, ...]]:
        ids = text_ids(self.core)
        return [tuple(self.random.choices(ids, k=self.workload.input_len)) for _ in range(count)]


def _describe(
    model: str | Path | None, workload: Workload, plan: EnginePlan, config: EngineConfig
) -> dict[str, object]:
    return {
        "model": "bundled" if model is None else Path(model).name,
        **{name: getattr(workload, name) for name in _SETTINGS},
        "backend": plan.traits.name,
        "ops": plan.traits.ops,
        "dtype": plan.dtype,
        "quantization": plan.quantization,
        "kv_cache_dtype": plan.kv_cache_dtype,
        "scheduler": config.scheduler,
        "max_num_seqs": plan.limits.max_num_seqs,
        "max_num_batched_tokens": plan.limits.max_num_batched_tokens,
        "max_model_len": plan.limits.max_model_len,
    }
