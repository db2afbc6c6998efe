"""An engine that is lost is a pause: the next one goes on with every open request.

On the token-storing runner in a process of its own. What a stream should be is what an engine in
this process gives that nothing happens to.
"""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path

import pytest

from cadenza.config import EngineConfig
from cadenza.engine.batch_engine import Cancel, Resume
from cadenza.engine.front import EngineFront, InProcessLink
from cadenza.engine.open_requests import OpenRequests
from cadenza.engine.process.process_link import CHANGED
from cadenza.engine.process.recovery import ENGINE_FAILED, TRIAL_TOKENS, Cause, Recovery
from cadenza.engine.step_watch import LiveNews, StepSummary
from cadenza.engine.timeouts import RequestTimeouts
from cadenza.errors import CadenzaError, EngineUnavailableError, QueueFullError
from cadenza.events import Event, Finished, Started, Token
from cadenza.request import Request, SamplingParams
from tests.by_day import by_day
from tests.engine.process.conftest import (
    IMPATIENT,
    QUICK,
    TIMEOUT_S,
    Front,
    HandClock,
    OpenFront,
    request,
)
from tests.engine.process.scripted_child import KILL, KILL_LATE, RAISE, limits_of, make_core

CONFIG = EngineConfig(max_num_seqs=8)
NUM_STREAMS = 64
StreamId = tuple[int, int]


@cache
def workload(count: int = NUM_STREAMS) -> tuple[Request, ...]:
    """Greedy, seeded and engine-seeded; short and longer than a step; one and two samples."""
    return tuple(
        Request(
            prompt_token_ids=tuple((index * 7 + at) % 80 for at in range(1 + index * 11 % 90)),
            params=SamplingParams(
                max_tokens=10 + index * 13 % 50,
                temperature=0.0 if index % 3 == 0 else 0.8,
                seed=index if index % 3 == 1 else None,
                frequency_penalty=0.5 if index % 4 == 1 else 0.0,
                logprobs=2 if index % 5 == 0 else None,
                prompt_logprobs=1 if index % 8 == 5 else None,
                n=2 if index % 7 == 3 else 1,
                ignore_eos=True,
            ),
        )
        for index in range(count)
    )


def content_of(events: list[Event]) -> dict[StreamId, list[object]]:
    """Everything that a client gets of each stream, in order; prompt logprobs one by one."""
    found: dict[StreamId, list[object]] = {}
    for event in events:
        if isinstance(event, Token):
            own = found.setdefault((event.request_id, event.sample), [])
            assert event.index == sum(isinstance(each, tuple) for each in own)
            own.append((event.token_id, event.logprobs))
        elif isinstance(event, Finished):
            own = found.setdefault((event.request_id, event.sample), [])
            own.append([event.finish_reason, event.num_prompt_tokens, event.num_generated_tokens])
        elif not isinstance(event, Started):
            own = found.setdefault((event.request_id, -1), [])
            assert event.start == 1 + len(own)
            own += event.entries
    return found


@cache
def undisturbed() -> dict[StreamId, list[object]]:
    service, events = EngineFront(InProcessLink(make_core(CONFIG))), list[Event]()
    for each in workload():
        service.submit(each)
    service.drain(TIMEOUT_S)
    service.serve(events.extend)
    return content_of(events)


def wait_all(front: Front) -> None:
    """Until no request is open and the last events have come, which are emitted after it."""
    front.wait(lambda: front.engine.load().num_open == 0)
    ends = front.engine.request_stats().ends
    num_ends = sum(count for reason, count in ends.items() if reason != "abort")
    front.wait(lambda: sum(isinstance(each, Finished) for each in front.events) == num_ends)


def kill(front: Front, number: signal.Signals = signal.SIGKILL) -> None:
    pid = front.link.pid
    assert pid is not None
    os.kill(pid, number)


