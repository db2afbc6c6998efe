"""Steps bounded in time, over the token-storing runner with a clock that steps advance.

Bar 7 of the reliability list: running streams' gaps keep to the bound, a short prompt behind a long
one need not wait for it. The clock advances by what a step truly costs; the engine is told a cost
that is wrong by a fifth and corrects it.
"""

import random
from dataclasses import dataclass, field, replace

import pytest

from cadenza.backends.fake import FakeRunner, FakeStepHandle
from cadenza.batch.step_cost import StepBound, StepCost, StepLoad
from cadenza.batch.step_schema import ModelInputs
from cadenza.config import EngineLimits, SchedulerLoop
from cadenza.engine.calibration import make_step_bound, measure_step_cost
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.events import Token
from cadenza.request import Request, SamplingParams
from tests.engine.simulation import EOS_TOKEN_IDS, SECRET, VOCAB_SIZE, Record

TRUE_COST = StepCost(fixed_ms=5.0, token_ms=0.25, logit_ms=0.2, key_ms=0.00005)
BOUND_MS = 50.0
LIMITS = EngineLimits(
    max_num_seqs=9,
    max_num_batched_tokens=512,
    max_model_len=4096,
    page_size=16,
    num_pages=2048,
    max_num_queued_reqs=100,
)


@dataclass(slots=True, eq=False, kw_only=True)
class TimedRunner(FakeRunner):
    """Advances its clock, when a step is read, by the step's true cost."""

    now_s: float = 0.0
    cost: StepCost = TRUE_COST
    step_ms: list[float] = field(default_factory=list)

    def clock(self) -> float:
        return self.now_s

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        starts, ends = inputs.rows.query_starts[:-1], inputs.rows.query_starts[1:]
        counts, kv_lens = ends - starts, inputs.rows.kv_lens
        keys = counts * (kv_lens - counts) + counts * (counts + 1) // 2
        load = StepLoad(
            num_tokens=inputs.num_tokens, num_logits=inputs.num_logits, num_keys=int(keys.sum())
        )
        ms = self.cost.predict_ms(load)
        handle = super(TimedRunner, self).launch(inputs)

        def read() -> None:
            self.now_s += ms / 1000
            self.step_ms.append(ms)

        return FakeStepHandle(handle.output, read)


def runner_of(limits: EngineLimits) -> TimedRunner:
    return TimedRunner(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_pages_per_seq=limits.max_pages_per_seq,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        vocab_size=VOCAB_SIZE,
    )


def engine_of(bound: StepBound | None, loop: SchedulerLoop) -> tuple[EngineCore, TimedRunner]:
    runner = runner_of(LIMITS)
    options = CoreOptions(
        eos_token_ids=EOS_TOKEN_IDS, secret=SECRET, loop=loop, step_bound=bound, clock=runner.clock
    )
    return EngineCore(runner, LIMITS, options), runner


def request_of(num_prompt_tokens: int, max_tokens: int, seed: int) -> Request:
    rng = random.Random(seed)
    prompt = tuple(rng.choices(range(VOCAB_SIZE), k=num_prompt_tokens))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(prompt_token_ids=prompt, params=params)


@dataclass(slots=True, kw_only=True)
class Times:
    """When each request's tokens came, in the runner's time."""

    token_s: dict[int, list[float]] = field(default_factory=dict)

    def worst_gap_ms(self, request_ids: range) -> float:
        gaps = [
            later - earlier
            for request_id in request_ids
            for earlier, later in zip(
                self.token_s[request_id], self.token_s[request_id][1:], strict=False
            )
        ]
        return 1000 * max(gaps)


def run_streams(bound: StepBound | None, loop: SchedulerLoop, long: list[int]) -> Times:
    """Seven streams decode; prompts of the lengths `long` come, and a short one behind them."""
    engine, runner = engine_of(bound, loop)
    record, times = Record(seed=0, engine=engine), Times()
    requests = [request_of(8, 150, seed) for seed in range(7)]
    for step in range(4000):
        if step == 20:
            requests = [request_of(length, 4, length) for length in long]
        if step == 26:
            requests = [request_of(100, 4, 1)]
        for request in requests:
            record.accept(engine.submit(request), request)
        requests = []
        for event in engine.step():
            record.take(event)
            if isinstance(event, Token):
                times.token_s.setdefault(event.request_id, []).append(runner.now_s)
        record.num_steps += 1
        if engine.is_idle and step > 30:
            break
    record.verify()
    return times


