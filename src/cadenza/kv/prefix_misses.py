"""Why tokens of a prompt were not found in the prefix cache, and how many were and were not.
Invariants: hits and misses add up to a prompt's tokens; what others asked has no influence; the
cost is one look-up for each missing page, and the comparison of one."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Literal, get_args

from cadenza.batch.sequence import Sequence
from cadenza.events import CacheMiss, CacheMissReason
from cadenza.figures import Figure
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.kv.page_keys import Content
from cadenza.kv.prefix_cache import Closest, InFlightPrefixes, Prefix, PrefixCache, kv_content_of

# In order: never computed, or forgotten long ago; computed, but its page was needed for something
# else since; being computed by a running sequence with too much left to wait for; in the cache, but
# without a snapshot of the recurrent state after it; after the last full page of the prompt, the
# last token among them, which is always computed; computed in any case, for its log probabilities;
# or for the mean of its hidden states. That another tenant has computed the same is no reason of
# its own: it is cold, so that no tenant can learn what others ask.
MissReason = Literal[
    "cold", "evicted", "in_flight", "no_snapshot", "tail", "prompt_logprobs", "pooling"
]

MISS_REASONS: tuple[MissReason, ...] = get_args(MissReason)

PrefixMisses = Mapping[MissReason, int]  # Tokens by reason


_THEN: Mapping[CacheMissReason, str] = {
    "new": ", which ends there",
    "differs": ", then differs",
    "evicted": ", whose pages were evicted since",
    "in_flight": ", which is still being computed",
    "no_snapshot": ", for all of which there is no snapshot of the recurrent state",
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
    """Prompt tokens looked up, found and missing; never decrease. `num_missed_prompts`: by the
    reason of their `CacheMiss`; `num_differing_tokens`: from where a prompt differs from an earlier
    one to its end. `on_prefix`: called with each counted sequence."""

    on_prefix: OnPrefix | None = None
    num_queries: int = 0
    num_hits: int = 0
    num_misses: dict[MissReason, int] = field(default_factory=no_misses)
    num_missed_prompts: dict[CacheMissReason, int] = field(default_factory=no_missed_prompts)
    num_differing_tokens: int = 0

    def add(self, sequence: Sequence, misses: PrefixMisses) -> None:
        """Once per prompt."""
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
        num_found = self.num_hits + sum(self.num_misses.values())
        assert num_found == self.num_queries, "prompt tokens looked up are counted wrongly"


PREFIX_FIGURES: tuple[Figure[PrefixCounts], ...] = (
    Figure(
        "prefix_cache_queries",
        "Prompt tokens looked up in the cache.",
        lambda counts: counts.num_queries,
        has_vllm_name=True,
    ),
    Figure(
        "prefix_cache_hits",
        "Prompt tokens found in the cache.",
        lambda counts: counts.num_hits,
        has_vllm_name=True,
    ),
    Figure(
        "prefix_cache_differing_tokens",
        "Tokens of prompts from where they differ from an earlier one of their tenant.",
        lambda counts: counts.num_differing_tokens,
        has_vllm_name=True,
    ),
    Figure(
        "prefix_cache_misses",
        "Prompt tokens looked up and not found.",
        lambda counts: {str(reason): count for reason, count in counts.num_misses.items()},
        ("reason",),
        has_vllm_name=True,
    ),
    Figure(
        "prefix_cache_missed_prompts",
        "Prompts that were not found whole, by why the look-up ended.",
        lambda counts: {str(reason): count for reason, count in counts.num_missed_prompts.items()},
        ("reason",),
        has_vllm_name=True,
    ),
)


def misses_of(
    kv_cache: KVCacheManager, sequence: Sequence, prefix: Prefix
) -> tuple[PrefixMisses, CacheMiss | None]:
    """Why the prompt of a starting sequence is not all in `prefix`, and where the look-up ended, if
    early."""
    misses, num_tokens = no_misses(), sequence.num_prompt_tokens
    num_missing = num_tokens - prefix.num_cached_tokens
    is_skipped = sequence.needs_prompt_rows
    if is_skipped:
        misses["prompt_logprobs" if sequence.prompt.pool is None else "pooling"] = num_missing
    else:
        misses["tail"] = min(1, num_missing)
        misses["cold"] = num_missing - misses["tail"]
    content = kv_content_of(sequence)
    if kv_cache.slot_prefixes is not None and not is_skipped:
        closest = kv_cache.slot_prefixes.closest(content, num_tokens)
        return misses, _miss_in_slots(closest, prefix.num_cached_tokens, num_tokens)
    if kv_cache.prefix_cache is None:
        return misses, None
    look_up = _LookUp(
        cache=kv_cache.prefix_cache,
        in_flight=kv_cache.in_flight_prefixes,
        keys=kv_cache.page_keys(sequence),
        num_tokens=num_tokens,
        num_found=prefix.num_published,
        num_matched=max(prefix.num_matched, prefix.num_published),
    )
    return misses if is_skipped else look_up.misses(), look_up.miss(content, is_skipped=is_skipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LookUp:
    """Of a prompt's pages `num_found` were found, `num_matched` are cached, with a snapshot of the
    state or not."""

    cache: PrefixCache
    in_flight: InFlightPrefixes
    keys: SequenceOf[bytes]
    num_tokens: int
    num_found: int
    num_matched: int

    @property
    def num_usable(self) -> int:
        return (self.num_tokens - 1) // self.cache.page_size

    def misses(self) -> dict[MissReason, int]:
        misses, size = no_misses(), self.cache.page_size
        misses["no_snapshot"] = (self.num_matched - self.num_found) * size
        for key in self.keys[self.num_matched : self.num_usable]:
            if self.cache.was_evicted(key):
                misses["evicted"] += size
            elif self.in_flight.is_being_computed(key):
                misses["in_flight"] += size
            else:
                misses["cold"] += size
        misses["tail"] = self.num_tokens - self.num_found * size - sum(misses.values())
        return misses

    def miss(self, content: Content, *, is_skipped: bool) -> CacheMiss | None:
        """None if only the page of the last token was not found."""
        keys, found, size = self.keys, self.num_found, self.cache.page_size
        usable = self.num_usable
        if found >= usable > 0:
            return None
        known = self.num_matched
        while known < usable and self._is_known(keys[known]):
            known += 1
        common = self.cache.num_common(keys, content, known)
        reason: CacheMissReason = "new" if common is None else "differs"
        if self.num_matched > found:
            reason = "no_snapshot"
        elif known > found:
            reason = "evicted" if self.cache.was_evicted(keys[found]) else "in_flight"
        if is_skipped:
            reason = "not_used"
        elif not usable:
            reason = "short"
        shared_tokens = min(known * size + (common or 0), self.num_tokens)
        return CacheMiss(shared_tokens=shared_tokens, reason=reason)

    def _is_known(self, key: bytes) -> bool:
        is_there = self.cache.page_of(key) is not None
        return is_there or self.cache.was_evicted(key) or self.in_flight.is_being_computed(key)


def _miss_in_slots(closest: Closest, num_cached_tokens: int, num_tokens: int) -> CacheMiss | None:
    if num_cached_tokens >= num_tokens - 1:
        return None
    return CacheMiss(
        shared_tokens=closest.num_common, reason="differs" if closest.goes_on else "new"
    )


def log_text(misses: PrefixMisses) -> str:
    """Say `evicted 32, tail 5`."""
    return ", ".join(f"{reason} {count}" for reason, count in misses.items() if count) or "none"


def miss_text(miss: CacheMiss | None, num_tokens: int) -> str:
    """Where a prompt of `num_tokens` tokens differs from earlier ones; no part of its text."""
    if miss is None or not miss.shared_tokens:
        return "" if miss is None else f"; reason: {miss.reason}"
    return (
        f"; shares the first {miss.shared_tokens} of {num_tokens} tokens with an earlier prompt "
        f"of the same tenant and salt{_THEN[miss.reason]}"
    )
