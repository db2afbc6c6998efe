"""Why tokens of a prompt were not found in the prefix cache, and how many were and were not.

Owns the reasons, the counts and the words of the log. Knows no pages. Invariant: a prompt's hits
and misses add up to its tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from cadenza.core.sequence import Sequence
from cadenza.events import CacheMiss, CacheMissReason

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


_THEN: Mapping[CacheMissReason, str] = {
    "new": ", which ends there",
    "differs": ", then differs",
    "evicted": ", whose pages were evicted since",
    "in_flight": ", which is still being computed",
    "short": "; too few to fill a page",
    "not_used": "; all are computed for their log probabilities or hidden states",
}


def no_misses() -> dict[MissReason, int]:
    return dict.fromkeys(MISS_REASONS, 0)


def no_missed_prompts() -> dict[CacheMissReason, int]:
    return dict.fromkeys(get_args(CacheMissReason), 0)


OnPrefix = Callable[[Sequence, PrefixMisses], None]


@dataclass(slots=True, eq=False)
class PrefixCounts:
    """Prompt tokens looked up, found and missing; they never decrease.

    `num_missed_prompts` are prompts by the reason of their `CacheMiss`; `num_differing_tokens` are
    those from where a prompt differs from an earlier one, for that reason, to its end.

    Args:
        on_prefix: called with each sequence that is counted, and with why tokens were missing.
    """

    on_prefix: OnPrefix | None = None
    num_queries: int = 0
    num_hits: int = 0
    num_misses: dict[MissReason, int] = field(default_factory=no_misses)
    num_missed_prompts: dict[CacheMissReason, int] = field(default_factory=no_missed_prompts)
    num_differing_tokens: int = 0

    def add(self, sequence: Sequence, misses: PrefixMisses) -> None:
        """The prompt of a sequence that starts; once per prompt."""
        self.num_queries += sequence.num_prompt_tokens
        self.num_hits += sequence.num_cached_tokens or 0
        for reason, count in misses.items():
            self.num_misses[reason] += count
        miss = sequence.cache_miss
        if miss is not None:
            self.num_missed_prompts[miss.reason] += 1
            if miss.reason == "differs":
                self.num_differing_tokens += sequence.num_prompt_tokens - miss.shared_tokens
        if self.on_prefix is not None:
            self.on_prefix(sequence, misses)

    def check_invariants(self) -> None:
        """Raises AssertionError if hits and misses do not add up."""
        num_found = self.num_hits + sum(self.num_misses.values())
        assert num_found == self.num_queries, "prompt tokens looked up are counted wrongly"


def log_text(misses: PrefixMisses) -> str:
    """Say `evicted 32, tail 5`."""
    return ", ".join(f"{reason} {count}" for reason, count in misses.items() if count) or "none"


def miss_text(miss: CacheMiss | None, num_tokens: int) -> str:
    """Where a prompt of `num_tokens` tokens parts from earlier ones; no part of its text."""
    if miss is None or not miss.shared_tokens:
        return "" if miss is None else f"; reason: {miss.reason}"
    return (
        f"; shares the first {miss.shared_tokens} of {num_tokens} tokens with an earlier prompt "
        f"of the same tenant and salt{_THEN[miss.reason]}"
    )
