"""What sparse prefill gains and costs on one engine: times to the first token, right answers of
tasks, and likeness to whole prompts, beside simpler choices of chunks. Invariants: all ways keep as
many chunks of a prompt; timed prompts have nothing in common, so that nothing is found in the
prefix cache."""

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cadenza import EngineConfig, EngineCore
from cadenza.backends import BACKENDS, Backends, find_backend
from cadenza.bench import OnStatus
from cadenza.bench.machine import describe_machine
from cadenza.bench.runs import text_ids
from cadenza.errors import ConfigError
from cadenza.frontend.loaded_model import LoadedModel, load_model
from cadenza.loading.draft import PrefillCost, cost_of_shape, sparse_gain
from cadenza.sparse_prefill import CHUNK, KeptTokens, SparsePrefill, SpecPrefillConfig, kept_of_mask
from cadenza_bench.spec_prefill.options import SHORTEST, SpecPrefillOptions
from cadenza_bench.spec_prefill.runs import (
    BASELINES,
    Played,
    chosen,
    divergence,
    first_token_s,
    forced_requests,
    greedy,
    run_all,
)
from cadenza_bench.spec_prefill.tasks import KINDS, Encode, TaskPrompt, make_prompt, make_text

DRAFT = "draft"  # the way of sparse prefill itself, beside `BASELINES`

WAYS = (DRAFT, *BASELINES)
ANSWER_LEN = 32
NUM_DEPTHS = 5
# Of right answers to whole prompts, below which a task says nothing about what was left out.
CEILING = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """How answers to pruned prompts compare with those to whole ones: a lower bound of the mean
    divergence of a token's distribution, and the share of tokens that are the likeliest of both."""

    kl: float
    top_1: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthResult:
    """Of one length and fraction; `likeness` by way, empty without texts."""

    input_len: int
    keep: float
    kept_tokens: int
    whole_s: float
    thinned_s: float
    predicted_ratio: float | None
    likeness: Mapping[str, Likeness]

    @property
    def ttft_ratio(self) -> float:
        return self.whole_s / self.thinned_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """Shares of right answers to a task by one way: with `whole` prompts, and `right` with the
    pruned ones; `recall`: of prompts of which all that was sought was kept; `by_depth`: pairs of
    recall and right answers, where one thing is sought."""

    task: str
    input_len: int
    keep: float
    way: str
    samples: int
    whole: float
    recall: float
    right: float
    by_depth: Mapping[str, tuple[float, float]]

    @property
    def counts(self) -> bool:
        return self.whole >= CEILING


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecPrefillResult:
    """Everything, with the machine and the setting."""

    machine: dict[str, object]
    workload: dict[str, object]
    results: tuple[LengthResult, ...]
    tasks: tuple[TaskResult, ...]

    @property
    def beaten_by(self) -> list[str]:
        """Baselines that give as many right answers as the draft model, over all tasks that
        count."""
        right = {way: self.mean_right(way) for way in WAYS}
        return [way for way in BASELINES if right[way] >= right[DRAFT]]

    def mean_right(self, way: str) -> float:
        """Of the tasks that count; 0 without any."""
        found = [each.right for each in self.tasks if each.way == way and each.counts]
        return statistics.mean(found) if found else 0.0


