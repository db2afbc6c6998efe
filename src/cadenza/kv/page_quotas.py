"""`PageQuotas`: how many pages each tenant holds and has in the prefix cache; tracks only quotas
below 100 %. Invariant: a tenant holds no more than its quota, each page counted once however many
sequences share it; nor are more cached, in use or not, than its own quota and that of all
tenants."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from cadenza.batch.sequence import Sequence
from cadenza.kv.page_pool import EvictionOrder, PageClass, PagePool
from cadenza.tenant import Tenant


class PageQuotas:
    """The pages of one pool; at most `cache_share` of them are in the prefix cache."""

    def __init__(self, pool: PagePool, cache_share: float = 1.0) -> None:
        self._pool = pool
        self.cache_share = cache_share
        self._held: dict[str, dict[int, int]] = {}
        # By tenant, and of all tenants under None; in use or not.
        self._cached: dict[str | None, EvictionOrder] = {}
        self._groups_of: dict[int, list[str | None]] = {}

    def take(self, sequence: Sequence, page_ids: Iterable[int]) -> None:
        tenant = sequence.tenant
        if tenant.page_share == 1.0:
            return
        held = self._held.setdefault(tenant.name, {})
        for page_id in page_ids:
            held[page_id] = held.get(page_id, 0) + 1

    def give_back(self, sequence: Sequence, known: SequenceOf[int]) -> None:
        """Last page first; `known`: those in the prefix cache, by id or content."""
        tenant = sequence.tenant
        for group, _ in self._limits_of(tenant):
            cached = self._cached.get(group)
            for page_id in reversed(known if cached else ()):
                if cached is not None and page_id in cached:
                    cached.add(page_id, self._pool.class_of(page_id))
        if tenant.page_share == 1.0:
            return
        held = self._held.get(tenant.name, {})
        for page_id in sequence.page_table:
            held[page_id] -= 1
            if not held[page_id]:
                del held[page_id]
        if not held:
            self._held.pop(tenant.name, None)

    def num_left(self, tenant: Tenant) -> int:
        most = tenant.most_pages(self._pool.num_pages)
        return most - len(self._held.get(tenant.name, ()))

    def num_held(self, tenant: Tenant, page_ids: Iterable[int]) -> int:
        held = self._held.get(tenant.name, {})
        return sum(1 for page_id in page_ids if page_id in held)

    def try_cache(self, tenant: Tenant, page_id: int, page_class: PageClass) -> bool:
        """Counts a page about to enter the prefix cache. Where a share is full, its first
        unreferenced page is evicted; False, with the page not counted, if all are in use."""
        limits = self._limits_of(tenant)
        if page_id in self._groups_of:
            return True
        for group, most in limits:
            cached = self._cached.setdefault(group, EvictionOrder(most, self._pool.reuse))
            if len(cached) >= most:
                oldest = cached.first(self._pool.is_reusable)
                if oldest is None:
                    return False
                self._pool.evict(oldest)
        for group, _ in limits:
            self._cached[group].add(page_id, page_class)
        if limits:
            self._groups_of[page_id] = [group for group, _ in limits]
        return True

    def forget(self, page_id: int) -> None:
        for group in self._groups_of.pop(page_id, ()):
            self._cached[group].evict(page_id)

    def _limits_of(self, tenant: Tenant) -> list[tuple[str | None, int]]:
        """The groups in which a tenant's cached pages count, and the most pages of each."""
        num_pages = self._pool.num_pages
        limits: list[tuple[str | None, int]] = []
        if tenant.cache_share < 1.0:
            limits.append((tenant.name, tenant.most_cached_pages(num_pages)))
        if self.cache_share < 1.0:
            limits.append((None, int(self.cache_share * num_pages)))
        return limits

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        expected: dict[str, dict[int, int]] = {}
        for sequence in sequences:
            tenant = sequence.tenant
            for page_id in sequence.page_table if tenant.page_share < 1.0 else ():
                pages = expected.setdefault(tenant.name, {})
                pages[page_id] = pages.get(page_id, 0) + 1
            most = tenant.most_pages(self._pool.num_pages)
            assert len(self._held.get(tenant.name, ())) <= most, f"{tenant} holds too much"
            most = tenant.most_cached_pages(self._pool.num_pages)
            assert len(self._cached.get(tenant.name, ())) <= most, f"{tenant} caches too much"
        assert expected == self._held, "pages held by tenants are counted wrongly"
        most = int(self.cache_share * self._pool.num_pages)
        assert len(self._cached.get(None, ())) <= most, "too many pages are in the prefix cache"
        for group, cached in self._cached.items():
            cached.check_invariants()
            counted = {page for page, groups in self._groups_of.items() if group in groups}
            is_same = len(cached) == len(counted) and all(page in cached for page in counted)
            assert is_same, "cached pages are counted wrongly"
