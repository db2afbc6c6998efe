"""`EvictionOrder` against a model, and what it means for a system prompt in a busy cache."""

from collections.abc import Iterable
from typing import NamedTuple

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

from cadenza.batch.sequence import Sequence
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.kv.page_pool import ROUNDS, EvictionOrder, PageClass, Reuse
from tests.scheduler.builders import manager_of, prompt_of, sequence_of

CLASSES = st.sampled_from(PageClass)


class Model(NamedTuple):
    """A page of the model, and the number of evictions when it was added."""

    page: int
    page_class: PageClass
    at: int


class OrderMachine(RuleBasedStateMachine):
    """The model is two lists in order of arrival: the newest pages, and those behind them."""

    order_type: type[EvictionOrder] = EvictionOrder

    @initialize(num_pages=st.integers(0, 9))
    def make(self, num_pages: int) -> None:
        self.reuse = Reuse(num_pages)
        self.order = self.order_type(num_pages, self.reuse)
        self.num_pages = num_pages
        self.num_evicted = 0
        self.newest: list[Model] = []
        self.older: list[Model] = []

    def counts_as_used_at(self, each: Model) -> int:
        most = max(1, self.num_pages)
        between = PageClass.GENERATED, PageClass.PROMPT
        if each.page_class is PageClass.SHARED:
            return each.at + ROUNDS * most
        if each.page_class not in between:
            return each.at - ROUNDS * most
        other = between[each.page_class is PageClass.GENERATED]
        return each.at - self.reuse.lag(each.page_class, other, most)

    @property
    def expected(self) -> list[int]:
        older = sorted(self.older, key=lambda each: (self.counts_as_used_at(each), each.page_class))
        return [each.page for each in (*older, *self.newest)]

    def drop(self, page: int) -> None:
        self.newest = [each for each in self.newest if each.page != page]
        self.older = [each for each in self.older if each.page != page]

    @rule(page=st.integers(0, 11), page_class=CLASSES)
    def add(self, page: int, page_class: PageClass) -> None:
        self.order.add(page, page_class)
        self.drop(page)
        self.newest.append(Model(page, page_class, self.num_evicted))
        if len(self.newest) > self.num_pages // 4:
            self.older.append(self.newest.pop(0))

    @precondition(lambda self: self.newest or self.older)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.expected)))
        self.order.take(page)
        self.drop(page)

    @precondition(lambda self: self.newest or self.older)
    @rule(data=st.data(), is_first=st.booleans())
    def evict(self, data: st.DataObject, is_first: bool) -> None:
        page = self.expected[0]
        if not is_first:
            page = data.draw(st.sampled_from(sorted(self.expected)))
        self.lose(page)

    @rule(count=st.integers(1, 30), page_class=CLASSES)
    def replace_often(self, count: int, page_class: PageClass) -> None:
        for _ in range(count):
            self.add(11, page_class)
            self.lose(self.expected[0])

    @rule(page_class=CLASSES, is_found=st.booleans(), count=st.integers(1, 9))
    def count(self, page_class: PageClass, is_found: bool, count: int) -> None:
        for _ in range(count):
            (self.reuse.count_found if is_found else self.reuse.count_lost)(page_class)

    def lose(self, page: int) -> None:
        self.order.evict(page)
        self.drop(page)
        self.num_evicted += 1

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
        assert all((page in self.order) == (page in found) for page in range(12))


TestEvictionOrder = OrderMachine.TestCase


class IgnoresClasses(EvictionOrder):
    """A negative control: recency alone."""

    def add(self, page_id: int, page_class: PageClass) -> None:
        super().add(page_id, PageClass.PROMPT)


class NeverAges(EvictionOrder):
    """A negative control: what was shared once is never older than what was not."""

    def _lead(self, page_class: int) -> int:
        return page_class << 40


class HasNoNewest(EvictionOrder):
    """A negative control: classes alone decide, however new a page is."""

    def __init__(self, num_pages: int, reuse: Reuse | None = None) -> None:
        super().__init__(num_pages, reuse)
        self._most_newest = 0


@pytest.mark.parametrize("mutant", [IgnoresClasses, NeverAges, HasNoNewest])
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


