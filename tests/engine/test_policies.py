"""Policies and batching decide who runs when: nobody starves, and no stream changes."""

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.batch.sequence import Sequence
from cadenza.config import EngineLimits, SchedulingPolicy
from cadenza.engine.core import EngineCore
from cadenza.events import Started, Token
from cadenza.request import Request, SamplingParams
from cadenza.scheduler.turns import FCFS, MAX_PREEMPTIONS, POLICIES, STARVATION_GUARD_S, TurnPolicy
from tests.engine.simulation import VOCAB_SIZE, Order, Record, make_engine, run_requests
from tests.scheduler.builders import sequence_of, turns_of

LIMITS = EngineLimits(
    max_num_seqs=2,
    max_num_batched_tokens=32,
    max_model_len=400,
    page_size=16,
    num_pages=60,
    max_num_queued_reqs=400,
)
GUARD_S = 2.0
STEP_S = 0.1
NUM_FLOODED_STEPS = 240


def request_of(num_tokens: int, seed: int, *, max_tokens: int = 2, priority: int = 0) -> Request:
    prompt = tuple(random.Random(seed).choices(range(VOCAB_SIZE), k=num_tokens))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(prompt_token_ids=prompt, params=params, priority=priority)


def waited_s(policy: TurnPolicy, late: Request, flood: list[Request]) -> float | None:
    """How long `late` waits for its start while each step brings a request that comes before it;
    None if it has not started when these end. All streams are verified."""
    now_s = 0.0
    order = Order(policy=policy, clock=lambda: now_s)
    engine = make_engine(LIMITS, order=order)
    record = Record(seed=0, engine=engine)

    def submit(request: Request) -> None:
        record.accept(engine.submit(request), request)

    for request in flood[:6]:
        submit(request)
    submit(late)
    started_s: float | None = None
    rest = flood[6:]
    while not engine.is_idle or rest:
        if rest:
            submit(rest.pop())
        for event in engine.step():
            record.take(event)
            if isinstance(event, Started) and event.request_id == 6 and rest:
                started_s = now_s
        engine.check_invariants()
        now_s += STEP_S
    record.verify()
    return started_s


def test_a_long_prompt_starts_when_the_guard_says_however_many_short_ones_come() -> None:
    flood = [request_of(8, seed, max_tokens=3) for seed in range(NUM_FLOODED_STEPS)]
    late = request_of(200, 9999)
    guarded = POLICIES["shortest_first"](GUARD_S)
    waited = waited_s(guarded, late, flood)
    assert waited is not None
    # Others whose guard passed earlier come first: those of the first steps.
    assert GUARD_S - STEP_S <= waited <= GUARD_S + 12 * STEP_S
    unguarded = POLICIES["shortest_first"](1000.0)
    assert waited_s(unguarded, late, flood) is None, "the flood would let anybody through"


def test_a_large_priority_is_aged_by_the_guard() -> None:
    flood = [request_of(8, seed, max_tokens=3) for seed in range(NUM_FLOODED_STEPS)]
    late = request_of(8, 9999, priority=3)
    waited = waited_s(POLICIES["priority"](GUARD_S), late, flood)
    assert waited is not None
    assert waited >= 3 * GUARD_S - STEP_S
    unaged = POLICIES["priority"](1000.0)
    assert waited_s(unaged, late, flood) is None, "the flood would let anybody through"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("fcfs", [0, 1, 2, 3]), ("shortest_first", [0, 3, 2, 1]), ("priority", [0, 3, 1, 2])],
)
def test_requests_start_in_the_order_of_the_policy(
    name: SchedulingPolicy, expected: list[int]
) -> None:
    limits = replace(LIMITS, max_num_seqs=1)
    engine = make_engine(
        limits, order=Order(policy=POLICIES[name](STARVATION_GUARD_S), clock=lambda: 0.0)
    )
    priorities = [0, 1, 2, -1] if name == "priority" else [0] * 4
    lengths = [10, 60, 40, 20]
    requests = [
        request_of(length, length, priority=priority)
        for length, priority in zip(lengths, priorities, strict=True)
    ]
    engine.submit(requests[0])
    order = [event.request_id for event in engine.step() if isinstance(event, Started)]
    for request in requests[1:]:
        engine.submit(request)
    while not engine.is_idle:
        order += [event.request_id for event in engine.step() if isinstance(event, Started)]
    assert order == expected


