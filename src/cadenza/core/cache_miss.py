"""`CacheMiss` of a prompt: how much of it an earlier prompt of the same tenant and salt had, and
why the look-up in the prefix cache ended there.

Pure functions of the cache's indexes; they change nothing and read no text. Keys and slots begin
with the salt, so that what others asked has no influence on what is said. Invariant: the cost is
one look-up for each page that is missing and was computed before, and the comparison of one page
(`PrefixCache.num_common`).
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from cadenza.core.prefix_cache import Content, PrefixCache
from cadenza.core.prefix_leaders import PrefixLeaders
from cadenza.core.slot_prefixes import Closest
from cadenza.events import CacheMiss, CacheMissReason


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedUpPrompt:
    """A prompt of `num_tokens` tokens, of which the first `num_found_pages` pages were found, or
    none because it `is_skipped`: its tokens are computed in any case.

    `content` may be longer than the prompt, and so may `keys`.
    """

    keys: SequenceOf[bytes]
    content: Content
    num_tokens: int
    num_found_pages: int
    is_skipped: bool


def miss_in_pages(
    cache: PrefixCache, leaders: PrefixLeaders, prompt: LookedUpPrompt
) -> CacheMiss | None:
    """None if all pages were found but the one with the prompt's last token."""
    keys, found, size = prompt.keys, prompt.num_found_pages, cache.page_size
    usable = (prompt.num_tokens - 1) // size
    if found >= usable > 0:
        return None
    known = found
    while known < usable and _is_known(cache, leaders, keys[known]):
        known += 1
    common = cache.num_common(keys, prompt.content, known)
    reason: CacheMissReason = "new" if common is None else "differs"
    if known > found:
        reason = "evicted" if cache.was_evicted(keys[found]) else "in_flight"
    if prompt.is_skipped:
        reason = "not_used"
    elif not usable:
        reason = "short"
    return CacheMiss(
        shared_tokens=min(known * size + (common or 0), prompt.num_tokens), reason=reason
    )


def miss_in_slots(closest: Closest, num_cached_tokens: int, num_tokens: int) -> CacheMiss | None:
    """None if all tokens of the prompt were found but the last one."""
    if num_cached_tokens >= num_tokens - 1:
        return None
    return CacheMiss(
        shared_tokens=closest.num_common, reason="differs" if closest.goes_on else "new"
    )


def _is_known(cache: PrefixCache, leaders: PrefixLeaders, key: bytes) -> bool:
    """Whether the page of a key was computed before, or is being computed."""
    is_there = cache.page_of(key) is not None
    return is_there or cache.was_evicted(key) or leaders.is_led(key)
