"""`cadenza bench batching`: the order of its runs, and the comparison of their tokens. Every mode
plays the same requests, each run in cache salts of its own. Invariant: no prompt is found in the
prefix cache, unless the setting is about that.
"""

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cadenza import EngineConfig, EngineCore
from cadenza.backends import BACKENDS, Backends, find_backend
from cadenza.bench import OnStatus
from cadenza.bench.machine import describe_machine
from cadenza.bench.runs import DecodeTask, run_decode, run_prefill, text_ids
from cadenza.bench.workloads import PlannedRequest, Workload, fitting_context
from cadenza.errors import ConfigError
from cadenza.frontend.loaded_model import load_model
from cadenza.loading.build import describe_backend, find_configured
from cadenza.loading.engine_plan import EnginePlan
from cadenza_bench.batching.bars import Bar, Measured, StepRates, bars_of, ideal_gain, waiting
from cadenza_bench.batching.figures import (
    Difference,
    ModeFigures,
    PlayedRun,
    first_token_difference,
)
from cadenza_bench.batching.plan import BatchingLoad, BatchingMode, BatchingOptions, BatchingPlan
from cadenza_bench.batching.player import POLICIES, BatchPlayer, PlayedRequest, PlayTask, Timing

RATE_STEPS = 16  # decode steps of a measured rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The runs of a plan; `difference` is None if all have the same tokens."""

    figures: Sequence[ModeFigures]
    rates: StepRates | None
    bars: Sequence[Bar]
    difference: Difference | None

    @property
    def all_bars_met(self) -> bool:
        return all(bar.is_met for bar in self.bars)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingResult:
    """What was compared, with the machine and the workload."""

    machine: dict[str, object]
    workload: dict[str, object]
    plan: BatchingPlan
    compared: Compared


def measure_batching(
    model: str | Path | None,
    config: EngineConfig,
    options: BatchingOptions,
    report: OnStatus,
    backends: Backends = BACKENDS,
) -> BatchingResult:
    """Loads the model and plays the plan. Raises CheckpointError, ConfigError,
    DeviceUnavailableError where it cannot be loaded or measured, RunnerError where a request
    failed."""
    checkpoint = find_configured(model, config, backends)
    trained = checkpoint.outline.max_position_embeddings
    plan = options.plan().within(min(trained, config.max_model_len or trained))
    traits = describe_backend(config, checkpoint, backends)
    fitted = fitted_config(config, plan, traits.max_num_batched_tokens, trained)
    report("loading the model")
    loaded = load_model(model, fitted, backends=backends)
    try:
        compared = compare_modes(loaded.core, plan, report)
        described = _describe(model, plan, loaded.plan)
    finally:
        loaded.close()
    instruments = find_backend(config.backend, backends).open_instruments()
    return BatchingResult(
        machine=describe_machine(instruments), workload=described, plan=plan, compared=compared
    )


def fitted_config(
    config: EngineConfig, plan: BatchingPlan, default_token_budget: int, trained: int
) -> EngineConfig:
    """`config` with the plan's rows and, unless it was given, a fitting context; `trained`: the
    positions of the model. Raises ConfigError where the runs do not fit, or the engine would decide
    what the modes are to decide."""
    if config.batching != "continuous":
        raise ConfigError(f"--batching {config.batching}: the modes batch; give --modes instead")
    if config.prefix_cache_disk is not None:
        raise ConfigError("--prefix-cache-disk: the runs store no pages; leave it out")
    if plan.system_len and not config.enable_prefix_caching:
        raise ConfigError("setting D measures the prefix cache; leave it on")
    needed = plan.longest_prompt + plan.longest_answer
    if not plan.system_len:
        sizes = rate_workload(plan)
        budget = config.max_num_batched_tokens or default_token_budget
        needed = max(needed, sizes.input_len + sizes.most_tokens(plan.rows, budget))
    length = fitting_context(needed, config.max_model_len, trained)
    return replace(config, max_num_seqs=plan.rows, max_model_len=length)


def rate_workload(plan: BatchingPlan) -> Workload:
    """The runs that measure steps: prompts of the average length, by the number of rows."""
    by_two = [1 << power for power in range(plan.rows.bit_length()) if 1 << power < plan.rows]
    return Workload(
        input_len=sum(plan.prompt_lens) // 2,
        output_len=RATE_STEPS,
        concurrency=(*by_two, plan.rows),
    )


