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


class PrefixCache:
    """Index of full pages. `secret` keys the hashes: nobody outside can aim at a collision."""

    def __init__(self, *, page_size: int, secret: bytes) -> None:
        self._page_size = page_size
        self._secret = secret
        self._page_of_key: dict[bytes, int] = {}
        self._content: dict[int, CachedPage] = {}
        self._num_published = 0

    def __len__(self) -> int:
        return len(self._content)

    def extend_keys(self, keys: list[bytes], token_ids: SequenceOf[int], salt: str) -> None:
        """Appends to `keys` those of the full pages of `token_ids` that it lacks."""
        size = self._page_size
        for index in range(len(keys), len(token_ids) // size):
            parent = keys[-1] if keys else self._root_key(salt)
            keys.append(self._chain(parent, token_ids[index * size : (index + 1) * size]))

    def find(self, keys: SequenceOf[bytes], token_ids: SequenceOf[int]) -> tuple[list[int], int]:
        """Page ids of the longest cached prefix, and the serial of the last; keys as made above."""
        found: list[int] = []
        parent = ROOT
        for index, key in enumerate(keys):
            page_id = self._page_of_key.get(key)
            if page_id is None:
                break
            content = self._content[page_id]
            if not self._is_same(content, parent, self._page_tokens(token_ids, index)):
                break
            found.append(page_id)
            parent = content.serial
        return found, parent

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
        self._content[page_id] = CachedPage(serial, key, parent_serial, tokens)
        return serial, True

    def forget(self, page_id: int) -> None:
        """The page is about to be overwritten."""
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
