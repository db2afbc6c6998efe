"""`SequenceStates`: which recurrent states of sequences are kept, published and started from.
Invariant: a snapshot is published only with a page of the prefix cache that holds the same
prefix."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from cadenza.batch.recurrent_state import SequenceState, StateSnapshot
from cadenza.batch.sequence import Sequence
from cadenza.config import EngineLimits
from cadenza.kv.page_pool import PageClass, PagePool
from cadenza.kv.prefix_cache import ROOT, Coming, Prefix, PrefixCache
from cadenza.kv.recurrent_states import Placement, RecurrentStates, snapshot_places


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
