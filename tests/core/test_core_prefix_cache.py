"""`PrefixCache`: longest prefix, private salts, keyed chains, and collisions that stay misses."""

from dataclasses import replace

import pytest

from cadenza.core.prefix_cache import KEY_BYTES, ROOT, PrefixCache

SIZE = 4


class ColludingCache(PrefixCache):
    """A cache whose hash sees only how many tokens there are: all pages at a depth collide."""

    def _chain(self, parent: bytes, token_ids: object) -> bytes:
        return bytes([parent[0] + 1 if len(parent) == 1 else 0])


def keys_of(cache: PrefixCache, tokens: list[int], salt: str = "") -> list[bytes]:
    keys: list[bytes] = []
    cache.extend_keys(keys, tokens, salt)
    return keys


def publish(
    cache: PrefixCache, tokens: list[int], page_ids: list[int], salt: str = ""
) -> list[bool]:
    """Publishes a prefix page by page; says which of the pages became findable."""
    taken: list[bool] = []
    serial: int | None = ROOT
    for index, (page_id, key) in enumerate(
        zip(page_ids, keys_of(cache, tokens, salt), strict=False)
    ):
        is_taken = False
        if serial is not None:
            serial, is_taken = cache.publish(page_id, index, key, tokens, serial)
        taken.append(is_taken)
    return taken


def find(cache: PrefixCache, tokens: list[int], salt: str = "") -> list[int]:
    return cache.find(keys_of(cache, tokens, salt), tokens)[0]


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(page_size=SIZE, secret=b"secret")


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
    one, other = (PrefixCache(page_size=SIZE, secret=secret) for secret in (b"a", b"b"))
    tokens = list(range(8))
    assert keys_of(one, tokens) == keys_of(one, tokens)
    assert not set(keys_of(one, tokens)) & set(keys_of(other, tokens))
    assert {len(key) for key in keys_of(one, tokens)} == {KEY_BYTES}


def test_keys_grow_as_tokens_do(cache: PrefixCache) -> None:
    tokens = list(range(19))
    keys: list[bytes] = []
    for end in range(20):
        cache.extend_keys(keys, tokens[:end], "")
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
    cache._content[0] = replace(cache._content[0], token_ids=(1, 2, 3, 5))
    assert find(cache, tokens) == []


def test_a_colliding_key_is_a_miss() -> None:
    cache = ColludingCache(page_size=SIZE, secret=b"secret")
    assert publish(cache, [1, 1, 1, 1], [0]) == [True]
    assert publish(cache, [2, 2, 2, 2], [1]) == [False]
    assert find(cache, [2, 2, 2, 2]) == []
    assert find(cache, [1, 1, 1, 1]) == [0]
