"""Why tokens of a prompt were not found in the prefix cache, and how many were and were not.

Owns the reasons and the counts. Knows no pages. Invariant: a prompt's hits and misses add up to its
tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from cadenza.core.sequence import Sequence

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


OnPrefix = Callable[[Sequence, PrefixMisses], None]


@dataclass(slots=True, eq=False)
class PrefixCounts:
    """Prompt tokens looked up, found and missing; they never decrease.

    Args:
        on_prefix: called with each sequence that is counted, and with why tokens were missing.
    """

    on_prefix: OnPrefix | None = None
    num_queries: int = 0
    num_hits: int = 0
    num_misses: dict[MissReason, int] = field(default_factory=no_misses)

    def add(self, sequence: Sequence, misses: PrefixMisses) -> None:
        """The prompt of a sequence that starts; once per prompt."""
        self.num_queries += sequence.num_prompt_tokens
        self.num_hits += sequence.num_cached_tokens or 0
        for reason, count in misses.items():
            self.num_misses[reason] += count
        if self.on_prefix is not None:
            self.on_prefix(sequence, misses)

    def check_invariants(self) -> None:
        """Raises AssertionError if hits and misses do not add up."""
        num_found = self.num_hits + sum(self.num_misses.values())
        assert num_found == self.num_queries, "prompt tokens looked up are counted wrongly"


def log_text(misses: PrefixMisses) -> str:
    """Say `evicted 32, tail 5`."""
    return ", ".join(f"{reason} {count}" for reason, count in misses.items() if count) or "none"
