"""`StepWatch`: what a summary counts, when it is due, and that an unwatched engine makes none."""

import logging
from itertools import pairwise

import pytest

from cadenza.backends.fake import FakeStepHandle
from cadenza.batch.step_schema import ModelInputs
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.stats import StepMeter
from cadenza.engine.step_watch import (
    MAX_WAITING_ROWS,
    SUMMARY_EVERY_S,
    RowSummary,
    StepSummary,
    StepWatch,
)
from cadenza.events import Token
from cadenza.request import Request, SamplingParams
from cadenza.tenant import Tenant
from tests.engine.test_stats import LIMITS, CountingRunner, make_runner

STEP_S = 0.02


class SlowRunner(CountingRunner):
    now_s: float = 0.0

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        self.now_s += STEP_S
        return super().launch(inputs)


class Watched:
    """An engine whose steps take `STEP_S`, by a clock that nothing else moves."""

    def __init__(self, options: CoreOptions | None = None) -> None:
        self.runner = make_runner(kind=SlowRunner)
        self.core = EngineCore(self.runner, LIMITS, options or CoreOptions(reserved_output=0.0))
        self.meter = StepMeter(self.core, lambda: self.runner.now_s)

    def submit(self, length: int, max_tokens: int = 20, tenant: str = "") -> int:
        return self.core.submit(
            Request(
                prompt_token_ids=tuple(range(1, length + 1)),
                params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
                tenant=Tenant(name=tenant),
            )
        )

    def play(self) -> list[StepSummary]:
        """Until the engine is idle; all summaries."""
        found: list[StepSummary] = []
        while not self.core.is_idle:
            self.meter.step()
            summary = self.meter.take_summary()
            if summary is not None:
                found.append(summary)
        due_in_s = self.meter.summary_due_in_s()
        if due_in_s is not None:
            self.runner.now_s += due_in_s
            last = self.meter.take_summary()
            assert last is not None
            found.append(last)
        return found


def test_an_unwatched_engine_makes_no_summary_and_neither_does_one_watched_no_more():
    watched = Watched()
    watched.submit(10)
    assert watched.play() == []
    assert watched.meter.take_summary() is None
    watched.meter.watch(1)
    watched.submit(10)
    assert watched.play()
    watched.meter.watch(None)
    watched.submit(10)
    assert watched.play() == []


def test_the_first_summary_is_due_at_once_and_says_what_is_there():
    watched = Watched()
    watched.meter.watch(7)
    summary = watched.meter.take_summary()
    assert summary is not None
    assert (summary.num_running, summary.num_waiting, summary.rows) == (0, 0, ())
    assert (summary.pages_live, summary.pages_cached, summary.pages_free) == (
        0,
        0,
        LIMITS.num_pages,
    )
    assert watched.meter.summary_due_in_s() is None
    watched.submit(3)
    assert watched.meter.summary_due_in_s() == SUMMARY_EVERY_S


def test_summaries_come_at_most_each_tenth_of_a_second_and_count_everything_once():
    watched = Watched()
    watched.meter.watch(1)
    watched.meter.take_summary()
    for length in (30, 50, 7):
        watched.submit(length, max_tokens=30)
    times_s: list[float] = []
    found: list[StepSummary] = []
    while not watched.core.is_idle or watched.meter.summary_due_in_s() is not None:
        if watched.core.is_idle:
            watched.runner.now_s += STEP_S
        else:
            watched.meter.step()
        summary = watched.meter.take_summary()
        if summary is not None:
            times_s.append(watched.runner.now_s)
            found.append(summary)
    gaps_s = [later - earlier for earlier, later in pairwise(times_s)]
    assert len(found) > 3
    assert min(gaps_s) >= SUMMARY_EVERY_S - 1e-9
    assert sum(each.num_tokens for each in found) == sum(watched.runner.num_tokens)
    assert sum(each.num_steps for each in found) == len(watched.runner.num_tokens)
    assert sum(each.num_sampled for each in found) == 90
    assert max(each.longest_s for each in found) == pytest.approx(STEP_S)
    assert found[-1].rows == ()
    assert sum(each.seconds for each in found) == pytest.approx(times_s[-1])


