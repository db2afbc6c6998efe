"""`KVCacheManager`: allocates pages to sequences, shares cached prefixes, publishes full pages.
Owns the page pool, the prefix cache and, for a model with recurrent state, the slots of states.
Invariants: a sequence's page table covers all its computed tokens; a page, or a snapshot of a
state, is published only after the step that made it has succeeded with finite logits."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Protocol

from cadenza.batch.batch import Batch
from cadenza.batch.sequence import PageCopy, Sequence
from cadenza.config import EngineLimits
from cadenza.kv.page_keys import PageKeys
from cadenza.kv.page_pool import PageClass, PagePool, PageQuotas
from cadenza.kv.prefix_cache import (
    ROOT,
    Coming,
    InFlightPrefixes,
    Prefix,
    PrefixCache,
    SlotPrefixes,
    kv_content_of,
)
from cadenza.kv.recurrent_states import RecurrentStates, SequenceStates


class MissingPages(NamedTuple):
    """What a waiting sequence could take from a store: pages `keys` after its first `num_before`,
    which are cached; snapshots of these back to `bare_keys`, which have none."""

    num_before: int
    keys: list[bytes]
    bare_keys: list[bytes]


class PageStore(Protocol):
    """Pages beyond the pool, by keys that mean the same prefix in all processes; they enter the
    prefix cache only through `KVCacheManager.install`, under these keys."""

    def is_reading(
        self, sequence: Sequence, now_s: float, missing: Callable[[], MissingPages]
    ) -> bool:
        """Whether to wait for pages of a sequence that are being read. Starts to read if pages are
        there; False once they have come, or after a bounded time."""
        ...

    def keep(self, key: bytes, page_id: int) -> None:
        """A page of prompt tokens was published or found; it may be stored while it is cached."""
        ...

    def keep_state(self, key: bytes, slot: int) -> None: ...


class KVCacheManager:
    """Pages of one engine; `secret` keys the hashes, `num_prefix_waits` counts waits for others'
    pages."""

    def __init__(
        self,
        limits: EngineLimits,
        secret: bytes,
        *,
        pool_type: Callable[[int, Callable[[int], None]], PagePool] = PagePool,
    ) -> None:
        self.page_size = limits.page_size
        self.prefix_cache: PrefixCache | None = None
        self.in_flight_prefixes = InFlightPrefixes()
        self.num_prefix_waits = 0
        self.page_store: PageStore | None = None
        self.slot_prefixes: SlotPrefixes | None = None
        if limits.enable_prefix_caching and limits.slot_unit is None:
            self.prefix_cache = PrefixCache(PageKeys(page_size=limits.page_size, secret=secret))
        elif limits.enable_prefix_caching and limits.slot_unit is not None:
            self.slot_prefixes = SlotPrefixes(limits.slot_unit)
        self.pool = pool_type(limits.num_pages, self._forget)
        self.page_quotas = PageQuotas(self.pool, limits.prefix_cache_memory_share)
        self.sequence_states: SequenceStates | None = None
        if limits.num_state_slots:
            self.sequence_states = SequenceStates(limits, self.prefix_cache, pool_type)

    @property
    def states(self) -> RecurrentStates | None:
        return None if self.sequence_states is None else self.sequence_states.slots

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def find_prefix(self, sequence: Sequence) -> Prefix:
        """The part whose KV exists, without the last token: a sibling's prompt, else the longest
        cached prefix (with a snapshot, for recurrent models); empty while logit rows of its prompt
        are needed."""
        source = sequence.fork_source
        if source is not None:
            return self._fork(source)
        if sequence.needs_prompt_rows:
            return Prefix()
        content = kv_content_of(sequence)
        if self.slot_prefixes is not None:
            slot = self.slot_prefixes.find(sequence, content)
            return (
                Prefix()
                if slot is None
                else Prefix(
                    partial_page=slot.slot,
                    may_take_over=slot.is_most,
                    num_tokens=slot.num_tokens,
                    num_cached_tokens=slot.num_tokens,
                )
            )
        if self.prefix_cache is None:
            return Prefix()
        found, serial = self._find_pages(sequence)
        if self.sequence_states is not None:
            return self.sequence_states.prefix_of(found)
        num_tokens = len(found) * self.page_size
        return Prefix(
            page_ids=found,
            num_tokens=num_tokens,
            num_published=len(found),
            serial=serial,
            num_cached_tokens=num_tokens,
            num_matched=len(found),
        )

    def _find_pages(self, sequence: Sequence) -> tuple[tuple[int, ...], int]:
        if self.prefix_cache is None or sequence.needs_prompt_rows:
            return (), ROOT
        return self.prefix_cache.find(
            self.page_keys(sequence),
            kv_content_of(sequence),
            num_pages=self._num_usable(sequence),
        )

    def num_uncached_tokens(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence that are not in the prefix cache; a hit is not confirmed."""
        if self.prefix_cache is None:
            return sequence.num_tokens
        known = self.prefix_cache.known(self.page_keys(sequence))
        num_found = len(known) if self.states is None else self.states.longest(known)[0]
        return sequence.num_tokens - num_found * self.page_size

    def page_keys(self, sequence: Sequence) -> list[bytes]:
        """Of full pages; empty without a prefix cache."""
        if self.prefix_cache is None:
            return []
        self.prefix_cache.page_keys.extend(sequence.page_keys, kv_content_of(sequence))
        return sequence.page_keys

    def is_prefix_coming(self, sequence: Sequence) -> bool:
        in_flight = self.in_flight_prefixes
        if not len(in_flight) or sequence.needs_prompt_rows:
            return False
        if in_flight.is_being_computed(sequence.awaited_key):
            return True
        is_first_wait = sequence.awaited_key is None
        missing = self._missing_pages(sequence)
        coming = in_flight.coming(missing.keys, self.page_size)
        if coming is not None and self._is_saving(sequence, coming, missing):
            sequence.awaited_key = missing.keys[0]
        else:
            sequence.awaited_key = None
        is_waiting = sequence.awaited_key is not None
        self.num_prefix_waits += is_waiting and is_first_wait
        return is_waiting

    def _is_saving(self, sequence: Sequence, coming: Coming, missing: MissingPages) -> bool:
        if self.sequence_states is None:
            return True
        num_shared = (missing.num_before + coming.num_pages) * self.page_size
        return self.sequence_states.is_saving(self.find_prefix(sequence), num_shared, coming)

    def is_being_read(self, sequence: Sequence, now_s: float) -> bool:
        store = self.page_store
        if store is None or self.prefix_cache is None or sequence.needs_prompt_rows:
            return False
        if sequence.fork_source is not None or sequence.is_expecting_source:
            return False
        if sequence.awaits_kept:  # its pages are not those of the whole prompt
            return False
        return store.is_reading(sequence, now_s, lambda: self._missing_pages(sequence))

    def _missing_pages(self, sequence: Sequence) -> MissingPages:
        if sequence.fork_source is not None:
            return MissingPages(0, [], [])
        found = self._find_pages(sequence)[0]
        count, keys = len(found), sequence.page_keys[: self._num_usable(sequence)]
        num_behind = count if self.states is None else self.states.longest(found)[0]
        return MissingPages(count, keys[count:], keys[num_behind:count])

    def _num_usable(self, sequence: Sequence) -> int:
        """Pages that a sequence may share: the last token is always computed."""
        return (len(sequence.token_ids) - 1) // self.page_size

    def install(
        self, sequence: Sequence, first: int, count: int, write: Callable[[list[int], int], bool]
    ) -> int:
        """Adds the `count` pages after a waiting sequence's first `first` from a store to the
        prefix cache; returns how many. None is added if those before are not cached, or too few are
        free. `write`: fills the pages given from its page of the index given; False if it
        cannot."""
        assert self.prefix_cache is not None
        known, known_serial = self._find_pages(sequence)
        start, end = len(known), first + count
        if not first <= start < end:
            return 0
        self.pool.share(known)
        page_ids = self.pool.try_allocate(end - start)
        num_added = 0
        if page_ids is not None:
            serial: int | None = known_serial if write(page_ids, start) else None
            for index, page_id in enumerate(page_ids, start):
                if serial is None:
                    break
                serial = self._add_to_cache(sequence, index, page_id, serial, PageClass.PROMPT)
                num_added += serial is not None
            self.pool.free(reversed(page_ids))
        self.pool.free(reversed(known))
        return num_added

    def install_state(
        self, sequence: Sequence, num_pages: int, write: Callable[[int], bool]
    ) -> bool:
        """Adds the snapshot after the first `num_pages` pages of a waiting sequence; False if these
        are not cached, or as `SequenceStates.install`."""
        states, found = self.sequence_states, self._find_pages(sequence)[0]
        if states is None or len(found) < num_pages:
            return False
        return states.install(found[num_pages - 1], write)

    def num_unheld(self, prefix: Prefix) -> int:
        """Unreferenced pages of a prefix: sharing them reduces the available pages."""
        return sum(1 for page_id in prefix.page_ids if not self.pool.ref_count(page_id))

    def try_adopt(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Shares the prefix's pages and allocates the rest for all tokens; False if too few."""
        assert not sequence.page_table, "cannot adopt a prefix: the sequence already has pages"
        self.pool.share(prefix.page_ids)
        self.page_quotas.take(sequence, prefix.page_ids)
        sequence.page_table.extend(prefix.page_ids)
        sequence.num_computed_tokens = prefix.num_tokens
        sequence.num_published_pages = prefix.num_published
        sequence.published_serial = prefix.serial
        states = self.sequence_states
        has_state = states is None or states.try_open(sequence, prefix)
        if not (has_state and self._try_grow_beside(sequence, prefix)):
            self.release(sequence)
            return False
        if self.prefix_cache is not None:
            self.prefix_cache.leave(sequence.page_keys)
            self.in_flight_prefixes.add(sequence, sequence.page_keys[prefix.num_published :])
        if not sequence.has_started and not any(each.has_started for each in sequence.siblings):
            self.pool.mark_found(prefix.page_ids[: prefix.num_published])
            if states is not None:
                states.mark_found(sequence, prefix)
            self._keep_found(sequence, prefix)
        if prefix.partial_page is not None:
            index = len(prefix.page_ids)
            sequence.page_copy = PageCopy(
                prefix.partial_page,
                sequence.page_table[index],
                prefix.num_tokens - index * self.page_size,
            )
        return True

    def _keep_found(self, sequence: Sequence, prefix: Prefix) -> None:
        store, num_found = self.page_store, prefix.num_published
        if store is None or not num_found:
            return
        for key, page_id in zip(sequence.page_keys, prefix.page_ids[:num_found], strict=False):
            if self.pool.class_of(page_id) is not PageClass.SPARSE:
                store.keep(key, page_id)
        if prefix.state_slot is not None:
            store.keep_state(sequence.page_keys[num_found - 1], prefix.state_slot)

    def place(self, batch: Batch) -> None:
        """Sets the pages and state slots that a step writes."""
        states = self.sequence_states
        for entry in batch.entries:
            sequence, start = entry.sequence, entry.start
            end = start + entry.num_new_tokens
            if states is not None:
                placed = states.place(sequence, start, end, len(entry.drafts))
                entry.state_start, entry.kept_states = placed.start, placed.kept
                batch.state_slots += placed.slots
                batch.has_states = True
            batch.write_pages(sequence, start, end, self.page_size)

    def settle_drafts(self, sequence: Sequence) -> None:
        """After a step with drafts was read: keeps the state after the accepted ones."""
        if self.sequence_states is not None:
            self.sequence_states.settle(sequence)

    def pin(self, page_ids: Iterable[int]) -> None:
        self.pool.pin(page_ids)

    def unpin(self, page_ids: Iterable[int], state_slots: Iterable[int]) -> None:
        self.pool.unpin(page_ids)
        if self.states is not None:
            self.states.pool.unpin(state_slots)

    @property
    def has_pinned(self) -> bool:
        """Whether pages or slots become available when launched steps have been read."""
        is_state_pinned = self.states is not None and self.states.pool.num_pinned > 0
        return self.pool.num_pinned > 0 or is_state_pinned

    def try_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extends the page table, with a slot for the state; False if pages or quota run out."""
        states = self.sequence_states
        if states is not None and not states.try_reserve(sequence):
            return False
        missing = -(-num_tokens // self.page_size) - len(sequence.page_table)
        if missing <= 0:
            return True
        if sequence.tenant.page_share < 1.0 and self.exceeds_quota(sequence, num_tokens):
            return False
        pages = self.pool.try_allocate(missing)
        if pages is None:
            return False
        self.page_quotas.take(sequence, pages)
        sequence.page_table.extend(pages)
        return True

    def grow_behind(self, sequence: Sequence, num_tokens: int, count: int) -> int:
        """Pages and state slots for up to `count` drafts; returns for how many."""
        if count and self.sequence_states is not None:
            count = self.sequence_states.reserve_drafts(sequence, count)
        if not count or self.try_grow(sequence, num_tokens + count):
            return count
        return len(sequence.page_table) * self.page_size - num_tokens

    def exceeds_quota(self, sequence: Sequence, num_tokens: int) -> bool:
        missing = -(-num_tokens // self.page_size) - len(sequence.page_table)
        return missing > self.page_quotas.num_left(sequence.tenant)

    def _try_grow_beside(self, sequence: Sequence, prefix: Prefix) -> bool:
        source = prefix.partial_page
        if source is None or self.pool.ref_count(source):
            return self.try_grow(sequence, sequence.num_tokens)
        if not prefix.may_take_over:
            self.pool.share((source,))
            is_grown = self.try_grow(sequence, sequence.num_tokens)
            self.pool.free((source,))
            if is_grown:
                return True
        self.pool.take_over(source)
        self.page_quotas.take(sequence, (source,))
        sequence.page_table.append(source)
        return self.try_grow(sequence, sequence.num_tokens)

    def release(self, sequence: Sequence) -> None:
        """Frees the last page first (the order of eviction) and rewinds the sequence."""
        self.in_flight_prefixes.remove(sequence)
        known = self._known_pages(sequence)
        for own, page_id in zip(reversed(sequence.page_table), reversed(known), strict=True):
            self.pool.free((own,))
            if page_id != own:
                self.pool.renew(page_id)
        self.page_quotas.give_back(sequence, known)
        if self.sequence_states is not None:
            self.sequence_states.release(sequence)
        sequence.rewind()

    def _known_pages(self, sequence: Sequence) -> list[int]:
        known = list(sequence.page_table)
        if self.prefix_cache is not None:
            keys = sequence.page_keys[: sequence.num_published_pages]
            for index, page_id in enumerate(map(self.prefix_cache.page_of, keys)):
                if page_id is not None:
                    known[index] = page_id
        return known

    def take_copies(self, started: Iterable[Sequence]) -> list[PageCopy]:
        """To be made before the next step, as the source page may be reused later."""
        copies: list[PageCopy] = []
        for sequence in started:
            if sequence.page_copy is not None:
                copies.append(sequence.page_copy)
                sequence.page_copy = None
        return copies

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        self._publish_pages(sequence, num_tokens)
        if self.sequence_states is None:
            return
        for page_id, slot in self.sequence_states.publish(sequence, num_tokens):
            if self.page_store is not None and self.prefix_cache is not None:
                self.page_store.keep_state(self.prefix_cache.key_of(page_id), slot)

    def _publish_pages(self, sequence: Sequence, num_tokens: int) -> None:
        tenant = sequence.tenant
        if self.slot_prefixes is not None:
            slot = sequence.page_table[0]
            if self.slot_prefixes.publish(sequence, kv_content_of(sequence), num_tokens):
                if self.page_quotas.try_cache(tenant, slot, PageClass.PROMPT):
                    self.pool.mark_cached(slot)
                else:
                    self.slot_prefixes.forget(slot)
            return
        full = num_tokens // self.page_size
        if self.prefix_cache is None or full <= sequence.num_published_pages:
            return
        self.page_keys(sequence)
        for index in range(sequence.num_published_pages, full):
            if sequence.published_serial is None:
                break
            page_id, page_class = sequence.page_table[index], self._class_of(sequence, index)
            sequence.published_serial = self._add_to_cache(
                sequence, index, page_id, sequence.published_serial, page_class
            )
            if page_class > PageClass.GENERATED:
                self._keep(sequence.page_keys[index])
        sequence.num_published_pages = full
        self.in_flight_prefixes.remove(sequence)

    def _keep(self, key: bytes) -> None:
        assert self.prefix_cache is not None
        page_id = self.prefix_cache.page_of(key)
        if self.page_store is not None and page_id is not None:
            self.page_store.keep(key, page_id)

    def _add_to_cache(
        self, sequence: Sequence, index: int, page_id: int, serial: int, page_class: PageClass
    ) -> int | None:
        """The page's serial; None after a key collision, or with the tenant's quota in use."""
        assert self.prefix_cache is not None
        key, tenant = sequence.page_keys[index], sequence.tenant
        is_known = self.prefix_cache.page_of(key) is not None
        if not is_known and not self.page_quotas.try_cache(tenant, page_id, page_class):
            return None
        content = kv_content_of(sequence)
        own, is_taken = self.prefix_cache.publish(
            page_id, index, sequence.page_keys, content, serial
        )
        if is_taken:
            self.pool.mark_cached(page_id, page_class)
        return own

    def forget_all(self) -> None:
        """The device's pages were lost."""
        self.pool.forget_cached()

    def check_invariants(self, sequences: SequenceOf[Sequence]) -> None:
        self.pool.check_invariants()
        holds: dict[int, int] = {}
        for sequence in sequences:
            for page_id in sequence.page_table:
                holds[page_id] = holds.get(page_id, 0) + 1
        for page_id in range(self.pool.num_pages):
            expected, actual = holds.get(page_id, 0), self.pool.ref_count(page_id)
            assert expected == actual, f"page {page_id}: {expected} holders, counted {actual}"
        if self.prefix_cache is not None:
            self.prefix_cache.check_invariants()
        if self.sequence_states is not None:
            self.sequence_states.check_invariants(sequences)
        self.in_flight_prefixes.check_invariants(sequences)
        self.page_quotas.check_invariants(sequences)

    def _fork(self, source: Sequence) -> Prefix:
        num_tokens = source.num_prompt_tokens - 1
        full, rest = divmod(num_tokens, self.page_size)
        return Prefix(
            is_fork=True,
            page_ids=tuple(source.page_table[:full]),
            num_tokens=num_tokens,
            partial_page=source.page_table[full] if rest else None,
            num_cached_tokens=source.num_cached_tokens or 0,
            state_slot=None if source.state is None else source.state.for_samples,
        )

    def _class_of(self, sequence: Sequence, index: int) -> PageClass:
        num_tokens = (index + 1) * self.page_size
        if kv_content_of(sequence).is_displaced(num_tokens):
            return PageClass.SPARSE
        is_prompt = num_tokens <= sequence.num_prompt_tokens
        return PageClass.PROMPT if is_prompt else PageClass.GENERATED

    def _forget(self, page_id: int) -> None:
        self.page_quotas.forget(page_id)
        if self.sequence_states is not None:
            self.sequence_states.slots.forget_page(page_id)
        if self.prefix_cache is not None:
            self.prefix_cache.forget(page_id)
        if self.slot_prefixes is not None:
            self.slot_prefixes.forget(page_id)
