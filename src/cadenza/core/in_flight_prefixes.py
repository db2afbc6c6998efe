"""`InFlightPrefixes`: which running sequence computes a page that others may soon share.

Owns the index from the keys of pages that are being computed to the sequences that compute them.
Invariant: a sequence is in it from its start until it publishes or loses its pages, so that none
waits for a page that will not come.
"""

from collections.abc import Sequence as SequenceOf
from itertools import takewhile
from typing import NamedTuple

from cadenza.core.sequence import Sequence

MAX_WAIT_RATIO = 2
"""A sequence waits for one that computes at most this many times the tokens to be shared."""


class Coming(NamedTuple):
    """A running sequence, and how many of its pages a waiting one shares and lacks."""

    sequence: Sequence
    num_pages: int


class InFlightPrefixes:
    """Keys of one prefix cache, each with the sequence that started first to compute its page."""

    def __init__(self) -> None:
        self._sequence_of: dict[bytes, Sequence] = {}
        self._computing: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._sequence_of)

    def add(self, sequence: Sequence, keys: SequenceOf[bytes]) -> None:
        """A sequence that starts will compute the pages of `keys`."""
        for key in keys:
            if self._sequence_of.setdefault(key, sequence) is sequence:
                self._computing.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A sequence has published its pages, or has lost them."""
        if sequence not in self._computing:
            return
        self._computing.remove(sequence)
        for key in sequence.page_keys:
            if self._sequence_of.get(key) is sequence:
                del self._sequence_of[key]

    def is_being_computed(self, key: bytes | None) -> bool:
        return key in self._sequence_of

    def coming(self, keys: SequenceOf[bytes], page_size: int) -> Coming | None:
        """Who computes the first pages of a waiting sequence's missing keys, if waiting for them
        saves work; else None.

        Pages are published when the whole prompt is computed: of the sequence that computes them
        there must not be much more left than what the two share.
        """
        other = self._sequence_of.get(keys[0]) if keys else None
        if other is None:
            return None
        shared = takewhile(lambda key: self._sequence_of.get(key) is other, keys)
        num_shared = sum(1 for _ in shared)
        is_near = other.num_uncomputed_tokens <= MAX_WAIT_RATIO * num_shared * page_size
        return Coming(other, num_shared) if is_near else None

    def check_invariants(self, running: SequenceOf[Sequence]) -> None:
        """Raises AssertionError if a sequence is in it that does not run."""
        assert self._computing == set(self._sequence_of.values()), "sequences and keys differ"
        assert self._computing <= set(running), "a page is awaited of a sequence that does not run"
