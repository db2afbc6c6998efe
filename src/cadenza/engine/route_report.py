"""`RouteReport`: an engine's load and prefixes, for those who choose among several engines;
`forecast_queue`: how long its prompts will take. Invariants: what is reported of a front end's
requests with an id up to `newest_id` is in the figures beside it; a prompt token is never free, and
costs more beside rows that decode."""

from itertools import chain, islice
from typing import NamedTuple

import msgspec

from cadenza.batch.step_cost import MIN_PROMPT_TOKENS, StepBound, StepCost, StepLoad
from cadenza.engine.core import EngineCore
from cadenza.engine.request_ids import front_of
from cadenza.scheduler.scheduler import Scheduler

# Waiting sequences of which it is looked up what is cached; of further ones as much is taken to be.
MAX_LOOKED_UP = 16

UNMEASURED_TOKEN_S = 0.001  # Of a prompt token where it is not known what steps cost


HELD_EVERY_S = 1.0  # Changes of what is held are reported that often at most
# Front ends of which it is remembered what came from them; the one that was silent for longest is
# forgotten first.
MAX_FRONTS = 64


class QueueForecast(NamedTuple):
    """Prompt tokens that are not computed, and the time of a further one, which is a guess unless
    `is_measured`."""

    num_tokens: int
    prompt_token_s: float
    is_measured: bool

    @property
    def queued_s(self) -> float:
        return self.num_tokens * self.prompt_token_s


def forecast_queue(scheduler: Scheduler) -> QueueForecast:
    num_queued, decodes = 0, StepLoad()
    for each in scheduler.running:
        num_left = each.num_uncomputed_tokens
        if num_left > 1:
            num_queued += num_left
        else:
            decodes = decodes.plus(each.num_computed_tokens, 1, 1)
    num_queued += _num_waiting_tokens(scheduler)
    cost = scheduler.times.cost
    if cost is None:
        return QueueForecast(num_queued, UNMEASURED_TOKEN_S, is_measured=False)
    most = max(1, scheduler.limits.max_num_batched_tokens - decodes.num_tokens)
    token_ms = _prompt_token_ms(cost, scheduler.step_bound, decodes, most)
    return QueueForecast(num_queued, token_ms / 1000, is_measured=True)


def _num_waiting_tokens(scheduler: Scheduler) -> int:
    waiting, kv_cache = scheduler.waiting, scheduler.kv_cache
    first = list(islice(waiting, MAX_LOOKED_UP))
    num_tokens = sum([each.num_tokens for each in first])
    num_uncached = sum([kv_cache.num_uncached_tokens(each) for each in first])
    num_others = sum([each.num_tokens for each in islice(waiting, MAX_LOOKED_UP, None)])
    return num_uncached + (num_others * num_uncached // num_tokens if num_tokens else 0)


def _prompt_token_ms(
    cost: StepCost, bound: StepBound | None, decodes: StepLoad, most: int
) -> float:
    count = float(most)
    if bound is not None:
        count = min(count, max(MIN_PROMPT_TOKENS, cost.most_tokens(0, bound.left_ms(decodes))))
    return cost.predict_ms(decodes) / count + cost.token_ms


class HeldChange(msgspec.Struct, frozen=True, kw_only=True):
    """Short keys (`page_keys`), concatenated, of page keys under `secret`; removals come first."""

    secret: bytes
    added: bytes
    removed: bytes


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine has of a front end's requests."""

    newest_id: int  # the highest id that it has received
    # requests with lower ids have their prompts computed, or have ended: what came of them is in
    # what the engine has reported
    first_pending_id: int


class RouteReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An engine's load, at times with what it holds. `queued_s`, `prompt_token_s`: as in
    `QueueForecast`."""

    queued_s: float  # as in `QueueForecast`
    prompt_token_s: float
    seen: dict[int, Seen]  # by front end, of those that have sent anything
    # None where it was reported a moment ago, or the engine knows no page keys
    held: HeldChange | None = None


class RouteReporter:
    """Of `core`, whose prefixes it follows from now on."""

    def __init__(self, core: EngineCore) -> None:
        self._scheduler = core.scheduler
        self._cache = core.scheduler.kv_cache.prefix_cache
        self._digest = None if self._cache is None else self._cache.watch()
        self._newest: dict[int, int] = {}
        self._first_pending_ids: dict[int, int] = {}
        self._held_at_s: float | None = None

    def received(self, request_id: int) -> None:
        front = front_of(request_id)
        newest = self._newest.pop(front, request_id)
        self._newest[front] = max(newest, request_id)
        if len(self._newest) > MAX_FRONTS:
            del self._newest[next(iter(self._newest))]

    def report(self, now_s: float) -> RouteReport:
        queue = forecast_queue(self._scheduler)
        held = self._take_held(now_s)
        seen = {
            front: Seen(newest_id=newest, first_pending_id=self._first_pending_ids.get(front, 0))
            for front, newest in self._newest.items()
        }
        return RouteReport(
            queued_s=queue.queued_s, prompt_token_s=queue.prompt_token_s, seen=seen, held=held
        )

    def _take_held(self, now_s: float) -> HeldChange | None:
        if self._cache is None or self._digest is None:
            return None
        if self._held_at_s is not None and now_s - self._held_at_s < HELD_EVERY_S:
            return None
        self._held_at_s = now_s
        self._first_pending_ids = self._first_pending()
        change = self._digest.take()
        return HeldChange(
            secret=self._cache.page_keys.secret, added=change.added, removed=change.removed
        )

    def _first_pending(self) -> dict[int, int]:
        """A prompt's pages are in the cache once its sequence has sampled."""
        found = {front: newest + 1 for front, newest in self._newest.items()}
        for each in chain(self._scheduler.waiting, self._scheduler.running):
            front = front_of(each.request_id)
            if not each.num_generated_tokens and front in found:
                found[front] = min(found[front], each.request_id)
        return found
