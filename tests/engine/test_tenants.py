"""Tenants share an engine by weight, and a flood of one does not hold up another.

The bound is that of VTC (arXiv 2401.00588, theorem 4.4). Service is what clients see: a prompt when
its request starts, and each token.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.batch.batch import BatchEntry
from cadenza.batch.sequence import Sequence
from cadenza.batch.step_cost import StepCost
from cadenza.config import EngineLimits, SchedulingPolicy
from cadenza.events import Started, Token
from cadenza.request import Request, SamplingParams
from cadenza.scheduler.fair_share import MAX_COUNTERS, FairShare, ServiceCost, measured_service_cost
from cadenza.scheduler.scheduler import Scheduler
from cadenza.scheduler.turns import POLICIES, STARVATION_GUARD_S
from cadenza.tenant import Tenant
from tests.by_day import by_day
from tests.engine.simulation import (
    REAL_PARTS,
    VOCAB_SIZE,
    Order,
    Parts,
    Record,
    make_engine,
    replayable,
    run_requests,
)
from tests.scheduler.builders import sequence_of, turns_of

LIMITS = EngineLimits(
    max_num_seqs=4,
    max_num_batched_tokens=48,
    max_model_len=96,
    page_size=16,
    num_pages=16,
    max_num_queued_reqs=1000,
    enable_prefix_caching=False,
)
COST = ServiceCost()
NUM_STEPS = 300
HERE = "tests/engine/test_tenants.py"


def request_of(rng: random.Random, tenant: Tenant, *, longest: int = 64) -> Request:
    prompt = tuple(rng.choices(range(VOCAB_SIZE), k=rng.randint(1, longest)))
    max_tokens = rng.randint(1, LIMITS.max_model_len - longest)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(prompt_token_ids=prompt, params=params, tenant=tenant)


Asks = Callable[[int, int, int], int]
"""How many requests the tenant at a place sends of which so many wait and so many are open."""


def floods(at: int, num_waiting: int, _num_open: int) -> int:
    """The first tenant has always many more requests in the queue."""
    return (4 if at else 20) - num_waiting


@dataclass(slots=True, kw_only=True)
class Backlog:
    """An engine in which every tenant always has several requests waiting, or as `asks` says.

    `longest`: the longest prompt of the first tenant and of the others; of what is left of the
    context answers have up to all.
    """

    seed: int
    tenants: list[Tenant]
    asks: Asks = floods
    longest: tuple[int, int] = (64, 24)
    policy: SchedulingPolicy = "fcfs"
    parts: Parts = REAL_PARTS
    services: dict[str, float] = field(default_factory=dict)

    def run(self) -> Iterator[dict[str, float]]:
        """Yields each tenant's service by weight after each step; verifies the streams at last."""
        rng = random.Random(f"backlog {self.seed}")
        order = Order(policy=POLICIES[self.policy](STARVATION_GUARD_S), clock=lambda: 0.0)
        engine = make_engine(LIMITS, loop="plain", parts=self.parts, order=order)
        record = Record(seed=self.seed, engine=engine)
        self.services = dict.fromkeys((each.name for each in self.tenants), 0.0)
        for step in range(NUM_STEPS):
            waiting = [each.request.tenant.name for each in engine.scheduler.waiting]
            opened = [each.request.tenant.name for each in engine.scheduler.sequences]
            for at, tenant in enumerate(self.tenants):
                count = self.asks(at, waiting.count(tenant.name), opened.count(tenant.name))
                for _ in range(count):
                    request = request_of(rng, tenant, longest=self.longest[at > 0])
                    record.accept(engine.submit(request), request)
            for event in engine.step():
                record.take(event)
                self._serve(record.requests[event.request_id], event)
            engine.check_invariants()
            yield dict(self.services)
            record.num_steps = step + 1
        for request_id in record.requests:
            for stream in record.open_streams(request_id):
                engine.cancel(request_id)
                record.cancelled.add(stream)
        record.verify()

    def _serve(self, request: Request, event: object) -> None:
        service = 0.0
        if isinstance(event, Started):
            service = COST.prompt * len(request.prompt_token_ids)
        elif isinstance(event, Token):
            service = COST.output
        self.services[request.tenant.name] += service / request.tenant.weight


