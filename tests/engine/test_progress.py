"""Where there is work and nothing is in flight, a step computes something: after a lost step over a
tight pool, too, with every policy and with tenants. An engine that does not says so and stops.
"""

import random
from functools import partial

import pytest

from cadenza.config import EngineLimits, SchedulerLoop, SchedulingPolicy
from cadenza.engine.core import MAX_EMPTY_STEPS
from cadenza.errors import EngineStalledError
from cadenza.request import Request, SamplingParams
from cadenza.scheduler.turns import POLICIES
from cadenza.tenant import Tenant
from tests.engine.simulation import (
    VOCAB_SIZE,
    LosingRunner,
    Order,
    Parts,
    Record,
    make_engine,
    replayable,
    run_requests,
)

HERE = "tests/engine/test_progress.py"
LIMITS = EngineLimits(
    max_num_seqs=6,
    max_num_batched_tokens=64,
    max_model_len=200,
    page_size=16,
    num_pages=16,
    max_num_queued_reqs=100,
)
NUM_TRIES = 600
LOOPS: tuple[SchedulerLoop, ...] = ("plain", "overlap")

HUNG: dict[tuple[SchedulingPolicy, int], tuple[int, ...]] = {
    ("fcfs", 1): (0, 1),
    ("fcfs", 2): (0, 11, 34, 48),
    ("shortest_first", 1): (11, 28, 29, 31),
    ("shortest_first", 2): (17, 28, 35, 38),
    ("priority", 1): (11, 12, 23, 24),
    ("priority", 2): (27, 33, 49),
}
"""Seeds with which an engine stopped for good that retried a sequence only at the head of its
queue; for one tenant in the order of arrival there were none."""


def requests_of(rng: random.Random, policy: SchedulingPolicy, num_tenants: int) -> list[Request]:
    tenants = [Tenant(name=f"t{at}") for at in range(num_tenants)]
    requests: list[Request] = []
    for _ in range(rng.randint(4, 9)):
        prompt = tuple(rng.choices(range(VOCAB_SIZE), k=rng.randint(4, 60)))
        params = SamplingParams(
            max_tokens=rng.randint(4, 120), temperature=0.0, ignore_eos=rng.random() < 0.8
        )
        priority = rng.randint(-2, 2) if policy == "priority" else 0
        requests.append(
            Request(
                prompt_token_ids=prompt,
                params=params,
                tenant=rng.choice(tenants),
                priority=priority,
            )
        )
    return requests


def lose_one_step(policy: SchedulingPolicy, num_tenants: int, seed: int) -> Record:
    rng = random.Random(f"{policy} {num_tenants} {seed}")
    requests = requests_of(rng, policy, num_tenants)
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.01
        return now_s

    engine = make_engine(
        LIMITS,
        loop=LOOPS[seed % 2],
        reserved_output=rng.choice([0.0, 0.0, 0.5]),
        order=Order(policy=POLICIES[policy](rng.choice([0.5, 10.0])), clock=clock),
        parts=Parts(runner=partial(LosingRunner, seed=seed, lost={rng.randint(0, 60)})),
    )
    record = run_requests(engine, requests)
    record.verify()
    return record


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_tenants", [1, 2])
def test_a_lost_step_over_a_tight_pool_stops_nobody(
    policy: SchedulingPolicy, num_tenants: int
) -> None:
    for seed in HUNG[policy, num_tenants]:
        with replayable(f"seed {seed}", f"lose_one_step({policy!r}, {num_tenants}, {seed})"):
            lose_one_step(policy, num_tenants, seed)


@pytest.mark.soak
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_tenants", [1, 2])
@pytest.mark.parametrize("first", range(0, NUM_TRIES, 100))
def test_no_try_of_600_with_each_policy_hangs(
    policy: SchedulingPolicy, num_tenants: int, first: int
) -> None:
    for seed in range(first, first + 100):
        with replayable(f"seed {seed}", f"lose_one_step({policy!r}, {num_tenants}, {seed})"):
            lose_one_step(policy, num_tenants, seed)


@pytest.mark.parametrize("loop", LOOPS)
def test_an_engine_says_that_it_computes_nothing_after_so_many_steps_and_then_goes_on(
    loop: SchedulerLoop,
) -> None:
    """All pages are held by somebody for a while."""
    engine = make_engine(LIMITS, loop=loop)
    pool = engine.scheduler.kv_cache.pool
    held = pool.try_allocate(LIMITS.num_pages)
    assert held is not None
    record = Record(seed=0, engine=engine)
    for request in requests_of(random.Random(7), "fcfs", 2)[:3]:
        record.accept(engine.submit(request), request)
    for _ in range(MAX_EMPTY_STEPS - 1):
        assert engine.step() == []
    with pytest.raises(
        EngineStalledError,
        match=r"0 running, 3 waiting, 0 of 16 pages free; 1 waits for: pages, 2 waits for: turn",
    ):
        engine.step()
    pool.free(held)
    while not engine.is_idle:
        record.step()
    record.verify()
