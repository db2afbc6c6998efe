"""Simulated engines that serve as one: the routes of `cluster`, over cores whose steps take time.

Owns the order of events: the earliest of the next arrival and each engine's next step. An engine's
clock is its own, and stands where it last did something.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cadenza.bench.traffic import TrafficArrival
from cadenza.cluster.prefix_view import PrefixView, page_keys
from cadenza.cluster.route_choice import ReplicaLoad, order_replicas
from cadenza.engine.core import EngineCore
from cadenza.request import Request


@dataclass(slots=True, eq=False)
class SimulatedClock:
    """Seconds since the start."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(slots=True, eq=False)
class SimulatedReplica:
    """An engine, its clock, and what was sent to it."""

    core: EngineCore
    clock: SimulatedClock
    view: PrefixView = field(default_factory=PrefixView)

    @property
    def due_s(self) -> float:
        """When it launches its next step, if nothing comes before."""
        return self.clock.now_s + self.core.launch_in_s()

    def load(self, keys: Sequence[bytes], page_size: int) -> ReplicaLoad:
        scheduler = self.core.scheduler
        queued = sum([each.num_prompt_tokens for each in scheduler.waiting])
        num_open = len(scheduler.running) + len(scheduler.waiting)
        held = self.view.num_held(keys) * page_size
        return ReplicaLoad(num_open, queued, held, len(self.view))


def route(replicas: Sequence[SimulatedReplica], request: Request) -> SimulatedReplica:
    """As `EngineGroup` does, with what the engines know at the arrival."""
    if len(replicas) == 1:
        return replicas[0]
    limits = replicas[0].core.limits
    keys = page_keys(request, limits.page_size)
    loads = [each.load(keys, limits.page_size) for each in replicas]
    order = order_replicas(loads, len(request.prompt_token_ids))
    has_room = [at for at in order if loads[at].num_open < limits.max_num_open_reqs]
    best = replicas[(has_room or order)[0]]
    best.view.add(keys)
    return best


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
