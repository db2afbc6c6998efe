"""Preemption for tenants that ask for no more than their share: the overload of another costs them
no wait for rows, pages and a step's prompt tokens, and they get no more service than it does."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.batch.sequence import Sequence
from cadenza.config import EngineLimits
from cadenza.events import Finished, Token
from cadenza.request import Request, SamplingParams
from cadenza.scheduler.fair_share import (
    CREDIT_STEPS,
    MAX_DISPLACEMENTS,
    FairShare,
    UnderShareTenants,
)
from cadenza.scheduler.scheduler import Scheduler
from cadenza.tenant import Tenant
from tests.engine.simulation import (
    REAL_PARTS,
    VOCAB_SIZE,
    Order,
    Parts,
    Record,
    make_engine,
    run_requests,
)
from tests.engine.test_tenants import COST, LIMITS, Asks, Backlog, bound_of, request_of
from tests.scheduler.builders import sequence_of

MANY, FEW = Tenant(name="many"), Tenant(name="few")
WIDE = replace(LIMITS, num_pages=64)
"""Pages for all rows: only rows are scarce."""


def tenants_of(open_sequences: list[Sequence], limits: EngineLimits = WIDE) -> UnderShareTenants:
    tenants = UnderShareTenants(limits)
    for sequence in open_sequences:
        tenants.open(sequence.request.tenant)
    return tenants


def sequences_of(tenant: Tenant, count: int, num_tokens: int = 16) -> list[Sequence]:
    found: list[Sequence] = []
    for at in range(count):
        sequence = sequence_of(at, num_tokens)
        sequence.request = replace(sequence.request, tenant=tenant)
        sequence.page_table = list(range(-(-num_tokens // LIMITS.page_size)))
        found.append(sequence)
    return found


@pytest.mark.parametrize(
    ("weight", "num_few", "expected"), [(1.0, 2, True), (1.0, 3, False), (3.0, 3, True)]
)
def test_a_tenant_is_under_its_share_while_its_sequences_fit_its_rows(
    weight: float, num_few: int, expected: bool
) -> None:
    few = sequences_of(replace(FEW, weight=weight), num_few)
    tenants = tenants_of([*sequences_of(MANY, 9), *few])
    assert tenants.is_under_share("few") is expected
    assert not tenants.is_under_share("many")
    for sequence in few[2:]:
        tenants.close(sequence.request.tenant)
    assert tenants.is_under_share("few")


def test_with_free_rows_the_share_is_one_of_all_open_sequences() -> None:
    tenants = tenants_of([*sequences_of(MANY, 2), *sequences_of(FEW, 1)])
    assert tenants.is_under_share("few")
    assert not tenants.is_under_share("many")
    tenants.open(FEW)
    assert tenants.is_under_share("few")
    assert tenants.is_under_share("many")


def test_a_tenant_alone_is_not_under_its_share() -> None:
    tenants = tenants_of(sequences_of(MANY, 1))
    assert not tenants.is_under_share("many")
    assert not tenants.is_under_share("unknown")


def test_only_sequences_of_tenants_above_their_share_are_preempted_and_only_so_often() -> None:
    running, (waiting,) = sequences_of(MANY, 4), sequences_of(FEW, 1)
    tenants = tenants_of([*running, waiting])
    assert tenants.preemptable_for(waiting, running, lacks_row=True) == running
    running[0].num_preemptions = MAX_DISPLACEMENTS
    assert tenants.preemptable_for(waiting, running, lacks_row=True) == running[1:]
    assert tenants.preemptable_for(waiting, running[:2], lacks_row=True) == []
    assert tenants.preemptable_for(running[3], [waiting], lacks_row=True) == [], (
        "a heavy one displaces nobody"
    )


def test_preemption_for_pages_needs_a_sequence_within_its_tenants_share_of_them() -> None:
    running = sequences_of(MANY, 2, num_tokens=96)
    (small,) = sequences_of(FEW, 1, num_tokens=96)
    small.page_table = []
    tenants = tenants_of([*running, *sequences_of(MANY, 2), small], replace(WIDE, num_pages=13))
    assert tenants.preemptable_for(small, running, lacks_row=False) == running
    assert tenants.preemptable_for(small, running[:1], lacks_row=False) == [], (
        "6 of 13 pages are a share"
    )
    (large,) = sequences_of(FEW, 1, num_tokens=112)
    assert tenants.preemptable_for(large, running, lacks_row=False) == []


class NoneUnderShare(UnderShareTenants):
    def is_under_share(self, name: str) -> bool:
        return False


class WithoutDisplacement(Scheduler):
    def __init__(self, limits: EngineLimits, *args: Any) -> None:
        super().__init__(limits, *args)
        self.turns.under_share = NoneUnderShare(limits)


PLAIN = Parts(scheduler=WithoutDisplacement)


@dataclass(kw_only=True)
class Arrival:
    """A request that comes when the engine is full of another tenant's."""

    limits: EngineLimits
    overload: list[Request]
    polite: Request
    after_steps: int = 12

    def steps_to_first_token(self, parts: Parts = REAL_PARTS) -> tuple[int, int]:
        """From the arrival, one of them in flight; and the number of preemptions. All streams are
        verified."""
        engine = make_engine(self.limits, parts=parts, order=Order(clock=lambda: 0.0))
        record = Record(seed=0, engine=engine)
        for request in self.overload:
            record.accept(engine.submit(request), request)
        first: int | None = None
        while not engine.is_idle:
            if record.num_steps == self.after_steps:
                record.accept(engine.submit(self.polite), self.polite)
            for event in engine.step():
                record.take(event)
                is_polite = record.requests[event.request_id] is self.polite
                if first is None and is_polite and isinstance(event, Token):
                    first = record.num_steps - self.after_steps
            engine.check_invariants()
            record.num_steps += 1
        record.verify()
        assert first is not None
        return first, engine.scheduler.num_preemptions


