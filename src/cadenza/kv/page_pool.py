"""`PagePool`: allocates pages; `EvictionOrder`: which cached one goes first; `PageQuotas`: tenants'
shares below 100 %. Invariants: free + cached + live + pinned = total (*live*: referenced; *pinned*:
a launched step writes it); the newest quarter goes last; a tenant holds and has cached no more than
its quota, each page counted once however many sequences share it."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from cadenza.batch.sequence import Sequence
from cadenza.tenant import Tenant

NEWEST_PARTS = 4  # The newest pages are one in so many

# Pools of evictions by which a shared page counts as used later, one that few share as earlier.
ROUNDS = 4


class PageClass(IntEnum):
    """By worth: a state after which its conversation continued; tokens after a gap of a pruned
    prompt, which only the same prompt shares; generated tokens that no request found; a prompt's;
    those after which several requests went on."""

    PASSED = 0
    SPARSE = 1
    GENERATED = 2
    PROMPT = 3
    SHARED = 4


class Reuse:
    """How many pages of a class were found, and evicted instead; old counts are halved
    repeatedly."""

    def __init__(self, num_pages: int) -> None:
        self._most = 8 * max(1, num_pages)
        self._found = [0] * len(PageClass)
        self._lost = [0] * len(PageClass)

    def count_found(self, page_class: PageClass) -> None:
        self._count(self._found, page_class)

    def count_lost(self, page_class: PageClass) -> None:
        self._count(self._lost, page_class)

    def lag(self, page_class: PageClass, other: PageClass, most: int) -> int:
        """From `most`, if pages of a class are never found, down to 0 at half the other class's
        share."""
        found, num = self._found[page_class], self._found[page_class] + self._lost[page_class]
        other_found, other_num = self._found[other], self._found[other] + self._lost[other]
        if not num or not other_found:
            return 0
        return max(0, most - 2 * most * found * other_num // (num * other_found))

    def _count(self, counts: list[int], page_class: PageClass) -> None:
        counts[page_class] += 1
        if self._found[page_class] + self._lost[page_class] > self._most:
            self._found = [each // 2 for each in self._found]
            self._lost = [each // 2 for each in self._lost]


class _Entry(NamedTuple):
    page_class: PageClass
    at: int  # the number of evictions when it was added


class EvictionOrder:
    """The order of at most `num_pages` pages; `reuse` is their pool's."""

    def __init__(self, num_pages: int, reuse: Reuse | None = None) -> None:
        self._num_pages = max(1, num_pages)
        self._most_newest = num_pages // NEWEST_PARTS
        self._reuse = reuse or Reuse(num_pages)
        self._num_evicted = 0
        self._newest = OrderedDict[int, _Entry]()
        # By class, after the newest: each page, and the number of evictions when it was added.
        self._classes = [OrderedDict[int, int]() for _ in PageClass]
        self._places: dict[int, OrderedDict[int, _Entry] | OrderedDict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, page_id: int) -> bool:
        return page_id in self._places

    def first(self, can_go: Callable[[int], bool] | None = None) -> int | None:
        """The first page for which `can_go`, if given, is true."""
        first, first_at = None, 0
        for page_class, pages in enumerate(self._classes):
            page_id = _first_of(pages, can_go)
            if page_id is None:
                continue
            at = pages[page_id] + self._lead(page_class)
            if first is None or at < first_at:
                first, first_at = page_id, at
        return _first_of(self._newest, can_go) if first is None else first

    def add(self, page_id: int, page_class: PageClass) -> None:
        if page_id in self._places:
            self.take(page_id)
        self._newest[page_id] = _Entry(page_class, self._num_evicted)
        self._places[page_id] = self._newest
        if len(self._newest) > self._most_newest:
            oldest, entry = self._newest.popitem(last=False)
            pages = self._classes[entry.page_class]
            pages[oldest] = entry.at
            self._places[oldest] = pages

    def take(self, page_id: int) -> None:
        del self._places.pop(page_id)[page_id]

    def evict(self, page_id: int) -> None:
        """Its content is lost; all others age by one eviction."""
        self.take(page_id)
        self._num_evicted += 1

    def _lead(self, page_class: int) -> int:
        if page_class == PageClass.PROMPT:
            return -self._reuse.lag(PageClass.PROMPT, PageClass.GENERATED, self._num_pages)
        if page_class == PageClass.GENERATED:
            return -self._reuse.lag(PageClass.GENERATED, PageClass.PROMPT, self._num_pages)
        rounds = ROUNDS if page_class == PageClass.SHARED else -ROUNDS
        return rounds * self._num_pages

    def check_invariants(self) -> None:
        lists = [self._newest, *self._classes]
        listed = {page: id(pages) for pages in lists for page in pages}
        assert sum(map(len, lists)) == len(listed), "a page is in two lists"
        assert listed == {page: id(at) for page, at in self._places.items()}, "lists are mixed up"
        assert len(self._newest) <= self._most_newest, "too many pages are among the newest"
        ages = [[entry.at for entry in self._newest.values()]]
        ages += [list(pages.values()) for pages in self._classes]
        assert all(each == sorted(each) for each in ages), "a page stands before an older one"


