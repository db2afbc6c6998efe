"""`Router`: chooses the replica of each request by its prefixes, and by when its queue ends.

No engines and no threads, so that a simulation uses it; times are one clock's readings, in seconds.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from statistics import fmean
from typing import NamedTuple

from cadenza.config import EngineLimits
from cadenza.engine.open_requests import EngineLoad
from cadenza.engine.route_report import UNMEASURED_TOKEN_S, HeldChange, RouteReport, Seen
from cadenza.kv.page_keys import MAX_KEYS, Content, PageKeys, short_keys, split_keys
from cadenza.request import Request

# What an open request counts for, in prompt tokens: it takes part in each further step.
TOKENS_OF_OPEN = 16

# A replica whose work is above twice the others' mean by more than this gets nothing for what it
# holds: another one then computes the prefix, too, and both have it.
SLACK_TOKENS = 512

TIE_SHARE = 0.1  # costs that differ by less are equal

# What a prompt token costs more for each open request of its replica, which it delays.
DELAY_SHARE = 0.3

# Prefixes of so many tokens are not computed by two replicas at once, unless the one that computes
# them is crowded.
ONCE_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """What is known of a replica, for a request: its open requests; `queued_s`: the time that its
    queued prompts will take; `token_s`: of a further prompt token; and tokens of the prompt that it
    holds or is about to compute (`num_held_tokens`), is about to compute (`num_coming_tokens`), or
    that were ever sent to it (`num_seen_tokens`), and that it holds of any prompts
    (`num_cached_tokens`)."""

    num_open: int
    queued_s: float
    token_s: float
    num_held_tokens: int = 0
    num_coming_tokens: int = 0
    num_seen_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def work_s(self) -> float:
        return self.queued_s + TOKENS_OF_OPEN * self.token_s * self.num_open


def order_replicas(loads: Sequence[ReplicaLoad], num_prompt_tokens: int) -> list[int]:
    """The indices of the replicas, best first. The cost of each is the work before the request and
    what of its prompt is left to compute, also for those whose next tokens wait for that. Those
    nearly as good as the best are equal: where the session was before, then fewer open requests,
    then less in the cache, so that each keeps prefixes of its own. One that would compute what
    another one is computing comes last."""
    total_s = sum(each.work_s for each in loads)
    crowded = [_is_crowded(each, total_s, len(loads) - 1) for each in loads]
    coming = [0 if crowded[at] else each.num_coming_tokens for at, each in enumerate(loads)]
    costs_s = [
        _cost_s(each, num_prompt_tokens, 0 if is_late else each.num_held_tokens)
        for each, is_late in zip(loads, crowded, strict=True)
    ]
    tied_s = min(costs_s) * (1 + TIE_SHARE)

    def key(index: int) -> tuple[bool, float, int, int, int, int]:
        each = loads[index]
        return (
            max(coming) - each.num_held_tokens >= ONCE_TOKENS,
            max(tied_s, costs_s[index]),
            -each.num_seen_tokens,
            each.num_open,
            each.num_cached_tokens,
            index,
        )

    return sorted(range(len(loads)), key=key)


def _cost_s(load: ReplicaLoad, num_prompt_tokens: int, num_held_tokens: int) -> float:
    num_left = num_prompt_tokens - min(num_held_tokens, num_prompt_tokens)
    return load.work_s + num_left * load.token_s * (1 + DELAY_SHARE * load.num_open)


def _is_crowded(load: ReplicaLoad, total_s: float, num_others: int) -> bool:
    """What it is about to compute of the prompt at hand is no reason to go elsewhere."""
    if not num_others:
        return False
    work_s = load.work_s - load.num_coming_tokens * load.token_s
    mean_s = (total_s - load.work_s) / num_others
    return work_s > 2 * mean_s + SLACK_TOKENS * load.token_s


def page_keys(request: Request, page_size: int, secret: bytes) -> tuple[bytes, ...]:
    """A short key for each full page of the prompt, of all that is before its end."""
    keys: list[bytes] = []
    content = Content(request.prompt_token_ids, request.attachments, request.cache_salt)
    PageKeys(page_size=page_size, secret=secret).extend(keys, content)
    return short_keys(keys)


class PrefixView:
    """Which prefixes one replica holds, by short keys of pages (`core.page_keys`), salted by
    tenant. What was sent (at most `max_keys`) counts until the replica has reported after it, and
    the newest of it where it reports nothing. A wrong guess costs a miss and never an answer."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._held: set[bytes] = set()
        self._sent: OrderedDict[bytes, int] = OrderedDict()  # the newest request with the key
        self._first_pending_id: int | None = None

    def __len__(self) -> int:
        if self._first_pending_id is None:
            return len(self._sent)
        newest = reversed(self._sent.values())
        return len(self._held) + sum(1 for _ in takewhile(self._is_pending, newest))

    def num_held(self, keys: Sequence[bytes]) -> int:
        """Leading pages that it holds or is about to compute."""
        return _deepest(keys, lambda key: key in self._held or self._is_coming(key))

    def num_coming(self, keys: Sequence[bytes]) -> int:
        return _deepest(keys, lambda key: key not in self._held and self._is_coming(key))

    def num_seen(self, keys: Sequence[bytes]) -> int:
        """Leading pages that were ever sent to it, as far as that is remembered."""
        return _deepest(keys, self._sent.__contains__)

    def add(self, keys: Sequence[bytes], request_id: int) -> None:
        for key in reversed(keys):  # the end of a prompt is forgotten before its beginning
            self._sent[key] = request_id
            self._sent.move_to_end(key)
        while len(self._sent) > self._max_keys:
            self._sent.popitem(last=False)

    def take(self, change: HeldChange, first_pending_id: int) -> None:
        self._held.difference_update(split_keys(change.removed))
        self._held.update(split_keys(change.added))
        self._first_pending_id = first_pending_id

    def clear(self) -> None:
        self._held.clear()
        self._sent.clear()
        self._first_pending_id = None

    def _is_coming(self, key: bytes) -> bool:
        request_id = self._sent.get(key)
        return request_id is not None and self._is_pending(request_id)

    def _is_pending(self, request_id: int) -> bool:
        return self._first_pending_id is None or request_id >= self._first_pending_id


