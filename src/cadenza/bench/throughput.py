"""Decode and prefill tokens per second through `EngineCore`, repeated, against their bounds.

Owns the plan of the runs: how many rows, tokens and prompts the engine must take, in which order
they are measured, and the medians. Knows no kernels. Invariant: no two prompts of a benchmark are
alike, so nothing is ever found in the prefix cache.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from cadenza import EngineConfig, EngineCore
from cadenza.backends import find_backend
from cadenza.backends.base import Instruments
from cadenza.bench.bounds import Limit, ModelCost, Prompts, Roofline, Work
from cadenza.bench.machine import describe_machine
from cadenza.bench.profile import StepProfile, calls_of_a_step, step_profile
from cadenza.bench.roofline import RooflineProbe
from cadenza.bench.runs import DecodeTask, Prompt, Timed, run_decode, run_prefill
from cadenza.config import MAX_NUM_SEQS_BOUND
from cadenza.errors import ConfigError
from cadenza.frontend.loaded_model import load_model
from cadenza.loading.build import describe_backend, find_checkpoint
from cadenza.loading.plan import EnginePlan

PREFILL_STEPS = 4
"""A prefill run has at least so many full steps' worth of prompts."""

PROBE_REPEATS = 3
"""Of each measurement of the machine, before and after each run."""

MAX_CONCURRENCIES = 64
MAX_REPEATS = 1000
_WARM_TOKENS = 8