def compare_modes(
    core: EngineCore, plan: BatchingPlan, report: OnStatus, timing: Timing | None = None
) -> Compared:
    """Plays the plan on an idle engine. Raises ConfigError where the KV pool has no room for all
    rows, RunnerError where a request failed."""
    _check_room(core, plan)
    requests = tuple(_as_text(each, core) for each in plan.requests(core.runner.vocab_size))
    stage = _Stage(
        core=core,
        plan=plan,
        requests=requests,
        timing=timing or Timing(),
        random=random.Random(f"bench batching rates {plan.seed}"),
    )
    has_rates = not plan.system_len
    rates: list[StepRates] = []
    runs: list[PlayedRun] = []
    for number in range(plan.repeats):
        if has_rates:
            report(f"round {number + 1} of {plan.repeats}: measuring steps")
            rates.append(stage.rates())
        play = stage.prefix_runs if plan.system_len else stage.mode_runs
        runs += play(number + 1, report)
    found = _median_rates(rates) if rates else None
    figures = _figures(runs, plan, requests, found)
    by_name = {(each.mode, each.load): each for each in figures}
    measured = Measured(plan=plan, requests=requests, figures=by_name, rates=found)
    return Compared(
        figures=figures,
        rates=found,
        bars=bars_of(measured),
        difference=first_token_difference(runs),
    )


