"""`OpenRequests`: ids, bounds, deadlines, and exactly one end for each request; a clock by hand."""

import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest
from msgspec import structs

from cadenza.config import EngineLimits
from cadenza.engine.open_requests import OpenRequests
from cadenza.engine.request_stats import RequestTimes
from cadenza.engine.timeouts import RequestTimeouts
from cadenza.errors import ConfigError, QueueFullError
from cadenza.events import Event, Finished, Preparing, Started, Token
from cadenza.request import Request, SamplingParams

LIMITS = EngineLimits(
    max_num_seqs=2,
    max_num_batched_tokens=16,
    max_model_len=64,
    page_size=16,
    num_pages=8,
    max_num_queued_reqs=3,
    max_num_queued_tokens=100,
)
TIMEOUTS = RequestTimeouts(queue_s=10, total_s=30)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def request(num_tokens: int = 1, n: int = 1) -> Request:
    return Request(prompt_token_ids=(1,) * num_tokens, params=SamplingParams(n=n))


def token(request_id: int, index: int = 0, sample: int = 0) -> Token:
    return Token(request_id=request_id, token_id=5, index=index, sample=sample)


def finished(request_id: int, sample: int = 0) -> Finished:
    return Finished(
        request_id=request_id,
        sample=sample,
        finish_reason="length",
        stop_token_id=None,
        num_prompt_tokens=1,
        num_generated_tokens=1,
        num_cached_tokens=0,
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def books(clock: Clock) -> OpenRequests:
    return OpenRequests(TIMEOUTS, clock)


def test_requests_are_accepted_up_to_the_queue_and_the_rows(books: OpenRequests):
    assert [books.accept(request(), LIMITS) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(QueueFullError, match=r"5 requests are open.*max-num-queued-reqs 3"):
        books.accept(request(), LIMITS)
    books.record([finished(2)])
    assert books.accept(request(), LIMITS) == 5
    assert books.stats().rejections == {"queue_full": 1}


def test_prompt_tokens_wait_up_to_their_bound_and_one_that_starts_makes_room(books: OpenRequests):
    for _ in range(2):
        books.accept(request(50), LIMITS)
    with pytest.raises(QueueFullError, match="100 prompt tokens wait already and 1 more"):
        books.accept(request(1), LIMITS)
    books.record([Started(request_id=0)])
    assert books.accept(request(50), LIMITS) == 2
    books.cancel(1)
    assert books.accept(request(50), LIMITS) == 3
    assert books.stats().rejections == {"queue_tokens_full": 1}


def test_a_prompt_above_the_bound_is_accepted_when_nobody_waits(books: OpenRequests):
    tight = replace(LIMITS, max_num_queued_tokens=10)
    assert books.accept(request(60), tight) == 0
    with pytest.raises(QueueFullError):
        books.accept(request(1), tight)


def test_nothing_passes_for_a_request_that_is_not_open(books: OpenRequests):
    first, second = books.accept(request(), LIMITS), books.accept(request(), LIMITS)
    assert books.cancel(first)
    assert not books.cancel(first)
    events: list[Event] = [token(first), token(second), finished(second), finished(second)]
    starts = [Started(request_id=each) for each in (first, second)]
    assert books.record([*starts, *events]) == events[1:3]
    assert books.record([Started(request_id=9), finished(9)]) == []


def test_each_sample_ends_once_and_the_request_with_the_last_of_them(books: OpenRequests):
    books.accept(request(n=4), LIMITS)
    events: list[Event] = [token(0, 0, 2), token(0, 0, 0), token(0, 1, 2), finished(0, 1)]
    assert books.record([Started(request_id=0), *events]) == events
    assert books.cancel(0, 0)
    assert not books.cancel(0, 0)
    assert not books.cancel(0, 1)
    assert books.record([token(0, 1, 0), finished(0, 0), finished(0, 1)]) == []
    assert books.num_open == 1
    ends = books.end_all("engine_lost", "gone")
    assert [(end.sample, end.num_generated_tokens) for end in ends] == [(2, 2), (3, 0)]
    assert books.num_open == 0
    assert books.stats().ends == {"length": 1, "abort": 1, "error": 2}


def test_each_deadline_ends_its_requests_once_and_not_before(books: OpenRequests, clock: Clock):
    queued, started = books.accept(request(3), LIMITS), books.accept(request(), LIMITS)
    books.record([Started(request_id=started), token(started)])
    assert books.next_deadline_s() == 1010.0
    clock.now_s = 1009.9
    assert books.end_overdue() == []
    clock.now_s = 1010.0
    (end,) = books.end_overdue()
    assert (end.request_id, end.error_kind, end.num_prompt_tokens) == (
        queued,
        "queue_timeout",
        3,
    )
    assert end.error is not None
    assert "10 are all that --queue-timeout allows" in end.error
    assert books.next_deadline_s() == 1030.0
    clock.now_s = 1030.0
    (end,) = books.end_overdue()
    assert (end.request_id, end.num_generated_tokens) == (started, 1)
    assert end.error_kind == "request_timeout"
    assert end.error is not None
    assert "30 seconds, all that --request-timeout allows" in end.error
    assert books.end_overdue() == []
    assert books.next_deadline_s() is None


@pytest.mark.parametrize("seconds", [0.0, -1.0, 86_401.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("name", "flag"), [("queue_s", "--queue-timeout"), ("total_s", "--request-timeout")]
)
def test_timeouts_out_of_bounds_are_refused_by_their_flag(name: str, flag: str, seconds: float):
    with pytest.raises(ConfigError, match=flag):
        RequestTimeouts(**{name: seconds})
    assert RequestTimeouts(**{name: 86_400.0}) != RequestTimeouts()


def test_the_times_of_a_request_are_split_at_its_start_and_its_first_token(
    books: OpenRequests, clock: Clock
):
    books.accept(request(), LIMITS)
    clock.now_s += 1.0
    books.record([Started(request_id=0)])
    clock.now_s += 2.0
    books.record([token(0)])
    clock.now_s += 4.0
    books.record([token(0, 1), finished(0)])
    stats = books.stats()
    times = (stats.queue_seconds, stats.prefill_seconds, stats.decode_seconds)
    assert [(each.count, each.total) for each in times] == [(1, 1.0), (1, 2.0), (1, 4.0)]


def test_a_request_leaves_the_queue_when_its_prompt_is_prepared(books: OpenRequests, clock: Clock):
    books.accept(request(), LIMITS)
    clock.now_s += 9.0
    assert books.record([Preparing(request_id=0)]) == []
    assert books.load().num_queued_tokens == 0
    clock.now_s += 9.0
    assert books.end_overdue() == []
    books.record([Started(request_id=0), token(0)])
    stats = books.stats()
    assert (stats.queue_seconds.total, stats.prefill_seconds.total) == (9.0, 9.0)


@pytest.mark.parametrize("n", [1, 2])
def test_a_prompt_alone_has_a_time_until_it_is_read_and_none_after_it(
    books: OpenRequests, clock: Clock, n: int
):
    books.accept(request(n=n), LIMITS)
    books.accept(request(), LIMITS)
    clock.now_s += 1.0
    books.record([Started(request_id=0), Started(request_id=1)])
    clock.now_s += 2.0
    failed = structs.replace(finished(1), finish_reason="error")
    books.record([*(finished(0, sample) for sample in range(n)), failed])
    stats = books.stats()
    times = (stats.queue_seconds, stats.prefill_seconds, stats.decode_seconds)
    assert [(each.count, each.total) for each in times] == [(2, 2.0), (1, 2.0), (0, 0.0)]


@pytest.mark.parametrize("seed", range(20))
def test_accepted_is_open_plus_ended_in_any_order_of_events(seed: int):
    rng, clock = random.Random(seed), Clock()
    books = OpenRequests(TIMEOUTS, clock)
    terminals: Counter[int] = Counter()
    for _ in range(300):
        clock.now_s += rng.choice([0, 0, 0.5, 3])
        target = rng.randrange(max(1, books.stats().num_accepted))
        action = rng.choice(["accept", "token", "start", "finish", "cancel", "look"])
        if action == "accept" and books.num_open < 5:
            with suppress(QueueFullError):
                books.accept(request(), LIMITS)
        elif action == "token":
            books.record([token(target)])
        elif action == "start":
            books.record([Started(request_id=target)])
        elif action == "finish":
            passed = books.record([finished(target)])
            terminals.update(event.request_id for event in passed)
        elif action == "cancel":
            terminals.update([target] * books.cancel(target))
        else:
            terminals.update(end.request_id for end in books.end_overdue())
        stats = books.stats()
        assert stats.num_accepted == books.num_open + sum(stats.ends.values())
    terminals.update(end.request_id for end in books.end_all("engine_lost", "gone"))
    assert terminals == Counter(range(books.stats().num_accepted))


def test_the_times_of_a_request_are_filled_in_with_the_pauses_of_lost_engines(
    books: OpenRequests, clock: Clock
):
    times = RequestTimes()
    books.accept(request(), LIMITS, times)

    def at(now_s: float, *events: Event) -> None:
        clock.now_s = now_s
        books.record(events)

    at(1001.0, Started(request_id=0))
    at(1002.0, token(0, 0))
    books.lose_engine(1003.0)
    at(1004.0, Started(request_id=0))
    at(1005.0, token(0, 1))
    books.lose_engine(1006.0)
    at(1007.0, finished(0))
    assert (times.accepted_s, times.started_s) == (1000.0, 1001.0)
    assert (times.first_token_s, times.ended_s) == (1002.0, 1007.0)
    assert times.pauses == [(1003.0, 1005.0), (1006.0, 1007.0)]