@pytest.mark.parametrize("loop", ["plain", "overlap"])
def test_streams_keep_to_the_bound_while_long_prompts_arrive(loop: SchedulerLoop) -> None:
    wrong = replace(TRUE_COST, fixed_ms=8.0, token_ms=0.2)
    bound = StepBound(max_ms=BOUND_MS, cost=wrong)
    times = run_streams(bound, loop, [2000])
    assert times.worst_gap_ms(range(7)) <= 1.3 * BOUND_MS


def test_without_a_bound_the_same_streams_wait_longer() -> None:
    times = run_streams(None, "overlap", [2000])
    assert times.worst_gap_ms(range(7)) > 2 * BOUND_MS


def test_a_short_prompt_behind_a_long_one_waits_two_bounds_at_most() -> None:
    alone = run_streams(StepBound(max_ms=BOUND_MS, cost=TRUE_COST), "overlap", [])
    behind = run_streams(StepBound(max_ms=BOUND_MS, cost=TRUE_COST), "overlap", [3900])
    extra_s = (behind.token_s[8][0] - behind.token_s[0][26]) - (
        alone.token_s[7][0] - alone.token_s[0][26]
    )
    assert 1000 * extra_s <= 2 * BOUND_MS
    assert behind.token_s[7][0] > behind.token_s[8][0], "the long prompt was not long"


def test_a_bound_that_decodes_alone_exceed_still_lets_prompts_progress() -> None:
    bound = StepBound(max_ms=1.0, cost=TRUE_COST)
    run_streams(bound, "overlap", [500])
    assert bound.num_granted > 500 // 16 - 1
    assert bound.num_exceeded > 0


def test_timed_steps_give_the_runners_cost() -> None:
    runner = runner_of(LIMITS)
    cost = measure_step_cost(runner, LIMITS, runner.clock)
    for load in (
        StepLoad(num_tokens=8, num_logits=8, num_keys=8000),
        StepLoad().plus(0, 200, 0),
        StepLoad().plus(3000, 64, 0),
    ):
        assert cost.predict_ms(load) == pytest.approx(TRUE_COST.predict_ms(load), rel=0.05)


@pytest.mark.parametrize(("fixed_ms", "num_timed"), [(5.0, 16), (400.0, 12), (1000.0, 4)])
def test_long_steps_are_timed_fewer_times(fixed_ms: float, num_timed: int) -> None:
    """Of four kinds: an engine should not start later for it."""
    runner = runner_of(LIMITS)
    runner.cost = replace(TRUE_COST, fixed_ms=fixed_ms)
    cost = measure_step_cost(runner, LIMITS, runner.clock)
    assert len(runner.step_ms) == num_timed
    assert cost.fixed_ms == pytest.approx(fixed_ms, rel=0.01)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_pages": 1, "max_model_len": 16},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 9},
        {"page_size": 4096, "num_pages": 9, "slot_unit": 1},
    ],
)
def test_steps_are_timed_within_any_limits(changes: dict[str, int]) -> None:
    limits = replace(LIMITS, **changes)
    runner = runner_of(limits)
    bound = make_step_bound(measure_step_cost(runner, limits, runner.clock), limits, None)
    assert bound.cost.fixed_ms > 0
    assert bound.max_ms >= 50.0


def test_a_derived_bound_follows_the_machine_and_a_fixed_one_does_not() -> None:
    runner = runner_of(LIMITS)
    full = StepLoad(num_tokens=9, num_logits=9, num_keys=9)
    slow_ms = 8 * TRUE_COST.predict_ms(full)
    measured = measure_step_cost(runner, LIMITS, runner.clock)
    derived = make_step_bound(measured, LIMITS, None)
    fixed = make_step_bound(measured, LIMITS, 60.0)
    assert derived.max_ms == 50.0
    for _ in range(200):
        for bound in (derived, fixed):
            bound.observe(full, slow_ms)
    assert derived.max_ms == pytest.approx(2 * slow_ms, rel=0.05)
    assert fixed.max_ms == 60.0
