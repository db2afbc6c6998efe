"""`EngineFront`: draining, deadlines, failures in a row; on one thread, a clock by hand."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from cadenza.backends.fake import FakeRunner, FakeStepHandle
from cadenza.batch.step_schema import ModelInputs
from cadenza.config import EngineLimits
from cadenza.engine.core import MAX_EMPTY_STEPS, EngineCore
from cadenza.engine.front import EngineFront, InProcessLink
from cadenza.engine.stats import EngineStats
from cadenza.engine.timeouts import RequestTimeouts
from cadenza.errors import (
    ContextLengthError,
    EngineClosedError,
    EngineStalledError,
    EngineUnavailableError,
    QueueFullError,
    RunnerError,
)
from cadenza.events import Event, Finished, Token
from cadenza.request import Request, SamplingParams
from cadenza.tenant import ONE_TENANT

LIMITS = EngineLimits(
    max_num_seqs=2,
    max_num_batched_tokens=16,
    max_model_len=64,
    page_size=16,
    num_pages=8,
    max_num_queued_reqs=30,
    max_consecutive_step_errors=3,
)


class Bench:
    """A service over the fake runner whose clock gains `launch_s` with each launched step.

    `on_step` is called at each launch with its number and may raise.
    """

    def __init__(self, queue_s: float = 20, total_s: float = 40, launch_s: float = 1.0) -> None:
        bench = self

        class Runner(FakeRunner):
            def launch(self, inputs: ModelInputs) -> FakeStepHandle:
                bench.num_launches += 1
                bench.on_step(bench.num_launches)
                return super().launch(inputs)

        self.num_launches = 0
        self.on_step: Callable[[int], None] = lambda number: None
        self.events: list[Event] = []
        runner = Runner(
            max_num_seqs=LIMITS.max_num_seqs,
            max_num_batched_tokens=LIMITS.max_num_batched_tokens,
            max_pages_per_seq=LIMITS.max_pages_per_seq,
            num_pages=LIMITS.num_pages,
            page_size=LIMITS.page_size,
        )
        self.core = EngineCore(runner, LIMITS)
        timeouts = RequestTimeouts(queue_s=queue_s, total_s=total_s)
        self.link = InProcessLink(self.core, timeouts, lambda: self.num_launches * launch_s)
        self.service = EngineFront(self.link)

    def submit(self, max_tokens: int) -> int:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return self.service.submit(Request(prompt_token_ids=(1, 2, 3), params=params))

    def serve(self) -> None:
        self.service.serve(self.events.extend)

    def ends(self) -> dict[int, tuple[str, str | None]]:
        ends = [event for event in self.events if isinstance(event, Finished)]
        assert len({end.request_id for end in ends}) == len(ends)
        return {end.request_id: (end.finish_reason, end.error_kind) for end in ends}


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_request_is_checked_again_unless_it_has_passed_the_engines_own_check(bench: Bench):
    beyond = Request(prompt_token_ids=(1,) * (LIMITS.max_model_len + 1))
    own = bench.core.request_check
    wider = replace(own, limits=replace(LIMITS, max_model_len=1 << 20, num_pages=1 << 20))
    with pytest.raises(ContextLengthError):
        bench.service.submit(wider.checked(beyond))
    passed = own.checked(Request(prompt_token_ids=(1,)))
    with pytest.raises(ContextLengthError):
        own.checked(replace(passed, request=beyond))
    assert bench.service.submit(passed) == 0
    assert passed.times.accepted_s is not None, "the caller's times are filled in"


def test_draining_finishes_what_is_open_and_refuses_the_rest(bench: Bench):
    for max_tokens in (3, 5, 8):
        bench.submit(max_tokens)
    bench.service.drain(within_s=30)
    assert bench.service.status().state == "draining"
    with pytest.raises(EngineUnavailableError, match="takes no new requests"):
        bench.submit(1)
    bench.serve()
    assert bench.ends() == dict.fromkeys(range(3), ("length", None))
    assert sum(isinstance(event, Token) for event in bench.events) == 16
    assert bench.service.status().state == "dead"
    assert bench.service.request_stats().rejections == {"unavailable": 1}


def test_what_has_not_finished_by_the_end_of_draining_gets_one_error(bench: Bench):
    bench.submit(3)
    bench.submit(60)
    bench.service.drain(within_s=10)
    bench.serve()
    assert bench.ends() == {0: ("length", None), 1: ("error", "engine_closed")}
    assert 10 <= bench.num_launches <= 11


def test_shutting_down_while_draining_ends_at_once(bench: Bench):
    bench.submit(60)
    bench.on_step = lambda number: bench.service.shutdown() if number == 2 else None
    bench.service.drain(within_s=1000)
    bench.serve()
    assert bench.ends() == {0: ("error", "engine_closed")}
    assert bench.num_launches == 2
    with pytest.raises(EngineClosedError):
        bench.submit(1)


def test_deadlines_end_requests_and_free_their_pages(bench: Bench):
    for max_tokens in (60, 60, 60, 2):
        bench.submit(max_tokens)
    bench.service.drain(within_s=1000)
    bench.serve()
    assert bench.ends() == {
        0: ("error", "request_timeout"),
        1: ("error", "request_timeout"),
        2: ("error", "queue_timeout"),
        3: ("error", "queue_timeout"),
    }
    assert bench.num_launches <= 41
    assert bench.link.stats.by_label["pages"]["live"] == 0


def test_figures_are_read_from_the_engine_at_times_and_when_it_has_nothing_to_do() -> None:
    """Not at each step: that takes a part of the host's time for it."""
    bench, seen = Bench(launch_s=0.01), list[EngineStats]()
    bench.on_step = lambda number: seen.append(bench.link.stats)
    bench.submit(max_tokens=35)
    bench.service.drain(within_s=1000)
    first = bench.link.stats
    bench.serve()
    assert len(seen) >= 35
    taken = [number for number, (a, b) in enumerate(pairwise([first, *seen])) if a is not b]
    assert len(taken) == 3
    assert all(b - a in (10, 11) for a, b in pairwise([0, *taken])), "each tenth of a second"
    assert bench.link.stats.histograms["step_seconds"].count == bench.num_launches