def _first_of(pages: Iterable[int], can_go: Callable[[int], bool] | None) -> int | None:
    return next(iter(pages) if can_go is None else filter(can_go, pages), None)


@dataclass(slots=True, eq=False)
class Page:
    """`has_next`: a request has continued after it."""

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
    """An internal error: an unreferenced page was freed, or an unpinned one unpinned."""


class PagePool:
    """`num_pages` pages, ids from 0; calls `on_evict(page_id)` before a cached page is reused."""

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
        """Free and cached pages."""
        return len(self._free) + len(self._cached)

    @property
    def num_pinned(self) -> int:
        """Unreferenced pages that a launched step still writes."""
        return len(self._pages) - self.num_available - self._num_live

    def counts(self) -> PageCounts:
        return PageCounts(
            free=len(self._free),
            cached=len(self._cached),
            live=self._num_live,
            pinned=self.num_pinned,
        )

    def ref_count(self, page_id: int) -> int:
        return self._pages[page_id].ref_count

    def is_cached(self, page_id: int) -> bool:
        return self._pages[page_id].is_cached

    def is_own(self, page_id: int) -> bool:
        page = self._pages[page_id]
        return page.ref_count == 1 and not page.is_cached

    def class_of(self, page_id: int) -> PageClass:
        return self._pages[page_id].page_class

    def try_allocate(self, count: int) -> list[int] | None:
        """With reference count 1, free ones before cached ones; None if too few."""
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
        return page_id in self._free or page_id in self._cached

    def evict(self, page_id: int) -> None:
        page = self._pages[page_id]
        assert page.is_cached, "only a cached page can be evicted"
        assert page_id in self._cached, "a page in use cannot be evicted"
        page.is_cached = False
        self.reuse.count_lost(page.page_class)
        self._cached.evict(page_id)
        self._add_free(page_id)
        self._on_evict(page_id)

    def free(self, page_ids: Iterable[int]) -> None:
        """Removes a reference each; in a class, cached pages are evicted in the order given."""
        for page_id in page_ids:
            if not 0 <= page_id < len(self._pages) or not self._pages[page_id].ref_count:
                raise PageAccountingError(f"page {page_id} was freed and nobody holds it")
            page = self._pages[page_id]
            page.ref_count -= 1
            if not page.ref_count:
                self._num_live -= 1
                self._release_if_unused(page_id, page)

    def pin(self, page_ids: Iterable[int]) -> None:
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
        page = self._pages[page_id]
        assert page.ref_count, "only a referenced page can be published"
        page.is_cached = True
        page.page_class = page_class
        page.has_parted = False

    def mark_found(self, page_ids: SequenceOf[int]) -> None:
        """A request found and holds these cached pages, and continues after the last. Generated
        tokens then count as prompt tokens; from the second continuation on pages are shared."""
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
        """A request found a cached page but leaves another in its place."""
        page = self._pages[page_id]
        assert page.ref_count, "only a referenced page can be passed"
        if page.page_class is not PageClass.SHARED:
            page.page_class = PageClass.PASSED

    def renew(self, page_id: int) -> None:
        """Its content was computed again: it is as new as that copy."""
        page = self._pages[page_id]
        assert page.is_cached, "only a cached page can be renewed"
        if page.page_class is PageClass.GENERATED:
            page.page_class = PageClass.PROMPT
        if page_id in self._cached:
            self._cached.add(page_id, page.page_class)

    def forget_cached(self) -> None:
        for page_id, page in enumerate(self._pages):
            if page.is_cached:
                self.uncache(page_id)

    def uncache(self, page_id: int) -> None:
        """Its content is lost; referenced or not."""
        page = self._pages[page_id]
        assert page.is_cached, "only a cached page can leave the prefix cache"
        page.is_cached = False
        if page_id in self._cached:
            self._cached.take(page_id)
            self._add_free(page_id)
        self._on_evict(page_id)

    def check_invariants(self) -> None:
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


