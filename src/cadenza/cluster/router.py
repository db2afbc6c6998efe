"""`Router`: chooses the replica of each request by a view of each: its prefixes, and until when its
queue will take. Times are readings of one clock, in seconds. Each of several routers counts what it
sent, and the replica's reports have the others'. No engines and no threads: a simulation uses it as
well.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from cadenza.cluster.prefix_view import PrefixView, page_keys
from cadenza.cluster.route_choice import ReplicaLoad, order_replicas
from cadenza.config import EngineLimits
from cadenza.engine.open_requests import EngineLoad
from cadenza.engine.queue_forecast import UNMEASURED_TOKEN_S
from cadenza.engine.route_report import RouteReport, Seen
from cadenza.request import Request

MOST_ON_WAY = 1 << 12
"""Requests that were sent since a replica's last report, of which it is remembered."""


NOTHING_SEEN = Seen(newest_id=-1, settled_below=0)


class Route(NamedTuple):
    """A replica for a request, the short keys of its prompt's pages there, and how many of its
    tokens that replica has to compute."""

    place: int
    keys: tuple[bytes, ...] = ()
    num_new_tokens: int = 0


class _Sent(NamedTuple):
    request_id: int
    num_new_tokens: int


@dataclass(slots=True, eq=False)
class _ReplicaView:
    secret: bytes
    prefixes: PrefixView = field(default_factory=PrefixView)
    report: RouteReport | None = None
    on_way: deque[_Sent] = field(default_factory=lambda: deque[_Sent](maxlen=MOST_ON_WAY))
    done_at_s: float = 0.0
    """When all that is known to be queued there will have been computed."""

    @property
    def token_s(self) -> float:
        return UNMEASURED_TOKEN_S if self.report is None else self.report.prompt_token_s

    def queued_s(self, load: EngineLoad, now_s: float) -> float:
        """What it has reported and was sent since, less the time that has passed; of one that
        reports nothing, the prompts that have not started."""
        if self.report is None:
            return load.num_queued_tokens * self.token_s
        return max(0.0, self.done_at_s - now_s)

    def send(self, request_id: int, num_new_tokens: int, now_s: float) -> None:
        self.on_way.append(_Sent(request_id, num_new_tokens))
        self.done_at_s = max(self.done_at_s, now_s) + num_new_tokens * self.token_s

    def take(self, report: RouteReport, seen: Seen, now_s: float) -> None:
        self.report = report
        left = [each for each in self.on_way if each.request_id > seen.newest_id]
        self.on_way = deque(left, maxlen=MOST_ON_WAY)
        num_on_way = sum([each.num_new_tokens for each in left])
        self.done_at_s = now_s + report.queued_s + num_on_way * self.token_s


class Router:
    """`secret`: that of the replicas' page keys, unless they report another one; `front`: the
    number of the front end whose requests it routes."""

    def __init__(self, secret: bytes, front: int = 0) -> None:
        self._secret, self._front = secret, front
        self._views: dict[int, _ReplicaView] = {}

    def choose(
        self, request: Request, loads: Mapping[int, EngineLoad], limits: EngineLimits, now_s: float
    ) -> Route:
        """One of the places of `loads`, which are those that serve; their `limits` are alike."""
        keys = _KeysOf(request, limits.page_size)
        places = list(loads)
        if len(places) == 1:
            return Route(places[0], (), len(request.prompt_token_ids))
        # Each replica learns what a token takes, and errs: so one value for all, and who holds a
        # prefix does not lose its session to a neighbour that seems faster.
        token_s = fmean([self._view(at).token_s for at in places])
        found = [self._load_of(at, keys, loads[at], token_s, now_s) for at in places]
        order = order_replicas(found, len(request.prompt_token_ids))
        has_room = [at for at in order if found[at].num_open < limits.max_num_open_reqs]
        best = (has_room or order)[0]
        num_new = len(request.prompt_token_ids) - found[best].num_held_tokens
        return Route(places[best], keys.under(self._view(places[best]).secret), num_new)

    def sent(self, route: Route, request_id: int, now_s: float) -> None:
        view = self._view(route.place)
        view.prefixes.add(route.keys, request_id)
        view.send(request_id, route.num_new_tokens, now_s)

    def take(self, place: int, report: RouteReport, now_s: float) -> None:
        view, seen = self._view(place), report.seen.get(self._front, NOTHING_SEEN)
        view.take(report, seen, now_s)
        if report.held is None:
            return
        if report.held.secret != view.secret:  # its pages are in a folder
            view.secret = report.held.secret
            view.prefixes.clear()
        view.prefixes.take(report.held, seen.settled_below)

    def forget(self, place: int) -> None:
        self._views.pop(place, None)

    def num_pages(self, place: int) -> int:
        return len(self._view(place).prefixes)

    def _view(self, place: int) -> _ReplicaView:
        if place not in self._views:
            self._views[place] = _ReplicaView(self._secret)
        return self._views[place]

    def _load_of(
        self, place: int, keys: "_KeysOf", load: EngineLoad, token_s: float, now_s: float
    ) -> ReplicaLoad:
        view, page_size = self._view(place), keys.page_size
        own, prefixes = keys.under(view.secret), view.prefixes
        return ReplicaLoad(
            num_open=load.num_open,
            queued_s=view.queued_s(load, now_s),
            token_s=token_s,
            num_held_tokens=prefixes.num_held(own) * page_size,
            num_coming_tokens=prefixes.num_coming(own) * page_size,
            num_seen_tokens=prefixes.num_seen(own) * page_size,
            num_cached_tokens=len(prefixes) * page_size,
        )


class _KeysOf:
    def __init__(self, request: Request, page_size: int) -> None:
        self._request = request
        self.page_size = page_size
        self._found: dict[bytes, tuple[bytes, ...]] = {}

    def under(self, secret: bytes) -> tuple[bytes, ...]:
        if secret not in self._found:
            self._found[secret] = page_keys(self._request, self.page_size, secret)
        return self._found[secret]
