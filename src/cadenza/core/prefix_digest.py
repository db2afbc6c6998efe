"""`PrefixDigest`: which prefixes an engine holds, as short keys, and how they changed.

Owns the first bytes of the keys of cached pages, the oldest dropped of too many, and what was added
and removed since the last change was taken. Invariant: applied one after the other, the changes
give exactly the keys that the digest has.
"""

from collections.abc import Iterable
from typing import NamedTuple

SHORT_BYTES = 8
"""Of a key, in a digest: two prefixes of a fleet share them once in 2^64, which costs a miss."""

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
        """Of a page that has left the cache; one that was dropped before changes nothing."""
        short = key[:SHORT_BYTES]
        if short in self._keys:
            self._drop(short)

    def take(self) -> DigestChange:
        """The change since the last call; at first, since there was nothing."""
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
    """As a digest has them."""
    return tuple(key[:SHORT_BYTES] for key in keys)


def split_keys(joined: bytes) -> list[bytes]:
    """The keys of a `DigestChange`."""
    return [joined[at : at + SHORT_BYTES] for at in range(0, len(joined), SHORT_BYTES)]
