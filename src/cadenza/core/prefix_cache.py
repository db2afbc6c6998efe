"""`PrefixCache`: finds pages whose KV somebody has already computed.

Owns the index from a page's key to its id. A key chains the keys of all pages before it with the
page's own tokens, under the engine's secret and the tenant's salt, so a key names one prefix of
one tenant. Knows nothing of reference counts. Invariant: a hit is confirmed by comparing tokens,
so a colliding key is a miss and never wrong output.
"""

import hashlib
from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

KEY_BYTES = 16


ROOT = 0
"""The serial of what comes before a first page."""


@dataclass(frozen=True, slots=True)
class CachedPage:
    """What a published page holds, and behind which published page.

    Serials are never used twice, so that a page stands for one whole prefix and not only for a
    parent that has the same key.
    """

    serial: int
    key: bytes
    parent_serial: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lookup:
    """The answer to the last look-up. It changes only when one of its pages is forgotten or a page
    with `missing_key` is published."""

    keys: SequenceOf[bytes]
    num_pages: int
    page_ids: tuple[int, ...]
    page_set: frozenset[int]
    serial: int
    missing_key: bytes | None


class PrefixCache:
    """Index of full pages. `secret` keys the hashes: nobody outside can aim at a collision.

    The last look-up is remembered: the sequence at the head of the queue asks in every step that it
    has to wait.
    """

    def __init__(self, *, page_size: int, secret: bytes) -> None:
        self._page_size = page_size
        self._secret = secret
        self._page_of_key: dict[bytes, int] = {}
        self._content: dict[int, CachedPage] = {}
        self._num_published = 0
        self._last: _Lookup | None = None

    def __len__(self) -> int:
        return len(self._content)

    def extend_keys(self, keys: list[bytes], token_ids: SequenceOf[int], salt: str) -> None:
        """Appends to `keys` those of the full pages of `token_ids` that it lacks."""
        size = self._page_size
        for index in range(len(keys), len(token_ids) // size):
            parent = keys[-1] if keys else self._root_key(salt)
            keys.append(self._chain(parent, token_ids[index * size : (index + 1) * size]))

    def find(
        self, keys: list[bytes], token_ids: SequenceOf[int], *, num_pages: int
    ) -> tuple[tuple[int, ...], int]:
        """Page ids of the longest cached prefix of at most `num_pages` pages, and the serial of the
        last. `keys` is one sequence's list for its life, as made above.
        """
        last = self._last
        if last is None or last.keys is not keys or last.num_pages != num_pages:
            last = self._last = self._look_up(keys, token_ids, num_pages)
        return last.page_ids, last.serial

    def _look_up(self, keys: list[bytes], token_ids: SequenceOf[int], num_pages: int) -> _Lookup:
        found: list[int] = []
        parent = ROOT
        missing_key: bytes | None = None
        for index in range(num_pages):
            key = keys[index]
            page_id = self._page_of_key.get(key)
            content = None if page_id is None else self._content[page_id]
            tokens = self._page_tokens(token_ids, index)
            if page_id is None or content is None or not self._is_same(content, parent, tokens):
                missing_key = key
                break
            found.append(page_id)
            parent = content.serial
        return _Lookup(
            keys=keys,
            num_pages=num_pages,
            page_ids=tuple(found),
            page_set=frozenset(found),
            serial=parent,
            missing_key=missing_key,
        )

    def publish(
        self, page_id: int, index: int, key: bytes, token_ids: SequenceOf[int], parent_serial: int
    ) -> tuple[int | None, bool]:
        """Makes page `index` of a prefix findable behind the page with `parent_serial`.

        Returns the serial to publish the next page behind, and whether this page was taken: it is
        not when an equal one is there already. The serial is None when another prefix has the key.
        """
        tokens = self._page_tokens(token_ids, index)
        known = self._page_of_key.get(key)
        if known is not None:
            content = self._content[known]
            is_same = self._is_same(content, parent_serial, tokens)
            return (content.serial if is_same else None), False
        self._num_published += 1
        serial = self._num_published
        self._page_of_key[key] = page_id
        if self._last is not None and self._last.missing_key == key:
            self._last = None
        self._content[page_id] = CachedPage(serial, key, parent_serial, tokens)
        return serial, True

    def forget(self, page_id: int) -> None:
        """The page is about to be overwritten."""
        if self._last is not None and page_id in self._last.page_set:
            self._last = None
        content = self._content.pop(page_id)
        del self._page_of_key[content.key]

    def check_invariants(self) -> None:
        assert len(self._page_of_key) == len(self._content), "index and contents differ in size"
        for page_id, content in self._content.items():
            assert self._page_of_key[content.key] == page_id, f"page {page_id} is misfiled"

    def _page_tokens(self, token_ids: SequenceOf[int], index: int) -> tuple[int, ...]:
        return tuple(token_ids[index * self._page_size : (index + 1) * self._page_size])

    @staticmethod
    def _is_same(content: CachedPage, parent_serial: int, tokens: tuple[int, ...]) -> bool:
        return content.parent_serial == parent_serial and content.token_ids == tokens

    def _root_key(self, salt: str) -> bytes:
        return hashlib.blake2b(
            salt.encode(), key=self._secret, digest_size=KEY_BYTES, person=b"cadenza-root"
        ).digest()

    def _chain(self, parent: bytes, token_ids: SequenceOf[int]) -> bytes:
        digest = hashlib.blake2b(parent, key=self._secret, digest_size=KEY_BYTES)
        digest.update(array("q", token_ids).tobytes())
        return digest.digest()
