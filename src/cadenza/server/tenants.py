"""The tenants (`--tenants FILE`): what each may have and has used. Invariants: an accepted file
names every limit by its meaning; a refused call has used nothing; after a refusal's stated time the
same call fits its rates if none came between."""

import math
import re
import tomllib
from collections.abc import Callable, Generator, Mapping
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
"""Of places for open requests: kept from a tenant with more than its part, once several have
called, so that one's overload refuses no other's calls."""

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
    """What a tenant may have; rates are None for any number."""

    # what the engine grants it; without a name for tenants that the file does not name
    tenant: Tenant = field(default_factory=Tenant)
    # of all places for open requests; with as many no further call is taken
    queue_share: float = 1.0
    requests_per_minute: float | None = None  # of which as many may come at once
    tokens_per_minute: float | None = None  # of prompts and answers


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantFile:
    """What `--tenants` says."""

    named: Mapping[str, TenantLimits] = field(default_factory=dict[str, TenantLimits])
    # tenants' names by key, as clients send it, or by `sha256:` and its hash in hex
    keys: Mapping[str, str] = field(default_factory=dict[str, str])
    default: TenantLimits = field(default_factory=TenantLimits)  # of tenants that it does not name


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
        position = f" ({at.group()})" if at else ""
        raise ConfigError(f"{where} is no TOML file{position}; see docs/serving.md") from None
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
        here = f"{where}: tenants.{name}"
        table = _table(here, value)
        for key in _keys_of(here, table.pop("keys", None)):
            if key in keys:
                raise ConfigError(f"{here} has a key of tenants.{keys[key]}; give each its own")
            keys[key] = name
        named[name] = _limits_of(here, table, Tenant(name=name))
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
    """A token bucket of `per_minute`; tokens known only afterwards may leave it below zero."""

    def __init__(self, per_minute: float, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._filled_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until it holds `amount`, or is full; 0.0 if it does now."""
        self._fill(now_s)
        missing = min(amount, self.per_minute) - self._level
        return max(0.0, missing) * MINUTE_S / self.per_minute

    def take(self, amount: float, now_s: float) -> None:
        self._fill(now_s)
        self._level -= amount

    def _fill(self, now_s: float) -> None:
        passed_s = now_s - self._filled_s
        self._level = min(self.per_minute, self._level + self.per_minute * passed_s / MINUTE_S)
        self._filled_s = now_s


class TenantUse:
    """What one tenant has used. On the event loop only, except `tenant`, which the engine gets."""

    def __init__(
        self, tenant: Tenant, limits: TenantLimits, counts: ServedCounts, clock: Callable[[], float]
    ) -> None:
        self.tenant = tenant
        self.limits = limits
        self.num_open = 0
        """Requests of open calls: one for each call, and those that it has besides its first."""
        self._counts = counts
        self._clock = clock
        per_minute = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
        self._buckets = {
            name: Bucket(rate, clock()) for name, rate in per_minute.items() if rate is not None
        }

    def check_rates(self, num_prompt_tokens: int) -> None:
        """Raises ApiError (429) unless the rates allow a request and the tokens (at least 1)."""
        amounts, now_s = {"requests": 1, "tokens": max(1, num_prompt_tokens)}, self._clock()
        waits = {
            f"{name}_per_minute of {bucket.per_minute:g}": bucket.wait_s(amounts[name], now_s)
            for name, bucket in self._buckets.items()
        }
        longest = max(waits, key=waits.__getitem__, default=None)
        if longest is not None and waits[longest] > 0:
            self._counts.reject("rate_limited")
            seconds = math.ceil(waits[longest])
            unit = "second" if seconds == 1 else "seconds"
            raise rate_limited(rate=longest, seconds=seconds, unit=unit)

    def take(self, **amounts: int) -> None:
        """Requests and tokens, even beyond the rates: an answer's are known when it has ended."""
        for name in self._buckets.keys() & amounts.keys():
            self._buckets[name].take(amounts[name], self._clock())


class Tenants:
    """The tenants of one server, by name; unknown names have default limits. On the event loop
    only."""

    def __init__(self, file: TenantFile, counts: ServedCounts, clock: Callable[[], float]) -> None:
        self._file = file
        self._counts = counts
        self._clock = clock
        self._uses: dict[str, TenantUse] = {}

    @contextmanager
    def calling(self, name: str, num_places: int) -> Generator[TenantUse]:
        """Counts an open call, of `num_places` in all. Raises ApiError (429) where the tenant has
        too many, or used up a rate."""
        use = self.use(name)
        share = use.limits.queue_share
        most = max(1, int(share * num_places))
        # With all places there is no share: the bound of the queue itself is what refuses.
        if share < 1.0 and use.num_open >= most:
            why = f"the queue_share of your key allows {most}"
        elif self._is_crowding(use, num_places):
            why = "the places that are left are kept for others"
        else:
            why = None
        if why is not None:
            self._counts.reject("tenant_queue_full")
            raise queue_full(
                message=f"{use.num_open} of your requests are open, and {why}; try again when some "
                f"have finished"
            )
        use.check_rates(0)
        use.num_open += 1
        try:
            yield use
        finally:
            use.num_open -= 1

    def use(self, name: str) -> TenantUse:
        if name not in self._uses:
            limits = self._file.named.get(name, self._file.default)
            tenant = replace(limits.tenant, name=name)
            self._uses[name] = TenantUse(tenant, limits, self._counts, self._clock)
        return self._uses[name]

    def _is_crowding(self, use: TenantUse, num_places: int) -> bool:
        """Whether only kept places are left, and the tenant has more requests than its part."""
        opened = [each.num_open for each in self._uses.values() if each.num_open]
        num_left = num_places - sum(opened)
        has_more = use.num_open > num_places / max(2, len(opened))
        return len(self._uses) > 1 and has_more and num_left <= KEPT_SHARE * num_places