def measure_spec_prefill(
    model: str | Path | None,
    config: EngineConfig,
    options: SpecPrefillOptions,
    report: OnStatus,
    backends: Backends = BACKENDS,
) -> SpecPrefillResult:
    """Loads the model with its draft and plays everything. Raises CheckpointError, ConfigError,
    DeviceUnavailableError where it cannot be loaded or measured, RunnerError where a request
    failed."""
    own = config.sparse_prompts or SpecPrefillConfig()
    report("loading the models")
    fitted = replace(config, spec_prefill=replace(own, threshold=1, force=True))
    loaded = load_model(model, fitted, backends=backends)
    try:
        bench = _Bench(loaded=loaded, options=options, report=report)
        lengths = options.lengths(bench.context)
        if not lengths:
            raise ConfigError(f"the context of {bench.context} tokens is too short for a prompt")
        results = [each for length in lengths for each in bench.length(length)]
        tasks = [each for length in lengths for each in bench.tasks(length)]
        instruments = find_backend(config.backend, backends).open_instruments()
        return SpecPrefillResult(
            machine=describe_machine(instruments),
            workload=_describe(model, own, options, loaded),
            results=tuple(results),
            tasks=tuple(tasks),
        )
    finally:
        loaded.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    loaded: LoadedModel
    options: SpecPrefillOptions
    report: OnStatus

    @property
    def core(self) -> EngineCore:
        return self.loaded.core

    @property
    def context(self) -> int:
        limits, scored = self.core.limits, self.loaded.text.sparse.scored_tokens
        return limits.max_model_len if scored is None else min(limits.max_model_len, scored)

    def length(self, length: int) -> list[LengthResult]:
        self.report(f"{length} tokens: first tokens")
        times = self._first_tokens(length)
        costs, found = self._costs(), list[LengthResult]()
        for keep in self.options.keep:
            found.append(
                LengthResult(
                    input_len=length,
                    keep=keep,
                    kept_tokens=SparsePrefill(keep=keep).num_kept_tokens(length),
                    whole_s=times[None],
                    thinned_s=times[keep],
                    predicted_ratio=None if costs is None else sparse_gain(*costs, length, keep),
                    likeness=self._likeness(length, keep) if self._has_text else {},
                )
            )
        return found

    def _first_tokens(self, length: int) -> dict[float | None, float]:
        """Seconds by fraction, None for whole prompts: medians of what is timed in turn, after a
        short prompt of each."""
        rng, ids = random.Random(length), text_ids(self.core)
        clock = time.process_time if self.options.processor_time else time.perf_counter
        taken: dict[float | None, list[float]] = {each: [] for each in (None, *self.options.keep)}
        for num_tokens in (min(length, SHORTEST), *(length,) * self.options.repeats):
            for keep, times in taken.items():
                prompt = tuple(rng.choices(ids, k=num_tokens))
                request = greedy(prompt, 1, None if keep is None else SparsePrefill(keep=keep))
                times.append(first_token_s(self.core, request, clock))
        return {keep: statistics.median(times[1:]) for keep, times in taken.items()}

    def _costs(self) -> tuple[PrefillCost, PrefillCost] | None:
        target, draft = self.loaded.checkpoint, self.loaded.plan.scorer
        if draft is None or not target.is_known or not draft.checkpoint.is_known:
            return None
        return cost_of_shape(target.config), cost_of_shape(draft.checkpoint.config)

    @property
    def _has_text(self) -> bool:
        return self.options.samples > 0 and self.loaded.text.tokenizer is not None

    @property
    def _encode(self) -> Encode:
        tokenizer = self.loaded.text.tokenizer
        assert tokenizer is not None, "it has text"
        return lambda text: tokenizer.encode(text, add_special_tokens=False)

    def _likeness(self, length: int, keep: float) -> dict[str, Likeness]:
        self.report(f"{length} tokens, keep {keep:g}: the same answers token by token")
        prompts = [make_text(length, seed, self._encode) for seed in range(self.options.samples)]
        wholes = run_all(self.core, [greedy(each, ANSWER_LEN) for each in prompts])
        found: dict[str, Likeness] = {}
        for way in WAYS:
            kept = self._kept(prompts, keep, way)
            pairs = [
                pair
                for prompt, whole, each in zip(prompts, wholes, kept, strict=True)
                for pair in self._compared(prompt, whole, each)
            ]
            found[way] = Likeness(
                kl=statistics.mean(kl for kl, _ in pairs),
                top_1=statistics.mean(is_same for _, is_same in pairs),
            )
        return found

    def _compared(
        self, prompt: tuple[int, ...], whole: Played, kept: KeptTokens
    ) -> list[tuple[float, bool]]:
        """The divergence at each token of the whole prompt's answer, and whether it stays the
        likeliest."""
        outcomes = run_all(self.core, forced_requests(prompt, whole.token_ids, kept))
        return [
            (divergence(own, each.logprobs[0]), each.token_ids[0] == token_id)
            for token_id, own, each in zip(whole.token_ids, whole.logprobs, outcomes, strict=True)
        ]

    def _kept(self, prompts: Sequence[tuple[int, ...]], keep: float, way: str) -> list[KeptTokens]:
        if way != DRAFT:
            return [chosen(each, keep, BASELINES[way]) for each in prompts]
        sparse = SparsePrefill(keep=keep)
        outcomes = run_all(self.core, [greedy(each, 1, sparse) for each in prompts])
        return [
            _kept_of(outcome, prompt) for outcome, prompt in zip(outcomes, prompts, strict=True)
        ]

    def tasks(self, length: int) -> list[TaskResult]:
        """Every task at one length, by every fraction and way."""
        if not self._has_text:
            return []
        found: list[TaskResult] = []
        for kind in KINDS:
            self.report(f"{length} tokens: {kind}")
            depths = [(place + 0.5) / NUM_DEPTHS for place in range(NUM_DEPTHS)]
            prompts = [
                make_prompt(kind, length, depths[seed % NUM_DEPTHS], seed, self._encode)
                for seed in range(self.options.samples)
            ]
            whole = self._right(prompts, [None] * len(prompts))
            for keep in self.options.keep:
                for way in WAYS:
                    kept = self._kept([each.token_ids for each in prompts], keep, way)
                    right = self._right(prompts, kept)
                    recalled = [_holds(*pair) for pair in zip(kept, prompts, strict=True)]
                    found.append(
                        TaskResult(
                            task=kind,
                            input_len=length,
                            keep=keep,
                            way=way,
                            samples=len(prompts),
                            whole=statistics.mean(whole),
                            recall=statistics.mean(recalled),
                            right=statistics.mean(right),
                            by_depth=_by_depth(prompts, recalled, right),
                        )
                    )
        return found

    def _right(
        self, prompts: Sequence[TaskPrompt], kept: Sequence[KeptTokens | None]
    ) -> list[bool]:
        requests = [
            greedy(
                prompt.token_ids,
                prompt.max_tokens,
                None if each is None else SparsePrefill(keep=1.0, kept=each.mask),
            )
            for prompt, each in zip(prompts, kept, strict=True)
        ]
        outcomes = run_all(self.core, requests)
        texts = [self.loaded.text.decode(each.token_ids) for each in outcomes]
        return [prompt.is_right(text) for prompt, text in zip(prompts, texts, strict=True)]


