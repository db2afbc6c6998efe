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

from cadenza import EngineConfig, EngineCore
from cadenza.bench.bounds import ModelCost, Prompts, Roofline, Work
from cadenza.bench.machine import describe_machine
from cadenza.bench.profile import StepProfile, calls_of_a_step, step_profile
from cadenza.bench.roofline import measure_roofline
from cadenza.bench.runs import DecodeTask, Prompt, Timed, run_decode, run_prefill
from cadenza.config import MAX_NUM_SEQS_BOUND
from cadenza.engine.build import describe_backend, find_checkpoint, load_model
from cadenza.engine.instruments import NativeInstruments, native_instruments
from cadenza.engine.plan import EnginePlan
from cadenza.errors import ConfigError

PREFILL_STEPS = 4
"""A prefill run has at least so many full steps' worth of prompts."""

MAX_CONCURRENCIES = 64
MAX_REPEATS = 1000
_WARM_TOKENS = 8

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is played.

    Raises:
        ConfigError: a number is out of bounds.
    """

    input_len: int = 128
    output_len: int = 64
    concurrency: tuple[int, ...] = (1, 4, 8, 32, 64)
    repeats: int = 3
    profile: bool = False

    def __post_init__(self) -> None:
        _check("input-len", self.input_len, 1, 1 << 24)
        _check("output-len", self.output_len, 2, 1 << 24)
        _check("repeats", self.repeats, 1, MAX_REPEATS)
        _check("concurrency (how many values)", len(self.concurrency), 1, MAX_CONCURRENCIES)
        for rows in self.concurrency:
            _check("concurrency", rows, 1, MAX_NUM_SEQS_BOUND)

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
class Measured:
    """One concurrency: every repeat's run, the bounds' work, and a profiled run of each kind."""

    concurrency: int
    decode: tuple[Timed, ...]
    prefill: tuple[Timed, ...]
    decode_work: Work
    prefill_work: Work
    decode_profile: StepProfile | None = None
    prefill_profile: StepProfile | None = None

    @property
    def decode_tok_s(self) -> float:
        return statistics.median(run.tokens_per_s for run in self.decode)

    @property
    def prefill_tok_s(self) -> float:
        return statistics.median(run.tokens_per_s for run in self.prefill)

    def decode_bound_tok_s(self, roofline: Roofline) -> float:
        return self.concurrency / self.decode_work.bound_s(roofline)

    def prefill_bound_tok_s(self, roofline: Roofline) -> float:
        return self.prefill[0].num_tokens / self.prefill_work.bound_s(roofline)


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
    """Loads the model, measures, and measures the machine before and after.

    Raises:
        CheckpointError, ConfigError, DeviceUnavailableError: it cannot be loaded or measured.
        RunnerError: a request failed.
    """
    traits = describe_backend(config, find_checkpoint(model).config)
    if traits.device_memory_bytes is not None:
        raise ConfigError(
            f"the bound is known for cpu only, not for {traits.name}; use --device cpu"
        )
    if workload.profile and traits.ops != "native":
        raise ConfigError(f"--profile counts in the native ops; here run the {traits.ops} ones")
    fitted = engine_config(config, workload, traits.max_num_batched_tokens)
    instruments = native_instruments()
    report("loading the model")
    loaded = load_model(model, fitted)
    try:
        plan = loaded.plan
        report("measuring the machine")
        roofline = measure_roofline(instruments, plan.dtype)
        stage = _Stage(loaded.core, workload, fitted.seed, report, instruments)
        cost = ModelCost.of(loaded.checkpoint.config, plan.dtype)
        results = tuple(stage.measure(rows, cost) for rows in workload.concurrency)
        roofline = roofline.better_of(measure_roofline(instruments, plan.dtype))
    finally:
        loaded.close()
    return Throughput(
        machine=describe_machine(instruments),
        workload=_describe(model, workload, plan, fitted),
        roofline=roofline,
        results=results,
    )


class _Stage:
    """Plays runs on one engine."""

    def __init__(
        self,
        core: EngineCore,
        workload: Workload,
        seed: int,
        report: Report,
        instruments: NativeInstruments | None,
    ) -> None:
        self._core = core
        self._workload = workload
        self._report = report
        self._instruments = instruments
        self._budget = core.limits.max_num_batched_tokens
        self._random = random.Random(seed)  # noqa: S311 - prompts, not secrets

    def measure(self, rows: int, cost: ModelCost) -> Measured:
        """Warm-up runs, the repeats, and a profiled run where it is wanted."""
        workload = self._workload
        self._report(f"concurrency {rows}: warming up")
        self._decode(rows, min(_WARM_TOKENS, workload.output_len))
        self._prefill(rows)
        decode: list[Timed] = []
        prefill: list[Timed] = []
        for repeat in range(workload.repeats):
            self._report(f"concurrency {rows}: run {repeat + 1} of {workload.repeats}")
            decode.append(self._decode(rows, workload.output_len))
            prefill.append(self._prefill(rows))
        measured = Measured(
            concurrency=rows,
            decode=tuple(decode),
            prefill=tuple(prefill),
            decode_work=cost.decode_step(rows, decode[0].context),
            prefill_work=cost.prefill(
                Prompts(
                    count=workload.num_prefill_prompts(rows, self._budget),
                    length=workload.input_len,
                    token_budget=self._budget,
                )
            ),
        )
        return self._with_profile(measured) if workload.profile else measured

    def _with_profile(self, measured: Measured) -> Measured:
        rows = measured.concurrency
        self._report(f"concurrency {rows}: profiling")
        decode = self._decode(rows, self._workload.output_len, self._instruments)
        prefill = self._prefill(rows, self._instruments)
        calls = calls_of_a_step(prefill.ops)
        return replace(
            measured,
            decode_profile=step_profile(decode, calls),
            prefill_profile=step_profile(prefill, calls),
        )

    def _decode(
        self, rows: int, output_len: int, profiler: NativeInstruments | None = None
    ) -> Timed:
        task = DecodeTask(
            prompts=self._prompts(rows),
            output_len=output_len,
            max_tokens=self._workload.most_tokens(rows, self._budget),
        )
        return run_decode(self._core, task, time.perf_counter, profiler)

    def _prefill(self, rows: int, profiler: NativeInstruments | None = None) -> Timed:
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
        "results": [_result_json(each, found.roofline) for each in found.results],
    }


def _result_json(found: Measured, roofline: Roofline) -> dict[str, object]:
    decode_bound = found.decode_bound_tok_s(roofline)
    prefill_bound = found.prefill_bound_tok_s(roofline)
    result: dict[str, object] = {
        "concurrency": found.concurrency,
        "decode_tok_s": found.decode_tok_s,
        "prefill_tok_s": found.prefill_tok_s,
        "decode_share_of_bound": found.decode_tok_s / decode_bound,
        "prefill_share_of_bound": found.prefill_tok_s / prefill_bound,
        "decode_bound_tok_s": decode_bound,
        "prefill_bound_tok_s": prefill_bound,
        "decode_limit": found.decode_work.limit(roofline),
        "prefill_limit": found.prefill_work.limit(roofline),
        "decode_tok_s_runs": [run.tokens_per_s for run in found.decode],
        "prefill_tok_s_runs": [run.tokens_per_s for run in found.prefill],
        "average_context": found.decode[0].context,
        "num_decode_steps": found.decode[0].num_steps,
        "num_prefill_tokens": found.prefill[0].num_tokens,
    }
    if found.decode_profile is not None and found.prefill_profile is not None:
        result["profile"] = {
            "decode": _profile_json(found.decode_profile),
            "prefill": _profile_json(found.prefill_profile),
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