def request(tenant: Tenant, num_prompt: int, num_output: int, seed: int = 0) -> Request:
    rng = random.Random(f"{tenant.name} {seed}")
    prompt = tuple(rng.choices(range(VOCAB_SIZE), k=num_prompt))
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    return Request(prompt_token_ids=prompt, params=params, tenant=tenant)


def test_a_request_under_its_tenants_share_gets_a_row_at_once() -> None:
    overload = [request(MANY, 8, 80, seed) for seed in range(12)]
    arrival = Arrival(limits=WIDE, overload=overload, polite=request(FEW, 8, 4))
    assert arrival.steps_to_first_token() == (2, 1)
    num_steps, num_preemptions = arrival.steps_to_first_token(PLAIN)
    assert num_steps > 50, "there was a row without displacing anybody"
    assert num_preemptions == 0


def test_a_request_under_its_tenants_share_gets_pages_at_once() -> None:
    """Two sequences hold the pool; one is displaced, though two rows are no more than a share."""
    limits = replace(LIMITS, num_pages=10)
    overload = [request(MANY, 40, 50, seed) for seed in range(12)]
    arrival = Arrival(limits=limits, overload=overload, polite=request(FEW, 40, 4))
    num_steps, num_preemptions = arrival.steps_to_first_token()
    assert num_steps <= 4
    assert num_preemptions >= 1
    assert arrival.steps_to_first_token(PLAIN)[0] > 10, "there were pages for it anyway"


def test_a_prompt_under_its_tenants_share_shares_no_step_with_an_overload() -> None:
    limits = replace(WIDE, max_num_batched_tokens=24)
    overload = [request(MANY, 90, 4, seed) for seed in range(12)]
    arrival = Arrival(limits=limits, overload=overload, polite=request(FEW, 44, 4))
    assert arrival.steps_to_first_token()[0] == 3
    assert arrival.steps_to_first_token(PLAIN)[0] > 3


