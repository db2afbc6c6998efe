"""`order_replicas`: which replica a request goes to, by work and by what is held of its prompt.

A pure function of numbers, so that a simulation can use it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

TOKENS_OF_OPEN = 16
"""What an open request counts for, in prompt tokens: it takes part in each further step."""

SLACK_TOKENS = 512
"""A replica whose work is above twice the others' mean by more than this gets nothing for what it
holds: another one then computes the prefix, too, and both have it."""

TIE_SHARE = 0.1
"""Costs that differ by less are equal."""

DELAY_SHARE = 0.3
"""What a prompt token costs more for each open request of its replica, which it delays."""

ONCE_TOKENS = 256
"""Prefixes of so many tokens are not computed by two replicas at once, unless the one that computes
them is crowded."""


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

    def key(place: int) -> tuple[bool, float, int, int, int, int]:
        each = loads[place]
        return (
            max(coming) - each.num_held_tokens >= ONCE_TOKENS,
            max(tied_s, costs_s[place]),
            -each.num_seen_tokens,
            each.num_open,
            each.num_cached_tokens,
            place,
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