def bound_of(tenants: list[Tenant]) -> float:
    num_pool_tokens = LIMITS.num_pages * LIMITS.page_size
    unit = max(COST.prompt * LIMITS.max_model_len, COST.output * num_pool_tokens)
    return 2 * unit / min(each.weight for each in tenants)


def check_bound(seed: int, *, policy: SchedulingPolicy = "fcfs", parts: Parts = REAL_PARTS) -> None:
    """The services of two tenants differ by at most the bound over any span of time: the most and
    the least that their difference ever is are no further apart."""
    rng = random.Random(f"tenants {seed}")
    weights = [rng.choice([0.5, 1.0, 1.0, 2.0]) for _ in range(rng.randint(2, 4))]
    tenants = [Tenant(name=f"t{at}", weight=weight) for at, weight in enumerate(weights)]
    bound = bound_of(tenants)
    spans = list(Backlog(seed=seed, tenants=tenants, policy=policy, parts=parts).run())
    assert sum(spans[-1].values()) > bound, "too little was served to tell"
    first = tenants[0].name
    for other in tenants[1:]:
        gaps = [services[first] - services[other.name] for services in spans]
        assert max(gaps) - min(gaps) <= bound, f"{first} and {other.name}: unfair"


@pytest.mark.parametrize("policy", by_day(["fcfs", "shortest_first", "priority"], ["fcfs"]))
@pytest.mark.parametrize("seed", by_day(range(100), [0]))
def test_the_services_of_tenants_that_wait_differ_by_at_most_the_bound(
    seed: int, policy: SchedulingPolicy
) -> None:
    name = "test_the_services_of_tenants_that_wait_differ_by_at_most_the_bound"
    with replayable(f"seed {seed}", f"python -m pytest '{HERE}::{name}[{seed}-{policy}]'"):
        check_bound(seed, policy=policy)


class InOrder(FairShare):
    """Tenants have no turns."""

    def in_turns(self, ordered: list[Sequence]) -> list[Sequence]:
        return ordered


class ServesAllAsOneTenant(Scheduler):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.turns.fair_share = InOrder()


def test_the_bound_catches_a_scheduler_without_counters() -> None:
    with pytest.raises(AssertionError, match="unfair"):
        check_bound(0, parts=Parts(scheduler=ServesAllAsOneTenant))


def steps_to_first_token(requests: list[Request], *, parts: Parts = REAL_PARTS) -> dict[int, int]:
    engine = make_engine(LIMITS, parts=parts, order=Order(clock=lambda: 0.0))
    record = run_requests(engine, requests)
    record.verify()
    return {e.request_id: at for at, e in reversed(record.log) if isinstance(e, Token)}


def test_a_request_passes_the_queue_of_a_tenant_that_floods() -> None:
    rng = random.Random("flood")
    flood = [request_of(rng, Tenant(name="many")) for _ in range(60)]
    polite = request_of(rng, Tenant(name="few"))
    last = len(flood)
    fair = steps_to_first_token([*flood, polite])
    assert fair[last] < sorted(fair.values())[10]
    unfair = steps_to_first_token([*flood, polite], parts=Parts(scheduler=ServesAllAsOneTenant))
    assert unfair[last] > sorted(unfair.values())[50], "the queue was no hindrance"


def test_one_tenants_requests_start_as_without_tenants() -> None:
    rng = random.Random("one")
    requests = [request_of(rng, Tenant()) for _ in range(30)]
    named = [replace(each, tenant=Tenant(name="one", weight=7.0)) for each in requests]
    assert steps_to_first_token(requests) == steps_to_first_token(named)


def waiting_of(*names: str) -> list[Sequence]:
    found: list[Sequence] = []
    for at, name in enumerate(names):
        sequence = sequence_of(at, 4)
        sequence.request = replace(sequence.request, tenant=Tenant(name=name))
        found.append(sequence)
    return found


def joined(share: FairShare, sequences: list[Sequence]) -> None:
    for sequence in sequences:
        share.join(sequence.request.tenant)


