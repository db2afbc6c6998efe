"""`EngineCore` as its callers see it: ids, refusals, cancels, bounds, ends.

Owns bar 8 (requests at the bounds of pool and context) and the order of launches and reads.
"""

import pytest

from cadenza.backends.fake import FakeRunner
from cadenza.config import EngineLimits, SchedulerLoop
from cadenza.engine.core import EngineCore
from cadenza.errors import EngineClosedError, InvalidRequestError, QueueFullError
from cadenza.events import Finished, Started, Token
from cadenza.request import Request, SamplingParams
from tests.engine.simulation import (
    EOS_TOKEN_IDS,
    VOCAB_SIZE,
    Record,
    make_engine,
    run_requests,
)
from tests.engine.solo import solo_stream

LOOPS: tuple[SchedulerLoop, ...] = ("plain", "overlap")


def limits_of(**changes: int | bool) -> EngineLimits:
    values: dict[str, int | bool] = {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 16,
        "max_model_len": 96,
        "page_size": 16,
        "num_pages": 18,
        "max_num_queued_reqs": 8,
        "enable_prefix_caching": True,
    }
    return EngineLimits(**(values | changes))  # type: ignore[arg-type]


def greedy(prompt: tuple[int, ...], max_tokens: int | None = 10) -> Request:
    """A request that only its length ends."""
    return Request(
        prompt_token_ids=prompt,
        params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
    )


def prompt_of(length: int, start: int = 1) -> tuple[int, ...]:
    return tuple((start + index * 7) % VOCAB_SIZE for index in range(length))


def launched(runner: object) -> list[int]:
    assert isinstance(runner, FakeRunner)
    return [step for what, step in runner.trace if what == "launch"]


def test_ids_are_unique_and_grow_and_skip_nothing_for_refused_requests() -> None:
    engine = make_engine(limits_of())
    first = engine.submit(greedy(prompt_of(3)))
    with pytest.raises(InvalidRequestError):
        engine.submit(greedy(()))
    second = engine.submit(greedy(prompt_of(3)))
    engine.cancel(second)
    third = engine.submit(greedy(prompt_of(3)))
    assert [first, second, third] == [0, 1, 2]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("page_size", [16, 64, 96])
