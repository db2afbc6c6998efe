"""`StepMeter`: every count equals what was seen from outside, and a snapshot stays as it was."""

from collections.abc import Mapping
from itertools import count
from typing import TypeVar, overload

import pytest

from cadenza.backends.fake import FakeRunner, FakeStepHandle
from cadenza.batch.step_cost import StepCost
from cadenza.batch.step_schema import ModelInputs
from cadenza.config import EngineLimits
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.stats import ENGINE_FIGURES, StepMeter
from cadenza.events import Finished
from cadenza.figures import Distribution, Tally
from cadenza.request import Request, SamplingParams

LIMITS = EngineLimits(
    max_num_seqs=3,
    max_num_batched_tokens=40,
    max_model_len=96,
    page_size=16,
    num_pages=8,
    max_num_queued_reqs=50,
)


class CountingRunner(FakeRunner):
    """Notes the true tokens of each launch; fails the launches whose numbers are in `fails_at`."""

    num_tokens: list[int]
    fails_at: frozenset[int]

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        self.num_tokens.append(int(inputs.rows.query_starts[-1]))
        if len(self.num_tokens) in self.fails_at:
            raise RuntimeError("the device was lost")
        return super().launch(inputs)


RunnerKind = TypeVar("RunnerKind", bound=CountingRunner)


@overload
def make_runner(*fails_at: int) -> CountingRunner: ...
@overload
def make_runner(*fails_at: int, kind: type[RunnerKind]) -> RunnerKind: ...
def make_runner(*fails_at: int, kind: type[CountingRunner] = CountingRunner) -> CountingRunner:
    runner = kind(
        max_num_seqs=LIMITS.max_num_seqs,
        max_num_batched_tokens=LIMITS.max_num_batched_tokens,
        max_pages_per_seq=LIMITS.max_pages_per_seq,
        num_pages=LIMITS.num_pages,
        page_size=LIMITS.page_size,
    )
    runner.num_tokens = []
    runner.fails_at = frozenset(fails_at)
    return runner


def make_meter(runner: FakeRunner) -> tuple[EngineCore, StepMeter]:
    """With a clock that gains a quarter of a second at each look."""
    core = EngineCore(runner, LIMITS, CoreOptions(reserved_output=0.0))
    readings = count()
    return core, StepMeter(core, lambda: next(readings) / 4)


def request(length: int, first: int = 1, max_tokens: int = 20) -> Request:
    prompt = tuple(range(first, first + length))
    return Request(
        prompt_token_ids=prompt, params=SamplingParams(max_tokens=max_tokens, temperature=0.0)
    )


def play(core: EngineCore, meter: StepMeter) -> None:
    while not core.is_idle:
        meter.step()
        stats = meter.stats()
        assert sum(stats.by_label["pages"].values()) == LIMITS.num_pages


def test_steps_tokens_and_seconds_equal_what_the_runner_saw():
    runner = make_runner()
    core, meter = make_meter(runner)
    for length in (30, 50, 7, 60):
        core.submit(request(length))
    play(core, meter)
    stats = meter.stats()
    assert stats.histograms["step_seconds"].count == len(runner.num_tokens)
    assert stats.histograms["iteration_tokens_total"].total == sum(runner.num_tokens)
    assert (
        stats.histograms["iteration_tokens_total"].count == stats.histograms["step_seconds"].count
    )
    assert stats.histograms["step_seconds"].total == pytest.approx(
        0.25 * stats.histograms["step_seconds"].count
    )
    assert stats.numbers["num_preemptions"] > 0
    assert (
        stats.numbers["num_requests_running"],
        stats.numbers["num_requests_waiting"],
        stats.by_label["pages"]["live"],
    ) == (0, 0, 0)


def test_a_prompt_counts_once_in_the_prefix_cache_however_often_it_was_preempted():
    core, meter = make_meter(make_runner())
    core.submit(request(40))
    play(core, meter)
    core.submit(request(40))
    core.submit(request(35, first=50))
    core.submit(request(30, first=20, max_tokens=50))
    play(core, meter)
    stats = meter.stats()
    assert stats.numbers["num_preemptions"] > 0
    assert (stats.numbers["prefix_cache_queries"], stats.numbers["prefix_cache_hits"]) == (
        40 + 40 + 35 + 30,
        32,
    )


def test_requests_are_running_or_waiting_and_pages_live_while_they_run():
    core, meter = make_meter(make_runner())
    for _ in range(5):
        core.submit(request(10))
    before = meter.stats()
    meter.step()
    after = meter.stats()
    states = ("num_requests_running", "num_requests_waiting")
    assert [before.numbers[each] for each in states] == [0, 5]
    assert [after.numbers[each] for each in states] == [3, 2]
    assert before.kv_cache_usage == 0.0
    assert after.kv_cache_usage == after.by_label["pages"]["live"] / 8 > 0


def test_prompts_that_wait_take_the_predicted_seconds_of_their_tokens_until_they_are_computed():
    cost = StepCost(fixed_ms=40.0, token_ms=1.0, logit_ms=0.1, key_ms=0.1)
    core = EngineCore(make_runner(), LIMITS, CoreOptions(step_cost=cost))
    meter = StepMeter(core, lambda: 0.0)
    for request_id in range(5):
        prompt = tuple(range(request_id, request_id + 40))
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        core.enqueue(request_id, Request(prompt_token_ids=prompt, params=params))
    assert meter.stats().numbers["queued_seconds"] == pytest.approx(200 * (40 / 40 + 1) / 1000)
    while not core.is_idle:
        meter.step()
    assert meter.stats().numbers["queued_seconds"] == 0.0


def test_failed_steps_are_counted_and_a_success_ends_their_row():
    runner = make_runner(1, 2, 3, 4)
    core, meter = make_meter(runner)
    for attempt in range(2):
        core.submit(request(5))
        play(core, meter)
        assert core.loop.num_consecutive_failures == 2 * (attempt + 1)
    core.submit(request(5))
    play(core, meter)
    assert core.loop.num_consecutive_failures == 0
    assert meter.stats().numbers["failed_steps"] == 4


def test_a_failed_request_says_what_kind_of_error_ended_it():
    core, _ = make_meter(make_runner(1, 2))
    core.submit(request(5))
    events = [event for _ in range(3) for event in core.step()]
    (finished,) = (event for event in events if isinstance(event, Finished))
    assert (finished.finish_reason, finished.error_kind) == ("error", "step_failed")


def test_a_value_on_a_bound_belongs_below_it_and_one_above_all_to_the_last_count():
    tally = Tally((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5, 9.0):
        tally.add(value)
    expected = Distribution(bounds=(1.0, 2.0), counts=(2, 2, 2), total=16.5)
    assert tally.snapshot() == expected
    tally.add(0.0)
    assert expected.count == 6


def test_a_figure_is_read_as_it_is_declared():
    core, meter = make_meter(make_runner())
    core.submit(request(10))
    play(core, meter)
    declared = {each.name: each for each in ENGINE_FIGURES}
    assert len(declared) == len(ENGINE_FIGURES), "two figures have one name"
    for name, reading in meter.stats().readings:
        assert isinstance(reading, Distribution) == (declared[name].type == "histogram"), name
        assert isinstance(reading, Mapping) == bool(declared[name].labels), name