def test_whoever_sees_that_all_requests_ended_reads_all_of_their_steps() -> None:
    bench = Bench(launch_s=0.0)
    read: list[float] = []

    def emit(events: list[Event]) -> None:
        bench.events += events
        read.append(bench.link.stats.numbers["num_requests_running"])

    bench.submit(max_tokens=5)
    bench.submit(max_tokens=9)
    bench.service.drain(within_s=1000)
    bench.service.serve(emit)
    assert read[-1] == 0
    assert bench.link.stats.histograms["iteration_tokens_total"].total == 2 * 3 + 4 + 8


@pytest.mark.parametrize(
    ("queue_s", "end"), [(50, ("error", "queue_timeout")), (70, ("length", None))]
)
def test_requests_behind_long_ones_wait_as_long_as_the_queues_timeout(
    queue_s: float, end: tuple[str, str | None]
):
    bench = Bench(queue_s=queue_s, total_s=600)
    for max_tokens in (60, 60, 2, 2):
        bench.submit(max_tokens)
    bench.service.drain(within_s=1000)
    bench.serve()
    assert bench.ends() == {0: ("length", None), 1: ("length", None), 2: end, 3: end}
    assert bench.num_launches >= 60
    assert bench.service.timeouts == RequestTimeouts(queue_s=queue_s, total_s=600)


def test_a_request_that_would_start_too_late_is_refused_at_once_with_the_time():
    """Two rows of ten steps: about twenty requests start in a hundred seconds."""
    bench = Bench(queue_s=100, total_s=1000)
    refused: list[QueueFullError] = []
    asked: list[QueueFullError | None] = []

    def come(number: int) -> None:
        if number != 60:
            return
        asked.append(bench.service.refusal(ONE_TENANT, 0))
        for _ in range(30):
            try:
                bench.submit(10)
            except QueueFullError as error:
                refused.append(error)
        asked.append(bench.service.refusal(ONE_TENANT, 0))
        bench.service.drain(within_s=1000)

    bench.on_step = come
    for _ in range(24):
        bench.submit(10)
    bench.serve()
    assert asked[0] is None
    assert str(asked[1]) == str(refused[-1])
    assert refused[0].retry_after_s == pytest.approx(100, rel=0.1)
    assert "100 are all that --queue-timeout allows" in str(refused[0])
    assert bench.service.request_stats().rejections == {"queue_too_long": len(refused)}
    # Of those that were accepted few wait in vain.
    ends = Counter(bench.ends().values())
    assert ends.keys() <= {("length", None), ("error", "queue_timeout")}
    assert ends["error", "queue_timeout"] <= 5
    assert ends["length", None] >= 26


def test_failures_in_a_row_stop_the_service_and_a_success_between_them_does_not(bench: Bench):
    def fail(number: int) -> None:
        if number in {1, 2, 4, 5} or number >= 8:
            raise RuntimeError("the device was lost")

    bench.on_step = fail
    for _ in range(20):
        bench.submit(1)
    with pytest.raises(RunnerError, match="3 steps in a row"):
        bench.serve()
    assert bench.num_launches == 10
    assert set(bench.ends()) == set(range(20))
    status = bench.service.status()
    assert (status.state, status.error is not None) == ("dead", True)
    assert bench.link.stats.numbers["failed_steps"] == 7


def test_an_engine_that_computes_nothing_although_requests_are_open_says_so_and_stops(bench: Bench):
    """It lacks the pages that somebody holds."""
    pool = bench.core.scheduler.kv_cache.pool
    assert pool.try_allocate(LIMITS.num_pages) is not None
    for _ in range(3):
        bench.submit(5)
    with pytest.raises(
        EngineStalledError,
        match=r"0 running, 3 waiting, 0 of 8 pages free; 1 waits for: pages, 2 waits for: turn",
    ):
        bench.serve()
    assert bench.core.loop.num_empty_steps == MAX_EMPTY_STEPS
    assert bench.ends() == dict.fromkeys(range(3), ("error", "engine_closed"))
    status = bench.service.status()
    assert status.state == "dead"
    assert "report it" in str(status.error)
