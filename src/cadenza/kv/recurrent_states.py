"""`RecurrentStates`: slots for sequences' states, and snapshots after pages of the prefix cache;
`SequenceStates`: which of them are kept, published and started from. Invariants: no other row reads
a slot that a step writes; a slot that a launched step reads or writes is pinned; a snapshot is
published with a page that holds the same prefix, and dropped with it."""

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from cadenza.batch.recurrent_state import (
    MAX_PROMPT_SNAPSHOTS,
    KeptState,
    SequenceState,
    StateSnapshot,
)
from cadenza.batch.sequence import Sequence
from cadenza.config import EngineLimits
from cadenza.figures import Figure
from cadenza.kv.page_pool import PageClass, PagePool
from cadenza.kv.prefix_cache import ROOT, Coming, Prefix, PrefixCache


class Placement(NamedTuple):
    """A row's state slots in a step: its start, or None for zeros; those kept; and all, pinned."""

    start: int | None
    kept: tuple[KeptState, ...]
    slots: list[int]


def snapshot_places(
    num_prompt_tokens: int, start: int, *, page_size: int, interval: int
) -> list[int]:
    """Multiples of `interval`, and the end of the last page without the last token, for equal
    prompts."""
    last = (num_prompt_tokens - 1) // page_size * page_size
    while (last - start) // interval > MAX_PROMPT_SNAPSHOTS:
        interval *= 2
    places = list(range(start // interval * interval + interval, last, interval))
    return [*places, last] if last > start else places


class RecurrentStates:
    """`num_slots` slots for `num_rows` rows and a prefix cache of `page_size`."""

    def __init__(
        self,
        num_slots: int,
        *,
        num_rows: int,
        page_size: int,
        pool_type: Callable[[int, Callable[[int], None]], PagePool] = PagePool,
    ) -> None:
        self.pool = pool_type(num_slots, self._forget)
        self.num_snapshots = self.num_hits = self.num_dropped = 0
        self._num_rows = num_rows
        self._num_open = 0
        self._page_size = page_size
        self._slot_of: dict[int, int] = {}  # by page
        self._page_of: dict[int, int] = {}

    def slot_of(self, page_id: int) -> int | None:
        return self._slot_of.get(page_id)

    def longest(self, page_ids: SequenceOf[int]) -> tuple[int, int | None]:
        """The most of a prefix's pages that end with a snapshot, and its slot."""
        for count in range(len(page_ids), 0, -1):
            slot = self._slot_of.get(page_ids[count - 1])
            if slot is not None:
                return count, slot
        return 0, None

    def try_open(self, state: SequenceState, *, from_snapshot: bool) -> bool:
        """References `state.current` and reserves a slot for the first step."""
        shared = [] if state.current is None else [state.current]
        self.pool.share(shared)
        spares = self.pool.try_allocate(1)
        if spares is None:
            self.pool.free(shared)
            return False
        state.spares += spares
        self._num_open += 1
        self.num_hits += from_snapshot
        return True

    def release(self, state: SequenceState) -> None:
        self.pool.free(state.slots())
        self._num_open -= 1

    def try_reserve(self, state: SequenceState) -> bool:
        """The state's own slot if not shared, or another; with none left, gives up its newest
        snapshot."""
        if state.spares or self._is_own(state.current):
            return True
        slots = self.pool.try_allocate(1)
        if slots is None:
            return self._try_write_over(state)
        state.spares += slots
        return True

    def reserve_drafts(self, state: SequenceState, count: int) -> int:
        """For up to `count` drafts; returns for how many."""
        most = len(state.spares) - (not self._is_own(state.current))
        while most < count and (slot := self._try_take()) is not None:
            state.spares.append(slot)
            most += 1
        return min(most, count)

    def place(self, state: SequenceState, start: int, end: int, num_drafts: int) -> Placement:
        """Sets and pins the slots of tokens [start, end), the last being drafts; may overwrite the
        sequence's own."""
        first, known = state.current, end - num_drafts
        target = first if first is not None and self._is_own(first) else state.spares.pop()
        kept = {known: target}
        for num_tokens in range(known + 1, end + 1):
            kept[num_tokens] = state.spares.pop()
        due = self._due(state, start, known, end)
        forks_at = state.forks_at
        if forks_at is not None and start < forks_at <= known and forks_at not in due:
            due.append(forks_at)
        taken = self._hold(state, sorted(due), kept)
        slots = list(kept.values()) if first is None or first == target else [*kept.values(), first]
        self.pool.pin(slots)
        self.pool.free(taken)
        if first is not None and first != target:
            self.pool.free((first,))
        self.pool.free(state.spares)
        state.spares.clear()
        state.current = None if num_drafts else target
        if num_drafts:
            state.drafted = {count: slot for count, slot in kept.items() if count >= known}
        places = tuple(KeptState(count - 1, kept[count]) for count in sorted(kept))
        return Placement(first, places, slots)

    def settle(self, state: SequenceState, num_tokens: int) -> None:
        if not state.drafted:
            return
        state.current = state.drafted.pop(num_tokens)
        self.pool.free(state.drafted.values())
        state.drafted = {}
        for count in [count for count in state.snapshots if count > num_tokens]:
            self.pool.free((state.snapshots.pop(count),))

    def keep_for_samples(self, state: SequenceState) -> None:
        if state.current is not None:
            self.pool.share((state.current,))
            state.for_samples = state.current

    def free_for_samples(self, state: SequenceState) -> None:
        state.forks_at = None
        if state.for_samples is not None:
            self.pool.free((state.for_samples,))
            state.for_samples = None

    def try_publish(self, snapshot: StateSnapshot, page_class: PageClass) -> bool:
        """A referenced slot becomes a page's snapshot; False if it has one."""
        page_id, slot = snapshot
        if page_id in self._slot_of:
            return False
        self.pool.mark_cached(slot, page_class)
        self._slot_of[page_id], self._page_of[slot] = slot, page_id
        self.num_snapshots += 1
        return True

    def roll(self, state: SequenceState, snapshot: StateSnapshot) -> None:
        """Drops the snapshot published before this one if no other took it."""
        if state.rolled is not None:
            page_id, slot = state.rolled
            is_there = self._slot_of.get(page_id) == slot and self.pool.is_reusable(slot)
            if is_there and self.pool.class_of(slot) is PageClass.GENERATED:
                self.pool.uncache(slot)
        state.rolled = snapshot

    def forget_page(self, page_id: int) -> None:
        slot = self._slot_of.get(page_id)
        if slot is not None:
            self.pool.uncache(slot)

    def check_invariants(
        self, states: SequenceOf[SequenceState], cached_pages: SequenceOf[int]
    ) -> None:
        self.pool.check_invariants()
        assert self._num_open == len(states), f"{len(states)} rows, counted {self._num_open}"
        holds: dict[int, int] = {}
        for state in states:
            for slot in state.slots():
                holds[slot] = holds.get(slot, 0) + 1
        for slot in range(self.pool.num_pages):
            expected, actual = holds.get(slot, 0), self.pool.ref_count(slot)
            assert expected == actual, f"state slot {slot}: {expected} holders, counted {actual}"
            is_snapshot = slot in self._page_of
            assert is_snapshot == self.pool.is_cached(slot), f"state slot {slot} is in two states"
        inverse = {slot: page_id for page_id, slot in self._slot_of.items()}
        assert inverse == self._page_of, "snapshots and their pages differ"
        assert set(self._slot_of) <= set(cached_pages), "a snapshot is left without its page"

    def _due(self, state: SequenceState, start: int, known: int, end: int) -> list[int]:
        passed = bisect_left(state.wanted, known + 1)
        due = [each for each in state.wanted[:passed] if each > start]
        del state.wanted[:passed]
        size = self._page_size
        if state.rolls_from is not None:
            newest = known // size * size
            if newest > start and newest >= state.rolls_from and newest not in due:
                due.append(newest)
            due += range(newest + size, end + 1, size)
        return due

    def _hold(self, state: SequenceState, due: SequenceOf[int], kept: dict[int, int]) -> list[int]:
        taken: list[int] = []
        for num_tokens in due:
            slot = kept.get(num_tokens)
            if slot is None:
                slot = self._try_take()
                if slot is None:
                    continue
                kept[num_tokens] = slot
                taken.append(slot)
            if num_tokens == state.forks_at:
                self.pool.share((slot,))
                state.for_samples = slot
            if state.rolls_from is not None and num_tokens % self._page_size == 0:
                self.pool.share((slot,))
                state.snapshots[num_tokens] = slot
        return taken

    def _try_take(self) -> int | None:
        """That a row can do without: those that may start need two each."""
        if self.pool.num_available <= 2 * (self._num_rows - self._num_open):
            return None
        slots = self.pool.try_allocate(1)
        return None if slots is None else slots[0]

    def _is_own(self, slot: int | None) -> bool:
        return slot is not None and self.pool.is_own(slot)

    def _try_write_over(self, state: SequenceState) -> bool:
        slot = state.current
        if slot is None:
            return False
        for num_tokens in [each for each, own in state.snapshots.items() if own == slot]:
            self.pool.free((state.snapshots.pop(num_tokens),))
        if state.for_samples == slot:
            self.free_for_samples(state)
        if self.pool.ref_count(slot) > 1:
            return False
        if self.pool.is_cached(slot):
            self.pool.uncache(slot)
        return True

    def _forget(self, slot: int) -> None:
        del self._slot_of[self._page_of.pop(slot)]
        self.num_dropped += 1


STATE_FIGURES: tuple[Figure[RecurrentStates], ...] = (
    Figure(
        "state_slots",
        "Slots of recurrent states by their state; cached ones are snapshots.",
        lambda states: states.pool.counts().by_state,
        ("state",),
        type="gauge",
    ),
    Figure(
        "state_snapshots",
        "Snapshots of recurrent states made.",
        lambda states: states.num_snapshots,
    ),
    Figure(
        "state_snapshot_hits",
        "Sequences that started from a snapshot of a recurrent state.",
        lambda states: states.num_hits,
    ),
    Figure(
        "state_snapshots_dropped",
        "Snapshots that made room for others, or whose page did.",
        lambda states: states.num_dropped,
    ),
)


class SequenceStates:
    """`prefix_cache` is None where prefixes are not shared."""

    def __init__(
        self,
        limits: EngineLimits,
        prefix_cache: PrefixCache | None,
        pool_type: Callable[[int, Callable[[int], None]], PagePool] = PagePool,
    ) -> None:
        size = self._page_size = limits.page_size
        self.slots = RecurrentStates(
            limits.num_state_slots,
            num_rows=limits.max_num_seqs,
            page_size=size,
            pool_type=pool_type,
        )
        self._prefix_cache = prefix_cache
        self._interval = -(-limits.state_snapshot_interval // size) * size

    def prefix_of(self, page_ids: tuple[int, ...]) -> Prefix:
        """The longest prefix of cached pages that ends with a snapshot."""
        assert self._prefix_cache is not None
        count, slot = self.slots.longest(page_ids)
        found = page_ids[:count]
        return Prefix(
            page_ids=found,
            num_tokens=count * self._page_size,
            num_published=count,
            serial=self._prefix_cache.serial_of(found[-1]) if found else ROOT,
            num_cached_tokens=count * self._page_size,
            state_slot=slot,
            num_matched=len(page_ids),
        )

    def is_saving(self, prefix: Prefix, num_shared: int, coming: Coming) -> bool:
        """Whether waiting for another sequence's first `num_shared` tokens gives a snapshot that
        saves work after `prefix`; asks for one where the two differ."""
        state = coming.sequence.state
        assert state is not None, "a running sequence has a state"
        return state.ask_for(num_shared, coming.sequence.num_computed_tokens) > prefix.num_tokens

    def try_open(self, sequence: Sequence, prefix: Prefix) -> bool:
        state = SequenceState(current=prefix.state_slot)
        num_prompt_tokens = sequence.num_prompt_tokens
        if self._prefix_cache is not None:
            state.rolls_from = num_prompt_tokens
            state.wanted = snapshot_places(
                num_prompt_tokens,
                prefix.num_tokens,
                page_size=self._page_size,
                interval=self._interval,
            )
            if prefix.num_matched > prefix.num_published:
                num_matched = prefix.num_matched * self._page_size
                state.ask_for(num_matched, prefix.num_tokens)
                if self._prefix_cache.goes_on(sequence.page_keys[prefix.num_matched - 1]):
                    state.parts_at = num_matched
        if sequence.is_fresh and len(sequence.siblings) > 1:
            state.forks_at = num_prompt_tokens - 1
        is_snapshot = prefix.num_published > 0
        if not self.slots.try_open(state, from_snapshot=is_snapshot):
            return False
        if state.forks_at == prefix.num_tokens:
            self.slots.keep_for_samples(state)
        sequence.state = state
        return True

    def mark_found(self, sequence: Sequence, prefix: Prefix) -> None:
        if prefix.num_published and prefix.state_slot is not None:
            self.slots.pool.mark_found((prefix.state_slot,))
            if _state_of(sequence).wanted:
                self.slots.pool.mark_passed(prefix.state_slot)

    def try_reserve(self, sequence: Sequence) -> bool:
        return self.slots.try_reserve(_state_of(sequence))

    def reserve_drafts(self, sequence: Sequence, count: int) -> int:
        return self.slots.reserve_drafts(_state_of(sequence), count)

    def place(self, sequence: Sequence, start: int, end: int, num_drafts: int) -> Placement:
        return self.slots.place(_state_of(sequence), start, end, num_drafts)

    def settle(self, sequence: Sequence) -> None:
        self.slots.settle(_state_of(sequence), sequence.num_computed_tokens)

    def release(self, sequence: Sequence) -> None:
        if sequence.state is not None:
            self.slots.release(sequence.state)

    def publish(self, sequence: Sequence, num_tokens: int) -> list[StateSnapshot]:
        """Snapshots the states after cached pages; returns new ones of prompts."""
        state, published = _state_of(sequence), list[StateSnapshot]()
        if state.forks_at is not None and not sequence.awaits_fork:
            self.slots.free_for_samples(state)
        for count in sorted(each for each in state.snapshots if each <= num_tokens):
            slot = state.snapshots.pop(count)
            page_id = self._page_of(sequence, count)
            is_prompt = count <= sequence.num_prompt_tokens
            if page_id is not None:
                snapshot = StateSnapshot(page_id, slot)
                page_class = PageClass.PROMPT if is_prompt else PageClass.GENERATED
                if count == state.parts_at:
                    page_class = PageClass.SHARED
                is_new = self.slots.try_publish(snapshot, page_class)
                if is_new and is_prompt:
                    published.append(snapshot)
                elif is_new:
                    self.slots.roll(state, snapshot)
            self.slots.pool.free((slot,))
        return published

    def install(self, page_id: int, write: Callable[[int], bool]) -> bool:
        """A snapshot after a cached page from a store; False if there is one, no slot is free, or
        `write`, which fills the slot given, cannot."""
        if self.slots.slot_of(page_id) is not None:
            return False
        taken = self.slots.pool.try_allocate(1)
        if taken is None:
            return False
        is_added = write(taken[0])
        if is_added:
            self.slots.try_publish(StateSnapshot(page_id, taken[0]), PageClass.PROMPT)
        self.slots.pool.free(taken)
        return is_added

    def check_invariants(self, sequences: SequenceOf[Sequence]) -> None:
        states = [each.state for each in sequences if each.state is not None]
        assert len(states) == len(sequences), "a running sequence has no state"
        cached = [] if self._prefix_cache is None else self._prefix_cache.page_ids
        self.slots.check_invariants(states, cached)

    def _page_of(self, sequence: Sequence, num_tokens: int) -> int | None:
        assert self._prefix_cache is not None, "snapshots are made for a prefix cache only"
        if sequence.published_serial is None:
            return None
        return self._prefix_cache.page_of(sequence.page_keys[num_tokens // self._page_size - 1])


def _state_of(sequence: Sequence) -> SequenceState:
    assert sequence.state is not None, "a sequence without a row has no state"
    return sequence.state
