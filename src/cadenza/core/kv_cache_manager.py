"""`KVCacheManager`: gives sequences pages, shares cached prefixes, publishes finished pages.

Owns the pool and the prefix cache together; knows sequences, not batches or devices.
Invariant: a sequence's page table covers exactly the tokens it was given room for, and a page is
published only after the step that filled it has succeeded with finite logits.
"""

from dataclasses import dataclass

from cadenza.core.page_pool import PagePool
from cadenza.core.prefix_cache import ROOT, Content, PrefixCache
from cadenza.core.sequence import PageCopy, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Pages that hold the first `num_tokens` tokens already.

    The first `num_published` of `page_ids` are known to the prefix cache, the last of them by
    `serial`. `partial_page` holds the tokens behind those of `page_ids` and goes on differently: it
    is copied. `num_cached_tokens` were found in the prefix cache.
    """

    page_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    num_published: int = 0
    serial: int = ROOT
    partial_page: int | None = None
    num_cached_tokens: int = 0


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

    def find_prefix(self, sequence: Sequence) -> Prefix:
        """What is there of a sequence's tokens, at least one of which is left to compute.

        A sibling's prompt where one has computed it, the longest cached prefix otherwise; nothing
        while the prompt's tokens are to be described.
        """
        source = sequence.fork_source
        if source is not None:
            return self._fork(source)
        if self.prefix_cache is None or sequence.needs_prompt_logprobs:
            return Prefix()
        content = _content_of(sequence)
        self.prefix_cache.extend_keys(sequence.page_keys, content)
        usable = (len(sequence.token_ids) - 1) // self.page_size
        found, serial = self.prefix_cache.find(sequence.page_keys, content, num_pages=usable)
        num_tokens = len(found) * self.page_size
        return Prefix(
            page_ids=found,
            num_tokens=num_tokens,
            num_published=len(found),
            serial=serial,
            num_cached_tokens=num_tokens,
        )

    def num_unheld(self, prefix: Prefix) -> int:
        """Pages of a prefix that nobody holds: sharing them takes from what is available."""
        return sum(1 for page_id in prefix.page_ids if not self.pool.ref_count(page_id))

    def try_adopt(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Starts a page table with a prefix's pages and covers all tokens; False for "not now"."""
        assert not sequence.page_table, "a sequence adopts a prefix before it owns pages"
        self.pool.share(prefix.page_ids)
        sequence.page_table.extend(prefix.page_ids)
        sequence.num_computed_tokens = prefix.num_tokens
        sequence.num_published_pages = prefix.num_published
        sequence.published_serial = prefix.serial
        if not self.try_grow(sequence, sequence.num_tokens):
            self.release(sequence)
            return False
        if prefix.partial_page is not None:
            index = len(prefix.page_ids)
            sequence.page_copy = PageCopy(
                prefix.partial_page,
                sequence.page_table[index],
                prefix.num_tokens - index * self.page_size,
            )
        return True

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
        content = _content_of(sequence)
        self.prefix_cache.extend_keys(sequence.page_keys, content)
        for index in range(sequence.num_published_pages, full):
            if sequence.published_serial is None:
                break
            page_id, key = sequence.page_table[index], sequence.page_keys[index]
            sequence.published_serial, is_taken = self.prefix_cache.publish(
                page_id, index, key, content, sequence.published_serial
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

    def _fork(self, source: Sequence) -> Prefix:
        """All of a computed prompt but its last token. Published pages are found out later."""
        num_tokens = source.num_prompt_tokens - 1
        full, rest = divmod(num_tokens, self.page_size)
        return Prefix(
            page_ids=tuple(source.page_table[:full]),
            num_tokens=num_tokens,
            partial_page=source.page_table[full] if rest else None,
            num_cached_tokens=source.num_cached_tokens or 0,
        )

    def _forget(self, page_id: int) -> None:
        if self.prefix_cache is not None:
            self.prefix_cache.forget(page_id)


def _content_of(sequence: Sequence) -> Content:
    request = sequence.request
    return Content(sequence.token_ids, request.attachments, request.cache_salt)
