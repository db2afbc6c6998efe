"""`Tenant`: on whose behalf a request is served, and what that tenant may hold. Invariant: every
instance is finite and within bounds."""

import re
from dataclasses import dataclass
from numbers import Real
from typing import cast

from cadenza.errors import InvalidRequestError, show

MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0
MIN_SHARE = 0.0001
_NAME = re.compile(r"[!-~]{0,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """The tenant of a request. Requests of one name must agree in the other fields. Raises
    InvalidRequestError: a value has the wrong type or is out of bounds."""

    name: str = ""  # up to 64 visible ASCII characters; empty where tenants are not told apart
    # Where several tenants wait, a tenant of weight 2 gets twice the service of one of weight
    # 1; 0.01 to 100.
    weight: float = 1.0
    # The share of all KV pages that its running requests may hold; 0.0001 to 1.
    page_share: float = 1.0
    # The share of all KV pages that its prefixes may have in the prefix cache, in use or not; 0
    # to 1.
    cache_share: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise InvalidRequestError(
                f"a tenant's name is {show(self.name)}; it must be at most 64 visible ASCII "
                f"characters",
                param="tenant",
            )
        self._take_number("weight", MIN_WEIGHT, MAX_WEIGHT)
        self._take_number("page_share", MIN_SHARE, 1.0)
        self._take_number("cache_share", 0.0, 1.0)

    def most_pages(self, num_pages: int) -> int:
        """At least one."""
        return max(1, int(self.page_share * num_pages))

    def most_cached_pages(self, num_pages: int) -> int:
        return int(self.cache_share * num_pages)

    def _take_number(self, field: str, low: float, high: float) -> None:
        value: object = getattr(self, field)
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or not low <= cast(float, value) <= high:
            raise InvalidRequestError(
                f"a tenant's {field} is {show(value)}; it must be a number from {low:g} to "
                f"{high:g}",
                param="tenant",
            )
        object.__setattr__(self, field, float(cast(float, value)))


ONE_TENANT = Tenant()  # that of requests for which none is given