@pytest.mark.parametrize(
    ("found", "lost", "found_of_prompts", "lost_of_prompts", "expected"),
    [
        (0, 0, 9, 1, 0),  # of generated pages nothing is known
        (0, 5, 0, 0, 0),  # nor of those of prompts
        (0, 5, 5, 5, 100),
        (1, 3, 1, 1, 0),  # a quarter of them and half of the others
        (1, 7, 1, 1, 50),
        (9, 1, 1, 9, 0),
    ],
)
def test_generated_pages_lag_as_far_as_they_are_found_less_than_half_as_often(
    found: int, lost: int, found_of_prompts: int, lost_of_prompts: int, expected: int
) -> None:
    reuse = Reuse(50)
    for page_class, counts in (
        (PageClass.GENERATED, (found, lost)),
        (PageClass.PROMPT, (found_of_prompts, lost_of_prompts)),
    ):
        for count, times in zip((reuse.count_found, reuse.count_lost), counts, strict=True):
            for _ in range(times):
                count(page_class)
    assert reuse.lag(PageClass.GENERATED, PageClass.PROMPT, 100) == expected


def test_what_is_long_past_does_not_decide_how_generated_pages_lag() -> None:
    reuse = Reuse(4)
    for _ in range(1000):
        reuse.count_found(PageClass.PROMPT)
        reuse.count_lost(PageClass.GENERATED)
    assert reuse.lag(PageClass.GENERATED, PageClass.PROMPT, 100) == 100
    for _ in range(8 * 4):
        reuse.count_found(PageClass.GENERATED)
    assert reuse.lag(PageClass.GENERATED, PageClass.PROMPT, 100) == 0


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


MOST_ROUNDS = 2 * ROUNDS + 2


@given(st.integers(1, 12), CLASSES)
def test_a_shared_page_that_nobody_takes_leaves_in_bounded_time(
    num_pages: int, others: PageClass
) -> None:
    gone = num_evictions_until_gone(EvictionOrder(num_pages), num_pages, others)
    assert gone <= MOST_ROUNDS * num_pages


def test_without_ageing_it_would_stay() -> None:
    assert num_evictions_until_gone(NeverAges(4), 4, PageClass.PROMPT) > MOST_ROUNDS * 4


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


def ask_thrice(manager: KVCacheManager) -> None:
    for index in range(3):
        manager.release(computed(manager, sequence_of(index, (*SYSTEM, index))))