Report = Callable[[str], None]
SampledRows = Literal["none", "one", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is played.

    Raises:
        ConfigError: a number is out of bounds.
    """

    input_len: int = 128
    output_len: int = 64
    concurrency: tuple[int, ...] = (1, 4, 8, 32, 64)
    repeats: int = 5
    profile: bool = False
    sampling: SampledRows = "none"

    def __post_init__(self) -> None:
        _check("input-len", self.input_len, 1, 1 << 24)
        _check("output-len", self.output_len, 2, 1 << 24)
        _check("repeats", self.repeats, 1, MAX_REPEATS)
        _check("concurrency (how many values)", len(self.concurrency), 1, MAX_CONCURRENCIES)
        if self.sampling not in get_args(SampledRows):
            raise ConfigError(f"--sampling {self.sampling} must be none, one or all")
        for rows in self.concurrency:
            _check("concurrency", rows, 1, MAX_NUM_SEQS_BOUND)

    def num_sampled(self, rows: int) -> int:
        """Of so many rows, how many are sampled with top-p and penalties."""
        return {"none": 0, "one": 1, "all": rows}[self.sampling]

    @property
    def most_rows(self) -> int:
        return max(self.concurrency)

    def num_prefill_prompts(self, rows: int, token_budget: int) -> int:
        return max(rows, -(-PREFILL_STEPS * token_budget // self.input_len))

    def most_tokens(self, rows: int, token_budget: int) -> int:
        """Of a row that starts first, until the one that starts last has its output.

        While a prompt is computed at most `rows` - 1 rows decode beside it.
        """
        for_prompts = max(1, token_budget - rows + 1)
        return self.output_len + -(-rows * self.input_len // for_prompts) + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A run, and what the machine could do just before and after it."""

    run: Timed
    roofline: Roofline


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Every repeat of one kind of run, against the bound of its work.

    `work` is what `num_tokens` tokens need. A run's share of its bound takes the machine as it was
    around that run, since what a machine's memory gives can change from one second to the next.
    """

    runs: tuple[Judged, ...]
    work: Work
    num_tokens: int
    profile: StepProfile | None = None

    @property
    def tok_s(self) -> float:
        return statistics.median(self.tok_s_runs)

    @property
    def bound_tok_s(self) -> float:
        return statistics.median(self._bound_tok_s(each) for each in self.runs)

    @property
    def share_of_bound(self) -> float:
        return statistics.median(self.share_runs)

    @property
    def tok_s_runs(self) -> list[float]:
        return [each.run.tokens_per_s for each in self.runs]

    @property
    def share_runs(self) -> list[float]:
        return [each.run.tokens_per_s / self._bound_tok_s(each) for each in self.runs]

    @property
    def limit(self) -> Limit:
        """Which of reading and multiplying sets the bound."""
        return self.work.limit(Roofline.median_of([each.roofline for each in self.runs]))

    def _bound_tok_s(self, judged: Judged) -> float:
        return self.num_tokens / self.work.bound_s(judged.roofline)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One concurrency."""

    concurrency: int
    decode: Rate
    prefill: Rate

    @property
    def rooflines(self) -> list[Roofline]:
        return [each.roofline for rate in (self.decode, self.prefill) for each in rate.runs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """A whole benchmark."""

    machine: dict[str, object]
    workload: dict[str, object]
    roofline: Roofline
    results: tuple[Measured, ...]


def engine_config(
    config: EngineConfig, workload: Workload, default_token_budget: int
) -> EngineConfig:
    """`config` with room for the workload: rows are raised where it needs more, the context is
    fitted where nothing was said of it."""
    budget = config.max_num_batched_tokens or default_token_budget
    filling = 2 * -(-budget // workload.input_len) + 1  # a step's prompts, and the next one's
    rows = max(config.max_num_seqs, workload.most_rows, min(filling, budget))
    tokens = max(workload.most_tokens(each, budget) for each in workload.concurrency)
    return replace(
        config,
        max_num_seqs=min(rows, MAX_NUM_SEQS_BOUND),
        max_model_len=config.max_model_len or workload.input_len + tokens,
    )


def measure_throughput(
    model: str | Path | None, config: EngineConfig, workload: Workload, report: Report
) -> Throughput:
    """Loads the model and plays every run, with the machine measured around each.

    Raises:
        CheckpointError, ConfigError, DeviceUnavailableError: it cannot be loaded or measured.
        RunnerError: a request failed.
    """
    traits = describe_backend(config, find_checkpoint(model, revision=config.revision).config)
    if traits.device_memory_bytes is not None:
        raise ConfigError(
            f"the bound is known for cpu only, not for {traits.name}; use --device cpu"
        )
    if workload.profile and traits.ops != "native":
        raise ConfigError(f"--profile counts in the native ops; here run the {traits.ops} ones")
    fitted = engine_config(config, workload, traits.max_num_batched_tokens)
    instruments = find_backend(config.backend).open_instruments()
    report("loading the model")
    loaded = load_model(model, fitted)
    try:
        plan = loaded.plan
        meter = _Meter(instruments, RooflineProbe(instruments, plan.dtype))
        stage = _Stage(loaded.core, workload, fitted.seed, report, meter)
        cost = ModelCost.of(loaded.checkpoint.config, plan.dtype)
        results = tuple(stage.measure(rows, cost) for rows in workload.concurrency)
    finally:
        loaded.close()
    return Throughput(
        machine=describe_machine(instruments),
        workload=_describe(model, workload, plan, fitted),
        roofline=Roofline.median_of([one for each in results for one in each.rooflines]),
        results=results,
    )


@dataclass(frozen=True, slots=True)
class _Meter:
    """What measures the machine around a run."""

    instruments: Instruments | None
    probe: RooflineProbe

    def judge(self, play: Callable[[], Timed]) -> Judged:
        before = self.probe.measure(PROBE_REPEATS)
        run = play()
        after = self.probe.measure(PROBE_REPEATS)
        return Judged(run=run, roofline=Roofline.median_of([before, after]))


class _Stage:
    """Plays runs on one engine."""

    def __init__(
        self,
        core: EngineCore,
        workload: Workload,
        seed: int,
        report: Report,
        meter: _Meter,
    ) -> None:
        self._core = core
        self._workload = workload
        self._report = report
        self._meter = meter
        self._budget = core.limits.max_num_batched_tokens
        self._random = random.Random(seed)  # noqa: S311 - prompts, not secrets

    def measure(self, rows: int, cost: ModelCost) -> Measured:
        """Warm-up runs, the repeats, and a profiled run where it is wanted."""
        workload = self._workload
        self._report(f"concurrency {rows}: warming up")
        self._decode(rows, min(_WARM_TOKENS, workload.output_len))
        self._prefill(rows)
        decode: list[Judged] = []
        prefill: list[Judged] = []
        for repeat in range(workload.repeats):
            self._report(f"concurrency {rows}: run {repeat + 1} of {workload.repeats}")
            decode.append(self._meter.judge(lambda: self._decode(rows, workload.output_len)))
            prefill.append(self._meter.judge(lambda: self._prefill(rows)))
        prompts = Prompts(
            count=workload.num_prefill_prompts(rows, self._budget),
            length=workload.input_len,
            token_budget=self._budget,
        )
        decode_work = cost.decode_step(rows, decode[0].run.context)
        measured = Measured(
            concurrency=rows,
            decode=Rate(runs=tuple(decode), work=decode_work, num_tokens=rows),
            prefill=Rate(
                runs=tuple(prefill), work=cost.prefill(prompts), num_tokens=prompts.num_tokens
            ),
        )
        return self._with_profile(measured) if workload.profile else measured

    def _with_profile(self, measured: Measured) -> Measured:
        rows = measured.concurrency
        self._report(f"concurrency {rows}: profiling")
        decode = self._decode(rows, self._workload.output_len, self._meter.instruments)
        prefill = self._prefill(rows, self._meter.instruments)
        calls = calls_of_a_step(prefill.ops)
        return replace(
            measured,
            decode=replace(measured.decode, profile=step_profile(decode, calls)),
            prefill=replace(measured.prefill, profile=step_profile(prefill, calls)),
        )

    def _decode(self, rows: int, output_len: int, profiler: Instruments | None = None) -> Timed:
        task = DecodeTask(
            prompts=self._prompts(rows),
            output_len=output_len,
            max_tokens=self._workload.most_tokens(rows, self._budget),
            num_sampled=self._workload.num_sampled(rows),
        )
        return run_decode(self._core, task, time.perf_counter, profiler)

    def _prefill(self, rows: int, profiler: Instruments | None = None) -> Timed:
        prompts = self._prompts(self._workload.num_prefill_prompts(rows, self._budget))
        return run_prefill(self._core, prompts, time.perf_counter, profiler)

    def _prompts(self, count: int) -> list[Prompt]:
        vocab_size = self._core.runner.vocab_size
        length = self._workload.input_len
        return [
            tuple(self._random.randrange(vocab_size) for _ in range(length)) for _ in range(count)
        ]


def as_json(found: Throughput) -> dict[str, object]:
    """The one object that `--json` prints."""
    return {
        "machine": found.machine,
        "workload": found.workload,
        "roofline": {"read_gb_s": found.roofline.read_gb_s, "gflop_s": found.roofline.gflop_s},
        "results": [_result_json(each) for each in found.results],
    }


def _result_json(found: Measured) -> dict[str, object]:
    result: dict[str, object] = {"concurrency": found.concurrency}
    for kind, rate in (("decode", found.decode), ("prefill", found.prefill)):
        result |= {
            f"{kind}_tok_s": rate.tok_s,
            f"{kind}_share_of_bound": rate.share_of_bound,
            f"{kind}_bound_tok_s": rate.bound_tok_s,
            f"{kind}_limit": rate.limit,
            f"{kind}_tok_s_runs": rate.tok_s_runs,
            f"{kind}_share_runs": rate.share_runs,
        }
    decode = found.decode.runs[0].run
    result |= {
        "average_context": decode.context,
        "num_decode_steps": decode.num_steps,
        "num_prefill_tokens": found.prefill.num_tokens,
    }
    if found.decode.profile is not None and found.prefill.profile is not None:
        result["profile"] = {
            "decode": _profile_json(found.decode.profile),
            "prefill": _profile_json(found.prefill.profile),
        }
    return result


def _profile_json(profile: StepProfile) -> dict[str, object]:
    return {
        "step_ms": profile.step_ms,
        "kernels_ms": profile.kernels_ms,
        "rest_ms": profile.rest_ms,
        "read_bytes": profile.read_bytes,
        "ops": [asdict(share) for share in profile.ops],
    }


def _describe(
    model: str | Path | None, workload: Workload, plan: EnginePlan, config: EngineConfig
) -> dict[str, object]:
    return {
        "model": "bundled" if model is None else Path(model).name,
        "input_len": workload.input_len,
        "output_len": workload.output_len,
        "repeats": workload.repeats,
        "sampling": workload.sampling,
        "backend": plan.traits.name,
        "ops": plan.traits.ops,
        "dtype": plan.dtype,
        "scheduler": config.scheduler,
        "max_num_seqs": plan.limits.max_num_seqs,
        "max_num_batched_tokens": plan.limits.max_num_batched_tokens,
        "max_model_len": plan.limits.max_model_len,
    }


def _check(flag: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"--{flag} {value} must be a whole number from {low} to {high}")