@pytest.mark.parametrize("past", [-1, 0, 1])
def test_requests_at_the_context_bound_are_served_or_refused(
    loop: SchedulerLoop, page_size: int, past: int
) -> None:
    limits = limits_of(page_size=page_size, num_pages=-(-96 // page_size))
    for num_prompt_tokens in (1, 48, 94):
        request = greedy(prompt_of(num_prompt_tokens), 96 + past - num_prompt_tokens)
        engine = make_engine(limits, loop=loop)
        if past > 0:
            with pytest.raises(InvalidRequestError):
                engine.submit(request)
            assert engine.is_idle
        else:
            run_requests(engine, [request, request]).verify()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("num_pages", [1, 2, 3])
@pytest.mark.parametrize("past", [-1, 0, 1])
def test_requests_at_the_pool_bound_are_served_or_refused(
    loop: SchedulerLoop, num_pages: int, past: int
) -> None:
    # The last token of a stream is never computed, so one more token fits than the pool has slots.
    most = num_pages * 16 + 1
    for num_prompt_tokens in (1, most // 2, most - 2):
        request = greedy(prompt_of(num_prompt_tokens), most + past - num_prompt_tokens)
        engine = make_engine(limits_of(num_pages=num_pages), loop=loop)
        if past > 0:
            with pytest.raises(InvalidRequestError):
                engine.submit(request)
            assert engine.is_idle
        else:
            run_requests(engine, [request, request, request]).verify()


def test_the_queue_is_bounded_and_drains() -> None:
    engine = make_engine(limits_of(max_num_queued_reqs=2))
    record = Record(seed=0, engine=engine)
    for _ in range(2):
        record.accept(engine.submit(greedy(prompt_of(4))), greedy(prompt_of(4)))
    assert engine.num_queue_slots == 0
    with pytest.raises(QueueFullError, match="2 requests wait"):
        engine.submit(greedy(prompt_of(4)))
    for event in engine.step():
        record.take(event)
    assert engine.num_queue_slots == 2
    record.accept(engine.submit(greedy(prompt_of(4))), greedy(prompt_of(4)))
    while not engine.is_idle:
        for event in engine.step():
            record.take(event)
    record.verify()
    assert sorted(record.finished) == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize("loop", LOOPS)
def test_never_more_rows_are_active_than_allowed_and_freed_rows_are_reused(
    loop: SchedulerLoop,
) -> None:
    engine = make_engine(limits_of(max_num_seqs=2), loop=loop)
    seen: dict[int, set[int]] = {}

    def watch(record: Record) -> None:
        running = engine.scheduler.running
        assert len(running) <= 2
        for sequence in running:
            assert sequence.row is not None
            seen.setdefault(sequence.row, set()).add(sequence.request_id)

    requests = [greedy(prompt_of(5, start), 3 + start) for start in range(7)]
    run_requests(engine, requests, before_step=watch).verify()
    assert set(seen) == {0, 1}
    assert all(len(request_ids) >= 3 for request_ids in seen.values())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("num_steps", range(6))
def test_cancel_frees_a_waiting_or_a_running_request_and_no_event_follows(
    loop: SchedulerLoop, num_steps: int
) -> None:
    engine = make_engine(limits_of(max_num_seqs=1), loop=loop)
    running, waiting = (engine.submit(greedy(prompt_of(20))) for _ in range(2))
    for _ in range(num_steps):
        engine.step()
    for request_id in (running, waiting):
        assert engine.cancel(request_id) is True
        assert engine.cancel(request_id) is False
        engine.check_invariants()
    events = [event for _ in range(4) for event in engine.step()]
    assert events == []
    assert engine.is_idle
    counts = engine.scheduler.kv_cache.pool.counts()
    assert (counts.live, counts.pinned) == (0, 0)


def test_cancel_of_an_unknown_or_a_finished_request_answers_false() -> None:
    engine = make_engine(limits_of())
    assert engine.cancel(0) is False
    assert engine.cancel(-1) is False
    run_requests(engine, [greedy(prompt_of(3))]).verify()
    assert engine.cancel(0) is False


def test_a_step_with_nothing_to_do_launches_nothing() -> None:
    engine = make_engine(limits_of())
    assert engine.is_idle
    assert engine.step() == []
    assert launched(engine.runner) == []


def stopping_request(*, at: int, max_tokens: int) -> tuple[Request, int]:
    """A request whose `at`-th token is the first that stops it, and that token."""
    for start in range(200):
        prompt = prompt_of(4, start)
        free = solo_stream(greedy(prompt, at), 0, 96).token_ids
        if free[-1] not in free[:-1] and not EOS_TOKEN_IDS & set(free):
            params = SamplingParams(
                temperature=0.0, max_tokens=max_tokens, stop_token_ids=(free[-1],)
            )
            return Request(prompt_token_ids=prompt, params=params), free[-1]
    raise AssertionError("no prompt gives such a stream")


@pytest.mark.parametrize("loop", LOOPS)
def test_a_stop_token_that_is_also_the_last_allowed_one_finishes_as_stop(
    loop: SchedulerLoop,
) -> None:
    request, stop_token_id = stopping_request(at=5, max_tokens=5)
    record = run_requests(make_engine(limits_of(), loop=loop), [request])
    record.verify()
    end = record.finished[0, 0]
    assert (end.finish_reason, end.stop_token_id) == ("stop", stop_token_id)
    assert end.num_generated_tokens == 5
    assert len(record.streams[0, 0]) == 4, "the stop token is no part of the stream"


@pytest.mark.parametrize("loop", LOOPS)
def test_an_eos_token_finishes_as_stop_and_names_no_stop_token(loop: SchedulerLoop) -> None:
    for start in range(200):
        request = Request(
            prompt_token_ids=prompt_of(4, start), params=SamplingParams(temperature=0.0)
        )
        solo = solo_stream(request, 0, 96)
        if solo.finish_reason == "stop":
            break
    record = run_requests(make_engine(limits_of(), loop=loop), [request])
    record.verify()
    assert record.finished[0, 0].finish_reason == "stop"
    assert record.finished[0, 0].stop_token_id is None


def test_tokens_leave_one_step_after_another_and_the_end_comes_with_the_last() -> None:
    engine = make_engine(limits_of(), loop="plain")
    engine.submit(greedy(prompt_of(4), 3))
    steps = [engine.step() for _ in range(3)]
    assert [[type(event) for event in events] for events in steps] == [
        [Started, Token],
        [Token],
        [Token, Finished],
    ]


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_request_starts_once_with_the_first_of_its_samples_that_gets_a_row(
    is_cancelled: bool,
) -> None:
    """Not again when it is preempted; two streams of 7 pages each do not fit the pool of 8."""
    engine = make_engine(limits_of(max_num_seqs=2, num_pages=8, max_model_len=112))
    params = SamplingParams(n=2, max_tokens=90, ignore_eos=True)
    request_id = engine.submit(Request(prompt_token_ids=prompt_of(20), params=params))
    if is_cancelled:
        engine.cancel(request_id, 0)
    events = []
    while not engine.is_idle:
        events += engine.step()
    assert events[0] == Started(request_id=request_id)
    assert sum(isinstance(event, Started) for event in events) == 1
    assert is_cancelled or engine.scheduler.num_preemptions > 0


def test_the_overlapped_loop_launches_a_step_before_it_reads_the_previous_one() -> None:
    engine = make_engine(limits_of(), loop="overlap")
    run_requests(engine, [greedy(prompt_of(20), 12), greedy(prompt_of(3), 20)]).verify()
    assert isinstance(engine.runner, FakeRunner)
    order = {entry: index for index, entry in enumerate(engine.runner.trace)}
    steps = launched(engine.runner)
    assert len(steps) > 12
    for step in steps[:-1]:
        assert order["launch", step + 1] < order["read", step]
    reads = [step for what, step in engine.runner.trace if what == "read"]
    assert reads == steps, "steps are read once each, in the order of their launches"


def test_the_plain_loop_reads_each_step_before_it_launches_the_next() -> None:
    engine = make_engine(limits_of(), loop="plain")
    run_requests(engine, [greedy(prompt_of(20), 12), greedy(prompt_of(3), 20)]).verify()
    assert isinstance(engine.runner, FakeRunner)
    steps = launched(engine.runner)
    expected = [(what, step) for step in steps for what in ("launch", "read")]
    assert engine.runner.trace == expected


def test_a_system_prompt_is_computed_once_and_its_cached_tokens_are_reported() -> None:
    engine = make_engine(limits_of(max_num_seqs=1))
    system = prompt_of(40)
    requests = [greedy((*system, 50 + index), 4) for index in range(4)]
    record = run_requests(engine, requests)
    record.verify()
    assert [record.finished[index, 0].num_cached_tokens for index in range(4)] == [0, 32, 32, 32]


def test_a_second_turn_reuses_the_pages_of_the_first_answer() -> None:
    engine = make_engine(limits_of())
    first = run_requests(engine, [greedy(prompt_of(20), 30)])
    request = greedy((*prompt_of(20), *first.token_ids((0, 0)), 5), 4)
    request_id = engine.submit(request)
    events = [event for _ in range(12) for event in engine.step()]
    end = events[-1]
    assert isinstance(end, Finished)
    assert end.num_cached_tokens == 48
    tokens = tuple(event.token_id for event in events if isinstance(event, Token))
    assert tokens == solo_stream(request, request_id, 96).token_ids


@pytest.mark.parametrize("loop", LOOPS)
def test_close_drops_everything_in_any_state_and_can_be_repeated(loop: SchedulerLoop) -> None:
    engine = make_engine(limits_of(max_num_seqs=1), loop=loop)
    for _ in range(3):
        engine.submit(greedy(prompt_of(20)))
    engine.step()
    engine.close()
    engine.close()
    counts = engine.scheduler.kv_cache.pool.counts()
    assert (counts.live, counts.pinned) == (0, 0)
    assert engine.is_idle
    with pytest.raises(EngineClosedError):
        engine.submit(greedy(prompt_of(3)))
    with pytest.raises(EngineClosedError):
        engine.step()


def test_requests_without_a_seed_depend_on_the_engines_seed_and_their_id_only() -> None:
    request = Request(prompt_token_ids=prompt_of(5), params=SamplingParams(max_tokens=12))

    def streams(seed: int) -> list[tuple[int, ...]]:
        engine: EngineCore = make_engine(limits_of(), seed=seed)
        record = run_requests(engine, [request, request], seed=seed)
        record.verify()
        return [record.token_ids((request_id, 0)) for request_id in (0, 1)]

    assert streams(1) == streams(1)
    assert streams(1) != streams(2)
    assert streams(1)[0] != streams(1)[1]


@pytest.mark.parametrize("loop", LOOPS)
def test_fifty_rows_at_once_are_each_sampled_as_they_are_alone(loop: SchedulerLoop) -> None:
    # Prompts of many lengths and outputs of many more: rows and logit rows part, rows change hands.
    engine = make_engine(
        limits_of(
            max_num_seqs=50, max_num_batched_tokens=120, num_pages=400, max_num_queued_reqs=100
        ),
        loop=loop,
    )
    requests = [
        Request(
            prompt_token_ids=prompt_of(1 + index * 7 % 40, index),
            params=SamplingParams(
                temperature=0.0 if index % 3 == 0 else 1.0,
                seed=index if index % 2 else None,
                max_tokens=20 + index * 5 % 30,
                ignore_eos=True,
                logprobs=(None, 0, 3, 20)[index % 4],
            ),
        )
        for index in range(80)
    ]
    most_rows = 0

    def watch(record: Record) -> None:
        nonlocal most_rows
        most_rows = max(most_rows, len(engine.scheduler.running))

    run_requests(engine, requests, before_step=watch).verify()
    assert most_rows == 50