def test_a_row_has_its_progress_and_what_is_new_since_the_last_summary():
    watched = Watched(CoreOptions(reserved_output=0.0, loop="plain"))
    watched.submit(60, max_tokens=30)  # 40 tokens a step
    watched.meter.watch(5)
    watched.meter.take_summary()
    rows: list[RowSummary] = []
    while not watched.core.is_idle:
        watched.runner.now_s += SUMMARY_EVERY_S  # so that each step has a summary
        watched.meter.step()
        summary = watched.meter.take_summary()
        assert summary is not None
        rows += summary.rows
    assert [(each.kind, each.computed, each.total, each.new) for each in rows[:4]] == [
        ("prompt", 40, 60, 0),
        ("decode", 60, 61, 1),
        ("decode", 61, 62, 1),
        ("decode", 62, 63, 1),
    ]
    assert {each.label for each in rows} == {5}
    assert sum(each.new for each in rows) == 29  # the last one ends the row


def test_what_a_row_did_before_the_watch_is_not_new():
    watched = Watched()
    watched.submit(10, max_tokens=20)
    for _ in range(6):
        watched.meter.step()
    watched.meter.watch(1)
    summary = watched.meter.take_summary()
    assert summary is not None
    (row,) = summary.rows
    assert (row.new, row.preempted) == (0, 0)
    assert row.total > 12


def test_preemptions_and_cached_tokens_are_those_of_the_engine():
    watched = Watched()
    watched.meter.watch(1)
    watched.submit(40)
    watched.play()
    watched.submit(40, max_tokens=50)
    watched.submit(35, max_tokens=50)
    watched.submit(30, max_tokens=50)
    found = watched.play()
    rows = [row for each in found for row in each.rows]
    assert watched.core.scheduler.num_preemptions > 0
    assert sum(row.preempted for row in rows) == watched.core.scheduler.num_preemptions
    assert max(row.cached for row in rows) == 32


def test_waiting_rows_are_bounded_and_counted():
    watched = Watched()
    for _ in range(MAX_WAITING_ROWS + 8):
        watched.submit(10)
    watched.meter.watch(1)
    summary = watched.meter.take_summary()
    assert summary is not None
    assert (summary.num_waiting, len(summary.rows)) == (MAX_WAITING_ROWS + 8, MAX_WAITING_ROWS)
    assert {row.kind for row in summary.rows} == {"waiting"}


def test_a_waiting_row_says_for_what_and_so_does_the_log_when_it_changes(
    caplog: pytest.LogCaptureFixture,
):
    watched = Watched(CoreOptions(reserved_output=1.0))
    for _ in range(3):
        watched.submit(40, max_tokens=50)
    with caplog.at_level(logging.DEBUG, "cadenza.engine.core"):
        watched.meter.watch(1)
        for _ in range(3):
            watched.meter.step()
        summary = watched.meter.take_summary()
    assert summary is not None
    assert [each.waits_for for each in summary.rows] == [None, "pages", "turn"]
    lines = [line for line in caplog.messages if "waits" in line]
    assert lines == [
        f"request {number}, sample 0 waits: {reason}"
        for number, reason in ((1, "prefix"), (2, "prefix"), (1, "pages"), (2, "turn"))
    ]


def test_rows_have_their_tenants():
    watched = Watched()
    watched.meter.watch(1)
    for tenant in ("a", "b", "a"):
        watched.submit(10, tenant=tenant)
    watched.meter.step()
    summary = watched.meter.take_summary()
    assert summary is not None
    assert [summary.tenants[row.tenant] for row in summary.rows] == ["a", "b", "a"]


def test_accepted_drafts_are_counted_for_their_row():
    watched = Watched()
    ids = [watched.submit(10) for _ in range(2)]
    watched.meter.step()
    watch = StepWatch(watched.core, lambda: watched.runner.now_s, 1)
    drafted = [
        Token(request_id=ids[1], token_id=5, index=each, is_draft=each < 3) for each in range(4)
    ]
    watch.note(drafted, STEP_S)
    summary = watch.take()
    assert [row.drafts for row in summary.rows] == [0, 3]
    assert [row.drafts for row in watch.take().rows] == [0, 0]