def test_a_tenant_that_joins_gets_the_smallest_counter_of_those_that_wait() -> None:
    share = FairShare()
    a, b, c = waiting_of("a", "b", "c")
    joined(share, [a, b])
    share.charge_prompt(a, 500)
    share.charge_prompt(b, 300)
    joined(share, [c])
    assert share.counter_of(c) == 300
    share.leave(c.request.tenant)
    share.charge_prompt(b, 300)
    joined(share, [c])
    assert share.counter_of(c) == 500


def test_a_tenant_that_joins_keeps_its_credit_and_no_more() -> None:
    share = FairShare(credit=100.0)
    a, b = waiting_of("a", "b")
    joined(share, [a, b])
    share.charge_prompt(a, 1000)
    share.charge_prompt(b, 30)
    share.leave(b.request.tenant)
    joined(share, [b])
    assert share.counter_of(b) == 900
    share.leave(b.request.tenant)
    share.charge_prompt(b, 50)
    joined(share, [b])
    assert share.counter_of(b) == 950


def test_a_tenant_that_joins_an_empty_queue_gets_the_counter_of_the_last_that_left() -> None:
    share = FairShare()
    a, b, c = waiting_of("a", "b", "c")
    joined(share, [a, b])
    share.charge_prompt(a, 500)
    share.leave(b.request.tenant)
    share.leave(a.request.tenant)
    joined(share, [c])
    assert share.counter_of(c) == 500


def entry_of(sequence: Sequence, num_new_tokens: int) -> BatchEntry:
    return BatchEntry(sequence, 0, 4, num_new_tokens, 1, 0)


def test_tokens_taken_unsampled_are_charged_like_those_of_a_prompt_and_once() -> None:
    share = FairShare(ServiceCost(prompt=1.0, output=10.0))
    a, b = waiting_of("a", "b")
    joined(share, [a, b])
    for _ in range(3):
        a.append_forced(7)
    share.charge_outputs([entry_of(a, 4), entry_of(b, 1)])
    assert (share.counter_of(a), share.counter_of(b)) == (13.0, 10.0)
    share.charge_outputs([entry_of(a, 1)])
    assert share.counter_of(a) == 23.0


def test_tokens_taken_unsampled_while_a_tenant_was_alone_are_not_charged_later() -> None:
    share = FairShare(ServiceCost(prompt=1.0, output=10.0))
    a, b = waiting_of("a", "b")
    joined(share, [a])
    for _ in range(9):
        a.append_forced(7)
        share.charge_outputs([entry_of(a, 2)])
    joined(share, [b])
    before = share.counter_of(a)
    share.charge_outputs([entry_of(a, 1)])
    assert share.counter_of(a) == before + 10.0


def test_turns_follow_counters_that_change_between_them() -> None:
    share = FairShare()
    waiting = waiting_of("a", "a", "a", "b", "b")
    joined(share, waiting)
    order: list[int] = []
    for sequence in share.in_turns(waiting):
        order.append(sequence.request_id)
        share.charge_prompt(sequence, 30 if sequence.request.tenant.name == "a" else 20)
    assert order == [0, 3, 4, 1, 2]


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12), st.randoms())
@settings(max_examples=30, deadline=None)
def test_turns_hold_each_sequence_once_and_keep_each_tenants_order(
    names: list[str], rng: random.Random
) -> None:
    share = FairShare()
    waiting = waiting_of(*names)
    joined(share, waiting)
    found: list[Sequence] = []
    for sequence in share.in_turns(waiting):
        found.append(sequence)
        share.charge_prompt(sequence, rng.randint(0, 50))
    assert sorted(each.request_id for each in found) == list(range(len(names)))
    for name in set(names):
        own = [each.request_id for each in found if each.request.tenant.name == name]
        assert own == sorted(own)


def test_counters_of_tenants_that_are_gone_do_not_pile_up() -> None:
    share = FairShare()
    for at in range(MAX_COUNTERS + 50):
        (sequence,) = waiting_of(f"t{at}")
        joined(share, [sequence])
        share.charge_prompt(sequence, 10)
        share.leave(sequence.request.tenant)
    assert len(share._counters) <= MAX_COUNTERS + 1


