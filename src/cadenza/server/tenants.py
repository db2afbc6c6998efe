"""The tenants of a server (`--tenants FILE`): who they are, what each may have and has used.

Owns the file's form and the buckets of its rates. Knows no HTTP but the error answers. Invariants:
a file that is accepted names every limit by its meaning; a call that is refused has used nothing;
after the time that a refusal states, the same call is within its rates if none came between.
"""

import math
import re
import tomllib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any, cast

from cadenza.errors import ConfigError, show, show_size
from cadenza.server.errors import queue_full, rate_limited
from cadenza.server.metrics import ServedCounts
from cadenza.tenant import MAX_WEIGHT, MIN_SHARE, MIN_WEIGHT, Tenant

MAX_FILE_BYTES = 1 << 20
MAX_KEYS = 1000
MINUTE_S = 60.0

KEPT_SHARE = 0.125
"""Of the places for open requests: kept from a tenant that has more than its part of all places,
once several tenants have called, so that a flood refuses nobody else's calls."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,32}")
_KEY = re.compile(r"[!-~]{8,}")
_HASHED = re.compile(r"sha256:([0-9a-f]{64})")

_SHARES: Mapping[str, tuple[float, float]] = {
    "weight": (MIN_WEIGHT, MAX_WEIGHT),
    "page_share": (MIN_SHARE, 1.0),
    "cache_share": (0.0, 1.0),
}
"""Fields of `Tenant`, with their bounds."""
_LIMITS: Mapping[str, tuple[float, float]] = {
    "queue_share": (MIN_SHARE, 1.0),
    "requests_per_minute": (0.01, 1e9),
    "tokens_per_minute": (1.0, 1e12),
}
"""Fields of `TenantLimits`, with their bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What a tenant may have.

    Args:
        tenant: what the engine grants it; without a name in the limits of tenants that the file
            does not name.
        queue_share: the share of all places for open requests; a tenant that has as many gets no
            further call.
        requests_per_minute: of which as many may come at once; None for any number.
        tokens_per_minute: of prompts and answers; None for any number.
    """

    tenant: Tenant = field(default_factory=Tenant)
    queue_share: float = 1.0
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantFile:
    """What `--tenants` says: limits by name, names by key, and the limits of all others.

    A key is as clients send it, or `sha256:` and its hash in hex.
    """

    named: Mapping[str, TenantLimits] = field(default_factory=dict[str, TenantLimits])
    keys: Mapping[str, str] = field(default_factory=dict[str, str])
    default: TenantLimits = field(default_factory=TenantLimits)


def read_tenants(path: Path) -> TenantFile:
    """Raises ConfigError, which names the place in the file and never a key."""
    where = f"--tenants {path}"
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError):
        raise ConfigError(f"{where} cannot be read; give a TOML file") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{where} has over {show_size(MAX_FILE_BYTES)}; give a smaller file")
    try:
        found = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        # The library quotes no value, only the place.
        at = re.search(r"at (line \d+, column \d+|end of document)", str(error))
        place = f" ({at.group()})" if at else ""
        raise ConfigError(f"{where} is no TOML file{place}; see docs/serving.md") from None
    _refuse_others(where, found, {"default", "tenants"})
    default = _limits_of(f"{where}: default", _table(where, found.get("default", {})), Tenant())
    tables = _table(f"{where}: tenants", found.get("tenants", {}))
    named: dict[str, TenantLimits] = {}
    keys: dict[str, str] = {}
    for name, value in tables.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{where}: a tenant's name is {show(name)}; use 1 to 32 letters, digits, ., _ or -"
            )
        place = f"{where}: tenants.{name}"
        table = _table(place, value)
        for key in _keys_of(place, table.pop("keys", None)):
            if key in keys:
                raise ConfigError(f"{place} has a key of tenants.{keys[key]}; give each its own")
            keys[key] = name
        named[name] = _limits_of(place, table, Tenant(name=name))
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"{where} has {len(keys)} keys; at most {MAX_KEYS} are allowed")
    return TenantFile(named=named, keys=keys, default=default)


def hash_in(key: str) -> bytes | None:
    """The digest that a key of the form `sha256:HEX` states."""
    matched = _HASHED.fullmatch(key)
    return None if matched is None else bytes.fromhex(matched.group(1))


def _table(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {show(value)}; it must be a table")
    return dict(cast(dict[str, Any], value))


def _refuse_others(where: str, table: Mapping[str, object], known: set[str]) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise ConfigError(f"{where} has {show(unknown[0])}; there are {', '.join(sorted(known))}")


def _keys_of(where: str, value: object) -> list[str]:
    keys = cast(list[object], value) if isinstance(value, list) else []
    if not keys:
        raise ConfigError(f"{where} has no keys; give a list of API keys: keys = [...]")
    for key in keys:
        is_key = isinstance(key, str) and _KEY.fullmatch(key)
        if not is_key or (cast(str, key).startswith("sha256:") and hash_in(cast(str, key)) is None):
            raise ConfigError(
                f"{where} has a key of another form; give at least 8 visible ASCII characters, "
                f"or sha256: and 64 hex digits in lower case"
            )
    return cast(list[str], keys)


def _limits_of(where: str, table: Mapping[str, object], tenant: Tenant) -> TenantLimits:
    _refuse_others(where, table, {*_SHARES, *_LIMITS})
    numbers = {
        name: _number(f"{where}: {name}", table[name], low, high)
        for name, (low, high) in (*_SHARES.items(), *_LIMITS.items())
        if name in table
    }
    shares = {name: number for name, number in numbers.items() if name in _SHARES}
    limits = {name: number for name, number in numbers.items() if name in _LIMITS}
    return TenantLimits(tenant=replace(tenant, **shares), **limits)


def _number(what: str, value: object, low: float, high: float) -> float:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not low <= cast(float, value) <= high:
        raise ConfigError(f"{what} is {show(value)}; it must be a number from {low:g} to {high:g}")
    return float(cast(float, value))


class Bucket:
    """At most `per_minute` at once, refilled at that rate. What is taken later than it is known,
    such as the tokens of an answer, may leave it below zero.
    """

    def __init__(self, per_minute: float, now_s: float) -> None:
        self._size = per_minute
        self._level = per_minute
        self._filled_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount` is there, or all that it holds; 0.0 if it is there now."""
        self._fill(now_s)
        missing = min(amount, self._size) - self._level
        return max(0.0, missing) * MINUTE_S / self._size

    def take(self, amount: float, now_s: float) -> None:
        self._fill(now_s)
        self._level -= amount

    def _fill(self, now_s: float) -> None:
        passed_s = now_s - self._filled_s
        self._level = min(self._size, self._level + self._size * passed_s / MINUTE_S)
        self._filled_s = now_s


