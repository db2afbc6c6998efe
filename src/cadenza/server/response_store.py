"""`ResponseStore`: answers of /v1/responses as JSON, bounded in number, bytes and idle seconds;
least recently used leave first. Invariant: a tenant finds only its own, and a conversation is whole
or not found."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from cadenza.errors import ConfigError

MAX_TURNS = 1024  # of one conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBounds:
    """What is kept at most. Raises ConfigError: a value cannot work."""

    max_count: int = 1024
    max_bytes: int = 64 << 20
    ttl_s: float = 3600.0  # after the last use

    def __post_init__(self) -> None:
        for flag, value in (
            ("max-stored-responses", self.max_count),
            ("max-stored-responses-bytes", self.max_bytes),
            ("stored-responses-ttl", self.ttl_s),
        ):
            if not value >= 0:
                raise ConfigError(f"--{flag} {value:g} must be 0 or more; 0 stores nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response, open or ended."""

    id: str
    previous_id: str | None  # of the response that it goes on from
    input: bytes  # its items, as JSON
    body: bytes  # the response, as JSON
    is_open: bool = False

    @property
    def num_bytes(self) -> int:
        return len(self.input) + len(self.body)


@dataclass(slots=True, eq=False)
class _Entry:
    response: StoredResponse
    used_s: float


class ResponseStore:
    """For one event loop. `clock`: seconds, monotonic."""

    def __init__(self, bounds: StoreBounds, clock: Callable[[], float]) -> None:
        self.num_bytes = 0
        self._bounds = bounds
        self._clock = clock
        # In the order of their last use.
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._waiters: dict[tuple[str, str], list[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, tenant: str, response: StoredResponse) -> None:
        """Stores a response, in place of one with its id. One beyond the bounds is not kept."""
        key = tenant, response.id
        self._remove(key)
        self._entries[key] = _Entry(response, self._clock())
        self.num_bytes += response.num_bytes
        self._shrink()
        if not response.is_open:
            self._wake(key)

    def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        self._shrink()
        key = tenant, response_id
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.used_s = self._clock()
        self._entries.move_to_end(key)
        return entry.response

    def conversation(self, tenant: str, response_id: str) -> list[StoredResponse] | None:
        """A response after all that it continues, oldest first; None where one is missing or open,
        or there are too many."""
        found: list[StoredResponse] = []
        next_id: str | None = response_id
        while next_id is not None:
            response = self.find(tenant, next_id)
            if response is None or response.is_open or len(found) == MAX_TURNS:
                return None
            found.append(response)
            next_id = response.previous_id
        return found[::-1]

    def delete(self, tenant: str, response_id: str) -> bool:
        key = tenant, response_id
        was_there = self._remove(key)
        self._wake(key)
        return was_there

    async def wait_end(self, tenant: str, response_id: str, within_s: float) -> None:
        """Returns when an open response has ended, and after `within_s` in any case."""
        key = tenant, response_id
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(key, []).append(waiter)
        try:
            await asyncio.wait([waiter], timeout=within_s)
        finally:
            left = self._waiters.get(key, [])
            if waiter in left:
                left.remove(waiter)
            if not left:
                self._waiters.pop(key, None)

    def _remove(self, key: tuple[str, str]) -> bool:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry.response.num_bytes
        return entry is not None

    def _shrink(self) -> None:
        oldest_s = self._clock() - self._bounds.ttl_s
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if (
                len(self._entries) <= self._bounds.max_count
                and self.num_bytes <= self._bounds.max_bytes
                and entry.used_s > oldest_s
            ):
                return
            self._remove(key)
            self._wake(key)

    def _wake(self, key: tuple[str, str]) -> None:
        for waiter in self._waiters.pop(key, []):
            if not waiter.done():
                waiter.set_result(None)
