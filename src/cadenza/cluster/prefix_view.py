"""`PrefixView`: which prefixes a replica holds, by short keys of pages (`core.page_keys`). What was
sent counts until the replica has reported after it, and the newest of it where it reports nothing.
Keys are salted by tenant. A wrong guess costs a miss and never an answer.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import takewhile

from cadenza.core.page_keys import MAX_KEYS, Content, PageKeys, short_keys, split_keys
from cadenza.engine.route_report import HeldChange
from cadenza.request import Request


def page_keys(request: Request, page_size: int, secret: bytes) -> tuple[bytes, ...]:
    """A short key for each full page of the prompt, of all that is before its end."""
    keys: list[bytes] = []
    content = Content(request.prompt_token_ids, request.attachments, request.cache_salt)
    PageKeys(page_size=page_size, secret=secret).extend(keys, content)
    return short_keys(keys)


class PrefixView:
    """Of one replica. `max_keys`: of what was sent; it bounds what it reports itself."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._held: set[bytes] = set()
        self._sent: OrderedDict[bytes, int] = OrderedDict()  # the newest request with the key
        self._settled_below: int | None = None

    def __len__(self) -> int:
        if self._settled_below is None:
            return len(self._sent)
        newest = reversed(self._sent.values())
        return len(self._held) + sum(1 for _ in takewhile(self._is_unsettled, newest))

    def num_held(self, keys: Sequence[bytes]) -> int:
        """The number of leading pages that it holds or is about to compute."""
        return _deepest(keys, lambda key: key in self._held or self._is_coming(key))

    def num_coming(self, keys: Sequence[bytes]) -> int:
        return _deepest(keys, lambda key: key not in self._held and self._is_coming(key))

    def num_seen(self, keys: Sequence[bytes]) -> int:
        """The same of pages that were ever sent to it, as far as that is remembered."""
        return _deepest(keys, self._sent.__contains__)

    def add(self, keys: Sequence[bytes], request_id: int) -> None:
        for key in reversed(keys):  # the end of a prompt is forgotten before its beginning
            self._sent[key] = request_id
            self._sent.move_to_end(key)
        while len(self._sent) > self._max_keys:
            self._sent.popitem(last=False)

    def take(self, change: HeldChange, settled_below: int) -> None:
        """It has reported; see `RouteReport` and `Seen`."""
        self._held.difference_update(split_keys(change.removed))
        self._held.update(split_keys(change.added))
        self._settled_below = settled_below

    def clear(self) -> None:
        self._held.clear()
        self._sent.clear()
        self._settled_below = None

    def _is_coming(self, key: bytes) -> bool:
        request_id = self._sent.get(key)
        return request_id is not None and self._is_unsettled(request_id)

    def _is_unsettled(self, request_id: int) -> bool:
        return self._settled_below is None or request_id >= self._settled_below


def _deepest(keys: Sequence[bytes], has: Callable[[bytes], bool]) -> int:
    """The number of pages up to the last one that `has` knows: reports may lack earlier ones, which
    were dropped for being old."""
    return next((at for at in range(len(keys), 0, -1) if has(keys[at - 1])), 0)
