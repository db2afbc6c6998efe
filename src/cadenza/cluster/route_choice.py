"""`order_replicas`: which replica a request goes to, by work and by what is held of its prompt.

A pure function of numbers, so that a simulation can use it. All costs are in prompt tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

TOKENS_OF_OPEN = 64
"""What an open request counts for: the tokens that it is still likely to need."""

SLACK_TOKENS = 512
"""A replica whose work is above twice the mean by more than this gets nothing for what it holds:
another one then computes the prefix, too, and both have it."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica's open requests, its queued prompt tokens, how many tokens of the prompt at hand it
    holds, and how many pages of any prompts."""

    num_open: int
    num_queued_tokens: int
    num_held_tokens: int
    num_pages: int = 0

    @property
    def work(self) -> int:
        return self.num_queued_tokens + TOKENS_OF_OPEN * self.num_open


def order_replicas(loads: Sequence[ReplicaLoad], num_prompt_tokens: int) -> list[int]:
    """The places of the replicas, best first: by work that is before the request and what of its
    prompt is left to compute; equal ones by fewer open requests, then by fewer pages, so that each
    keeps prefixes of its own."""
    mean = sum(each.work for each in loads) / len(loads)

    def cost(place: int) -> tuple[int, int, int, int]:
        each = loads[place]
        is_crowded = each.work > 2 * mean + SLACK_TOKENS
        held = 0 if is_crowded else min(each.num_held_tokens, num_prompt_tokens)
        return each.work + num_prompt_tokens - held, each.num_open, each.num_pages, place

    return sorted(range(len(loads)), key=cost)
