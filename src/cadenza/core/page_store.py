"""`PageStore`: the protocol of what keeps pages beyond the pool, by their keys.

Knows neither files nor devices. Invariant: a page of a store enters the prefix cache only through
`KVCacheManager.install`, under a key that its content was stored under.
"""

from collections.abc import Callable
from typing import Protocol

from cadenza.core.sequence import Sequence


class PageStore(Protocol):
    """Pages that are not in the prefix cache. A key stands for the same prefix in all processes."""

    def is_reading(
        self, sequence: Sequence, now_s: float, missing: Callable[[], tuple[int, list[bytes]]]
    ) -> bool:
        """Whether a waiting sequence should wait for pages that are being read.

        Starts to read if pages are there; answers False once they have come, or after a bounded
        time.

        Args:
            missing: returns how many of the sequence's pages are in the prefix cache, and the keys
                of those that follow and that it could take.
        """
        ...

    def keep(self, key: bytes, page_id: int) -> None:
        """A page of prompt tokens was published or found; it may be stored while it is cached."""
        ...