def _kept_of(outcome: Played, prompt: tuple[int, ...]) -> KeptTokens:
    if outcome.kept is None:
        raise ConfigError(f"a prompt was computed whole: {outcome.whole_because}")
    return kept_of_mask(outcome.kept, len(prompt))


def _holds(kept: KeptTokens, prompt: TaskPrompt) -> bool:
    chunks = {*kept.chunks}
    return all(
        place // CHUNK in chunks for span in prompt.sought for place in range(span.start, span.stop)
    )


def _by_depth(
    prompts: Sequence[TaskPrompt], recalled: Sequence[bool], right: Sequence[bool]
) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for depth in sorted({each.depth for each in prompts if each.depth is not None}):
        own = [place for place, each in enumerate(prompts) if each.depth == depth]
        found[f"{depth:g}"] = (
            statistics.mean(recalled[place] for place in own),
            statistics.mean(right[place] for place in own),
        )
    return found


def _describe(
    model: str | Path | None,
    own: SpecPrefillConfig,
    options: SpecPrefillOptions,
    loaded: LoadedModel,
) -> dict[str, object]:
    plan = loaded.plan
    found: dict[str, Any] = {
        "model": "bundled" if model is None else Path(model).name,
        "draft": own.model or "bundled-draft",
        "draft_quantization": own.quantization,
        "samples": options.samples,
        "repeats": options.repeats,
        "processor_time": options.processor_time,
        "backend": plan.traits.name,
        "ops": plan.traits.ops,
        "dtype": plan.dtype,
        "quantization": plan.quantization,
        "max_model_len": plan.limits.max_model_len,
        "max_num_batched_tokens": plan.limits.max_num_batched_tokens,
    }
    return found
