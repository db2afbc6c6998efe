"""`SequenceState`: the slots of one sequence's recurrent state, and the snapshots that it wants."""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_PROMPT_SNAPSHOTS = 8
"""Snapshots at regular places of one prompt: a longer one has them further apart."""

MAX_WANTED = 2 * MAX_PROMPT_SNAPSHOTS
"""Places of one prompt where a snapshot is wanted, with those that waiting sequences ask for."""


class KeptState(NamedTuple):
    """Keeps the recurrent state after the token at `position` in a slot."""

    position: int
    slot: int


class StateSnapshot(NamedTuple):
    """The state after the last token of a page in the prefix cache."""

    page_id: int
    slot: int


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceState:
    """The recurrent state of a sequence in a row. Each slot in it is one reference.

    Args:
        current: after all computed tokens; None for zeros, and while drafts are not read.
        wanted: numbers of tokens after which a snapshot is wanted, ascending.
        rolls_from: a snapshot after the newest full page is wanted, from so many tokens on; None
            if it is not.
        forks_at: the number of tokens after which its samples start; None if there are no others.
        parts_at: the number of tokens after which another prompt went on; None if none did.
        spares: allocated for the next step.
        snapshots: by number of tokens, until they are published or given up.
        drafted: by number of tokens, after each token of a step with drafts that is not read.
        for_samples: after `forks_at` tokens.
        rolled: the newest published snapshot from `rolls_from` on; holds no reference.
    """

    current: int | None = None
    wanted: list[int] = field(default_factory=list[int])
    rolls_from: int | None = None
    forks_at: int | None = None
    parts_at: int | None = None
    spares: list[int] = field(default_factory=list[int])
    snapshots: dict[int, int] = field(default_factory=dict[int, int])
    drafted: dict[int, int] = field(default_factory=dict[int, int])
    for_samples: int | None = None
    rolled: StateSnapshot | None = None

    def slots(self) -> Iterator[int]:
        yield from self.spares
        yield from self.snapshots.values()
        yield from self.drafted.values()
        for slot in (self.current, self.for_samples):
            if slot is not None:
                yield slot

    def ask_for(self, num_tokens: int, num_computed: int) -> int:
        """Asks for a snapshot; returns after how many tokens, at most these, there will be one, or
        0."""
        is_new = num_tokens > num_computed and num_tokens not in self.wanted
        if is_new and len(self.wanted) < MAX_WANTED:
            insort(self.wanted, num_tokens)
        coming = (*self.snapshots, *self.wanted)
        return max((each for each in coming if each <= num_tokens), default=0)