def test_the_victim_is_of_the_tenant_with_the_largest_counter() -> None:
    running = waiting_of("a", "b", "a", "b")
    counters = {"a": 5.0, "b": 7.0}
    share = FairShare()
    turns = turns_of(fair_share=share)
    share._counters = counters
    assert turns.victim(running) is running[3]
    counters["a"] = 9.0
    assert turns.victim(running) is running[2]
    counters.clear()
    assert turns.victim(running) is running[3]


def test_weights_of_tokens_are_what_they_take() -> None:
    cost = StepCost(fixed_ms=8.0, token_ms=0.25, logit_ms=0.25, key_ms=0.0)
    assert measured_service_cost(cost, 16) == ServiceCost(prompt=0.25, output=1.0)
    noisy = replace(cost, token_ms=1e-9, logit_ms=0.5)
    assert measured_service_cost(noisy, 16).prompt == pytest.approx(0.01)


CAPPED = Tenant(name="capped", page_share=0.5, cache_share=0.25)


def test_a_tenant_holds_no_more_than_its_share_and_others_pass_it() -> None:
    """That no invariant is violated in any step says that the shares are kept."""
    rng = random.Random("shares")
    limits = replace(LIMITS, enable_prefix_caching=True)
    capped = [request_of(rng, CAPPED) for _ in range(12)]
    other = [request_of(rng, Tenant(name="other")) for _ in range(6)]
    engine = make_engine(limits, order=Order(clock=lambda: 0.0))
    most: dict[str, int] = {"capped": 0, "other": 0}

    def watch(_: Record) -> None:
        for name, seen in most.items():
            own = [s for s in engine.scheduler.running if s.request.tenant.name == name]
            most[name] = max(seen, len({page for s in own for page in s.page_table}))

    record = run_requests(engine, [*capped, *other], before_step=watch)
    record.verify()
    assert most["capped"] <= limits.num_pages // 2 < most["other"]


def test_a_tenant_alone_in_its_share_finishes_by_preempting_its_own() -> None:
    """Two sequences that together outgrow the share, admitted by what they hold at first."""
    params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    own = [Request(prompt_token_ids=(at,) * 8, params=params, tenant=CAPPED) for at in range(1, 4)]
    other = Request(prompt_token_ids=(9,) * 8, params=params, tenant=Tenant(name="other"))
    engine = make_engine(LIMITS, reserved_output=0.0, order=Order(clock=lambda: 0.0))
    record = run_requests(engine, [other, *own])
    record.verify()
    assert engine.scheduler.num_preemptions > 0
    longest = {stream: at for at, event in record.log for stream in [event.request_id]}
    assert longest[0] < max(longest.values()), "the other tenant's was preempted for them"


def test_a_tenants_prefixes_fill_its_share_of_the_cache_and_no_more() -> None:
    limits = replace(LIMITS, enable_prefix_caching=True, num_pages=32)
    rng = random.Random("cache share")
    engine = make_engine(limits, order=Order(clock=lambda: 0.0))
    run_requests(engine, [request_of(rng, Tenant(name="other"), longest=40) for _ in range(6)])
    num_others = engine.scheduler.kv_cache.pool.counts().cached
    assert num_others > 8
    last = request_of(rng, CAPPED)
    run_requests(engine, [*[request_of(rng, CAPPED) for _ in range(12)], last])
    assert engine.scheduler.kv_cache.pool.counts().cached == 32 // 4 + min(num_others, 24)
    again = run_requests(engine, [last])
    again.verify()


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_all_tenants_together_fill_the_share_of_the_cache_that_is_given(share: float) -> None:
    limits = replace(
        LIMITS, enable_prefix_caching=True, num_pages=32, prefix_cache_memory_share=share
    )
    rng = random.Random("memory share")
    engine = make_engine(limits, order=Order(clock=lambda: 0.0))
    tenants = [Tenant(name="other"), replace(CAPPED, page_share=1.0)]
    requests = [request_of(rng, tenants[at % 2]) for at in range(24)]
    run_requests(engine, requests).verify()
    assert engine.scheduler.kv_cache.pool.counts().cached == int(32 * share)
    run_requests(engine, requests[-4:]).verify()
    assert bool(engine.scheduler.prefix_counts.num_hits) == (share > 0)
