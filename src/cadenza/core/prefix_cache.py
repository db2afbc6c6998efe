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


@dataclass(frozen=True, slots=True)
class CachedPage:
    """What a published page holds."""

    key: bytes
    parent_key: bytes
    token_ids: tuple[int, ...]


class PrefixCache:
    """Index of full pages. `secret` keys the hashes: nobody outside can aim at a collision."""

    def __init__(self, *, page_size: int, secret: bytes) -> None:
        self._page_size = page_size
        self._secret = secret
        self._page_of_key: dict[bytes, int] = {}
        self._content: dict[int, CachedPage] = {}

    def __len__(self) -> int:
        return len(self._content)

    def extend_keys(self, keys: list[bytes], token_ids: SequenceOf[int], salt: str) -> None:
        """Appends to `keys` those of the full pages of `token_ids` that it lacks."""
        size = self._page_size
        for index in range(len(keys), len(token_ids) // size):
            parent = keys[-1] if keys else self._root_key(salt)
            keys.append(self._chain(parent, token_ids[index * size : (index + 1) * size]))

    def find(self, keys: SequenceOf[bytes], token_ids: SequenceOf[int], salt: str) -> list[int]:
        """Page ids of the longest cached prefix; `keys` as `extend_keys` made them."""
        size = self._page_size
        found: list[int] = []
        parent = self._root_key(salt)
        for index, key in enumerate(keys):
            page_id = self._page_of_key.get(key)
            if page_id is None:
                break
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            if self._content[page_id] != CachedPage(key, parent, tokens):
                break
            found.append(page_id)
            parent = key
        return found

    def try_publish(
        self,
        page_id: int,
        index: int,
        keys: SequenceOf[bytes],
        token_ids: SequenceOf[int],
        salt: str,
    ) -> bool:
        """Makes page `index` of a prefix findable; False when an equal page already is."""
        key = keys[index]
        if key in self._page_of_key:
            return False
        size = self._page_size
        parent = keys[index - 1] if index else self._root_key(salt)
        tokens = tuple(token_ids[index * size : (index + 1) * size])
        self._page_of_key[key] = page_id
        self._content[page_id] = CachedPage(key, parent, tokens)
        return True

    def forget(self, page_id: int) -> None:
        """The page is about to be overwritten."""
        content = self._content.pop(page_id)
        del self._page_of_key[content.key]

    def check_invariants(self) -> None:
        assert len(self._page_of_key) == len(self._content), "index and contents differ in size"
        for page_id, content in self._content.items():
            assert self._page_of_key[content.key] == page_id, f"page {page_id} is misfiled"

    def _root_key(self, salt: str) -> bytes:
        return hashlib.blake2b(
            salt.encode(), key=self._secret, digest_size=KEY_BYTES, person=b"cadenza-root"
        ).digest()

    def _chain(self, parent: bytes, token_ids: SequenceOf[int]) -> bytes:
        digest = hashlib.blake2b(parent, key=self._secret, digest_size=KEY_BYTES)
        digest.update(array("q", token_ids).tobytes())
        return digest.digest()
