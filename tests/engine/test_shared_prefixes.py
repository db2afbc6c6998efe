"""A prefix is computed once, also when all its requests come at the same time."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.batch.sequence import Sequence
from cadenza.config import EngineLimits
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.request import Request, SamplingParams
from tests.engine.simulation import (
    REAL_PARTS,
    VOCAB_SIZE,
    ObservedRunner,
    Parts,
    Record,
    make_engine,
    run_requests,
)

PAGE_SIZE = 16


def limits_of(token_budget: int, max_num_seqs: int = 16) -> EngineLimits:
    return EngineLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(token_budget, max_num_seqs),
        max_model_len=1200,
        page_size=PAGE_SIZE,
        num_pages=16 * 75,
        max_num_queued_reqs=100,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """`num_requests` prompts that begin with the same `num_shared` tokens."""

    num_requests: int
    num_shared: int
    num_own: int
    max_tokens: int
    seed: int = 0

    def requests(self) -> list[Request]:
        rng = random.Random(self.seed)

        def tokens(count: int) -> tuple[int, ...]:
            return tuple(rng.choices(range(VOCAB_SIZE), k=count))

        shared = tokens(self.num_shared)
        params = SamplingParams(temperature=0.0, max_tokens=self.max_tokens, ignore_eos=True)
        return [
            Request(prompt_token_ids=(*shared, index, *tokens(self.num_own - 1)), params=params)
            for index in range(self.num_requests)
        ]

    @property
    def num_useful_tokens(self) -> int:
        """Tokens to launch if the shared pages are computed once."""
        whole = self.num_shared // PAGE_SIZE * PAGE_SIZE
        each = self.num_shared - whole + self.num_own + self.max_tokens - 1
        return whole + self.num_requests * each


def num_launched(crowd: Crowd, token_budget: int, parts: Parts = REAL_PARTS) -> int:
    engine = make_engine(limits_of(token_budget), loop="overlap", parts=parts)
    run_requests(engine, crowd.requests()).verify()
    assert isinstance(engine.runner, ObservedRunner)
    return engine.runner.num_launched_tokens


@given(
    st.builds(
        Crowd,
        num_requests=st.integers(2, 16),
        num_shared=st.integers(64, 400),
        num_own=st.integers(1, 40),
        max_tokens=st.integers(1, 4),
        seed=st.integers(0, 100),
    ),
    st.integers(16, 300),
)
def test_simultaneous_requests_launch_their_prefix_once(crowd: Crowd, token_budget: int) -> None:
    # A row that has ended may be launched once more; each wasted token is one of those.
    extra = num_launched(crowd, token_budget) - crowd.num_useful_tokens
    assert 0 <= extra <= crowd.num_requests


def test_thirty_two_requests_with_a_long_system_prompt_launch_it_once() -> None:
    crowd = Crowd(num_requests=32, num_shared=1000, num_own=30, max_tokens=2)
    assert num_launched(crowd, 256) - crowd.num_useful_tokens <= crowd.num_requests


class Impatient(KVCacheManager):
    """No sequence waits for a prefix."""

    def is_prefix_coming(self, sequence: Sequence) -> bool:
        return False


def test_without_waiting_the_prefix_would_be_launched_several_times() -> None:
    crowd = Crowd(num_requests=8, num_shared=200, num_own=4, max_tokens=2)
    launched = num_launched(crowd, 600, Parts(kv_cache=Impatient))
    assert launched >= crowd.num_useful_tokens + 192


def test_another_prompt_passes_those_that_wait_for_a_prefix() -> None:
    engine = make_engine(limits_of(64))
    crowd = Crowd(num_requests=3, num_shared=600, num_own=4, max_tokens=4).requests()
    other = Request(
        prompt_token_ids=(5,) * 20, params=SamplingParams(temperature=0.0, max_tokens=1)
    )
    for request in (*crowd, other):
        engine.submit(request)
    engine.step()
    running = [sequence.request_id for sequence in engine.scheduler.running]
    assert running == [0, 3]
    assert engine.scheduler.kv_cache.num_prefix_waits == 2


@pytest.mark.parametrize("cancelled_after", [1, 3, 6])
def test_the_next_one_leads_when_the_leader_is_cancelled(cancelled_after: int) -> None:
    engine = make_engine(limits_of(64))
    crowd = Crowd(num_requests=4, num_shared=320, num_own=4, max_tokens=4)
    requests = crowd.requests()
    record = Record(seed=0, engine=engine)
    for request in requests:
        record.accept(engine.submit(request), request)
    while not engine.is_idle:
        if record.num_steps == cancelled_after:
            assert engine.cancel(0)
            record.cancelled.add((0, 0))
        for event in engine.step():
            record.take(event)
        engine.check_invariants()
        record.num_steps += 1
        assert record.num_steps < 500, "the others wait for ever"
    record.verify()
    assert isinstance(engine.runner, ObservedRunner)
    assert engine.runner.num_launched_tokens <= 2 * crowd.num_useful_tokens


def test_nobody_waits_for_a_leader_that_has_far_more_of_its_own_left() -> None:
    engine = make_engine(limits_of(64))
    long, short = (
        Crowd(num_requests=1, num_shared=64, num_own=count, max_tokens=4).requests()[0]
        for count in (1000, 8)
    )
    engine.submit(long)
    engine.submit(short)
    engine.step()
    assert [sequence.request_id for sequence in engine.scheduler.running] == [0, 1]


def test_a_tenants_prefix_is_not_waited_for_by_another() -> None:
    engine = make_engine(limits_of(64))
    one = Crowd(num_requests=1, num_shared=600, num_own=4, max_tokens=4).requests()[0]
    engine.submit(one)
    engine.submit(
        Request(prompt_token_ids=one.prompt_token_ids, params=one.params, cache_salt="other")
    )
    engine.step()
    assert engine.scheduler.kv_cache.num_prefix_waits == 0
