"""`StartForecast` and the refusals that follow from it: queues of drawn requests, a clock by hand.

The engine of these queues has rows that each generate a token a step, for requests in the order in
which they came, or of their tenants' turns.
"""

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from cadenza.config import EngineLimits
from cadenza.engine.open_requests import OpenRequests
from cadenza.engine.timeouts import RequestTimeouts, StartForecast
from cadenza.errors import QueueFullError
from cadenza.events import Event, Finished, Started, Token
from cadenza.request import Request, SamplingParams
from cadenza.tenant import ONE_TENANT, Tenant

LIMITS = EngineLimits(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=64,
    page_size=16,
    num_pages=8,
    max_num_queued_reqs=100_000,
)
STEP_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    at_s: float
    num_tokens: int
    tenant: Tenant = ONE_TENANT


@dataclass(slots=True, eq=False, kw_only=True)
class Served:
    """What came of arrivals; `num_useful` tokens of whole answers of `num_generated`."""

    num_useful: int = 0
    num_generated: int = 0
    ends: Counter[str] = field(default_factory=Counter[str])
    waits: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    refused_after_s: list[float] = field(default_factory=list[float])


class Engine:
    """Rows of a token a step; of several tenants the one with the fewest tokens so far is next."""

    def __init__(self, timeouts: RequestTimeouts) -> None:
        self.now_s = 0.0
        self.served = Served()
        self.books = OpenRequests(timeouts, lambda: self.now_s)
        self.waiting: dict[str, deque[tuple[int, Arrival]]] = {}
        self.rows: dict[int, tuple[Arrival, int]] = {}
        self.service: Counter[str] = Counter()

    def serve(self, arrivals: Sequence[Arrival], until_s: float) -> Served:
        coming = deque(sorted(arrivals, key=lambda each: each.at_s))
        while self.now_s < until_s:
            while coming and coming[0].at_s <= self.now_s:
                self.accept(coming.popleft())
            self.step()
            self.now_s += STEP_S
        return self.served

    def accept(self, arrival: Arrival) -> None:
        params = SamplingParams(max_tokens=1000)
        request = Request(prompt_token_ids=(1,), params=params, tenant=arrival.tenant)
        try:
            request_id = self.books.accept(request, LIMITS)
        except QueueFullError as refusal:
            self.served.ends["refused"] += 1
            self.served.refused_after_s.append(refusal.retry_after_s or 0.0)
        else:
            self.waiting.setdefault(arrival.tenant.name, deque()).append((request_id, arrival))

    def step(self) -> None:
        for end in self.books.end_overdue():
            assert end.error_kind is not None
            self.served.ends[end.error_kind] += 1
            self.rows.pop(end.request_id, None)
            for queue in self.waiting.values():
                late = [each for each in queue if each[0] == end.request_id]
                for each in late:
                    queue.remove(each)
        events: list[Event] = []
        while len(self.rows) < LIMITS.max_num_seqs and any(self.waiting.values()):
            name = min(
                (name for name, queue in self.waiting.items() if queue),
                key=lambda name: self.service[name],
            )
            request_id, arrival = self.waiting[name].popleft()
            self.rows[request_id] = arrival, 0
            self.served.waits.setdefault(name, []).append(self.now_s - arrival.at_s)
            events.append(Started(request_id=request_id))
        for request_id, (arrival, count) in [*self.rows.items()]:
            events.append(Token(request_id=request_id, token_id=5, index=count))
            self.rows[request_id] = arrival, count + 1
            self.service[arrival.tenant.name] += 1
            self.served.num_generated += 1
            if count + 1 == arrival.num_tokens:
                events.append(ended(request_id, arrival.num_tokens))
                del self.rows[request_id]
                self.served.ends["answered"] += 1
                self.served.num_useful += arrival.num_tokens
        self.books.record(events)


def ended(request_id: int, num_tokens: int) -> Finished:
    return Finished(
        request_id=request_id,
        sample=0,
        finish_reason="length",
        stop_token_id=None,
        num_prompt_tokens=1,
        num_generated_tokens=num_tokens,
        num_cached_tokens=0,
    )


def drawn(rng: random.Random, load: float, seconds: float, mean_tokens: int = 50) -> list[Arrival]:
    """Arrivals that ask for `load` times what the rows compute."""
    rate = load * LIMITS.max_num_seqs / STEP_S / mean_tokens
    arrivals: list[Arrival] = []
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        num_tokens = 1 + min(900, int(rng.expovariate(1 / mean_tokens)))
        arrivals.append(Arrival(at_s=at_s, num_tokens=num_tokens))
    return arrivals


@pytest.mark.parametrize(
    ("queue_s", "total_s"), [(2.0, 60.0), (10.0, 10.0), (600.0, 5.0), (0.5, 600.0)]
)
@pytest.mark.parametrize("load", [1.5, 5.0])
def test_an_overloaded_engine_works_for_answers_that_arrive_in_time(
    queue_s: float, total_s: float, load: float
):
    engine = Engine(RequestTimeouts(queue_s=queue_s, total_s=total_s))
    served = engine.serve(drawn(random.Random(1), load, 60.0), 60.0)
    assert served.num_useful >= 0.9 * LIMITS.max_num_seqs * 60.0 / STEP_S
    # Most that could not be answered in time are told so at once.
    num_late = served.ends["queue_timeout"] + served.ends["request_timeout"]
    assert num_late < 0.2 * served.ends["refused"]


def test_requests_below_the_capacity_are_all_accepted():
    engine = Engine(RequestTimeouts(queue_s=2.0, total_s=60.0))
    served = engine.serve(drawn(random.Random(2), 0.8, 120.0), 120.0)
    assert served.ends.keys() == {"answered"}