def begin(front: Front, num_events: int) -> None:
    """The workload, until so many of its events have come."""
    front.engine.wait_ready(TIMEOUT_S)
    for each in workload():
        front.engine.submit(each)
    front.wait(lambda: len(front.events) >= num_events)


@pytest.mark.parametrize("num_events", by_day([1, 300, 1200], {300}))
def test_a_killed_engine_changes_no_stream(open_front: OpenFront, num_events: int):
    front = open_front(CONFIG)
    begin(front, num_events)
    num_before = front.engine.load().num_open
    kill(front)
    wait_all(front)
    assert content_of(front.events) == undisturbed()
    stats = front.engine.request_stats()
    assert stats.ends == {"length": sum(each.params.n for each in workload())}
    assert 0 < stats.num_resumed <= num_before
    assert 0 < stats.resume_seconds.count <= 8
    assert front.engine.status().num_restarts == 1


def kill_again_and_again(front: Front, kills: list[int]) -> None:
    """Each kill waits for so many further events, also while requests run alone."""
    begin(front, 1)
    for turn, num_events in enumerate(kills, start=1):
        most = len(front.events) + num_events
        front.wait(lambda most=most: len(front.events) >= most or not front.engine.load().num_open)
        front.wait_state("ready")
        kill(front)
        front.wait_restarts(turn)
    wait_all(front)


@pytest.mark.soak
def test_an_engine_killed_again_and_again_changes_no_stream(open_front: OpenFront):
    """Each life gets some request on; between two kills or while requests run alone."""
    front = open_front(CONFIG)
    kill_again_and_again(front, [100, 300, 500, 100, 200, 1])
    assert content_of(front.events) == undisturbed()
    assert front.engine.status().num_restarts == 6


@pytest.mark.soak
def test_a_stopped_engine_changes_no_stream(open_front: OpenFront):
    clock = HandClock()
    front = open_front(CONFIG, IMPATIENT, clock=clock)
    begin(front, 200)
    kill(front, signal.SIGSTOP)
    clock.let_pass_until(lambda: front.engine.status().num_restarts)
    wait_all(front)
    assert content_of(front.events) == undisturbed()


@pytest.mark.parametrize("first_token", by_day([KILL, KILL_LATE], {KILL_LATE}))
def test_a_request_that_kills_the_engine_fails_alone_after_three_deaths_without_others(
    open_front: OpenFront, caplog: pytest.LogCaptureFixture, first_token: int
):
    front = open_front(CONFIG)
    front.engine.wait_ready(TIMEOUT_S)
    poison = 20
    for index, each in enumerate(workload()):
        is_poison = index == poison
        front.engine.submit(request(first_token, 1, max_tokens=100) if is_poison else each)
    wait_all(front)
    front.wait_state("ready")
    found = content_of(front.events)
    (end,) = [
        event for event in front.events if isinstance(event, Finished) and event.error is not None
    ]
    assert (end.request_id, end.error_kind) == (poison, "engine_failed")
    expected = {key: own for key, own in undisturbed().items() if key[0] != poison}
    assert {key: own for key, own in found.items() if key[0] != poison} == expected
    # In the first deaths it ran beside others, and may have got on by a token.
    assert 5 <= front.engine.status().num_restarts <= 8
    assert f"request {poison} is ended: {ENGINE_FAILED}" in caplog.text


@pytest.mark.soak
def test_one_request_after_another_that_kills_the_engine_fails_alone(open_front: OpenFront):
    front = open_front(CONFIG)
    front.engine.wait_ready(TIMEOUT_S)
    for turn in range(2):
        front.engine.submit(request(KILL))
        assert front.wait_ends(turn + 1)[turn].error_kind == "engine_failed"
        front.wait_state("ready")
    assert front.engine.status().num_restarts == 10


@pytest.mark.soak
def test_an_engine_killed_each_time_that_it_loads_loses_no_request(
    open_front: OpenFront, tmp_path: Path
):
    gate = tmp_path / "gate"
    gate.touch()
    front = open_front(CONFIG, gate=gate)
    begin(front, 300)
    gate.unlink()
    for turn in range(1, 6):
        kill(front)
        front.wait_restarts(turn)
        front.wait(lambda: front.engine.status().phase == "load")
    gate.touch()
    wait_all(front)
    assert content_of(front.events) == undisturbed()


