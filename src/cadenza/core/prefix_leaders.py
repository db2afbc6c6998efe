"""`PrefixLeaders`: which running sequence computes a page that others may soon share.

Owns the index from the keys of pages that are being computed to the sequences that compute them.
Knows no pages. Invariant: a sequence leads from its start until it publishes or loses its pages,
so that nobody waits for a page that will not come.
"""

from collections.abc import Sequence as SequenceOf

from cadenza.core.sequence import Sequence

PATIENCE = 2
"""A sequence waits for a leader that computes at most this many times the tokens to be shared."""


class PrefixLeaders:
    """Keys of one prefix cache. A key has one leader: the sequence that started first."""

    def __init__(self) -> None:
        self._leader_of: dict[bytes, Sequence] = {}
        self._leading: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._leader_of)

    def lead(self, sequence: Sequence, keys: SequenceOf[bytes]) -> None:
        """A sequence that starts will compute the pages of `keys`."""
        for key in keys:
            if self._leader_of.setdefault(key, sequence) is sequence:
                self._leading.add(sequence)

    def leave(self, sequence: Sequence) -> None:
        """A sequence has published its pages, or has lost them."""
        if sequence not in self._leading:
            return
        self._leading.remove(sequence)
        for key in sequence.page_keys:
            if self._leader_of.get(key) is sequence:
                del self._leader_of[key]

    def is_led(self, key: bytes | None) -> bool:
        return key in self._leader_of

    def awaited_key(self, keys: SequenceOf[bytes], page_size: int) -> bytes | None:
        """The first of a waiting sequence's missing keys, if waiting for it saves work; else None.

        The leader publishes when its whole prompt is computed: it must not have much more left
        than what the two share.
        """
        leader = self._leader_of.get(keys[0]) if keys else None
        if leader is None:
            return None
        num_shared = 0
        for key in keys:
            if self._leader_of.get(key) is not leader:
                break
            num_shared += 1
        is_near = leader.num_uncomputed_tokens <= PATIENCE * num_shared * page_size
        return keys[0] if is_near else None

    def check_invariants(self, running: SequenceOf[Sequence]) -> None:
        """Raises AssertionError if a sequence leads that does not run."""
        assert self._leading == set(self._leader_of.values()), "leaders and their keys differ"
        assert self._leading <= set(running), "a sequence leads that does not run"
