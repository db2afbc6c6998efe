"""`forecast_queue`: how long the prompts of an engine will take, and one more token of a prompt.
Invariant: a prompt token is never free, and costs more beside rows that decode."""

from itertools import islice
from typing import NamedTuple

from cadenza.batch.step_cost import MIN_PROMPT_TOKENS, StepBound, StepCost, StepLoad
from cadenza.scheduler.scheduler import Scheduler

# Waiting sequences of which it is looked up what is cached; of further ones as much is taken to be.
MAX_LOOKED_UP = 16

UNMEASURED_TOKEN_S = 0.001  # Of a prompt token where it is not known what steps cost


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
    cost = scheduler.step_cost
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
    """In steps that have `decodes` and as many prompt tokens as fit, at most `most`."""
    count = float(most)
    if bound is not None:
        count = min(count, max(MIN_PROMPT_TOKENS, cost.most_tokens(0, bound.left_ms(decodes))))
    return cost.predict_ms(decodes) / count + cost.token_ms