def test_tenants_that_both_overload_preempt_none_of_each_other() -> None:
    rng = random.Random("both")
    requests = [request_of(rng, tenant) for _ in range(30) for tenant in (MANY, FEW)]
    engine = make_engine(WIDE, order=Order(clock=lambda: 0.0))
    most: list[int] = []
    record = run_requests(
        engine, requests, before_step=lambda _: most.append(len(engine.scheduler.waiting))
    )
    record.verify()
    num_displaced = engine.scheduler.num_preemptions
    # One that is left with a few requests at the end is tenants.
    assert max(most) > 50
    assert num_displaced <= 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One tenant that always has requests waiting, and others.

    Args:
        others: how many requests each of them may have open, and the chance in per cent that it
            sends some in a step.
        longest: the longest prompt of the first tenant, and of the others.
    """

    seed: int
    others: list[tuple[int, int]]
    weights: list[float]
    longest: tuple[int, int]

    def lead(self, parts: Parts = REAL_PARTS) -> float:
        """The most service, by weight, that any tenant ever gets more than the one that waits, over
        any span of time. All streams are verified."""
        backlog = Backlog(
            seed=self.seed,
            tenants=self.tenants,
            asks=self._asks(),
            longest=self.longest,
            parts=parts,
        )
        spans = list(backlog.run())
        first = self.tenants[0].name
        return max(_most_gained(spans, each.name, first) for each in self.tenants[1:])

    @property
    def bound(self) -> float:
        credit = COST.prompt * CREDIT_STEPS * LIMITS.max_num_batched_tokens
        return bound_of(self.tenants) + credit

    @property
    def tenants(self) -> list[Tenant]:
        weights = self.weights[: len(self.others) + 1]
        return [Tenant(name=f"t{at}", weight=weight) for at, weight in enumerate(weights)]

    def _asks(self) -> Asks:
        rng = random.Random(f"asks {self.seed}")

        def asks(at: int, num_waiting: int, num_open: int) -> int:
            if not at:
                return 6 - num_waiting
            most, chance = self.others[at - 1]
            return rng.randint(0, most - num_open) if rng.randrange(100) < chance else 0

        return asks


def _most_gained(spans: list[dict[str, float]], name: str, than: str) -> float:
    lead = most = 0.0
    for before, after in pairwise(_with_start(spans)):
        gained = after[name] - before[name] - (after[than] - before[than])
        lead = max(0.0, lead + gained)
        most = max(most, lead)
    return most


def _with_start(spans: list[dict[str, float]]) -> Iterator[dict[str, float]]:
    yield dict.fromkeys(spans[0], 0.0)
    yield from spans


loads = st.builds(
    Load,
    seed=st.integers(0, 1 << 20),
    others=st.lists(st.tuples(st.integers(1, 5), st.integers(5, 100)), min_size=1, max_size=3),
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=4, max_size=4),
    longest=st.tuples(st.sampled_from([8, 64]), st.sampled_from([8, 24, 90])),
)


@given(load=loads)
@settings(max_examples=4, deadline=None)
def test_no_tenant_gets_more_than_the_bound_beyond_one_that_waits(load: Load) -> None:
    assert load.lead() <= load.bound


class UnderShareFirst(FairShare):
    """Tenants under their share start whatever service they have had."""

    def in_turns(self, ordered: list[Sequence]) -> list[Sequence]:
        return sorted(ordered, key=lambda each: each.request.tenant.name == "t0")


class StartsOutOfTurn(Scheduler):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.turns.fair_share = UnderShareFirst()


def test_the_bound_catches_tenants_under_their_share_that_start_out_of_turn() -> None:
    load = Load(seed=0, others=[(2, 100)], weights=[1.0] * 2, longest=(8, 90))
    assert load.lead() <= load.bound
    assert load.lead(Parts(scheduler=StartsOutOfTurn)) > load.bound


def test_a_prompt_of_another_tenant_goes_on_beside_those_that_come_first() -> None:
    """Nothing of it waits, so that no counter says that it is its turn."""
    limits = EngineLimits(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=1024,
        page_size=16,
        num_pages=400,
        max_num_queued_reqs=16,
        enable_prefix_caching=False,
    )

    def ask(tenant: Tenant, num_tokens: int, max_tokens: int, first: int) -> Request:
        prompt = tuple((7 * first + place) % VOCAB_SIZE for place in range(num_tokens))
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return Request(prompt_token_ids=prompt, params=params, tenant=tenant)

    engine = make_engine(limits)
    for place in range(3):
        engine.submit(ask(MANY, 10, 400, place))
    engine.step()
    long_id = engine.submit(ask(MANY, 320, 4, 9))
    few: set[int] = set()
    for step in range(200):
        while len(few) < 2:
            few.add(engine.submit(ask(FEW, 512, 1, 100 + 2 * step + len(few))))
        events = engine.step()
        engine.check_invariants()
        few -= {event.request_id for event in events if isinstance(event, Finished)}
        if any(isinstance(each, Token) and each.request_id == long_id for each in events):
            return
    pytest.fail("a prompt of the other tenant stood still")


def test_tenants_that_join_one_after_another_start_at_one_level() -> None:
    """A credit each below what one that waits has had, whoever came between."""
    share = FairShare(COST, credit=10.0)
    waiting = sequences_of(MANY, 1)[0]
    share.join(MANY)
    share.join(FEW)
    share.charge_prompt(waiting, 1000)
    share.leave(FEW)
    before = share.counter_of(waiting)
    for place in range(20):
        tenant = Tenant(name=f"tenant-{place}")
        share.join(tenant)
        joined = sequences_of(tenant, 1)[0]
        assert share.counter_of(joined) == before - 10.0
