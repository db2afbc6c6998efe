"""Slots keep what their sequence computed, and sequences that begin alike copy it."""

import pytest

from cadenza.batch.sequence import PageCopy, Sequence
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.kv.page_keys import Content
from cadenza.kv.page_pool import PageCounts
from cadenza.kv.prefix_cache import BLOCK, MIN_PREFIX, common_length, num_alike
from cadenza.request import Attachment, SamplingParams
from tests.scheduler.builders import SECRET, limits_of, prompt_of, sequence_of

SLOT = 160
FIRST = prompt_of(100)


def slots_of(count: int, unit: int = 1) -> KVCacheManager:
    return KVCacheManager(limits_of(num_pages=count, page_size=SLOT, slot_unit=unit), SECRET)


def played(manager: KVCacheManager, sequence: Sequence) -> int:
    """The slot of a sequence that computed all of its tokens and ended."""
    assert manager.try_adopt(sequence, manager.find_prefix(sequence))
    manager.publish(sequence, len(sequence.token_ids))
    (slot,) = sequence.page_table
    manager.release(sequence)
    return slot


def test_a_sequence_that_begins_alike_copies_the_slot_and_leaves_it_as_it_is() -> None:
    manager = slots_of(2)
    slot = played(manager, sequence_of(0, FIRST))
    second = sequence_of(1, (*FIRST[:40], 99, 99))
    prefix = manager.find_prefix(second)
    assert (prefix.num_tokens, prefix.num_cached_tokens) == (40, 40)
    assert manager.try_adopt(second, prefix)
    assert second.page_copy == PageCopy(slot, second.page_table[0], 40)
    assert second.page_table != [slot]
    assert second.num_computed_tokens == 40
    manager.check_invariants([second])
    assert manager.find_prefix(sequence_of(2, FIRST)).num_tokens == 99


def test_a_sequence_takes_a_slot_over_if_it_shares_half_of_it() -> None:
    manager = slots_of(3)
    slots = [played(manager, sequence_of(at, prompt_of(100, 10 + at))) for at in range(3)]
    for at in (1, 2, 0):
        follower = sequence_of(at, (*prompt_of(100, 10 + at)[:50], 99))
        assert manager.try_adopt(follower, manager.find_prefix(follower))
        assert follower.page_table == [slots[at]]
        assert follower.page_copy == PageCopy(slots[at], slots[at], 50)
        manager.check_invariants([follower])
        manager.release(follower)


def test_a_snapshot_is_copied_because_others_may_go_on_from_it() -> None:
    manager = slots_of(2, unit=32)
    slot = played(manager, sequence_of(0, FIRST))
    for at in (1, 2):
        follower = sequence_of(at, (*FIRST, at, at))
        assert manager.try_adopt(follower, manager.find_prefix(follower))
        assert follower.page_copy == PageCopy(slot, 1 - slot, 96)
        manager.release(follower)


def test_the_last_slot_is_taken_over_and_then_stands_for_its_new_sequence_only() -> None:
    manager = slots_of(1)
    slot = played(manager, sequence_of(0, FIRST))
    second = sequence_of(1, (*FIRST[:40], *[99] * 20))
    assert manager.try_adopt(second, manager.find_prefix(second))
    assert second.page_copy == PageCopy(slot, slot, 40)
    manager.check_invariants([second])
    assert manager.find_prefix(sequence_of(2, FIRST)).num_tokens == 0
    manager.publish(second, 60)
    assert manager.find_prefix(sequence_of(3, FIRST)).num_tokens == 40


def test_a_running_sequence_can_be_copied_as_far_as_it_has_sampled() -> None:
    manager = slots_of(2)
    first = sequence_of(0, FIRST)
    assert manager.try_adopt(first, manager.find_prefix(first))
    follower = sequence_of(1, (*FIRST, 7, 7))
    assert manager.find_prefix(follower).num_tokens == 0
    manager.publish(first, 100)
    first.token_ids += [7, 7]
    assert manager.find_prefix(follower).num_tokens == 100
    manager.publish(first, 101)
    assert manager.find_prefix(follower).num_tokens == 101


