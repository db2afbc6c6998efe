"""`EvictionOrder` against a model, and what it means for a system prompt in a busy cache."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cadenza.core.eviction_order import ROUNDS, EvictionOrder, PageClass
from cadenza.core.kv_cache_manager import KVCacheManager
from cadenza.core.sequence import Sequence
from tests.core.builders import manager_of, prompt_of, sequence_of

CLASSES = st.sampled_from(PageClass)


class OrderMachine(RuleBasedStateMachine):
    """The model is a list of (page, class, evictions when it got there), in order of arrival."""

    order_type: type[EvictionOrder] = EvictionOrder

    @initialize(num_pages=st.integers(0, 6))
    def make(self, num_pages: int) -> None:
        self.order = self.order_type(num_pages)
        self.max_age = ROUNDS * max(1, num_pages)
        self.num_evicted = 0
        self.listed: list[tuple[int, PageClass, int]] = []

    @property
    def expected(self) -> list[int]:
        return [page for page, _, _ in sorted(self.listed, key=lambda each: each[1])]

    def drop(self, page: int) -> None:
        self.listed = [each for each in self.listed if each[0] != page]

    @rule(page=st.integers(0, 9), page_class=CLASSES)
    def add(self, page: int, page_class: PageClass) -> None:
        self.order.add(page, page_class)
        self.drop(page)
        self.listed.append((page, page_class, self.num_evicted))

    @precondition(lambda self: self.listed)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.expected)))
        self.order.take(page)
        self.drop(page)

    @precondition(lambda self: self.listed)
    @rule(data=st.data(), is_first=st.booleans())
    def evict(self, data: st.DataObject, is_first: bool) -> None:
        page = self.expected[0]
        if not is_first:
            page = data.draw(st.sampled_from(sorted(self.expected)))
        self.lose(page)

    @rule(count=st.integers(1, 30), page_class=CLASSES)
    def replace_often(self, count: int, page_class: PageClass) -> None:
        for _ in range(count):
            self.add(9, page_class)
            self.lose(self.expected[0])

    def lose(self, page: int) -> None:
        self.order.evict(page)
        self.drop(page)
        self.num_evicted += 1
        for fallen in (PageClass.SHARED, PageClass.PROMPT, PageClass.GENERATED):
            old = [
                each
                for each in self.listed
                if each[1] is fallen and self.num_evicted - each[2] >= self.max_age
            ]
            for each in old:
                self.listed.remove(each)
                self.listed.append((each[0], PageClass(fallen - 1), self.num_evicted))

    @invariant()
    def the_order_is_the_models(self) -> None:
        if not hasattr(self, "order"):
            return
        self.order.check_invariants()
        found: list[int] = []
        while (page := self.order.first(lambda each: each not in found)) is not None:
            found.append(page)
        assert found == self.expected
        assert len(self.order) == len(found)
        assert all((page in self.order) == (page in found) for page in range(10))


TestEvictionOrder = OrderMachine.TestCase


class IgnoresClasses(EvictionOrder):
    """A negative control: recency alone."""

    def add(self, page_id: int, page_class: PageClass) -> None:
        super().add(page_id, PageClass.PROMPT)


class NeverAges(EvictionOrder):
    """A negative control: what was shared once stays in its class."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(1 << 40)


@pytest.mark.parametrize("mutant", [IgnoresClasses, NeverAges])
def test_the_state_machine_catches_the_fault(mutant: type[EvictionOrder]) -> None:
    class Mutated(OrderMachine):
        order_type = mutant

    quick = settings(max_examples=200, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Mutated, settings=quick)


def test_an_empty_order_has_no_first_page() -> None:
    order = EvictionOrder(0)
    assert order.first() is None
    assert len(order) == 0
    with pytest.raises(KeyError):
        order.evict(0)


def num_evictions_until_gone(order: EvictionOrder, num_pages: int, others: PageClass) -> int:
    """Of a shared page 0 that nobody takes, while pages of the class `others` come and go."""
    order.add(0, PageClass.SHARED)
    num_evicted, most = 0, 20 * num_pages
    for newest in range(1, most):
        order.add(newest, others)
        first = order.first()
        if 0 not in order or first is None:
            break
        if len(order) > num_pages:
            order.evict(first)
            num_evicted += 1
    return num_evicted


@given(st.integers(1, 12), CLASSES)
def test_a_shared_page_that_nobody_takes_leaves_in_bounded_time(
    num_pages: int, others: PageClass
) -> None:
    most = (3 * ROUNDS + 1) * num_pages
    assert num_evictions_until_gone(EvictionOrder(num_pages), num_pages, others) <= most