@pytest.mark.parametrize("num_oom_kills", [[0], range(1000)], ids=["none", "each time"])
def test_a_load_that_is_killed_for_want_of_memory_has_failed(
    open_front: OpenFront, tmp_path: Path, num_oom_kills: Sequence[int]
):
    counts = cycle(num_oom_kills)
    front = open_front(CONFIG, gate=tmp_path / "gate", count_oom_kills=lambda: next(counts))
    for turn in range(3):
        front.wait(lambda turn=turn: front.engine.status().num_restarts == turn)
        front.wait(lambda: front.engine.status().phase == "load")
        kill(front)
    if len(num_oom_kills) > 1:
        front.wait_state("dead")
    else:
        front.wait_restarts(3)


def test_an_engine_that_cannot_be_loaded_again_ends_every_request_and_is_given_up(
    open_front: OpenFront, tmp_path: Path
):
    broken = tmp_path / "broken"
    front = open_front(CONFIG, steps=5, crash_while=broken)
    deaths: list[CadenzaError] = []
    front.engine.call_at_death(deaths.append)
    begin(front, 5)
    broken.touch()
    kill(front)
    front.wait_state("dead")
    wait_all(front)
    ends = [event for event in front.events if isinstance(event, Finished)]
    assert {end.error_kind for end in ends} == {"engine_lost"}
    assert len(ends) == sum(each.params.n for each in workload())
    with pytest.raises(EngineUnavailableError, match="failed too often"):
        front.engine.submit(request())
    assert front.engine.status().num_restarts == 3
    front.wait(lambda: deaths)
    assert "failed so 3 times in a row while it loaded" in str(deaths[0])


def test_an_engine_that_crashes_while_it_loads_is_a_longer_pause(
    open_front: OpenFront, tmp_path: Path
):
    crash_once = tmp_path / "crash"
    front = open_front(CONFIG, crash_once=crash_once)
    begin(front, 300)
    crash_once.touch()
    kill(front)
    wait_all(front)
    assert content_of(front.events) == undisturbed()
    assert front.engine.status().num_restarts == 2


@pytest.mark.soak
def test_an_engine_that_crashes_while_it_resumes_is_a_longer_pause(open_front: OpenFront):
    front = open_front(CONFIG)
    begin(front, 300)
    num_events = len(front.events)
    kill(front)
    front.wait_restarts(1)
    front.wait(lambda: front.engine.status().is_ready or len(front.events) > num_events)
    kill(front)
    wait_all(front)
    assert content_of(front.events) == undisturbed()


def test_an_engine_with_other_weights_does_not_go_on(open_front: OpenFront, tmp_path: Path):
    identity = tmp_path / "identity"
    identity.write_text("one")
    front = open_front(CONFIG, steps=5, identity=identity)
    begin(front, 5)
    identity.write_text("another")
    kill(front)
    wait_all(front)
    ends = [event for event in front.events if isinstance(event, Finished)]
    assert {(end.error_kind, end.error) for end in ends} == {("engine_lost", CHANGED)}
    front.wait_state("ready")


def test_a_client_that_leaves_while_the_engine_is_down_is_forgotten(
    open_front: OpenFront, tmp_path: Path
):
    gate = tmp_path / "gate"
    gate.touch()
    front = open_front(CONFIG, gate=gate)
    begin(front, 100)
    gate.unlink()
    kill(front)
    front.wait_restarts(1)
    front.wait(lambda: front.engine.status().phase == "load")
    assert front.engine.status().state == "restarting"
    num_before = len(front.events)
    for request_id in range(0, NUM_STREAMS, 2):
        front.engine.cancel(request_id)
    with pytest.raises(EngineUnavailableError):
        front.engine.submit(request())
    gate.touch()
    wait_all(front)
    assert all(event.request_id % 2 for event in front.events[num_before:])
    expected = {key: own for key, own in undisturbed().items() if key[0] % 2}
    assert {k: own for k, own in content_of(front.events).items() if k[0] % 2} == expected
    assert front.engine.request_stats().num_resumed <= NUM_STREAMS // 2