def test_the_shortest_is_the_one_with_the_fewest_uncached_tokens() -> None:
    policy = POLICIES["shortest_first"](STARVATION_GUARD_S)
    engine = make_engine(
        replace(LIMITS, max_num_seqs=1), order=Order(policy=policy, clock=lambda: 0.0)
    )
    cached, fresh = request_of(160, 1), request_of(60, 2)
    run_requests(engine, [cached])
    engine.submit(request_of(8, 3, max_tokens=8))
    engine.step()
    engine.submit(fresh)
    engine.submit(cached)
    order: list[int] = []
    while not engine.is_idle:
        order += [event.request_id for event in engine.step() if isinstance(event, Started)]
    assert order == [3, 2]


def sequences_of(priorities: Iterable[int], preempted: Iterable[int]) -> list[Sequence]:
    found: list[Sequence] = []
    for at, (priority, count) in enumerate(zip(priorities, preempted, strict=True)):
        sequence = sequence_of(at, 4)
        sequence.request = replace(sequence.request, priority=priority)
        sequence.num_preemptions = count
        sequence.arrived_s = float(at)
        found.append(sequence)
    return found


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 9)), min_size=1, max_size=8))
def test_the_victim_is_of_the_last_class_and_was_not_preempted_too_often(
    entries: list[tuple[int, int]],
) -> None:
    running = sequences_of(*zip(*entries, strict=True))
    victim = turns_of(POLICIES["priority"](100.0)).victim(running)
    spared = [each for each in running if each.num_preemptions < MAX_PREEMPTIONS]
    assert victim in (spared or running)
    last = max(each.request.priority for each in spared or running)
    assert victim.request.priority == last, "ages differ by less than a class here"
    assert turns_of(FCFS).victim(running) is (spared or running)[-1]


def run_static(requests: list[Request]) -> tuple[EngineCore, Record, list[tuple[int, int]]]:
    """Returns the log of (number of running requests before, request that starts)."""
    engine = make_engine(LIMITS, order=Order(batching="static"))
    starts: list[tuple[int, int]] = []
    record = Record(seed=0, engine=engine)
    for request in requests:
        record.accept(engine.submit(request), request)
    while not engine.is_idle:
        num_running = len(engine.scheduler.running)
        for event in engine.step():
            record.take(event)
            if isinstance(event, Started):
                starts.append((num_running, event.request_id))
        engine.check_invariants()
        record.num_steps += 1
    record.verify()
    return engine, record, starts


def test_a_static_batch_starts_when_the_last_of_the_one_before_has_ended() -> None:
    lengths = [3, 30, 5, 20, 4]
    requests = [request_of(40, at, max_tokens=length) for at, length in enumerate(lengths)]
    _, record, starts = run_static(requests)
    assert starts == [(0, at) for at in range(5)]
    continuous = make_engine(LIMITS)
    assert run_requests(continuous, requests).num_steps < record.num_steps


def test_tokens_of_a_static_batch_come_as_they_are_made() -> None:
    _, record, _ = run_static([request_of(8, at, max_tokens=4 + at) for at in range(2)])
    first = [at for at, event in record.log if isinstance(event, Token) and event.index == 0]
    assert max(first) < record.num_steps - 3


def test_samples_of_one_prompt_are_one_static_batch() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=4, n=2, seed=1, ignore_eos=True)
    both = Request(prompt_token_ids=(1, 2, 3, 4) * 10, params=params)
    _, record, starts = run_static([both, request_of(8, 1)])
    assert starts == [(0, 0), (0, 1)]
    assert len(record.streams) == 3


def test_what_a_static_batch_copies_is_copied_before_its_other_rows_write() -> None:
    """One that starts without a token in the step copies a slot that the next one is given."""
    limits = replace(
        LIMITS,
        max_num_seqs=3,
        max_num_batched_tokens=32,
        max_model_len=128,
        page_size=128,
        num_pages=3,
        slot_unit=1,
    )

    def ask(prompt: list[int], max_tokens: int = 5) -> Request:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=5)
        return Request(prompt_token_ids=tuple(prompt), params=params)

    cached = [place % 50 + 1 for place in range(60)]
    others = [[step * place % 50 + 2 for place in range(60)] for step in (3, 7, 11)]
    requests = [
        ask(others[0] * 2),
        ask(cached[:20] + others[1]),
        ask(others[2][:20]),
    ]
    engine = make_engine(limits, order=Order(batching="static"))
    record = Record(seed=0, engine=engine)
    for batch in ([ask(cached, 3)], requests):
        for request in batch:
            record.accept(engine.submit(request), request)
        while not engine.is_idle:
            for event in engine.step():
                record.take(event)
            engine.check_invariants()
    record.verify()
    assert engine.scheduler.prefix_counts.num_hits > 0
