"""Drafts of a second model: the streams are the same, and a model that is right is always right.

The second model is a token-storing runner too. One that computes as the target does is accepted
each time, unless its pages, its progress or its keys are wrong.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from cadenza.backends.fake import FakeRunner, FakeStepHandle
from cadenza.config import EngineLimits
from cadenza.core.admission import Admission
from cadenza.core.draft_costs import DecodeCost
from cadenza.core.draft_plan import MIN_RATIO, DraftChance, plan_drafts
from cadenza.core.drafts import PROBE_EVERY, Drafting, SharedAcceptance
from cadenza.core.kv_cache_manager import KVCacheManager
from cadenza.core.scheduler import Scheduler, SchedulerOptions
from cadenza.core.sequence import Sequence
from cadenza.core.step_cost import StepCost
from cadenza.core.step_schema import ModelInputs
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.model_drafter import MAX_FAILURES, DraftModel, ModelDrafter
from cadenza.request import Request, SamplingParams
from cadenza.speculative_config import SpeculativeConfig
from tests.engine.simulation import (
    VOCAB_SIZE,
    ObservedRunner,
    Parts,
    Scenario,
    Simulation,
    replayable,
    run_requests,
)
from tests.engine.test_speculation import AlwaysDrafts, audit_published_pages

SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(8, 300))]
NUM_STEPS = 60
HERE = "tests/engine/test_draft_models.py"


def fake_of(limits: EngineLimits, kind: Callable[..., FakeRunner] = FakeRunner) -> FakeRunner:
    return kind(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_pages_per_seq=limits.max_pages_per_seq,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        vocab_size=VOCAB_SIZE,
    )


@dataclass(eq=False)
class Erring:
    """Draws other tokens than the runner it stands for, one in a few, and as its last ones, too."""

    runner: FakeRunner
    error: float
    rng: random.Random

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        handle = self.runner.launch(inputs)
        output = handle.output
        is_wrong = [self.rng.random() < self.error for _ in output.token_ids]
        drawn = np.where(is_wrong, (output.token_ids + 1) % VOCAB_SIZE, output.token_ids)
        drawn = drawn.astype(np.int32)
        rows = inputs.logits.rows[: len(drawn)]
        self.runner._last_sampled[rows] = drawn
        return FakeStepHandle(replace(output, token_ids=drawn), handle.on_read)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)


def parts_with(*, shares_kv: bool, error: float, context: float = 1.0) -> Parts:
    """An engine whose sequences draft with a second model.

    Args:
        shares_kv: it computes on the pages of the target's runner.
        error: the share of its tokens that are wrong.
        context: of the second model, as a share of the target's.
    """
    targets: list[FakeRunner] = []

    def make_runner(**sizes: Any) -> FakeRunner:
        targets.append(ObservedRunner(**sizes))
        return targets[-1]

    class ModelScheduler(Scheduler):
        def __init__(
            self,
            limits: EngineLimits,
            kv_cache: KVCacheManager,
            admission: Admission,
            options: SchedulerOptions,
        ) -> None:
            own = replace(limits, max_model_len=max(1, int(limits.max_model_len * context)))
            runner = targets[-1] if shares_kv else fake_of(own)
            rng = random.Random(f"errors {limits.num_pages}")
            draft = Erring(runner, error, rng) if error else runner
            model = DraftModel(runner=draft, limits=own, shares_kv=shares_kv)  # type: ignore[arg-type]
            self.drafter = ModelDrafter(model, kv_cache, lambda: 0.0)
            super().__init__(limits, kv_cache, admission, replace(options, drafter=self.drafter))

        def add(self, sequence: Sequence) -> None:
            rng = random.Random(f"{sequence.request_id} {sequence.sample}")
            kind = rng.choice([AlwaysDrafts, AlwaysDrafts, Drafting, None])
            if kind is not None:
                sequence.drafting = kind(source=None, most=rng.choice([1, 3, 5]))
            super().add(sequence)

    return Parts(runner=make_runner, scheduler=ModelScheduler)


@pytest.mark.parametrize("shares_kv", [False, True], ids=["own pages", "shared pages"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_second_model_that_is_right_is_always_accepted(seed: int, *, shares_kv: bool) -> None:
    with replayable(f"seed {seed}", f"python -m pytest '{HERE}' -k '{seed}'"):
        scenario = Scenario(seed=seed, num_steps=NUM_STEPS, hang_up=0.0)
        parts = parts_with(shares_kv=shares_kv, error=0.0)
        record = Simulation(
            scenario, loop="overlap", parts=parts, audit=audit_published_pages
        ).run()
        record.verify()
        ends = sum(end.finish_reason == "stop" for end in record.finished.values())
        counts = record.engine.scheduler.draft_counts
        # A stop token ends a stream within its drafts; none behind it counts as accepted.
        assert counts.num_draft_tokens - counts.num_accepted_tokens <= ends


@pytest.mark.parametrize("shares_kv", [False, True], ids=["own pages", "shared pages"])
@pytest.mark.parametrize("seed", SEEDS)
def test_streams_are_exact_whatever_a_second_model_draws(seed: int, *, shares_kv: bool) -> None:
    with replayable(f"seed {seed}", f"python -m pytest '{HERE}' -k '{seed}'"):
        scenario = Scenario(seed=seed, num_steps=NUM_STEPS)
        context = random.Random(seed).choice([1.0, 1.0, 0.5])
        parts = parts_with(shares_kv=shares_kv, error=(0.1, 0.4, 1.0)[seed % 3], context=context)
        for loop in ("plain", "overlap"):
            Simulation(scenario, loop=loop, parts=parts, audit=audit_published_pages).run().verify()


LIMITS = EngineLimits(
    max_num_seqs=4,
    max_num_batched_tokens=40,
    max_model_len=100,
    page_size=16,
    num_pages=28,
    max_num_queued_reqs=8,
)
CONFIG = SpeculativeConfig(method="draft_model", model="small", num_speculative_tokens=4)
CHEAP = StepCost(fixed_ms=0.1, token_ms=0.01, logit_ms=0.01, key_ms=0.0)
DEAR = StepCost(fixed_ms=10.0, token_ms=0.01, logit_ms=0.01, key_ms=0.0)


def engine_with(
    draft: FakeRunner, *, cost: StepCost | None = None, target: StepCost | None = None
) -> EngineCore:
    model = DraftModel(runner=draft, limits=LIMITS, shares_kv=False, cost=cost)
    options = CoreOptions(speculation=CONFIG, draft_model=model, step_cost=target)
    return EngineCore(fake_of(LIMITS), LIMITS, options)


def requests(count: int, **params: Any) -> list[Request]:
    return [
        Request(
            prompt_token_ids=tuple(range(seed, seed + 9)),
            params=SamplingParams(**{"max_tokens": 60, "seed": seed, "ignore_eos": True, **params}),
        )
        for seed in range(count)
    ]


def test_accepted_drafts_save_steps() -> None:
    engine = engine_with(fake_of(LIMITS))
    record = run_requests(engine, requests(3))
    record.verify()
    counts = engine.scheduler.draft_counts
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 120
    assert record.num_steps < 30


def test_a_request_without_drafts_runs_beside_others() -> None:
    engine = engine_with(fake_of(LIMITS))
    record = run_requests(engine, [*requests(2), *requests(1, speculative=False)])
    record.verify()
    drafted = [sum(t.is_draft for t in tokens) for tokens in record.streams.values()]
    assert drafted[0] > 40 < drafted[1]
    assert drafted[2] == 0


def test_a_prefix_that_is_cached_is_not_computed_again_by_the_draft_model() -> None:
    draft = fake_of(LIMITS, ObservedRunner)
    assert isinstance(draft, ObservedRunner)
    engine = engine_with(draft)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    request = Request(prompt_token_ids=tuple(range(80)), params=params)
    num_tokens: list[int] = []
    for _ in range(2):
        before = draft.num_launched_tokens
        run_requests(engine, [request])
        num_tokens.append(draft.num_launched_tokens - before)
    assert num_tokens[0] > 80
    assert num_tokens[1] <= num_tokens[0] - 64


def test_drafts_that_cost_more_than_they_save_are_not_made() -> None:
    draft = fake_of(LIMITS)
    engine = engine_with(draft, cost=DEAR, target=CHEAP)
    run_requests(engine, requests(3)).verify()
    assert engine.scheduler.draft_counts.num_drafts == 0
    assert draft.trace == []
    draft = fake_of(LIMITS)
    engine = engine_with(draft, cost=CHEAP, target=DEAR)
    run_requests(engine, requests(3)).verify()
    assert engine.scheduler.draft_counts.num_drafts > 0


class Breaks(FakeRunner):
    """Each of its steps fails."""

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        raise RuntimeError("no memory")


def test_a_draft_model_that_fails_costs_drafts_and_no_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = engine_with(fake_of(LIMITS, Breaks))
    run_requests(engine, requests(3)).verify()
    assert engine.scheduler.draft_counts.num_drafts == 0
    assert engine.num_failed_steps == 0
    assert caplog.text.count("a step of the draft model failed") == MAX_FAILURES


def test_closing_the_engine_closes_the_draft_model() -> None:
    draft = fake_of(LIMITS)
    engine = engine_with(draft)
    engine.close()
    assert draft.stored(0, 1) == []


def chances(*acceptances: float, most: int = 5) -> list[DraftChance]:
    return [DraftChance(acceptance=each, most=most, num_keys=10) for each in acceptances]


def target(num_rows: int) -> DecodeCost:
    return DecodeCost.linear(5.0 + 0.2 * num_rows, 0.2)


QUARTER = StepCost(fixed_ms=1.2, token_ms=0.03, logit_ms=0.03, key_ms=0.0)


def test_more_is_drafted_where_more_is_accepted() -> None:
    counts = [
        plan_drafts(chances(each), 1, target(1), QUARTER).counts[0]
        for each in (0.1, 0.5, 0.8, 0.95, 1.0)
    ]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == 5


def test_a_plan_is_the_best_of_all_equal_numbers_of_drafts() -> None:
    for acceptance in (0.3, 0.6, 0.8, 0.93):
        for rows in (1, 2, 4, 8):
            plan = plan_drafts(chances(*[acceptance] * rows), rows, target(rows), QUARTER)
            rates = [expected_rate(acceptance, rows, count) for count in range(6)]
            best = max(rates)
            if best < MIN_RATIO * rates[0]:
                assert plan.counts == [0] * rows
            else:
                assert plan.rate == pytest.approx(best)
                assert plan.counts == [rates.index(best)] * rows
                assert plan.saved_ms == pytest.approx(1 / rates[0] - 1 / best)


def expected_rate(acceptance: float, rows: int, count: int) -> float:
    tokens = rows * sum(acceptance**depth for depth in range(count + 1))
    ms = 5.0 + rows * 0.2 + count * (rows * 0.2 + 1.2 + rows * 0.06)
    return tokens / ms


def test_a_sequence_that_accepts_little_does_not_draft_beside_one_that_accepts_much() -> None:
    plan = plan_drafts(chances(0.95, 0.02), 2, target(2), QUARTER)
    assert plan.counts[0] > 1
    assert plan.counts[1] == 0


def test_sequences_start_from_what_others_have_met_and_some_do_not() -> None:
    shared = SharedAcceptance()
    for _ in range(1000):
        shared.learn(is_accepted=False)
    starts = [shared.start() for _ in range(2 * PROBE_EVERY)]
    assert sum(start > 0.5 for start in starts) == 2
    assert min(starts) < 0.01
