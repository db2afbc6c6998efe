"""`PageKeys`: keys of KV pages, chained hashes with a secret and the tenant's salt; `PrefixDigest`:
which keys an engine holds. Invariants: engines and front ends with one secret agree on the key of a
tenant's prefix; a digest's changes, applied in order, give exactly its keys."""

import hashlib
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from cadenza.request import Attachment
from cadenza.sparse_prefill import KeptTokens

# Keys outlive the process where pages are stored (`core.kv_cache_manager.PageStore`).
KEY_BYTES = 32

# An attachment's start, relative to the page's first token, and its digest.
Mark = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class Content:
    """What a sequence's KV is computed from; `kept` of a pruned prompt."""

    token_ids: SequenceOf[int]
    attachments: tuple[Attachment, ...] = ()
    salt: str = ""
    kept: KeptTokens | None = None

    def page(self, index: int, size: int) -> "PageContent":
        start, end = index * size, (index + 1) * size
        token_ids = tuple(self.token_ids[start:end])
        if self.is_displaced(end):
            assert self.kept is not None
            return PageContent(token_ids, indices=tuple(self.kept.indices(start, end)))
        if not self.attachments:
            return PageContent(token_ids)
        inside = [each for each in self.attachments if each.start < end and each.end > start]
        return PageContent(token_ids, tuple((each.start - start, each.digest) for each in inside))

    def is_displaced(self, num_tokens: int) -> bool:
        """Whether the first `num_tokens` positions have tokens of other indices."""
        kept = self.kept
        return kept is not None and kept.num_skipped > 0 and num_tokens > kept.num_dense


@dataclass(frozen=True, slots=True)
class PageContent:
    """A full page's tokens and the attachments that overlap it. `indices` are those of its tokens,
    none if they are their positions: after the first gap of a pruned prompt no page is the whole
    prompt's."""

    token_ids: tuple[int, ...]
    marks: tuple[Mark, ...] = ()
    indices: tuple[int, ...] = ()

    def num_common(self, other: "PageContent") -> int:
        """Tokens up to which two pages are equal; an attachment differs from its start on."""
        if self.indices != other.indices:
            return 0
        pairs = zip(self.token_ids, other.token_ids, strict=False)
        num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        starts = (max(0, start) for start, _ in set(self.marks) ^ set(other.marks))
        return min(num_equal, *starts) if self.marks != other.marks else num_equal


class PageKeys:
    """Of pages of `page_size` tokens, under one secret."""

    def __init__(self, *, page_size: int, secret: bytes) -> None:
        self.page_size = page_size
        self.secret = secret

    def extend(self, keys: list[bytes], content: Content) -> None:
        size = self.page_size
        for index in range(len(keys), len(content.token_ids) // size):
            parent = keys[-1] if keys else self.root(content.salt)
            keys.append(self.chain(parent, content.page(index, size)))

    def root(self, salt: str) -> bytes:
        return hashlib.blake2b(
            salt.encode(), key=self.secret, digest_size=KEY_BYTES, person=b"cadenza-root"
        ).digest()

    def chain(self, parent: bytes, page: PageContent) -> bytes:
        key = hashlib.blake2b(parent, key=self.secret, digest_size=KEY_BYTES)
        key.update(array("q", page.token_ids).tobytes())
        for start, digest in page.marks:
            key.update(array("q", (start, len(digest))).tobytes() + digest)
        if page.indices:
            key.update(b"indices" + array("q", page.indices).tobytes())
        return key.digest()


# Of a key, in a digest: two prefixes of a fleet share them once in 2^64, which costs a miss.
SHORT_BYTES = 8

MAX_KEYS = 1 << 16


class DigestChange(NamedTuple):
    """Short keys, one after another, that came and that went."""

    added: bytes
    removed: bytes


class PrefixDigest:
    """At most `max_keys` keys."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._keys: dict[bytes, None] = {}
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: bytes) -> None:
        short = key[:SHORT_BYTES]
        if short in self._keys:
            return
        self._keys[short] = self._added[short] = None
        if len(self._keys) > self._max_keys:
            self._drop(next(iter(self._keys)))

    def remove(self, key: bytes) -> None:
        short = key[:SHORT_BYTES]
        if short in self._keys:
            self._drop(short)

    def take(self) -> DigestChange:
        """The change since the last call."""
        change = DigestChange(b"".join(self._added), b"".join(self._removed))
        self._added.clear()
        self._removed.clear()
        return change

    def _drop(self, short: bytes) -> None:
        """A key that went and came again since the last change is in both; removals come first."""
        del self._keys[short]
        if short in self._added:
            del self._added[short]
        else:
            self._removed[short] = None


def short_keys(keys: Iterable[bytes]) -> tuple[bytes, ...]:
    return tuple(key[:SHORT_BYTES] for key in keys)


def split_keys(joined: bytes) -> list[bytes]:
    return [joined[at : at + SHORT_BYTES] for at in range(0, len(joined), SHORT_BYTES)]