def _check_room(core: EngineCore, plan: BatchingPlan) -> None:
    limits = core.limits
    longest = plan.longest_prompt + plan.longest_answer
    needed = plan.rows * -(-longest // limits.page_size)
    if needed > limits.num_pages:
        raise ConfigError(
            f"{plan.rows} requests of {longest} tokens need {needed} KV pages, and there are "
            f"{limits.num_pages}; raise --kv-cache-memory-bytes or --num-pages, or lower "
            f"--max-num-seqs"
        )


def _as_text(request: PlannedRequest, core: EngineCore) -> PlannedRequest:
    """Without the placeholder of images, which stands for nothing here."""
    images = core.limits.images
    if images is None:
        return request
    ids = (each - (each == images.token_id) for each in request.prompt_token_ids)
    return replace(request, prompt_token_ids=tuple(ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    core: EngineCore
    plan: BatchingPlan
    requests: Sequence[PlannedRequest]
    timing: Timing
    random: random.Random  # of the prompts that measure steps

    def mode_runs(self, number: int, report: OnStatus) -> Iterator[PlayedRun]:
        """Of one round: every load in every mode, in every second round from the last one."""
        modes = self.plan.modes if number % 2 else self.plan.modes[::-1]
        for load in self.plan.loads:
            arrivals_s = self.plan.arrivals_s(load)
            requests = [
                replace(each, after_s=after_s)
                for each, after_s in zip(self.requests, arrivals_s, strict=True)
            ]
            for mode in modes:
                task = PlayTask(
                    policy=POLICIES[mode],
                    rows=self.plan.rows,
                    requests=requests,
                    salts=[f"{number} {load.label} {mode}"] * len(requests),
                    clients=load.clients,
                )
                what = f"round {number} of {self.plan.repeats}, {load.label}, {mode}"
                played, num_steps = self._play(task, what, report)
                yield PlayedRun(
                    mode=mode, load=load, round=number, requests=played, num_steps=num_steps
                )

    def prefix_runs(self, number: int, report: OnStatus) -> Iterator[PlayedRun]:
        """Of one round: the same questions one by one, each as if nothing were known, and behind a
        first one that leaves the system prompt in the prefix cache."""
        (load,) = self.plan.loads
        count = len(self.requests)
        hit = f"{number} hit"
        system = self.requests[0].prompt_token_ids[: self.plan.system_len]
        first = PlannedRequest(prompt_token_ids=system, max_tokens=1)
        salts = {"miss": [f"{number} miss {at}" for at in range(count)], "hit": [hit] * count}
        for name in ("miss", "hit") if number % 2 else ("hit", "miss"):
            if name == "hit":  # right before: the misses may push it out
                self._play(_one_by_one([first], [hit]), f"round {number}, system prompt", report)
            task = _one_by_one(self.requests, salts[name])
            what = f"round {number} of {self.plan.repeats}, {name}"
            played, num_steps = self._play(task, what, report)
            yield PlayedRun(
                mode=name, load=load, round=number, requests=played, num_steps=num_steps
            )

    def rates(self) -> StepRates:
        sizes, clock = rate_workload(self.plan), self.timing.clock
        budget = self.core.limits.max_num_batched_tokens
        step_s: dict[int, float] = {}
        for rows in sizes.concurrency:
            task = DecodeTask(
                prompts=self._prompts(rows, sizes.input_len),
                output_len=sizes.output_len,
                max_tokens=sizes.most_tokens(rows, budget),
            )
            step_s[rows] = rows / run_decode(self.core, task, clock).tokens_per_s
        count = sizes.num_prefill_prompts(self.plan.rows, budget)
        prefill = run_prefill(self.core, self._prompts(count, sizes.input_len), clock)
        return StepRates(prefill_tok_s=prefill.tokens_per_s, decode_step_s=step_s)

    def _prompts(self, count: int, length: int) -> list[tuple[int, ...]]:
        ids = text_ids(self.core)
        return [tuple(self.random.choices(ids, k=length)) for _ in range(count)]

    def _play(self, task: PlayTask, what: str, report: OnStatus) -> tuple[list[PlayedRequest], int]:
        """The requests, and the engine's steps until the last of them was handed over."""

        def on_done(done: int) -> None:
            report(f"{what}: {done} of {len(task.requests)} requests")

        report(what)
        player = BatchPlayer(self.core, task, self.timing, on_done)
        played = player.play()
        num_steps = player.num_steps
        player.drain()
        return played, num_steps


def _one_by_one(requests: Sequence[PlannedRequest], salts: Sequence[str]) -> PlayTask:
    policy = POLICIES["sequential"]
    return PlayTask(policy=policy, rows=1, requests=requests, salts=salts, clients=1)


def _median_rates(found: Sequence[StepRates]) -> StepRates:
    return StepRates(
        prefill_tok_s=statistics.median(each.prefill_tok_s for each in found),
        decode_step_s={
            rows: statistics.median(each.decode_step_s[rows] for each in found)
            for rows in found[0].decode_step_s
        },
    )


def _figures(
    runs: Sequence[PlayedRun],
    plan: BatchingPlan,
    requests: Sequence[PlannedRequest],
    rates: StepRates | None,
) -> list[ModeFigures]:
    """Load by load, the modes in the order of the plan."""
    found: list[ModeFigures] = []
    for load in plan.loads:
        own = [run for run in runs if run.load == load]
        if plan.system_len:
            found += [_of_mode(name, load, own) for name in ("miss", "hit")]
            continue
        has_waits = load.is_saturated and len(requests) > plan.rows
        continuous = replace(_of_mode("continuous", load, own), has_waits=has_waits)
        found += [
            continuous
            if mode == "continuous"
            else replace(
                _of_mode(mode, load, own),
                continuous=continuous,
                has_waits=has_waits,
                is_whole=POLICIES[mode].is_whole,
                **_limits(mode, requests, plan.rows, rates if has_waits else None),
            )
            for mode in plan.modes
        ]
    return found


def _of_mode(name: str, load: BatchingLoad, runs: Sequence[PlayedRun]) -> ModeFigures:
    return ModeFigures(mode=name, load=load, runs=[run for run in runs if run.mode == name])


def _limits(
    mode: BatchingMode, requests: Sequence[PlannedRequest], rows: int, rates: StepRates | None
) -> dict[str, Any]:
    if rates is None:
        return {}
    first = waiting(mode, requests, rows)
    lens = [each.max_tokens for each in first]
    return {
        "ideal_gain": ideal_gain(mode, lens, rows),
        "allowed_gain": rates.allowed_gain(mode, first, rows),
    }


def _describe(
    model: str | Path | None, plan: BatchingPlan, engine: EnginePlan
) -> dict[str, object]:
    return {
        "model": "bundled" if model is None else Path(model).name,
        "setting": plan.setting,
        "rows": plan.rows,
        "modes": list(plan.modes) or ["miss", "hit"],
        "loads": [each.label for each in plan.loads],
        "num_requests": plan.num_requests,
        "input_len": list(plan.prompt_lens),
        "output_len": list(plan.output_lens),
        "long_answers": plan.long_answers,
        "system_len": plan.system_len,
        "repeats": plan.repeats,
        "seed": plan.seed,
        "backend": engine.traits.name,
        "ops": engine.traits.ops,
        "dtype": engine.dtype,
        "quantization": engine.quantization,
        "kv_cache_dtype": engine.kv_cache_dtype,
        "max_num_batched_tokens": engine.limits.max_num_batched_tokens,
    }
