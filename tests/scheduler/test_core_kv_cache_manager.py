"""`KVCacheManager`: page tables grow and shrink, prefixes are shared, pages are published."""

from dataclasses import replace

import pytest

from cadenza.batch.sequence import Sequence
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.kv.page_keys import PageContent, PageKeys
from cadenza.kv.page_pool import PageCounts
from cadenza.kv.prefix_cache import Prefix, PrefixCache
from tests.scheduler.builders import SECRET, limits_of, manager_of, prompt_of, sequence_of


def computed(manager: KVCacheManager, sequence: Sequence) -> Sequence:
    """The sequence with all of its tokens computed and published."""
    assert manager.try_adopt(sequence, manager.find_prefix(sequence))
    manager.publish(sequence, len(sequence.token_ids))
    return sequence


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (33, 3)])
def test_a_page_table_covers_exactly_its_tokens(num_tokens: int, num_pages: int) -> None:
    manager, sequence = manager_of(8), sequence_of(0, 40)
    assert manager.try_grow(sequence, num_tokens)
    assert len(sequence.page_table) == num_pages == manager.num_pages_for(num_tokens)
    manager.check_invariants([sequence])


def test_growth_beyond_the_pool_is_not_now_and_changes_nothing() -> None:
    manager, sequence = manager_of(2), sequence_of(0, 40)
    assert manager.try_grow(sequence, 16)
    assert not manager.try_grow(sequence, 49)
    assert len(sequence.page_table) == 1
    assert manager.pool.num_available == 1
    assert manager.try_grow(sequence, 32)


def test_growth_to_fewer_tokens_takes_nothing() -> None:
    manager, sequence = manager_of(4), sequence_of(0, 40)
    assert manager.try_grow(sequence, 40)
    table = sequence.page_table.copy()
    assert manager.try_grow(sequence, 3)
    assert sequence.page_table == table


def test_a_hit_leaves_at_least_one_token_to_compute() -> None:
    manager = manager_of(8)
    computed(manager, sequence_of(0, prompt_of(32)))
    for length, num_cached in [(16, 0), (17, 16), (32, 16), (33, 32), (40, 32)]:
        follower = sequence_of(1, (*prompt_of(32), *prompt_of(8, 9))[:length])
        assert manager.find_prefix(follower).num_tokens == num_cached


def test_an_adopted_prefix_is_shared_and_counted() -> None:
    manager = manager_of(8)
    first = computed(manager, sequence_of(0, prompt_of(40)))
    second = sequence_of(1, (*prompt_of(40)[:34], 1, 2))
    hit = manager.find_prefix(second)
    assert hit.page_ids == tuple(first.page_table[:2])
    assert manager.num_unheld(hit) == 0
    assert manager.try_adopt(second, hit)
    assert second.num_computed_tokens == 32
    manager.check_invariants([first, second])
    manager.release(first)
    manager.check_invariants([second])
    assert manager.pool.counts() == PageCounts(free=5, cached=0, live=3, pinned=0)


def test_pages_of_a_hit_that_nobody_holds_count_as_taken() -> None:
    manager = manager_of(8)
    manager.release(computed(manager, sequence_of(0, prompt_of(40))))
    hit = manager.find_prefix(sequence_of(1, prompt_of(40)))
    assert (len(hit.page_ids), manager.num_unheld(hit)) == (2, 2)


def test_a_released_sequence_gives_back_all_and_keeps_its_tokens() -> None:
    manager = manager_of(4)
    sequence = computed(manager, sequence_of(0, 40))
    tokens = sequence.token_ids.copy()
    manager.release(sequence)
    assert (sequence.page_table, sequence.num_computed_tokens) == ([], 0)
    assert sequence.token_ids == tokens
    assert manager.pool.num_available == 4
    manager.check_invariants([])


def test_eviction_takes_the_tail_of_the_oldest_prefix_first() -> None:
    manager = manager_of(3)
    manager.release(computed(manager, sequence_of(0, prompt_of(48))))
    assert manager.pool.try_allocate(1)
    again = sequence_of(1, (*prompt_of(48), 1))
    assert manager.find_prefix(again).num_tokens == 32
    assert manager.pool.try_allocate(1)
    assert manager.find_prefix(again).num_tokens == 16