class PageQuotas:
    """The pages of one pool; at most `cache_share` of them are in the prefix cache."""

    def __init__(self, pool: PagePool, cache_share: float = 1.0) -> None:
        self._pool = pool
        self.cache_share = cache_share
        self._held: dict[str, dict[int, int]] = {}
        # By tenant, and of all tenants under None; in use or not.
        self._cached: dict[str | None, EvictionOrder] = {}
        self._groups_of: dict[int, list[str | None]] = {}

    def take(self, sequence: Sequence, page_ids: Iterable[int]) -> None:
        tenant = sequence.tenant
        if tenant.page_share == 1.0:
            return
        held = self._held.setdefault(tenant.name, {})
        for page_id in page_ids:
            held[page_id] = held.get(page_id, 0) + 1

    def give_back(self, sequence: Sequence, known: SequenceOf[int]) -> None:
        """Last page first; `known`: those in the prefix cache, by id or content."""
        tenant = sequence.tenant
        for group, _ in self._limits_of(tenant):
            cached = self._cached.get(group)
            for page_id in reversed(known if cached else ()):
                if cached is not None and page_id in cached:
                    cached.add(page_id, self._pool.class_of(page_id))
        if tenant.page_share == 1.0:
            return
        held = self._held.get(tenant.name, {})
        for page_id in sequence.page_table:
            held[page_id] -= 1
            if not held[page_id]:
                del held[page_id]
        if not held:
            self._held.pop(tenant.name, None)

    def num_left(self, tenant: Tenant) -> int:
        most = tenant.most_pages(self._pool.num_pages)
        return most - len(self._held.get(tenant.name, ()))

    def num_held(self, tenant: Tenant, page_ids: Iterable[int]) -> int:
        held = self._held.get(tenant.name, {})
        return sum(1 for page_id in page_ids if page_id in held)

    def try_cache(self, tenant: Tenant, page_id: int, page_class: PageClass) -> bool:
        """Counts a page about to enter the prefix cache. Where a share is full, its first
        unreferenced page is evicted; False, with the page not counted, if all are in use."""
        limits = self._limits_of(tenant)
        if page_id in self._groups_of:
            return True
        for group, most in limits:
            cached = self._cached.setdefault(group, EvictionOrder(most, self._pool.reuse))
            if len(cached) >= most:
                oldest = cached.first(self._pool.is_reusable)
                if oldest is None:
                    return False
                self._pool.evict(oldest)
        for group, _ in limits:
            self._cached[group].add(page_id, page_class)
        if limits:
            self._groups_of[page_id] = [group for group, _ in limits]
        return True

    def forget(self, page_id: int) -> None:
        for group in self._groups_of.pop(page_id, ()):
            self._cached[group].evict(page_id)

    def _limits_of(self, tenant: Tenant) -> list[tuple[str | None, int]]:
        """The groups in which a tenant's cached pages count, and the most pages of each."""
        num_pages = self._pool.num_pages
        limits: list[tuple[str | None, int]] = []
        if tenant.cache_share < 1.0:
            limits.append((tenant.name, tenant.most_cached_pages(num_pages)))
        if self.cache_share < 1.0:
            limits.append((None, int(self.cache_share * num_pages)))
        return limits

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        expected: dict[str, dict[int, int]] = {}
        for sequence in sequences:
            tenant = sequence.tenant
            for page_id in sequence.page_table if tenant.page_share < 1.0 else ():
                pages = expected.setdefault(tenant.name, {})
                pages[page_id] = pages.get(page_id, 0) + 1
            most = tenant.most_pages(self._pool.num_pages)
            assert len(self._held.get(tenant.name, ())) <= most, f"{tenant} holds too much"
            most = tenant.most_cached_pages(self._pool.num_pages)
            assert len(self._cached.get(tenant.name, ())) <= most, f"{tenant} caches too much"
        assert expected == self._held, "pages held by tenants are counted wrongly"
        most = int(self.cache_share * self._pool.num_pages)
        assert len(self._cached.get(None, ())) <= most, "too many pages are in the prefix cache"
        for group, cached in self._cached.items():
            cached.check_invariants()
            counted = {page for page, groups in self._groups_of.items() if group in groups}
            is_same = len(cached) == len(counted) and all(page in cached for page in counted)
            assert is_same, "cached pages are counted wrongly"
