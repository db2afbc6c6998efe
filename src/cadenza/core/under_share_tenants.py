"""`UnderShareTenants`: which tenants ask for no more than their share, and what they may preempt.

Owns the number of each tenant's open sequences, waiting or running. A tenant is *under its share*
while others have open sequences, too, and its own fit its fair share, by weight, of the rows, or of
all open sequences if these are fewer. Invariants: no sequence of such a tenant is preempted for
another tenant's; with one tenant there is none. `FairShare` says whose turn it is, so that being
under its share brings a tenant no more service.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from cadenza.config import EngineLimits
from cadenza.core.sequence import Sequence
from cadenza.tenant import Tenant

MAX_DISPLACEMENTS = 2
"""A sequence that was preempted as often makes room for no other tenant; below
`WHOLE_AFTER_PREEMPTIONS`, so that displacement alone never makes it wait for pages for complete
outputs."""


class UnderShareTenants:
    """Of one scheduler, with the rows and pages of `limits`."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._num_open: Counter[str] = Counter()
        self._total_open = 0
        self._weights: dict[str, float] = {}
        self._total_weight = 0.0

    def open(self, tenant: Tenant) -> None:
        """One more sequence of the tenant is open."""
        self._num_open[tenant.name] += 1
        self._total_open += 1
        if self._weights.get(tenant.name) != tenant.weight:
            self._weights[tenant.name] = tenant.weight
            self._total_weight = sum(self._weights.values())

    def close(self, tenant: Tenant) -> None:
        """A sequence of the tenant has ended."""
        name = tenant.name
        self._num_open[name] -= 1
        self._total_open -= 1
        if not self._num_open[name]:
            del self._num_open[name], self._weights[name]
            self._total_weight = sum(self._weights.values())

    def is_under_share(self, name: str) -> bool:
        """Whether the tenant's open sequences fit its share of the rows in use, beside others."""
        if len(self._num_open) < 2 or name not in self._num_open:
            return False
        num_rows = min(self._limits.max_num_seqs, self._total_open)
        return self._num_open[name] <= self._share_of(name, num_rows)

    def has_any(self, names: Iterable[str]) -> bool:
        """Whether one of the tenants is under its share."""
        return len(self._num_open) > 1 and any(map(self.is_under_share, names))

    def preemptable_for(
        self, sequence: Sequence, running: SequenceOf[Sequence], *, lacks_row: bool
    ) -> list[Sequence]:
        """Running sequences that a waiting one may displace, which lacks a row, or else pages.

        They are of tenants that have more than their share of what it lacks. There are none unless
        its tenant is under its share and, with the sequence, within its share of the pages.
        """
        name = sequence.tenant.name
        if not self.is_under_share(name):
            return []
        if lacks_row:
            return self._above_share(running, lambda _: 1, self._limits.max_num_seqs)
        held = sum(len(each.page_table) for each in running if each.tenant.name == name)
        wanted = held + -(-sequence.num_tokens // self._limits.page_size)
        num_pages = self._limits.num_pages
        if wanted > self._share_of(name, num_pages):
            return []
        return self._above_share(running, lambda each: len(each.page_table), num_pages)

    def check_invariants(self, sequences: list[Sequence]) -> None:
        """Raises AssertionError if other sequences are open than were told."""
        found = Counter(each.tenant.name for each in sequences)
        assert found == self._num_open, f"{found} are open, counted {self._num_open}"

    def _above_share(
        self, running: SequenceOf[Sequence], size_of: Callable[[Sequence], int], total: int
    ) -> list[Sequence]:
        sizes: Counter[str] = Counter()
        for each in running:
            sizes[each.tenant.name] += size_of(each)
        above = {name for name, size in sizes.items() if size > self._share_of(name, total)}
        return [
            each
            for each in running
            if each.tenant.name in above
            and not self.is_under_share(each.tenant.name)
            and each.num_preemptions < MAX_DISPLACEMENTS
        ]

    def _share_of(self, name: str, total: int) -> float:
        """Of `total` rows or pages, at least one."""
        return max(1.0, total * self._weights[name] / self._total_weight)