def test_a_crowd_that_can_be_served_in_time_is_accepted_after_a_quiet_hour():
    """What an engine does that has little to do says nothing of what it can do."""
    engine = Engine(RequestTimeouts(queue_s=10.0, total_s=60.0))
    crowd = [Arrival(at_s=60.0, num_tokens=50) for _ in range(70)]  # eight a second end
    served = engine.serve([*drawn(random.Random(4), 0.1, 60.0), *crowd], 75.0)
    assert served.ends.keys() == {"answered"}


def test_a_refusal_names_the_time_after_which_the_request_would_have_started():
    """A crowd at once, behind enough that is measured: what is refused waits in vain for longer
    than is allowed, and a queue of the forecast length takes as long as was said."""
    timeouts = RequestTimeouts(queue_s=5.0, total_s=600.0)
    before = [Arrival(at_s=0.0, num_tokens=50) for _ in range(40)]
    crowd = [Arrival(at_s=4.0, num_tokens=50) for _ in range(200)]
    served = Engine(timeouts).serve([*before, *crowd], 30.0)
    # Four rows of half a second each: eight a second.
    assert served.ends["answered"] == pytest.approx(8 * (4 + 5), abs=6)
    assert served.ends["refused"] == 240 - served.ends["answered"]
    assert min(served.refused_after_s) == max(served.refused_after_s)
    assert served.refused_after_s[0] == pytest.approx(5.0, abs=0.3)
    assert max(served.waits[""]) == pytest.approx(5.0, abs=0.5)


def test_nothing_is_refused_before_anything_is_measured():
    engine = Engine(RequestTimeouts(queue_s=0.5, total_s=600.0))
    served = engine.serve([Arrival(at_s=0.0, num_tokens=50) for _ in range(1000)], 1.0)
    assert not served.ends["refused"]


def test_a_flood_of_one_tenant_does_not_have_another_tenants_requests_refused():
    rng = random.Random(3)
    flood = [replace(each, tenant=Tenant(name="flood")) for each in drawn(rng, 4.0, 60.0)]
    polite = [replace(each, tenant=Tenant(name="polite")) for each in drawn(rng, 0.3, 60.0)]
    engine = Engine(RequestTimeouts(queue_s=3.0, total_s=60.0))
    served = engine.serve([*flood, *polite], 60.0)
    assert len(served.waits["polite"]) >= len(polite) - 2
    assert max(served.waits["polite"]) < 3.0
    assert served.ends["refused"] > 500
    assert served.num_useful >= 0.9 * LIMITS.max_num_seqs * 60.0 / STEP_S


def test_others_are_ahead_by_their_shares_and_the_own_by_their_order():
    forecast = StartForecast(RequestTimeouts())
    flood, heavy, light = Tenant(name="f"), Tenant(name="h", weight=4.0), Tenant(name="l")
    for at in range(10):
        forecast.add(flood, 0, float(at))
    assert forecast.num_ahead(flood, 0, 100.0) == 10
    assert forecast.num_ahead(light, 0, 100.0) == 1
    assert forecast.num_ahead(heavy, 0, 100.0) == 1  # a quarter of one, but no less
    forecast.add(light, 0, 50.0)
    assert forecast.num_ahead(light, 0, 100.0) == 1 + 2
    assert forecast.num_ahead(flood, 0, 100.0) == 10 + 1
    forecast.add(heavy, 0, 60.0)
    forecast.add(heavy, 0, 61.0)
    assert forecast.num_ahead(light, 0, 100.0) == 1 + 2 + 2
    forecast.remove(light, 0, 50.0)
    assert forecast.num_ahead(light, 0, 100.0) == 0 + 1 + 2


def test_where_priorities_are_read_only_what_starts_before_a_request_is_ahead():
    forecast = StartForecast(RequestTimeouts(), priority_s=10.0)
    for at in range(5):
        forecast.add(ONE_TENANT, 0, float(at))
    forecast.add(ONE_TENANT, 3, 0.0)  # as one that came at 30 s
    assert forecast.num_ahead(ONE_TENANT, 0, 6.0) == 5
    assert forecast.num_ahead(ONE_TENANT, -1, 6.0) == 0
    assert forecast.num_ahead(ONE_TENANT, -1, 12.5) == 3
    assert forecast.num_ahead(ONE_TENANT, 3, 6.0) == 6
    forecast.remove(ONE_TENANT, 3, 0.0)
    assert forecast.num_ahead(ONE_TENANT, 3, 6.0) == 5


def test_prompts_that_are_there_delay_a_request_by_its_place_among_them():
    forecast = StartForecast(RequestTimeouts())
    assert forecast.start_in_s(0, 4, prompts_s=900.0) == 0.0
    for at in range(10):
        forecast.add(Tenant(name="f"), 0, float(at))
    assert forecast.start_in_s(10, 4, prompts_s=900.0) == 900.0
    assert forecast.start_in_s(1, 4, prompts_s=900.0) == 90.0


def test_a_request_that_finds_a_free_row_starts_at_once_however_slow_the_engine():
    forecast = StartForecast(RequestTimeouts())
    for _ in range(200):
        forecast.note_work(10, 10.0)
        forecast.note_end(100, 100.0)
    assert forecast.start_in_s(0, 1, 0.0) == 0.0
    assert forecast.start_in_s(3, 4, 0.0) == 0.0
    assert forecast.start_in_s(0, 0, 0.0) == pytest.approx(100.0)
    assert forecast.start_in_s(4, 2, 0.0) == pytest.approx(300.0)
    assert forecast.mean_run_s == pytest.approx(100.0)
