"""Simulated engines that serve as one: the routes of `cluster`. The next event is the earliest of
the next arrival and each engine's next step. An engine's clock is its own, and stands where it last
did something.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cadenza.cluster.router import Router
from cadenza.engine.core import EngineCore
from cadenza.engine.open_requests import EngineLoad
from cadenza.engine.process.worker import IDLE_BEAT_S
from cadenza.engine.route_report import RouteReporter
from cadenza.engine.stats import STATS_EVERY_S
from cadenza.request import Request
from cadenza_bench.simulate.traffic import TrafficArrival

SECRET = b"simulated"
"""Of the keys of all simulated engines."""


@dataclass(slots=True, eq=False)
class SimulatedClock:
    """Seconds since the start."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(slots=True, eq=False)
class SimulatedReplica:
    """An engine and its clock. `reporter` is None where there is nothing to choose."""

    core: EngineCore
    clock: SimulatedClock
    place: int = 0
    reporter: RouteReporter | None = None
    reported_s: float = 0.0

    @property
    def due_s(self) -> float:
        """When it launches its next step, if nothing comes before."""
        return self.clock.now_s + self.core.launch_in_s()

    @property
    def load(self) -> EngineLoad:
        scheduler = self.core.scheduler
        num_queued = sum([each.num_prompt_tokens for each in scheduler.waiting])
        num_open = len(scheduler.running) + len(scheduler.waiting)
        return EngineLoad(num_open=num_open, num_queued_tokens=num_queued)


class SimulatedGroup:
    """Engines with one router, to which each reports as often as an engine process does."""

    def __init__(self, replicas: Sequence[SimulatedReplica], router: Router | None = None) -> None:
        self.replicas = replicas
        self._router = router or Router(SECRET)
        if len(replicas) > 1:
            for place, each in enumerate(replicas):
                each.place, each.reporter = place, RouteReporter(each.core)

    def submit(self, request: Request, at_s: float) -> tuple[int, int]:
        """Sends a request that comes at `at_s`; returns the index of its engine and its id there.
        Raises QueueFullError."""
        for each in self.replicas:
            every_s = IDLE_BEAT_S if each.core.is_idle else STATS_EVERY_S
            if at_s >= each.reported_s + every_s:
                self._report(each, at_s)
        loads = {at: each.load for at, each in enumerate(self.replicas)}
        route = self._router.choose(request, loads, self.replicas[0].core.limits, at_s)
        replica = self.replicas[route.place]
        replica.clock.now_s = max(replica.clock.now_s, at_s)
        request_id = replica.core.submit(request)
        if replica.reporter is not None:
            replica.reporter.received(request_id)
        self._router.sent(route, request_id, at_s)
        return route.place, request_id

    def stepped(self, place: int) -> None:
        replica = self.replicas[place]
        now_s = replica.clock.now_s
        if replica.core.is_idle or now_s >= replica.reported_s + STATS_EVERY_S:
            self._report(replica, now_s)

    def _report(self, replica: SimulatedReplica, now_s: float) -> None:
        if replica.reporter is None:
            return
        replica.reported_s = now_s
        self._router.take(replica.place, replica.reporter.report(now_s), now_s)


@dataclass(slots=True, eq=False)
class Happening:
    """The next thing: `arrival` comes, or `replica` makes a step. One of them is None."""

    at_s: float
    arrival: TrafficArrival | None
    replica: SimulatedReplica | None


def happenings(
    replicas: Sequence[SimulatedReplica], traffic: Iterator[TrafficArrival]
) -> Iterator[Happening]:
    """In the order of time, until there are none; each is to be acted on before the next."""
    coming = next(traffic, None)
    while True:
        busy = [each for each in replicas if not each.core.is_idle]
        first = min(busy, key=lambda each: each.due_s, default=None)
        if coming is not None and (first is None or coming.after_s <= first.due_s):
            yield Happening(coming.after_s, coming, None)
            coming = next(traffic, None)
        elif first is not None:
            yield Happening(first.due_s, None, first)
        else:
            return