def test_salts_do_not_share() -> None:
    manager = manager_of(8)
    computed(manager, sequence_of(0, prompt_of(40), salt="one"))
    assert manager.find_prefix(sequence_of(1, prompt_of(40), salt="another")) == Prefix()
    assert manager.find_prefix(sequence_of(1, prompt_of(40), salt="one")).num_tokens == 32


def test_without_prefix_caching_nothing_is_ever_found() -> None:
    manager = manager_of(8, caching=False)
    computed(manager, sequence_of(0, prompt_of(40)))
    assert manager.find_prefix(sequence_of(1, prompt_of(40))) == Prefix()
    assert manager.prefix_cache is None


def test_only_full_pages_are_published() -> None:
    manager = manager_of(8)
    sequence = sequence_of(0, prompt_of(40))
    assert manager.try_grow(sequence, 40)
    manager.publish(sequence, 15)
    assert manager.find_prefix(sequence_of(1, prompt_of(40))) == Prefix()
    manager.publish(sequence, 31)
    assert manager.find_prefix(sequence_of(1, prompt_of(40))).num_tokens == 16


def test_two_sequences_that_computed_the_same_page_publish_it_once() -> None:
    manager = manager_of(8)
    pair = [sequence_of(index, prompt_of(20)) for index in range(2)]
    for sequence in pair:
        assert manager.try_grow(sequence, 20)
    for sequence in pair:
        manager.publish(sequence, 20)
    for sequence in pair:
        manager.release(sequence)
    assert manager.pool.counts() == PageCounts(free=7, cached=1, live=0, pinned=0)


def test_after_the_device_lost_its_pages_nothing_is_found() -> None:
    manager = manager_of(8)
    sequence = computed(manager, sequence_of(0, prompt_of(40)))
    manager.forget_all()
    assert manager.find_prefix(sequence_of(1, prompt_of(40))) == Prefix()
    manager.release(sequence)
    assert manager.pool.counts() == PageCounts(free=8, cached=0, live=0, pinned=0)


def test_the_invariants_catch_a_reference_that_no_page_table_has() -> None:
    manager = manager_of(4)
    sequence = sequence_of(0, 20)
    assert manager.try_grow(sequence, 20)
    sequence.page_table.pop()
    with pytest.raises(AssertionError, match="0 holders, counted 1"):
        manager.check_invariants([sequence])


class ColludingKeys(PageKeys):
    """Keys that do not see the first token of a page."""

    def chain(self, parent: bytes, page: PageContent) -> bytes:
        return super().chain(parent, replace(page, token_ids=page.token_ids[1:]))


class CollidingManager(KVCacheManager):
    """Pages under keys that collide."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(limits_of(num_pages=num_pages), SECRET)
        self.prefix_cache = PrefixCache(ColludingKeys(page_size=16, secret=SECRET))


def test_a_page_with_a_colliding_key_is_not_shared() -> None:
    manager = CollidingManager(8)
    computed(manager, sequence_of(0, (1, *range(16))))
    assert manager.find_prefix(sequence_of(1, (2, *range(16)))) == Prefix()
    assert manager.find_prefix(sequence_of(1, (1, *range(16)))).num_tokens == 16


def test_a_page_behind_one_with_a_colliding_key_is_not_shared() -> None:
    manager = CollidingManager(8)
    first, tail = tuple(range(15)), tuple(range(20, 36))
    computed(manager, sequence_of(0, (1, *first)))
    computed(manager, sequence_of(1, (2, *first, *tail)))
    # The second page's KV was computed behind a 2; behind a 1 it would be wrong.
    assert manager.find_prefix(sequence_of(2, (1, *first, *tail, 0))).num_tokens == 16


def test_a_page_is_not_shared_behind_another_that_took_its_parents_key() -> None:
    manager = CollidingManager(8)
    first, tail = tuple(range(15)), tuple(range(20, 36))
    parent = sequence_of(0, (2, *first))
    child = sequence_of(1, (2, *first, *tail))
    assert manager.try_grow(child, 32)
    computed(manager, parent)
    manager.publish(child, 32)
    manager.release(parent)
    assert manager.pool.try_allocate(6), "evicts the parent; the child's own pages live on"
    usurper = sequence_of(2, (1, *first))
    usurper.page_table = [child.page_table[0]]
    manager.publish(usurper, 16)
    assert manager.find_prefix(sequence_of(3, (1, *first, *tail, 0))).num_tokens <= 16