def test_without_ageing_it_would_stay() -> None:
    assert num_evictions_until_gone(NeverAges(4), 4, PageClass.PROMPT) > (3 * ROUNDS + 1) * 4


def computed(manager: KVCacheManager, sequence: Sequence) -> Sequence:
    assert manager.try_adopt(sequence, manager.find_prefix(sequence))
    sequence.has_started = True
    manager.publish(sequence, len(sequence.token_ids))
    return sequence


SYSTEM = prompt_of(64, seed=1)
NUM_PAGES = 32


def flood(manager: KVCacheManager, num_requests: int) -> None:
    """Prompts of five pages and an answer of one that come once."""
    for index in range(num_requests):
        sequence = sequence_of(100 + index, prompt_of(80, seed=100 + index))
        sequence.token_ids += prompt_of(16, seed=index)
        manager.release(computed(manager, sequence))
        manager.check_invariants([])


def num_cached(manager: KVCacheManager, prompt: tuple[int, ...]) -> int:
    return manager.find_prefix(sequence_of(99, (*prompt, 1))).num_tokens


def test_a_flood_of_prompts_that_come_once_leaves_a_shared_system_prompt() -> None:
    manager = manager_of(NUM_PAGES)
    for index in range(2):
        manager.release(computed(manager, sequence_of(index, (*SYSTEM, index))))
    flood(manager, ROUNDS * NUM_PAGES // 6)
    assert num_cached(manager, SYSTEM) == len(SYSTEM)


def test_the_flood_takes_a_prompt_that_came_once() -> None:
    """The control: without a second request the same pages go."""
    manager = manager_of(NUM_PAGES)
    manager.release(computed(manager, sequence_of(0, (*SYSTEM, 0))))
    flood(manager, 2 * NUM_PAGES // 6)
    assert num_cached(manager, SYSTEM) == 0


def test_a_system_prompt_that_is_no_longer_used_leaves_in_the_end() -> None:
    manager = manager_of(NUM_PAGES)
    for index in range(2):
        manager.release(computed(manager, sequence_of(index, (*SYSTEM, index))))
    flood(manager, (2 * ROUNDS + 2) * NUM_PAGES // 6)
    assert num_cached(manager, SYSTEM) == 0


def test_generated_pages_go_before_older_ones_of_prompts() -> None:
    manager = manager_of(8)
    manager.release(computed(manager, sequence_of(0, prompt_of(48, seed=4))))
    sequence = sequence_of(1, prompt_of(40))
    sequence.token_ids += prompt_of(40, seed=3)
    tokens = tuple(sequence.token_ids)
    manager.release(computed(manager, sequence))
    assert manager.pool.try_allocate(1)
    assert num_cached(manager, tokens) == 64
    assert manager.pool.try_allocate(2), "the others with generated tokens"
    assert num_cached(manager, tokens) == 32
    assert num_cached(manager, prompt_of(48, seed=4)) == 48


@pytest.mark.parametrize("is_second_request", [True, False])
def test_only_another_request_makes_pages_shared(is_second_request: bool) -> None:
    manager = manager_of(16)
    sequence = computed(manager, sequence_of(0, (*SYSTEM, 5)))
    pages = sequence.page_table[:4]
    manager.release(sequence)
    again = sequence_of(1, (*SYSTEM, 6)) if is_second_request else sequence
    computed(manager, again)
    expected = PageClass.SHARED if is_second_request else PageClass.PROMPT
    assert {manager.pool.class_of(page) for page in pages} == {expected}


def test_a_sample_of_the_same_request_does_not_make_pages_shared() -> None:
    manager = manager_of(16)
    first, second = sequence_of(0, (*SYSTEM, 5)), sequence_of(0, (*SYSTEM, 5))
    first.siblings = second.siblings = [first, second]
    pages = computed(manager, first).page_table[:4]
    manager.release(first)
    computed(manager, second)
    assert {manager.pool.class_of(page) for page in pages} == {PageClass.PROMPT}


def test_a_bounded_share_of_the_cache_evicts_by_class_too() -> None:
    manager = manager_of(NUM_PAGES, prefix_cache_memory_share=0.5)
    for index in range(2):
        manager.release(computed(manager, sequence_of(index, (*SYSTEM, index))))
    flood(manager, NUM_PAGES // 6)
    assert num_cached(manager, SYSTEM) == len(SYSTEM)