def test_the_slot_that_shares_most_is_found_and_a_short_prefix_is_not_worth_a_copy() -> None:
    manager = slots_of(3)
    played(manager, sequence_of(0, (*FIRST[:50], 99)))
    longest = played(manager, sequence_of(1, (*FIRST[:60], 99)))
    assert manager.find_prefix(sequence_of(2, FIRST)).partial_page == longest
    for length, num_tokens in [(MIN_PREFIX - 1, 0), (MIN_PREFIX, MIN_PREFIX)]:
        follower = sequence_of(3, (*FIRST[:length], 99, 98))
        assert manager.find_prefix(follower).num_tokens == num_tokens


def test_another_tenant_finds_nothing() -> None:
    manager = slots_of(2)
    played(manager, sequence_of(0, FIRST, salt="one"))
    assert manager.find_prefix(sequence_of(1, FIRST, salt="other")).num_tokens == 0
    assert manager.find_prefix(sequence_of(2, FIRST, salt="one")).num_tokens == 99


def test_lost_slots_are_forgotten() -> None:
    manager = slots_of(2)
    played(manager, sequence_of(0, FIRST))
    manager.forget_all()
    assert manager.find_prefix(sequence_of(1, FIRST)).num_tokens == 0
    assert manager.pool.counts() == PageCounts(free=2, cached=0, live=0, pinned=0)


@pytest.mark.parametrize(
    ("length", "num_cached"), [(96, 0), (97, 96), (100, 96), (140, 96)], ids=str
)
def test_a_snapshot_is_of_the_last_whole_unit_of_a_prompt(length: int, num_cached: int) -> None:
    manager = slots_of(2, unit=32)
    played(manager, sequence_of(0, FIRST))
    follower = sequence_of(1, (*FIRST, *prompt_of(60, 5))[:length])
    assert manager.find_prefix(follower).num_tokens == num_cached


def test_a_prompt_that_differs_before_the_snapshot_finds_nothing() -> None:
    manager = slots_of(2, unit=32)
    played(manager, sequence_of(0, FIRST))
    follower = sequence_of(1, (*FIRST[:95], 99, *FIRST[96:]))
    assert manager.find_prefix(follower).num_tokens == 0


def test_a_snapshot_is_not_used_for_tokens_that_were_generated() -> None:
    manager = slots_of(2, unit=32)
    played(manager, sequence_of(0, FIRST))
    resumed = sequence_of(1, FIRST[:40])
    resumed.token_ids += FIRST[40:]
    assert manager.find_prefix(resumed).num_tokens == 0


def test_prompts_with_log_probabilities_neither_leave_nor_take_snapshots() -> None:
    manager, scored = slots_of(2, unit=32), SamplingParams(prompt_logprobs=0)
    played(manager, sequence_of(0, FIRST, params=scored))
    assert manager.find_prefix(sequence_of(1, FIRST)).num_tokens == 0
    played(manager, sequence_of(2, FIRST))
    assert manager.find_prefix(sequence_of(3, FIRST)).num_tokens == 96
    assert manager.find_prefix(sequence_of(4, FIRST, params=scored)).num_tokens == 0


@pytest.mark.parametrize("place", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7])
def test_the_common_length_ends_at_the_first_difference(place: int) -> None:
    one = list(range(3 * BLOCK))
    other = (*one[:place], -1, *one[place + 1 :])
    assert common_length(one, other, len(one)) == place
    assert common_length(one, other, place) == place
    assert common_length(one, one, len(one)) == len(one)


def test_slots_are_shared_up_to_the_first_image_that_differs() -> None:
    def content(*marks: tuple[int, bytes]) -> Content:
        parts = tuple(Attachment(start=at, length=4, digest=digest) for at, digest in marks)
        return Content(list(range(40)), parts)

    cat = content((20, b"cat"))
    assert num_alike(cat, cat) > 40
    assert num_alike(cat, content((20, b"dog"))) == 20
    assert num_alike(cat, content((20, b"cat"), (30, b"dog"))) == 30
    assert num_alike(content(), content((5, b"cat"))) == 5