def test_a_flood_of_prompts_that_come_once_leaves_a_shared_system_prompt() -> None:
    manager = manager_of(NUM_PAGES)
    ask_thrice(manager)
    flood(manager, ROUNDS * NUM_PAGES // 6)
    assert num_cached(manager, SYSTEM) == len(SYSTEM)


def test_a_flood_leaves_a_system_prompt_that_is_in_use_however_long_it_lasts() -> None:
    manager = manager_of(NUM_PAGES)
    ask_thrice(manager)
    for index in range(8):
        flood(manager, ROUNDS * NUM_PAGES // 6)
        sequence = computed(manager, sequence_of(50 + index, (*SYSTEM, 50 + index)))
        assert sequence.num_published_pages == len(SYSTEM) // 16
        assert manager.pool.class_of(sequence.page_table[0]) is PageClass.SHARED
        manager.release(sequence)


def test_the_flood_takes_a_prompt_that_came_once() -> None:
    """The control: without other requests the same pages go."""
    manager = manager_of(NUM_PAGES)
    manager.release(computed(manager, sequence_of(0, (*SYSTEM, 0))))
    flood(manager, 2 * NUM_PAGES // 6)
    assert num_cached(manager, SYSTEM) == 0


def test_a_system_prompt_that_is_no_longer_used_leaves_in_the_end() -> None:
    manager = manager_of(NUM_PAGES)
    ask_thrice(manager)
    flood(manager, (ROUNDS + 2) * NUM_PAGES // 6)
    assert num_cached(manager, SYSTEM) == 0


def talk(manager: KVCacheManager, seed: int, *, has_answer: bool) -> None:
    """Two turns; the second has the first one's answer, or another one."""
    first = sequence_of(seed, prompt_of(32, seed=seed))
    first.token_ids += prompt_of(48, seed=-seed)
    manager.release(computed(manager, first))
    answer = tuple(first.token_ids[32:]) if has_answer else prompt_of(16, seed=seed + 1000)
    again = (*prompt_of(32, seed=seed), *answer, *prompt_of(17, seed=seed + 2000))
    manager.release(computed(manager, sequence_of(seed, again)))


@pytest.mark.parametrize("has_answer", [True, False])
def test_generated_pages_go_before_older_prompts_where_none_are_found(has_answer: bool) -> None:
    manager = manager_of(NUM_PAGES)
    for seed in range(1, 30):
        talk(manager, seed, has_answer=has_answer)
    older, answered, newest = (prompt_of(16 * count, seed=100 + count) for count in (6, 1, 8))
    manager.release(computed(manager, sequence_of(100, older)))
    sequence = sequence_of(101, answered)
    sequence.token_ids += prompt_of(80, seed=101)
    tokens = tuple(sequence.token_ids)
    manager.release(computed(manager, sequence))
    manager.release(computed(manager, sequence_of(102, newest)))
    assert manager.pool.try_allocate(NUM_PAGES - 6 - 6 - 8 + 5)
    expected = (16, 96) if has_answer else (96, 16)
    assert (num_cached(manager, older), num_cached(manager, tokens)) == expected
    assert num_cached(manager, newest) == 128


def test_generated_pages_that_were_found_stay_as_long_as_the_prompt_behind_them() -> None:
    manager = manager_of(16)
    first = sequence_of(1, prompt_of(16, seed=1))
    first.token_ids += prompt_of(16, seed=2)
    pages = computed(manager, first).page_table[:2]
    manager.release(first)
    classes = [manager.pool.class_of(page) for page in pages]
    assert classes == [PageClass.PROMPT, PageClass.GENERATED]
    computed(manager, sequence_of(2, (*first.token_ids, *prompt_of(16, seed=3))))
    assert {manager.pool.class_of(page) for page in pages} == {PageClass.PROMPT}


def classes_behind(requests: Iterable[tuple[int, ...]]) -> set[PageClass]:
    """Of the system prompt's pages, after requests one after the other."""
    manager, pages = manager_of(32), list[int]()
    for index, request in enumerate(requests):
        sequence = computed(manager, sequence_of(index, request))
        pages = pages or sequence.page_table[: len(SYSTEM) // 16]
        manager.release(sequence)
    return {manager.pool.class_of(page) for page in pages}


def test_pages_are_shared_from_the_second_request_on_that_goes_on_behind_them() -> None:
    requests = [(*SYSTEM, index) for index in range(3)]
    assert classes_behind(requests[:2]) == {PageClass.PROMPT}
    assert classes_behind(requests) == {PageClass.SHARED}


def test_the_turns_of_one_conversation_do_not_share_its_pages() -> None:
    turns = [prompt_of(64 + 32 * index + 1) for index in range(6)]
    manager, known = manager_of(32), 0
    for index, turn in enumerate(turns):
        sequence = computed(manager, sequence_of(index, turn))
        assert sequence.page_table[:known] == list(manager.find_prefix(sequence).page_ids[:known])
        known = len(turn) // 16
        assert {manager.pool.class_of(page) for page in sequence.page_table[:known]} == {
            PageClass.PROMPT
        }
        manager.release(sequence)


def test_a_sequence_that_starts_again_does_not_share_its_pages() -> None:
    manager = manager_of(16)
    sequence = computed(manager, sequence_of(0, (*SYSTEM, 5)))
    pages = sequence.page_table[:4]
    for _ in range(3):
        manager.release(sequence)
        computed(manager, sequence)
    assert {manager.pool.class_of(page) for page in pages} == {PageClass.PROMPT}


def test_samples_of_the_same_request_do_not_share_pages() -> None:
    manager = manager_of(16)
    samples = [sequence_of(0, (*SYSTEM, 5)) for _ in range(4)]
    for each in samples:
        each.siblings = samples
    pages = computed(manager, samples[0]).page_table[:4]
    manager.release(samples[0])
    for each in samples[1:]:
        computed(manager, each)
    assert {manager.pool.class_of(page) for page in pages} == {PageClass.PROMPT}


def test_a_page_that_is_computed_a_second_time_goes_after_those_behind_it() -> None:
    """A prompt of whole pages computes its last one again; the first copy is the one behind which
    the answer is found."""
    manager = manager_of(16)
    prompt = prompt_of(48, seed=5)
    manager.release(computed(manager, sequence_of(0, prompt)))
    manager.release(computed(manager, sequence_of(2, prompt_of(80, seed=7))))
    again = computed(manager, sequence_of(1, prompt))
    again.token_ids += prompt_of(32, seed=6)
    tokens = tuple(again.token_ids)
    assert manager.try_grow(again, len(tokens))
    manager.publish(again, len(tokens))
    manager.release(again)
    found = []
    while taken := manager.pool.try_allocate(1):
        assert len(taken) == 1
        found.append(num_cached(manager, tokens))
    assert found == sorted(found, reverse=True)
    assert {80, 64, 48, 32, 16} <= set(found), "one page after the other, from the last one on"


def test_a_bounded_share_of_the_cache_evicts_by_class_too() -> None:
    manager = manager_of(NUM_PAGES, prefix_cache_memory_share=0.5)
    ask_thrice(manager)
    flood(manager, NUM_PAGES // 6)
    assert num_cached(manager, SYSTEM) == len(SYSTEM)