def _deepest(keys: Sequence[bytes], has: Callable[[bytes], bool]) -> int:
    """The number of pages up to the last one that `has` knows: reports may lack earlier ones, which
    were dropped for being old."""
    return next((at for at in range(len(keys), 0, -1) if has(keys[at - 1])), 0)


# Requests that were sent since a replica's last report, of which it is remembered.
MOST_ON_WAY = 1 << 12


NOTHING_SEEN = Seen(newest_id=-1, first_pending_id=0)


class Route(NamedTuple):
    """A replica for a request, the short keys of its prompt's pages there, and how many of its
    tokens that replica has to compute."""

    replica: int
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
    done_at_s: float = 0.0  # when all that is known to be queued there will have been computed

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
    """Counts what it sent; the replicas' reports have what others sent. `secret`: that of the
    replicas' page keys, unless they report another one; `front`: the number of the front end whose
    requests it routes."""

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
        view = self._view(route.replica)
        view.prefixes.add(route.keys, request_id)
        view.send(request_id, route.num_new_tokens, now_s)

    def take(self, index: int, report: RouteReport, now_s: float) -> None:
        view, seen = self._view(index), report.seen.get(self._front, NOTHING_SEEN)
        view.take(report, seen, now_s)
        if report.held is None:
            return
        if report.held.secret != view.secret:  # its pages are in a folder
            view.secret = report.held.secret
            view.prefixes.clear()
        view.prefixes.take(report.held, seen.first_pending_id)

    def forget(self, index: int) -> None:
        self._views.pop(index, None)

    def num_pages(self, index: int) -> int:
        return len(self._view(index).prefixes)

    def _view(self, index: int) -> _ReplicaView:
        if index not in self._views:
            self._views[index] = _ReplicaView(self._secret)
        return self._views[index]

    def _load_of(
        self, index: int, keys: "_KeysOf", load: EngineLoad, token_s: float, now_s: float
    ) -> ReplicaLoad:
        view, page_size = self._view(index), keys.page_size
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
