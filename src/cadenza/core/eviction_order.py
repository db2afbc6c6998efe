"""`EvictionOrder`: which page of the prefix cache is reused first.

Owns each page's class and its place within it: the lowest class goes first, and within a class the
page that was added first. Invariant: a page that nobody takes falls to the next lower class after
`ROUNDS` times as many evictions as there are pages, so no class keeps a page for ever.
"""

from collections import OrderedDict
from collections.abc import Callable
from enum import IntEnum

ROUNDS = 4
"""Evictions after which a page falls by one class, as a multiple of the number of pages."""


class PageClass(IntEnum):
    """What a page is worth: it holds tokens behind a gap of a prompt that is thinned out, which
    only the same prompt can share; generated tokens; those of a prompt only; or has been taken from
    the cache by a second request."""

    SPARSE = 0
    GENERATED = 1
    PROMPT = 2
    SHARED = 3


def _is_any(_page_id: int) -> bool:
    return True


class EvictionOrder:
    """The order of at most `num_pages` pages."""

    def __init__(self, num_pages: int) -> None:
        self._max_age = ROUNDS * max(1, num_pages)
        self._num_evicted = 0
        # By class: each page, and the number of evictions when it was added or fell.
        self._classes = [OrderedDict[int, int]() for _ in PageClass]
        self._class_of: dict[int, PageClass] = {}

    def __len__(self) -> int:
        return len(self._class_of)

    def __contains__(self, page_id: int) -> bool:
        return page_id in self._class_of

    def first(self, can_go: Callable[[int], bool] = _is_any) -> int | None:
        """The first page for which `can_go` is true; None if there is none."""
        for pages in self._classes:
            for page_id in pages:
                if can_go(page_id):
                    return page_id
        return None

    def add(self, page_id: int, page_class: PageClass) -> None:
        """Puts a page, which may be in the order already, behind all others of its class."""
        if page_id in self._class_of:
            self.take(page_id)
        self._classes[page_class][page_id] = self._num_evicted
        self._class_of[page_id] = page_class

    def take(self, page_id: int) -> None:
        """Removes a page that is used again."""
        del self._classes[self._class_of.pop(page_id)][page_id]

    def evict(self, page_id: int) -> None:
        """Removes a page whose content is lost; the others age by one eviction."""
        self.take(page_id)
        self._num_evicted += 1
        for page_class in (PageClass.SHARED, PageClass.PROMPT, PageClass.GENERATED):
            pages = self._classes[page_class]
            while pages and self._num_evicted - next(iter(pages.values())) >= self._max_age:
                self.add(next(iter(pages)), PageClass(page_class - 1))

    def check_invariants(self) -> None:
        """Raises AssertionError if the classes and the pages' classes disagree."""
        listed = {page: at for at, pages in enumerate(self._classes) for page in pages}
        assert listed == self._class_of, "pages are in other classes than they should be"