@dataclass(slots=True, eq=False)
class _Use:
    """What a tenant has used."""

    limits: TenantLimits
    requests: Bucket | None
    tokens: Bucket | None
    num_open: int = 0


class Tenants:
    """What the tenants of one server have used. On the event loop only.

    A tenant is known by its name in the file, or by another one, with the default limits.
    """

    def __init__(self, file: TenantFile, counts: ServedCounts) -> None:
        self._file = file
        self._counts = counts
        self._uses: dict[str, _Use] = {}

    def tenant(self, name: str) -> Tenant:
        """What the engine is told of a tenant. Safe on any thread."""
        named = self._file.named.get(name)
        return replace(self._file.default.tenant, name=name) if named is None else named.tenant

    @contextmanager
    def calling(self, name: str, num_places: int, now_s: float) -> Generator[None]:
        """Counts an open call as one request, `add_open` those that it has beside its first.

        `num_places` is the most requests that may be open in all.

        Raises ApiError (429) where the tenant has too many, or has used up a rate.
        """
        use = self._use(name, now_s)
        share = use.limits.queue_share
        most = max(1, int(share * num_places))
        # With all places there is no share: the bound of the queue itself is what refuses.
        if share < 1.0 and use.num_open >= most:
            self._counts.reject("tenant_queue_full")
            raise queue_full(
                message=f"{use.num_open} of your requests are open, and the queue_share of your "
                f"key allows {most}; try again when some have finished"
            )
        if self._is_crowding(use, num_places):
            self._counts.reject("tenant_queue_full")
            raise queue_full(
                message=f"{use.num_open} of your requests are open, and the places that are left "
                f"are kept for others; try again when some have finished"
            )
        self.check_rates(name, 0, now_s)
        use.num_open += 1
        try:
            yield
        finally:
            use.num_open -= 1

    def add_open(self, name: str, num_requests: int) -> None:
        """An open call has so many more requests beside its first; fewer, where it is negative."""
        self._uses[name].num_open += num_requests

    def _is_crowding(self, use: _Use, num_places: int) -> bool:
        """Whether only kept places are left, and the tenant has more requests than its part."""
        opened = [each.num_open for each in self._uses.values() if each.num_open]
        num_left = num_places - sum(opened)
        has_more = use.num_open > num_places / max(2, len(opened))
        return len(self._uses) > 1 and has_more and num_left <= KEPT_SHARE * num_places

    def take(self, name: str, num_prompt_tokens: int, now_s: float) -> None:
        """A call is served, with prompts that have passed `check_rates`."""
        use = self._use(name, now_s)
        if use.requests is not None:
            use.requests.take(1, now_s)
        if use.tokens is not None:
            use.tokens.take(num_prompt_tokens, now_s)

    def take_answer(self, name: str, num_tokens: int, now_s: float) -> None:
        """A call's answer has ended; its tokens are taken even if too few are there."""
        use = self._use(name, now_s)
        if use.tokens is not None:
            use.tokens.take(num_tokens, now_s)

    def check_rates(self, name: str, num_prompt_tokens: int, now_s: float) -> None:
        """Raises ApiError (429) unless a request and so many tokens, at least one, are there."""
        use = self._use(name, now_s)
        limits, waits = use.limits, dict[str, float]()
        if use.requests is not None:
            what = f"requests_per_minute of {limits.requests_per_minute:g}"
            waits[what] = use.requests.wait_s(1, now_s)
        if use.tokens is not None:
            what = f"tokens_per_minute of {limits.tokens_per_minute:g}"
            waits[what] = use.tokens.wait_s(max(1, num_prompt_tokens), now_s)
        longest = max(waits, key=waits.__getitem__, default=None)
        if longest is not None and waits[longest] > 0:
            self._counts.reject("rate_limited")
            seconds = math.ceil(waits[longest])
            unit = "second" if seconds == 1 else "seconds"
            raise rate_limited(rate=longest, seconds=seconds, unit=unit)

    def _use(self, name: str, now_s: float) -> _Use:
        use = self._uses.get(name)
        if use is None:
            limits = self._file.named.get(name, self._file.default)
            per_minute = limits.requests_per_minute, limits.tokens_per_minute
            requests, tokens = (None if n is None else Bucket(n, now_s) for n in per_minute)
            use = self._uses[name] = _Use(limits, requests, tokens)
        return use
