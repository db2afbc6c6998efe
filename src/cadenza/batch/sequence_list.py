"""`SequenceList`: sequences in an order, of which any one leaves without a search through all. Owns
the order; does not know what it means. Invariant: each sequence is in it at most once."""

import heapq
from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from itertools import count
from typing import overload

from cadenza.batch.sequence import Sequence, SequenceStatus


class SequenceList(SequenceOf[Sequence]):
    """The scheduler's waiting, or running, sequences."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._ranks: dict[Sequence, int] = {}
        self._next_ranks, self._ranks_before = count(), count(-1, -1)

    def append(self, sequence: Sequence) -> None:
        self._ranks[sequence] = next(self._next_ranks)
        self._sequences.append(sequence)

    def appendleft(self, sequence: Sequence) -> None:
        self._ranks[sequence] = next(self._ranks_before)
        self._sequences.insert(0, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Raises KeyError if it is not there."""
        index = bisect_left(self._sequences, self._ranks[sequence], key=self._ranks.__getitem__)
        del self._sequences[index], self._ranks[sequence]

    def of_tenant(self, name: str) -> list[Sequence]:
        return [each for each in self._sequences if each.tenant.name == name]

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __contains__(self, value: object) -> bool:
        return value in self._ranks

    @overload
    def __getitem__(self, index: int) -> Sequence: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sequence]: ...

    def __getitem__(self, index: int | slice) -> Sequence | list[Sequence]:
        return self._sequences[index]


class RunningRows(SequenceList):
    """In the order of their starts, each in the lowest row that was free."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._free = list(range(num_rows))
        self._num_rows = num_rows

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def append(self, sequence: Sequence) -> None:
        sequence.row = heapq.heappop(self._free)
        sequence.status = SequenceStatus.RUNNING
        super().append(sequence)

    def remove(self, sequence: Sequence) -> None:
        assert sequence.row is not None, "a running sequence has no row"
        heapq.heappush(self._free, sequence.row)
        super().remove(sequence)

    def check_invariants(self) -> None:
        rows = [sequence.row for sequence in self if sequence.row is not None]
        assert len(rows) == len(self), "a running sequence has no row"
        assert sorted([*rows, *self._free]) == list(range(self._num_rows)), (
            "rows are lost or shared"
        )
