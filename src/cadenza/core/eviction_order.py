"""`EvictionOrder`: which page of the prefix cache is reused first.

Owns the places of pages: the newest quarter goes last, oldest first. Behind it a page goes by its
last use, which counts as later or earlier by the lead of its class. Invariants: of the newest
pages, as many as a quarter of all, none goes before an older one; no lead keeps a page for ever.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import NamedTuple

NEWEST_PARTS = 4
"""The newest pages are one in so many."""

ROUNDS = 4
"""By how many pools of evictions a shared page counts as used later than it was, and one that
hardly anybody can use as used earlier."""


class PageClass(IntEnum):
    """What a page is worth: it is a state from which its conversation has gone on; holds tokens
    behind a gap of a prompt that is thinned out, which only the same prompt can share; generated
    tokens that no request has found; those of a prompt; or those behind which several requests
    went on."""

    PASSED = 0
    SPARSE = 1
    GENERATED = 2
    PROMPT = 3
    SHARED = 4


class Reuse:
    """How many pages of a class were found by a request, and how many were evicted instead.

    Generated tokens are found where the next turn has them, and never where it has only the answer
    without the thoughts; of states, those behind prompts are found where the others are not. Counts
    of what is long past are halved, again and again, so that they follow the traffic.
    """

    def __init__(self, num_pages: int) -> None:
        self._most = 8 * max(1, num_pages)
        self._found = [0] * len(PageClass)
        self._lost = [0] * len(PageClass)

    def count_found(self, page_class: PageClass) -> None:
        self._count(self._found, page_class)

    def count_lost(self, page_class: PageClass) -> None:
        self._count(self._lost, page_class)

    def lag(self, page_class: PageClass, other: PageClass, most: int) -> int:
        """`most`, if pages of a class are never found, down to 0 if they are found at least half as
        often as those of another class; 0 while nothing is known of either."""
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


class _Place(NamedTuple):
    page_class: PageClass
    at: int  # the number of evictions when it was added


class EvictionOrder:
    """The order of at most `num_pages` pages; `reuse` is that of the pool that has them."""

    def __init__(self, num_pages: int, reuse: Reuse | None = None) -> None:
        self._num_pages = max(1, num_pages)
        self._most_newest = num_pages // NEWEST_PARTS
        self._reuse = reuse or Reuse(num_pages)
        self._num_evicted = 0
        self._newest = OrderedDict[int, _Place]()
        # By class, behind the newest: each page, and the number of evictions when it was added.
        self._classes = [OrderedDict[int, int]() for _ in PageClass]
        self._places: dict[int, OrderedDict[int, _Place] | OrderedDict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, page_id: int) -> bool:
        return page_id in self._places

    def first(self, can_go: Callable[[int], bool] | None = None) -> int | None:
        """The first page, or the first for which `can_go` is true; None if there is none."""
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
        """Makes a page, which may be in the order already, the newest one."""
        if page_id in self._places:
            self.take(page_id)
        self._newest[page_id] = _Place(page_class, self._num_evicted)
        self._places[page_id] = self._newest
        if len(self._newest) > self._most_newest:
            oldest, place = self._newest.popitem(last=False)
            pages = self._classes[place.page_class]
            pages[oldest] = place.at
            self._places[oldest] = pages

    def take(self, page_id: int) -> None:
        """Removes a page that is used again, or empty."""
        del self._places.pop(page_id)[page_id]

    def evict(self, page_id: int) -> None:
        """Removes a page whose content is lost; all others age by one eviction."""
        self.take(page_id)
        self._num_evicted += 1

    def _lead(self, page_class: int) -> int:
        """The evictions by which a page counts as used later than it was."""
        if page_class == PageClass.PROMPT:
            return -self._reuse.lag(PageClass.PROMPT, PageClass.GENERATED, self._num_pages)
        if page_class == PageClass.GENERATED:
            return -self._reuse.lag(PageClass.GENERATED, PageClass.PROMPT, self._num_pages)
        rounds = ROUNDS if page_class == PageClass.SHARED else -ROUNDS
        return rounds * self._num_pages

    def check_invariants(self) -> None:
        """Raises AssertionError if a page has two places, or stands before an older one."""
        lists = [self._newest, *self._classes]
        listed = {page: id(pages) for pages in lists for page in pages}
        assert sum(map(len, lists)) == len(listed), "a page is in two lists"
        assert listed == {page: id(at) for page, at in self._places.items()}, "lists are mixed up"
        assert len(self._newest) <= self._most_newest, "too many pages are among the newest"
        ages = [[place.at for place in self._newest.values()]]
        ages += [list(pages.values()) for pages in self._classes]
        assert all(each == sorted(each) for each in ages), "a page stands before an older one"


def _first_of(pages: Iterable[int], can_go: Callable[[int], bool] | None) -> int | None:
    return next(iter(pages) if can_go is None else filter(can_go, pages), None)