def test_the_queues_bounds_count_the_requests_that_wait_for_an_engine(
    open_front: OpenFront, tmp_path: Path
):
    go = tmp_path / "go"
    config = EngineConfig(max_num_seqs=1, max_num_queued_reqs=2)
    front = open_front(config, steps=3, go=go)
    front.engine.wait_ready(TIMEOUT_S)
    for _ in range(3):
        front.engine.submit(request(max_tokens=50))
    front.wait(lambda: front.events)
    kill(front)
    front.wait_restarts(1)
    front.wait_state("ready")
    with pytest.raises(QueueFullError, match="3 requests are open"):
        front.engine.submit(request())
    go.touch()
    assert {end.finish_reason for end in front.wait_ends(3).values()} == {"length"}


def test_deadlines_count_on_while_the_engine_is_down(open_front: OpenFront, tmp_path: Path):
    gate, clock = tmp_path / "gate", HandClock()
    gate.touch()
    timeouts = RequestTimeouts(queue_s=20.0, total_s=50.0)
    config = EngineConfig(max_num_seqs=1)
    watchdog = replace(QUICK, load_hung_after_s=8.0)  # looked at every second
    front = open_front(config, watchdog, timeouts, clock=clock, gate=gate, steps=5)
    front.engine.wait_ready(TIMEOUT_S)
    running, queued = (front.engine.submit(request(max_tokens=100)) for _ in range(2))
    front.wait(lambda: front.events)
    gate.unlink()
    kill(front)
    clock.let_pass_until(lambda: front.engine.status().num_restarts, step_s=0.1)
    clock.let_pass_until(lambda: queued in front.ends(), step_s=5.0)
    assert front.ends()[queued].error_kind == "queue_timeout"
    assert running not in front.ends()
    clock.let_pass_until(lambda: running in front.ends(), step_s=10.0)
    assert front.ends()[running].error_kind == "request_timeout"


def test_an_engine_that_is_killed_while_it_drains_is_replaced_to_finish(open_front: OpenFront):
    front = open_front(CONFIG, step_s=0.002)
    begin(front, 50)
    front.engine.drain(within_s=TIMEOUT_S)
    kill(front)
    front.thread.join(TIMEOUT_S)
    assert content_of(front.events) == undisturbed()
    assert front.engine.status().num_restarts == 1


def test_steps_that_fail_too_often_are_a_pause_for_all_others(open_front: OpenFront):
    config = EngineConfig(max_num_seqs=8, max_consecutive_step_errors=1)
    front = open_front(config)
    front.engine.wait_ready(TIMEOUT_S)
    poison = 20
    for index, each in enumerate(workload()):
        front.engine.submit(request(RAISE) if index == poison else each)
    wait_all(front)
    expected = {key: own for key, own in undisturbed().items() if key[0] != poison}
    found = content_of(front.events)
    assert {key: own for key, own in found.items() if key[0] != poison} == expected
    (end,) = [each for each in found[poison, 0] if isinstance(each, list)]
    assert end[0] == "error"


