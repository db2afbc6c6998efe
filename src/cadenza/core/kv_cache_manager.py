"""`KVCacheManager`: gives sequences pages, shares cached prefixes, publishes finished pages.

Owns the pool and the prefix cache together; knows sequences, not batches or devices.
Invariant: a sequence's page table covers exactly the tokens it was given room for, and a page is
published only after the step that filled it has succeeded with finite logits.
"""

from dataclasses import dataclass

from cadenza.core.page_pool import PagePool
from cadenza.core.prefix_cache import ROOT, PrefixCache
from cadenza.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached pages that hold the first `num_tokens` tokens; `serial` is the last one's."""

    page_ids: tuple[int, ...]
    num_tokens: int
    serial: int


NO_HIT = PrefixHit((), 0, ROOT)


class KVCacheManager:
    """Pages of `page_size` tokens. `secret` keys the prefix cache's hashes."""

    def __init__(
        self, *, num_pages: int, page_size: int, enable_prefix_caching: bool, secret: bytes
    ) -> None:
        self.page_size = page_size
        self.prefix_cache = (
            PrefixCache(page_size=page_size, secret=secret) if enable_prefix_caching else None
        )
        self.pool = PagePool(num_pages, self._forget)

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def find_prefix(self, sequence: Sequence) -> PrefixHit:
        """The longest cached prefix that leaves at least one token to compute."""
        if self.prefix_cache is None:
            return NO_HIT
        salt = sequence.request.cache_salt
        self.prefix_cache.extend_keys(sequence.page_keys, sequence.token_ids, salt)
        usable = sequence.page_keys[: (len(sequence.token_ids) - 1) // self.page_size]
        found, serial = self.prefix_cache.find(usable, sequence.token_ids)
        return PrefixHit(tuple(found), len(found) * self.page_size, serial)

    def num_unheld(self, hit: PrefixHit) -> int:
        """Pages of a hit that nobody holds, so that sharing them takes from what is available."""
        return sum(1 for page_id in hit.page_ids if not self.pool.ref_count(page_id))

    def adopt(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Starts a sequence's page table with a hit's pages."""
        assert not sequence.page_table, "a sequence adopts a prefix before it owns pages"
        self.pool.share(hit.page_ids)
        sequence.page_table.extend(hit.page_ids)
        sequence.num_computed_tokens = hit.num_tokens
        sequence.num_published_pages = len(hit.page_ids)
        sequence.published_serial = hit.serial

    def try_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes the page table cover `num_tokens` tokens; False, unchanged, for "not now"."""
        missing = -(-num_tokens // self.page_size) - len(sequence.page_table)
        if missing <= 0:
            return True
        pages = self.pool.try_allocate(missing)
        if pages is None:
            return False
        sequence.page_table.extend(pages)
        return True

    def release(self, sequence: Sequence) -> None:
        """Gives back every page, the tail first, and rewinds the sequence."""
        self.pool.free(reversed(sequence.page_table))
        sequence.rewind()

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Makes the full pages of the first `num_tokens` tokens findable by others."""
        full = num_tokens // self.page_size
        if self.prefix_cache is None or full <= sequence.num_published_pages:
            return
        salt = sequence.request.cache_salt
        self.prefix_cache.extend_keys(sequence.page_keys, sequence.token_ids, salt)
        for index in range(sequence.num_published_pages, full):
            if sequence.published_serial is None:
                break
            page_id, key = sequence.page_table[index], sequence.page_keys[index]
            sequence.published_serial, is_taken = self.prefix_cache.publish(
                page_id, index, key, sequence.token_ids, sequence.published_serial
            )
            if is_taken:
                self.pool.mark_cached(page_id)
        sequence.num_published_pages = full

    def forget_all(self) -> None:
        """The device lost its pages: nothing cached can be trusted."""
        self.pool.forget_cached()

    def check_invariants(self, sequences: list[Sequence]) -> None:
        """Reference counts equal the page tables' holds. Raises AssertionError."""
        self.pool.check_invariants()
        holds: dict[int, int] = {}
        for sequence in sequences:
            for page_id in sequence.page_table:
                holds[page_id] = holds.get(page_id, 0) + 1
        for page_id in range(self.pool.num_pages):
            expected, actual = holds.get(page_id, 0), self.pool.ref_count(page_id)
            assert expected == actual, f"page {page_id}: {expected} holders, counted {actual}"
        if self.prefix_cache is not None:
            self.prefix_cache.check_invariants()

    def _forget(self, page_id: int) -> None:
        if self.prefix_cache is not None:
            self.prefix_cache.forget(page_id)
