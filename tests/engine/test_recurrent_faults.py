"""A model with recurrent state that lacks a slot."""

from dataclasses import replace
from functools import partial

import pytest

from cadenza.config import EngineLimits, SchedulerLoop
from cadenza.kv.kv_cache_manager import KVCacheManager
from tests.by_day import by_day
from tests.engine.simulation import Parts, make_engine, replayable, run_requests
from tests.engine.test_faults import LIMITS, FailsOneAllocation, requests_of

LOOPS: tuple[SchedulerLoop, ...] = ("plain", "overlap")
HERE = "tests/engine/test_recurrent_faults.py"
RECURRENT = replace(LIMITS, num_state_slots=10, state_snapshot_interval=16)


class WithFailingSlots(KVCacheManager):
    """Has no slot for the `at`-th allocation of states."""

    def __init__(self, at: int, limits: EngineLimits, secret: bytes) -> None:
        super().__init__(limits, secret)
        assert self.states is not None
        pool = self.states.pool
        self.states.pool = FailsOneAllocation(pool.num_pages, self.states._forget, at)


def run_with_failed_allocation(at: int, loop: SchedulerLoop) -> FailsOneAllocation:
    engine = make_engine(RECURRENT, loop=loop, parts=Parts(kv_cache=partial(WithFailingSlots, at)))
    run_requests(engine, requests_of(0, 12), most_empty_steps=1).verify()
    states = engine.scheduler.kv_cache.states
    assert states is not None
    pool = states.pool
    assert isinstance(pool, FailsOneAllocation)
    return pool


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("at", by_day(range(40), {0, 1, 2, 3, 11, 29}))
def test_a_slot_that_is_not_there_is_only_not_now(loop: SchedulerLoop, at: int) -> None:
    name = "test_a_slot_that_is_not_there_is_only_not_now"
    with replayable(f"allocation {at} failed", f"python -m pytest '{HERE}::{name}[{at}-{loop}]'"):
        run_with_failed_allocation(at, loop)


def test_the_workload_allocates_as_many_slots_as_fail() -> None:
    assert run_with_failed_allocation(-1, "plain").num_allocations > 40