def test_no_other_request_is_in_the_engine_while_a_quarantined_one_runs() -> None:
    books = OpenRequests(RequestTimeouts(), lambda: 0.0)
    recovery = Recovery(books)
    limits = limits_of(CONFIG)
    ids = [books.accept(request(max_tokens=50), limits) for _ in range(4)]
    for crash_s in (1.0, 2.0):
        books.record([Started(request_id=each) for each in ids[1:3]])
        assert recovery.lose_engine(crash_s) is None
    (alone,) = recovery.begin()
    assert isinstance(alone, Resume)
    assert (alone.request_id, recovery.is_done) == (1, False)
    assert recovery.advance() == []
    books.record([Started(request_id=1)])
    tokens = [Token(request_id=1, token_id=5, index=index) for index in range(TRIAL_TOKENS)]
    books.record(tokens[:-1])
    assert recovery.advance() == []
    books.record(tokens[-1:])
    withdrawn, alone = recovery.advance()
    assert withdrawn == Cancel(1, None)
    assert isinstance(alone, Resume)
    assert alone.request_id == 2
    books.cancel(2)
    rest = recovery.advance()
    assert [(type(each), each.request_id) for each in rest] == [
        (Resume, 0),
        (Resume, 1),
        (Resume, 3),
    ]
    assert recovery.is_done
    # Of the losses before, none is quarantined.
    assert recovery.lose_engine(3.0) is None
    assert {each.request_id for each in recovery.begin()} == {0, 1, 3}


class Trial:
    """One request, alone in engines that are lost when the test says so."""

    def __init__(self) -> None:
        self.books = OpenRequests(RequestTimeouts(), lambda: 0.0)
        self.recovery = Recovery(self.books)
        self.id = self.books.accept(request(max_tokens=50), limits_of(CONFIG))
        self.num_tokens = 0

    def live(self, *, is_started: bool = True, num_tokens: int = 0) -> Cause | None:
        """One life of an engine; the cause of its loss, if it is known then."""
        self.recovery.begin()
        if is_started:
            self.books.record([Started(request_id=self.id)])
        for _ in range(num_tokens):
            token = Token(request_id=self.id, token_id=5, index=self.num_tokens)
            self.books.record([token])
            self.num_tokens += 1
            self.recovery.advance()
        return self.recovery.lose_engine(0.0)


def test_a_request_is_the_cause_of_the_third_loss_in_a_row_in_which_it_was_alone() -> None:
    trial = Trial()
    assert [trial.live() for _ in range(4)] == [None] * 4
    cause = trial.live()
    assert cause is not None
    assert cause.request_id == trial.id
    assert [end.error_kind for end in cause.ends] == ["engine_failed"]


def test_a_request_that_was_not_started_is_not_the_cause() -> None:
    trial = Trial()
    assert [trial.live() for _ in range(4)] == [None] * 4
    assert [trial.live(is_started=False) for _ in range(20)] == [None] * 20
    assert trial.live() is not None


@pytest.mark.parametrize("num_tokens", [1, TRIAL_TOKENS, TRIAL_TOKENS + 1])
def test_a_request_that_gets_on_is_never_the_cause_however_often_the_engine_is_killed(
    num_tokens: int,
) -> None:
    trial = Trial()
    for _ in range(3):
        assert [trial.live() for _ in range(4)] == [None] * 4
        assert trial.live(num_tokens=num_tokens) is None


def test_who_watches_is_told_of_a_lost_engine_and_sees_the_next_one_with_new_labels(
    open_front: OpenFront,
):
    front, news = open_front(step_s=0.03), list[LiveNews]()
    front.engine.watch(news.append)
    front.engine.wait_ready(TIMEOUT_S)
    front.engine.submit(request(max_tokens=20))
    front.wait(lambda: any(labels_in(each) for each in news))
    pid = front.link.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    front.wait_ends(1)
    front.wait(lambda: isinstance(news[-1], StepSummary) and not news[-1].rows)
    lost, ready = news.index("lost"), len(news) - 1 - news[::-1].index("ready")
    assert 0 < lost < ready
    before = {label for each in news[:lost] for label in labels_in(each)}
    after = {label for each in news[ready:] for label in labels_in(each)}
    assert before
    assert not before & after
    front.engine.watch(None)
    num_news = len(news)
    front.engine.submit(request())
    front.wait_ends(2)
    assert len(news) == num_news


def labels_in(news: LiveNews) -> set[int]:
    return {row.label for row in news.rows} if isinstance(news, StepSummary) else set()
