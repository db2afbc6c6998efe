"""`Worker`: when it reports and what; over the fake runner, a scripted link and a clock by hand."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from cadenza.backends.fake import FakeRunner, FakeStepHandle
from cadenza.batch.step_cost import StepCost
from cadenza.batch.step_schema import ModelInputs
from cadenza.config import EngineConfig, EngineLimits
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.page_folder import PageFolder
from cadenza.engine.process.messages import (
    Cancel,
    EngineOutputs,
    FromEngine,
    Loading,
    Start,
    Submit,
    ToEngine,
    WireError,
)
from cadenza.engine.process.supervision import Supervision, WatchdogTimeouts
from cadenza.engine.process.worker import IDLE_BEAT_S, Worker
from cadenza.engine.step_watch import Watch
from cadenza.engine.stored_pages import WAIT_S, StoredPages
from cadenza.errors import RunnerError
from cadenza.events import Finished, Started, Token
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.request import Request, SamplingParams

LIMITS = EngineLimits(
    max_num_seqs=2,
    max_num_batched_tokens=64,
    max_model_len=256,
    page_size=16,
    num_pages=64,
    max_num_queued_reqs=30,
    max_consecutive_step_errors=2,
)


class Bench:
    """Plays `turns`: each is what the link receives then; a wait takes its whole time.

    `cost`: what the engine is told of its steps, or nothing.
    """

    def __init__(
        self, step_s: Callable[[int], float], *turns: list[ToEngine], cost: StepCost | None = None
    ) -> None:
        bench = self

        class Runner(FakeRunner):
            def launch(self, inputs: ModelInputs) -> FakeStepHandle:
                bench.now_s += step_s(int(inputs.rows.query_starts[-1]))
                return super().launch(inputs)

        self.now_s = 0.0
        self.turns = list(turns)
        self.sent: list[tuple[float, EngineOutputs]] = []
        runner = Runner(
            max_num_seqs=LIMITS.max_num_seqs,
            max_num_batched_tokens=LIMITS.max_num_batched_tokens,
            max_pages_per_seq=LIMITS.max_pages_per_seq,
            num_pages=LIMITS.num_pages,
            page_size=LIMITS.page_size,
        )
        options = CoreOptions(step_cost=cost, clock=lambda: self.now_s)
        self.core = EngineCore(runner, LIMITS, options)
        self.worker = Worker(self.core, self, clock=lambda: self.now_s)

    def receive(self, timeout_s: float) -> list[ToEngine] | None:
        if not self.turns and self.core.is_idle:
            return None
        messages = self.turns.pop(0) if self.turns else []
        if not messages:
            self.now_s += timeout_s
        return messages

    def send(self, message: FromEngine) -> None:
        assert isinstance(message, EngineOutputs)
        self.sent.append((self.now_s, message))

    def play(self) -> list[EngineOutputs]:
        self.worker.serve()
        return [report for _, report in self.sent]


def ends_of(report: EngineOutputs) -> list[Finished]:
    return [event for event in report.events if isinstance(event, Finished)]


def has_tokens(report: EngineOutputs) -> bool:
    return any(isinstance(event, Token) for event in report.events)


def submit(request_id: int, num_prompt_tokens: int, max_tokens: int) -> Submit:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Submit(request_id, Request(prompt_token_ids=(1,) * num_prompt_tokens, params=params))


def test_events_leave_with_their_step_and_the_last_report_has_final_statistics():
    bench = Bench(lambda _: 0.01, [submit(5, 3, 4), submit(6, 3, 2)])
    reports = bench.play()
    started, *rest = [report.events for report in reports if report.events]
    assert started == (Started(request_id=5), Started(request_id=6))
    assert [sum(isinstance(each, Token) for each in events) for events in rest] == [2, 2, 1, 1]
    last = reports[-1]
    assert last.is_idle
    assert last.stats is not None
    assert (
        last.stats.histograms["step_seconds"].count,
        last.stats.numbers["num_requests_running"],
    ) == (4, 0)
    assert last.num_steps == 4


def test_a_step_without_events_is_reported_when_a_beat_is_due():
    bench = Bench(lambda tokens: 0.1 if tokens > 3 else 0.01, [submit(0, 200, 1)])
    bench.play()
    times_s = [at_s for at_s, _ in bench.sent]
    gaps = [later - sooner for sooner, later in pairwise(times_s)]
    assert max(gaps) <= 0.36


def test_an_idle_engine_beats_once_for_each_wait():
    bench = Bench(lambda _: 0.01, [], [], [])
    reports = bench.play()
    assert [at_s for at_s, _ in bench.sent] == [IDLE_BEAT_S, 2 * IDLE_BEAT_S, 3 * IDLE_BEAT_S]
    assert all(report.is_idle and report.predicted_s == 0 for report in reports)


class Storing(StoredPages):
    """Is busy with pages during so many waits."""

    def __init__(self, bench: Bench, folder: Path, num_waits: int) -> None:
        super().__init__(
            FakeRunner(
                max_num_seqs=1,
                max_num_batched_tokens=16,
                max_pages_per_seq=1,
                num_pages=1,
                page_size=16,
            ),
            KVCacheManager(LIMITS, b""),
            PageFolder(folder, "a model", 1 << 20),
        )
        self._bench, self._num_left = bench, num_waits

    @property
    def is_busy(self) -> bool:
        return self._num_left > 0

    def wait(self) -> bool:
        self._num_left -= 1
        self._bench.now_s += WAIT_S
        return True


def test_an_engine_that_only_stores_pages_is_idle_and_counts_as_progress(tmp_path: Path):
    bench = Bench(lambda _: 0.01, [submit(0, 3, 1)])
    bench.core.stored_pages = Storing(bench, tmp_path, 1000)
    bench.play()
    bench.core.close()
    assert bench.now_s > 2 * WatchdogTimeouts().hung_after_s
    supervision = Supervision(WatchdogTimeouts(), 0.0)
    supervision.started(0.0)
    supervision.loaded(0.0, {})
    for at_s, report in bench.sent:
        assert not supervision.is_hung(at_s)
        supervision.beat(at_s, report.num_steps, report.predicted_s, is_idle=report.is_idle)
    assert not supervision.is_hung(bench.now_s)
    finished_s = next(at_s for at_s, report in bench.sent if ends_of(report))
    assert all(report.is_idle for at_s, report in bench.sent if at_s > finished_s)
    assert not bench.sent[0][1].is_idle, "the request is open"


def test_a_step_that_may_be_slow_is_announced_before_it_runs():
    bench = Bench(lambda tokens: tokens / 20, [submit(0, 1, 6)], [], [submit(1, 60, 1)])
    bench.play()
    slow_end_s = max(at_s for at_s, report in bench.sent if has_tokens(report))
    announced = [
        report.predicted_s
        for at_s, report in bench.sent
        if at_s < slow_end_s and not report.events and report.predicted_s >= 3.0
    ]
    assert announced


def test_the_time_for_which_a_step_is_put_off_is_part_of_it():
    cost = StepCost(fixed_ms=200.0, token_ms=1e-6, logit_ms=1e-6, key_ms=1e-6)
    bench = Bench(lambda _: 0.05, [submit(0, 1, 40)], cost=cost)
    reports = bench.play()
    last = reports[-1].stats
    assert last is not None
    assert last.histograms["step_seconds"].count == 40
    assert last.histograms["step_seconds"].total == pytest.approx(bench.now_s, rel=0.03)
    assert bench.now_s > 1.2 * 40 * 0.05, "no step was put off"
    with_tokens = [(at_s, report) for at_s, report in bench.sent if has_tokens(report)]
    for (at_s, report), (next_s, _) in pairwise(with_tokens[2:-1]):
        assert next_s - at_s <= report.predicted_s + 0.01


def test_a_queue_of_short_requests_is_not_forecast_as_a_full_step():
    # Else a stopped engine whose steps never were full would be waited for a minute and more.
    step_s = 0.3
    bench = Bench(lambda _: step_s, [submit(each, 1, 6) for each in range(8)])
    reports = bench.play()
    measured = [report for report in reports if report.num_steps > 1]
    assert max(report.predicted_s for report in measured) <= 4 * step_s


def test_cancelling_the_only_request_is_reported_at_once():
    bench = Bench(lambda _: 0.01, [submit(0, 3, 100)], [], [Cancel(0, None)], [])
    reports = bench.play()
    assert not any(map(ends_of, reports))
    idle = next(report for report in reports if report.is_idle)
    assert idle.stats is not None
    assert idle.stats.numbers["num_requests_running"] == 0


def test_failed_steps_in_a_row_stop_it_after_their_errors_were_reported():
    def fail(_: int) -> float:
        raise RuntimeError("the device was lost")

    bench = Bench(fail, [submit(0, 3, 4)], [submit(1, 3, 4)])
    with pytest.raises(RunnerError, match="2 steps in a row"):
        bench.play()
    ends = [end for _, report in bench.sent for end in ends_of(report)]
    assert [(end.request_id, end.error_kind) for end in ends] == [(0, "step_failed")]


def test_a_message_that_does_not_belong_is_refused():
    start = Start(model=None, config=EngineConfig(), log_level=0)
    with pytest.raises(WireError, match="Start"):
        Bench(lambda _: 0.01, [start]).play()
    assert Loading("load").phase == "load"


def test_a_watched_worker_sends_a_summary_each_tenth_of_a_second_until_it_is_watched_no_more():
    bench = Bench(
        lambda _: 0.01,
        [Watch(1), submit(0, 3, 60)],
        *[[] for _ in range(45)],
        [Watch(None)],
    )
    bench.play()
    summaries = [(at_s, each.summary) for at_s, each in bench.sent if each.summary is not None]
    assert [round(at_s, 2) for at_s, _ in summaries] == [0.0, 0.11, 0.21, 0.31, 0.41]
    assert [each.num_steps for _, each in summaries] == [0, 11, 10, 10, 10]
    assert bench.sent[-1][0] > 0.55


def test_an_idle_worker_sends_the_summary_of_the_last_steps_when_it_is_due():
    bench = Bench(lambda _: 0.01, [Watch(1), submit(0, 3, 3)], *[[]] * 8)
    bench.play()
    found = [(at_s, each.summary) for at_s, each in bench.sent if each.summary is not None]
    assert [round(at_s, 2) for at_s, _ in found] == [0.0, 0.1]
    last = found[-1][1]
    assert (last.num_running, last.num_steps, last.num_sampled) == (0, 3, 3)


def test_an_unwatched_worker_sends_no_summary():
    bench = Bench(lambda _: 0.2, [submit(0, 200, 5)])
    assert all(each.summary is None for each in bench.play())
