"""`PagePool` against a model of who holds what (bar 1), and its single rules."""

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cadenza.kv.page_pool import PageAccountingError, PageCounts, PagePool


class PoolMachine(RuleBasedStateMachine):
    """Holders and steps come and go at random; a plain count of each page's holds is the truth."""

    pool_type: type[PagePool] = PagePool

    @initialize(num_pages=st.integers(1, 12))
    def make_pool(self, num_pages: int) -> None:
        self.evicted: list[int] = []
        self.pool = self.pool_type(num_pages, self.evicted.append)
        self.holds: list[list[int]] = []  # one list of pages for each holder
        self.pins: list[list[int]] = []  # one list of pages for each launched step
        self.cached: set[int] = set()

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        available = self.pool.num_available
        in_use = {page for pages in [*self.holds, *self.pins] for page in pages}
        cached_before, num_evicted = set(self.cached), len(self.evicted)
        pages = self.pool.try_allocate(count)
        if count > available:
            assert pages is None
            assert len(self.evicted) == num_evicted
            return
        assert pages is not None
        assert len(set(pages)) == len(pages) == count
        assert not in_use & set(pages), "a page in use was handed out"
        assert set(self.evicted[num_evicted:]) == cached_before & set(pages)
        self.cached -= set(pages)
        self.holds.append(pages)

    @precondition(lambda self: any(self.holds))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from([page for pages in self.holds for page in pages]))
        self.pool.mark_cached(page)
        self.cached.add(page)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def share_found_pages(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.cached)), unique=True, min_size=1))
        self.pool.share(pages)
        self.holds.append(pages)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.pool.free(reversed(pages))

    @precondition(lambda self: any(self.holds))
    @rule(data=st.data())
    def pin_for_a_step(self, data: st.DataObject) -> None:
        held = sorted({page for pages in self.holds for page in pages})
        pages = data.draw(st.lists(st.sampled_from(held), unique=True, min_size=1))
        self.pool.pin(pages)
        self.pins.append(pages)

    @precondition(lambda self: self.pins)
    @rule()
    def finish_the_oldest_step(self) -> None:
        self.pool.unpin(self.pins.pop(0))

    @rule()
    def lose_the_device(self) -> None:
        num_evicted = len(self.evicted)
        self.pool.forget_cached()
        assert sorted(self.evicted[num_evicted:]) == sorted(self.cached)
        self.cached.clear()

    @rule(data=st.data())
    def free_what_nobody_holds(self, data: st.DataObject) -> None:
        page = data.draw(st.integers(-2, self.pool.num_pages + 1))
        if not any(page in pages for pages in self.holds):
            with pytest.raises(PageAccountingError):
                self.pool.free([page])

    @invariant()
    def the_invariants_hold(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        held = [page for pages in self.holds for page in pages]
        pinned = {page for pages in self.pins for page in pages} - set(held)
        for page in range(self.pool.num_pages):
            assert self.pool.ref_count(page) == held.count(page)
        idle = set(range(self.pool.num_pages)) - set(held) - pinned
        assert self.pool.counts() == PageCounts(
            free=len(idle - self.cached),
            cached=len(idle & self.cached),
            live=len(set(held)),
            pinned=len(pinned),
        )
        assert self.pool.num_available == len(idle)
        assert self.pool.num_pinned == len(pinned)


TestPagePool = PoolMachine.TestCase


@pytest.mark.soak
def test_the_invariants_hold_in_a_thousand_runs_of_a_hundred_steps() -> None:
    full = settings(max_examples=1000, stateful_step_count=100)
    run_state_machine_as_test(PoolMachine, settings=full)


class ForgetsPins(PagePool):
    """A negative control: pages written by a launched step are handed out again."""

    def _release_if_unused(self, page_id: int, page: object) -> None:
        if not self._pages[page_id].ref_count:
            self._add_free(page_id)


class CountsOneHolder(PagePool):
    """A negative control: sharing a page does not count."""

    def share(self, page_ids: object) -> None:
        super().share(page for page in page_ids if not self.ref_count(page))  # type: ignore[attr-defined]


@pytest.mark.parametrize("mutant", [ForgetsPins, CountsOneHolder])
def test_the_state_machine_catches_the_fault(mutant: type[PagePool]) -> None:
    class Mutated(PoolMachine):
        pool_type = mutant

    quick = settings(max_examples=100, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Mutated, settings=quick)


def test_pages_come_oldest_first_and_cached_ones_last() -> None:
    pool = PagePool(4)
    assert pool.try_allocate(4) == [0, 1, 2, 3]
    pool.mark_cached(1)
    pool.mark_cached(2)
    pool.free([2, 1, 0, 3])
    assert sorted(pool.try_allocate(2) or []) == [0, 3], "pages worth nothing go first"
    assert pool.try_allocate(2) == [2, 1], "then the cached page that was freed first"


def test_an_exhausted_pool_says_not_now_and_takes_nothing() -> None:
    pool = PagePool(2)
    assert pool.try_allocate(3) is None
    assert pool.num_available == 2
    assert pool.try_allocate(2) == [0, 1]
    assert pool.try_allocate(1) is None
    assert pool.try_allocate(0) == []


def test_a_page_is_evicted_once_and_only_when_it_is_reused() -> None:
    evicted: list[int] = []
    pool = PagePool(1, evicted.append)
    pool.try_allocate(1)
    pool.mark_cached(0)
    pool.free([0])
    assert evicted == []
    assert pool.counts() == PageCounts(free=0, cached=1, live=0, pinned=0)
    pool.try_allocate(1)
    assert evicted == [0]
    pool.free([0])
    pool.try_allocate(1)
    assert evicted == [0]


def test_a_double_free_is_refused() -> None:
    pool = PagePool(2)
    pages = pool.try_allocate(1)
    assert pages is not None
    pool.free(pages)
    with pytest.raises(PageAccountingError, match="page 0 was freed and nobody holds it"):
        pool.free(pages)


@pytest.mark.parametrize("page_id", [-1, 2, 1 << 40])
def test_a_foreign_page_is_refused(page_id: int) -> None:
    pool = PagePool(2)
    pool.try_allocate(2)
    with pytest.raises(PageAccountingError):
        pool.free([page_id])
    pool.check_invariants()


def test_a_second_unpin_is_refused() -> None:
    pool = PagePool(1)
    pool.try_allocate(1)
    pool.pin([0])
    pool.unpin([0])
    with pytest.raises(PageAccountingError, match="unpinned"):
        pool.unpin([0])


def test_a_freed_page_is_not_handed_out_while_a_step_writes_it() -> None:
    pool = PagePool(1)
    pool.try_allocate(1)
    pool.pin([0])
    pool.pin([0])
    pool.free([0])
    assert pool.try_allocate(1) is None
    pool.unpin([0])
    assert pool.try_allocate(1) is None
    pool.unpin([0])
    assert pool.try_allocate(1) == [0]


def test_a_cached_page_can_be_shared_while_a_step_still_pins_it() -> None:
    pool = PagePool(1)
    pool.try_allocate(1)
    pool.mark_cached(0)
    pool.pin([0])
    pool.free([0])
    pool.share([0])
    pool.check_invariants()
    pool.unpin([0])
    assert pool.counts() == PageCounts(free=0, cached=0, live=1, pinned=0)
    assert pool.try_allocate(1) is None
