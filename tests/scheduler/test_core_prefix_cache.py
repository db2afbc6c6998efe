"""`PrefixCache`: longest prefix, private salts, keyed chains, and collisions that stay misses."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.kv.page_keys import (
    KEY_BYTES,
    SHORT_BYTES,
    Content,
    PageContent,
    PageKeys,
    PrefixDigest,
    split_keys,
)
from cadenza.kv.prefix_cache import MAX_LOOKUPS, ROOT, PrefixCache
from cadenza.request import Attachment

SIZE = 4


class ColludingKeys(PageKeys):
    """A hash that sees only how many tokens there are: all pages at a depth collide."""

    def chain(self, parent: bytes, page: PageContent) -> bytes:
        return bytes([parent[0] + 1 if len(parent) == 1 else 0])


def keys_of(cache: PrefixCache, tokens: list[int], salt: str = "") -> list[bytes]:
    keys: list[bytes] = []
    cache.page_keys.extend(keys, Content(tokens, (), salt))
    return keys


def publish(
    cache: PrefixCache, tokens: list[int], page_ids: list[int], salt: str = ""
) -> list[bool]:
    """Publishes a prefix page by page; says which of the pages became findable."""
    taken: list[bool] = []
    serial: int | None = ROOT
    keys = keys_of(cache, tokens, salt)
    for index, page_id in enumerate(page_ids[: len(keys)]):
        is_taken = False
        if serial is not None:
            serial, is_taken = cache.publish(page_id, index, keys, Content(tokens), serial)
        taken.append(is_taken)
    return taken


def find(cache: PrefixCache, tokens: list[int], salt: str = "") -> list[int]:
    keys = keys_of(cache, tokens, salt)
    return list(cache.find(keys, Content(tokens), num_pages=len(keys))[0])


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(PageKeys(page_size=SIZE, secret=b"secret"))


def test_the_longest_prefix_of_full_pages_is_found(cache: PrefixCache) -> None:
    tokens = list(range(12))
    assert publish(cache, tokens, [5, 6, 7]) == [True, True, True]
    assert find(cache, tokens) == [5, 6, 7]
    assert find(cache, [*tokens, 1, 2, 3, 4]) == [5, 6, 7]
    assert find(cache, tokens[:11]) == [5, 6]
    assert find(cache, [*tokens[:8], 99, 99, 99, 99]) == [5, 6]
    assert find(cache, [99, *tokens[1:]]) == []
    assert find(cache, tokens[:3]) == []
    assert len(cache) == 3
    cache.check_invariants()


def test_the_same_page_after_another_prefix_is_not_found(cache: PrefixCache) -> None:
    publish(cache, [1, 1, 1, 1, 2, 2, 2, 2], [0, 1])
    publish(cache, [3, 3, 3, 3], [2])
    assert find(cache, [3, 3, 3, 3, 2, 2, 2, 2]) == [2]
    assert find(cache, [2, 2, 2, 2]) == []


def test_pages_are_private_to_their_salt(cache: PrefixCache) -> None:
    tokens = [1, 2, 3, 4]
    publish(cache, tokens, [0], salt="one tenant")
    assert find(cache, tokens, salt="one tenant") == [0]
    assert find(cache, tokens, salt="another") == []
    assert find(cache, tokens) == []
    assert publish(cache, tokens, [1]) == [True]
    assert (find(cache, tokens), find(cache, tokens, salt="one tenant")) == ([1], [0])


def test_keys_depend_on_the_secret_and_have_a_fixed_length() -> None:
    one, other = (PrefixCache(PageKeys(page_size=SIZE, secret=secret)) for secret in (b"a", b"b"))
    tokens = list(range(8))
    assert keys_of(one, tokens) == keys_of(one, tokens)
    assert not set(keys_of(one, tokens)) & set(keys_of(other, tokens))
    assert {len(key) for key in keys_of(one, tokens)} == {KEY_BYTES}


def test_keys_grow_as_tokens_do(cache: PrefixCache) -> None:
    tokens = list(range(19))
    keys: list[bytes] = []
    for end in range(20):
        cache.page_keys.extend(keys, Content(tokens[:end]))
        assert len(keys) == end // SIZE
    assert keys == keys_of(cache, tokens)


def test_an_equal_page_is_published_once(cache: PrefixCache) -> None:
    assert publish(cache, [1, 2, 3, 4], [0]) == [True]
    assert publish(cache, [1, 2, 3, 4], [1]) == [False]
    assert find(cache, [1, 2, 3, 4]) == [0]
    cache.check_invariants()


def test_a_forgotten_page_is_not_found_and_hides_those_behind_it(cache: PrefixCache) -> None:
    tokens = list(range(12))
    publish(cache, tokens, [0, 1, 2])
    cache.forget(1)
    cache.check_invariants()
    assert find(cache, tokens) == [0]
    assert publish(cache, tokens, [0, 7]) == [False, True]
    assert find(cache, tokens)[:2] == [0, 7]


def test_a_hit_is_confirmed_by_its_tokens(cache: PrefixCache) -> None:
    tokens = [1, 2, 3, 4]
    publish(cache, tokens, [0])
    cache._pages[0] = replace(cache._pages[0], content=PageContent((1, 2, 3, 5)))
    assert find(cache, tokens) == []


def test_a_colliding_key_is_a_miss() -> None:
    cache = PrefixCache(ColludingKeys(page_size=SIZE, secret=b"secret"))
    assert publish(cache, [1, 1, 1, 1], [0]) == [True]
    assert publish(cache, [2, 2, 2, 2], [1]) == [False]
    assert find(cache, [2, 2, 2, 2]) == []
    assert find(cache, [1, 1, 1, 1]) == [0]


class CountingCache(PrefixCache):
    """Counts the look-ups that compare contents."""

    num_look_ups = 0

    def _look_up(self, keys: list[bytes], content: Content, num_pages: int) -> Any:
        self.num_look_ups += 1
        return super()._look_up(keys, content, num_pages)


def test_who_asks_again_is_answered_without_comparing_contents() -> None:
    cache, tokens = CountingCache(PageKeys(page_size=SIZE, secret=b"secret")), list(range(16))
    keys = keys_of(cache, tokens)
    publish(cache, tokens[:12], [5, 6, 7])
    assert cache.find(keys, Content(tokens), num_pages=4)[0] == (5, 6, 7)
    publish(cache, [90, 91, 92, 93], [9])  # another prefix
    assert cache.find(keys, Content(tokens), num_pages=4)[0] == (5, 6, 7)
    assert cache.num_look_ups == 1
    assert cache.find(keys, Content(tokens), num_pages=2)[0] == (5, 6)
    assert cache.num_look_ups == 2


def test_several_who_ask_by_turns_are_each_looked_up_once_until_their_pages_change() -> None:
    cache = CountingCache(PageKeys(page_size=SIZE, secret=b"secret"))
    prompts = [[number, *range(15)] for number in range(MAX_LOOKUPS)]
    keys = [keys_of(cache, each) for each in prompts]
    for number, tokens in enumerate(prompts):
        publish(cache, tokens[:8], [2 * number, 2 * number + 1])

    def ask() -> list[int]:
        both = zip(keys, prompts, strict=True)
        return [len(cache.find(own, Content(each), num_pages=3)[0]) for own, each in both]

    for _ in range(3):
        assert ask() == [2] * MAX_LOOKUPS
    assert cache.num_look_ups == MAX_LOOKUPS
    cache.forget(7)
    assert ask() == [2, 2, 2, 1, *[2] * (MAX_LOOKUPS - 4)]
    publish(cache, prompts[5][:12], [10, 11, 70])
    assert ask() == [2, 2, 2, 1, 2, 3, *[2] * (MAX_LOOKUPS - 6)]
    assert cache.num_look_ups == MAX_LOOKUPS + 2
    cache.leave(keys[0])
    ask()
    assert cache.num_look_ups == MAX_LOOKUPS + 3
    others = [keys_of(cache, each) for each in prompts]
    for own, tokens in zip(others, prompts, strict=True):
        cache.find(own, Content(tokens), num_pages=3)
    assert len(cache._lookups) == MAX_LOOKUPS


def test_who_asks_again_is_told_of_pages_that_came_and_went(cache: PrefixCache) -> None:
    tokens = list(range(16))
    keys = keys_of(cache, tokens)

    def ask() -> list[int]:
        return list(cache.find(keys, Content(tokens), num_pages=4)[0])

    assert ask() == []
    serial, _ = cache.publish(5, 0, keys, Content(tokens), ROOT)
    assert ask() == [5]
    assert serial is not None
    cache.publish(6, 1, keys, Content(tokens), serial)
    assert ask() == [5, 6]
    cache.forget(5)
    assert ask() == []
    cache.publish(8, 0, keys, Content(tokens), ROOT)
    assert ask() == [8], "page 6 stands behind page 5, not behind page 8"


def test_who_asks_again_after_a_collision_sees_it_end() -> None:
    cache = PrefixCache(ColludingKeys(page_size=SIZE, secret=b"secret"))
    other, tokens = [9, 9, 9, 9], [1, 2, 3, 4]
    publish(cache, other, [3])
    keys = keys_of(cache, tokens)
    assert cache.find(keys, Content(tokens), num_pages=1)[0] == ()
    cache.forget(3)
    publish(cache, tokens, [4])
    assert cache.find(keys, Content(tokens), num_pages=1)[0] == (4,)


def attached(tokens: list[int], *spans: tuple[int, int, bytes]) -> Content:
    """Tokens with attachments of (start, length, digest)."""
    return Content(
        tokens,
        tuple(Attachment(start=at, length=size, digest=digest) for at, size, digest in spans),
    )


def hits(cache: PrefixCache, content: Content) -> list[int]:
    keys: list[bytes] = []
    cache.page_keys.extend(keys, content)
    return list(cache.find(keys, content, num_pages=len(keys))[0])


def test_equal_tokens_share_pages_only_where_their_attachments_are_the_same(
    cache: PrefixCache,
) -> None:
    tokens = [1] * 16
    image = attached(tokens, (5, 6, b"cat"))  # in pages 1 and 2
    keys: list[bytes] = []
    cache.page_keys.extend(keys, image)
    serial: int | None = ROOT
    for index in range(len(keys)):
        assert serial is not None
        serial, _ = cache.publish(10 + index, index, keys, image, serial)
    assert hits(cache, image) == [10, 11, 12, 13]
    assert hits(cache, attached(tokens)) == [10]
    assert hits(cache, attached(tokens, (5, 6, b"dog"))) == [10]
    assert hits(cache, attached(tokens, (6, 5, b"cat"))) == [10]
    assert hits(cache, attached(tokens, (5, 3, b"cat"))) == [10, 11]
    assert hits(cache, attached(tokens, (5, 6, b"cat"), (12, 1, b"dog"))) == [10, 11, 12]


def test_colliding_pages_of_other_attachments_are_a_miss() -> None:
    cache = PrefixCache(ColludingKeys(page_size=SIZE, secret=b"secret"))
    cat, dog = (attached([1] * 4, (0, 2, digest)) for digest in (b"cat", b"dog"))
    keys: list[bytes] = []
    cache.page_keys.extend(keys, cat)
    cache.publish(3, 0, keys, cat, ROOT)
    assert hits(cache, cat) == [3]
    assert hits(cache, dog) == []


KEYS = [bytes([at]) * 32 for at in range(8)]


def applied(held: set[bytes], digest: PrefixDigest) -> set[bytes]:
    change = digest.take()
    return (held - {*split_keys(change.removed)}) | {*split_keys(change.added)}


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(["add", "remove", "take"]))))
def test_changes_give_exactly_the_newest_keys_that_are_held(acts: list[tuple[bytes, str]]) -> None:
    digest, told = PrefixDigest(max_keys=4), set[bytes]()
    held: list[bytes] = []
    for key, act in acts:
        short = key[:SHORT_BYTES]
        if act == "add":
            digest.add(key)
            held = held if short in held else [*held, short][-4:]
        elif act == "remove":
            digest.remove(key)
            held = [each for each in held if each != short]
        else:
            told = applied(told, digest)
            assert told == {*held}
    assert applied(told, digest) == {*held}
    assert len(digest) == len(held)
    assert digest.take() == (b"", b"")
