"""Why tokens of a prompt were not found in the prefix cache.

Owns the reasons. Knows no pages. Invariant: a prompt's hits and misses add up to its tokens.
"""

from collections.abc import Mapping
from typing import Literal, get_args

MissReason = Literal["cold", "evicted", "in_flight", "tail", "prompt_logprobs", "pooling"]
"""In order: never computed, or forgotten long ago; computed, but its page was needed for something
else since; being computed by a running sequence that is too far behind to wait for; behind the last
full page of the prompt, the last token among them, which is always computed; computed in any case,
for its log probabilities; or for the mean of its hidden states.

That another tenant has computed the same is no reason of its own: it is cold, so that no tenant can
learn what others ask."""

MISS_REASONS: tuple[MissReason, ...] = get_args(MissReason)

PrefixMisses = Mapping[MissReason, int]
"""Tokens by reason."""


def no_misses() -> dict[MissReason, int]:
    return dict.fromkeys(MISS_REASONS, 0)


def log_text(misses: PrefixMisses) -> str:
    """Say `evicted 32, tail 5`."""
    return ", ".join(f"{reason} {count}" for reason, count in misses.items() if count) or "none"
