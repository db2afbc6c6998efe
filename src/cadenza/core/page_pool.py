"""`PagePool`: allocation of the KV cache's pages.

Owns reference counts, pins, free pages and the classes of cached ones. Invariant: free + cached +
live + pinned = total, where a page is *live* if its reference count is above 0, *pinned* if it is
unreferenced but a launched step still writes it, *cached* if it is unreferenced, unpinned and in
the prefix cache, and *free* otherwise.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from cadenza.core.eviction_order import EvictionOrder, PageClass, Reuse


@dataclass(slots=True, eq=False)
class Page:
    """A page's reference count, pin count, whether it is in the prefix cache, as what, and whether
    a request has gone on behind it."""

    ref_count: int = 0
    pin_count: int = 0
    is_cached: bool = False
    page_class: PageClass = PageClass.PROMPT
    has_parted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCounts:
    """Pages by state; the sum is the pool's size."""

    free: int
    cached: int
    live: int
    pinned: int

    @property
    def by_state(self) -> dict[str, int]:
        """Pinned ones are live."""
        return {"live": self.live + self.pinned, "cached": self.cached, "free": self.free}


class PageAccountingError(AssertionError):
    """An unreferenced page was freed, or an unpinned one unpinned: an internal error."""


class PagePool:
    """`num_pages` pages, ids from 0. Calls `on_evict(page_id)` before a cached page is reused;
    `order_type` makes the order of those that can be."""

    def __init__(
        self,
        num_pages: int,
        on_evict: Callable[[int], None] = lambda _: None,
        *,
        order_type: Callable[[int, Reuse], EvictionOrder] = EvictionOrder,
    ) -> None:
        self.reuse = Reuse(num_pages)
        self._pages = [Page() for _ in range(num_pages)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._cached = order_type(num_pages, self.reuse)  # the reusable ones
        self._on_evict = on_evict
        self._num_live = 0

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    @property
    def num_available(self) -> int:
        """Pages that can be allocated now: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_pinned(self) -> int:
        """Unreferenced pages that a launched step still writes; available once it has been read."""
        return len(self._pages) - self.num_available - self._num_live

    def counts(self) -> PageCounts:
        """Counts by state."""
        return PageCounts(
            free=len(self._free),
            cached=len(self._cached),
            live=self._num_live,
            pinned=self.num_pinned,
        )

    def ref_count(self, page_id: int) -> int:
        return self._pages[page_id].ref_count

    def is_cached(self, page_id: int) -> bool:
        """Whether it is in the prefix cache, referenced or not."""
        return self._pages[page_id].is_cached

    def is_own(self, page_id: int) -> bool:
        """Whether it has one holder, and is not in the prefix cache."""
        page = self._pages[page_id]
        return page.ref_count == 1 and not page.is_cached

    def class_of(self, page_id: int) -> PageClass:
        """The class of a page in the prefix cache."""
        return self._pages[page_id].page_class

    def try_allocate(self, count: int) -> list[int] | None:
        """`count` pages with reference count 1, free ones before cached ones; None if too few."""
        if count > self.num_available:
            return None
        taken: list[int] = []
        for _ in range(count):
            if not self._free:
                oldest = self._cached.first()
                assert oldest is not None, "no page is free or cached"
                self.evict(oldest)
            page_id, _none = self._free.popitem(last=False)
            self._pages[page_id].ref_count = 1
            taken.append(page_id)
        self._num_live += count
        return taken

    def share(self, page_ids: Iterable[int]) -> None:
        """Adds a reference to each of the pages, which are live or in the prefix cache."""
        for page_id in page_ids:
            page = self._pages[page_id]
            if not page.ref_count:
                self._num_live += 1
                if page_id in self._cached:
                    self._cached.take(page_id)
                self._free.pop(page_id, None)
            page.ref_count += 1

    def take_over(self, page_id: int) -> None:
        """Removes an unreferenced page from the prefix cache and gives it a reference."""
        page = self._pages[page_id]
        assert page.is_cached, "only a cached page can be taken over"
        self.share((page_id,))
        page.is_cached = False
        self._on_evict(page_id)

    def is_reusable(self, page_id: int) -> bool:
        """Whether it is free or cached."""
        return page_id in self._free or page_id in self._cached

    def evict(self, page_id: int) -> None:
        """Makes a cached page free."""
        page = self._pages[page_id]
        assert page.is_cached, "only a cached page can be evicted"
        assert page_id in self._cached, "a page in use cannot be evicted"
        page.is_cached = False
        self.reuse.count_lost(page.page_class)
        self._cached.evict(page_id)
        self._add_free(page_id)
        self._on_evict(page_id)

    def free(self, page_ids: Iterable[int]) -> None:
        """Removes a reference from each page; of a class, cached pages are evicted in the order
        given."""
        for page_id in page_ids:
            if not 0 <= page_id < len(self._pages) or not self._pages[page_id].ref_count:
                raise PageAccountingError(f"page {page_id} was freed and nobody holds it")
            page = self._pages[page_id]
            page.ref_count -= 1
            if not page.ref_count:
                self._num_live -= 1
                self._release_if_unused(page_id, page)

    def pin(self, page_ids: Iterable[int]) -> None:
        """Prevents the reuse of pages while a launched step writes them."""
        for page_id in page_ids:
            self._pages[page_id].pin_count += 1

    def unpin(self, page_ids: Iterable[int]) -> None:
        for page_id in page_ids:
            page = self._pages[page_id]
            if not page.pin_count:
                raise PageAccountingError(f"page {page_id} was unpinned and is not pinned")
            page.pin_count -= 1
            if not page.ref_count:
                self._release_if_unused(page_id, page)

    def mark_cached(self, page_id: int, page_class: PageClass = PageClass.PROMPT) -> None:
        """Records that the page is in the prefix cache, until `on_evict` is called for it."""
        page = self._pages[page_id]
        assert page.ref_count, "only a referenced page can be published"
        page.is_cached = True
        page.page_class = page_class
        page.has_parted = False

    def mark_found(self, page_ids: SequenceOf[int]) -> None:
        """Records that a request has found cached pages, which it holds now, and goes on behind the
        last one. Generated tokens are those of a prompt then; from the second one on that goes on
        there, the pages are shared. Those of thinned out prompts stay what they are."""
        if not page_ids:
            return
        last = self._pages[page_ids[-1]]
        for page_id in page_ids:
            page = self._pages[page_id]
            assert page.ref_count, "only a referenced page can be found"
            assert page.is_cached, "only a page from the cache can be found"
            self.reuse.count_found(page.page_class)
            if page.page_class is PageClass.SPARSE:
                continue
            if last.has_parted:
                page.page_class = PageClass.SHARED
            elif page.page_class is PageClass.GENERATED:
                page.page_class = PageClass.PROMPT
        last.has_parted = True

    def mark_passed(self, page_id: int) -> None:
        """Records that a request found a cached page, and leaves one that replaces it; a shared one
        stays what it is."""
        page = self._pages[page_id]
        assert page.ref_count, "only a referenced page can be passed"
        if page.page_class is not PageClass.SHARED:
            page.page_class = PageClass.PASSED

    def renew(self, page_id: int) -> None:
        """Records that a request has computed the content of a cached page again, which is as new
        then as its own."""
        page = self._pages[page_id]
        assert page.is_cached, "only a cached page can be renewed"
        if page.page_class is PageClass.GENERATED:
            page.page_class = PageClass.PROMPT
        if page_id in self._cached:
            self._cached.add(page_id, page.page_class)

    def forget_cached(self) -> None:
        """Evicts all cached pages, because the device's pages were lost."""
        for page_id, page in enumerate(self._pages):
            if page.is_cached:
                self.uncache(page_id)

    def uncache(self, page_id: int) -> None:
        """Removes a page from the prefix cache, referenced or not; its content is lost."""
        page = self._pages[page_id]
        assert page.is_cached, "only a cached page can leave the prefix cache"
        page.is_cached = False
        if page_id in self._cached:
            self._cached.take(page_id)
            self._add_free(page_id)
        self._on_evict(page_id)

    def check_invariants(self) -> None:
        """Raises AssertionError if the counters and the pages' states disagree."""
        for page_id, page in enumerate(self._pages):
            assert page.ref_count >= 0, f"page {page_id}: ref_count {page.ref_count}"
            assert page.pin_count >= 0, f"page {page_id}: pin_count {page.pin_count}"
            in_use = bool(page.ref_count or page.pin_count)
            assert in_use != self.is_reusable(page_id), f"page {page_id} is in two states"
            is_listed = page.is_cached and not in_use
            assert is_listed == (page_id in self._cached), f"page {page_id} is in the wrong list"
        live = sum(1 for page in self._pages if page.ref_count)
        assert live == self._num_live, f"{live} pages are live, counted {self._num_live}"
        self._cached.check_invariants()
        counts = self.counts()
        total = counts.free + counts.cached + counts.live + counts.pinned
        assert total == self.num_pages, f"{counts} do not add up to {self.num_pages}"

    def _release_if_unused(self, page_id: int, page: Page) -> None:
        if page.ref_count or page.pin_count:
            return
        if page.is_cached:
            self._cached.add(page_id, page.page_class)
        else:
            self._add_free(page_id)

    def _add_free(self, page_id: int) -> None:
        """The newest free page is used first: it may still be in the processor's caches."""
        self._free[page_id] = None
        self._free.move_to_end(page_id, last=False)
