"""`PrefixView`: which prefixes a replica is likely to hold, by what was sent to it.

Owns the keys of pages of prompts, oldest forgotten first. A key stands for a prefix of a tenant's
salt, so salts part tenants. A wrong guess costs a miss and never an answer: what a replica really
holds, it looks up itself.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from cadenza.request import Request

MAX_KEYS = 1 << 16
KEY_BYTES = 8


def page_keys(request: Request, page_size: int) -> tuple[bytes, ...]:
    """A key for each full page of the prompt, of all that is before its end."""
    tokens = array("q", request.prompt_token_ids)
    key = hashlib.blake2b(request.cache_salt.encode(), digest_size=KEY_BYTES).digest()
    keys: list[bytes] = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = tokens[start : start + page_size].tobytes()
        for each in request.attachments:
            if each.start < start + page_size and each.end > start:
                page += each.digest
        key = hashlib.blake2b(page, key=key, digest_size=KEY_BYTES).digest()
        keys.append(key)
    return tuple(keys)


class PrefixView:
    """Of one replica. `max_keys`: as many as its pool has pages, at most."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def num_held(self, keys: Sequence[bytes]) -> int:
        """The number of leading pages that it is likely to hold."""
        for place, key in enumerate(keys):
            if key not in self._keys:
                return place
        return len(keys)

    def add(self, keys: Sequence[bytes]) -> None:
        """It computes a prompt with these pages, or has done so."""
        for key in reversed(keys):  # the end of a prompt is evicted before its beginning
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        """It has started anew."""
        self._keys.clear()
