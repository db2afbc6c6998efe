"""`SequenceState`: the slots of one sequence's recurrent state, and the snapshots that it wants."""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

# Snapshots at regular places of one prompt: a longer one has them further apart.
MAX_PROMPT_SNAPSHOTS = 8

# Places of one prompt where a snapshot is wanted, with those that waiting sequences ask for.
MAX_WANTED = 2 * MAX_PROMPT_SNAPSHOTS


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
    """Of a sequence in a row. Each slot in it is one reference."""

    # after all computed tokens; None for zeros, and while drafts are not read
    current: int | None = None
    # numbers of tokens after which a snapshot is wanted, ascending
    wanted: list[int] = field(default_factory=list[int])
    # a snapshot after the newest full page is wanted, from so many tokens on; None if it is not
    rolls_from: int | None = None
    # the number of tokens after which its samples start; None if there are no others
    forks_at: int | None = None
    # the number of tokens after which another prompt went on; None if none did
    parts_at: int | None = None
    spares: list[int] = field(default_factory=list[int])  # allocated for the next step
    # by number of tokens, until they are published or given up
    snapshots: dict[int, int] = field(default_factory=dict[int, int])
    # by number of tokens, after each token of a step with drafts that is not read
    drafted: dict[int, int] = field(default_factory=dict[int, int])
    for_samples: int | None = None  # after `forks_at` tokens
    # the newest published snapshot from `rolls_from` on; holds no reference
    rolled: StateSnapshot | None = None

    def slots(self) -> Iterator[int]:
        yield from self.spares
        yield from self.snapshots.values()
        yield from self.drafted.values()
        for slot in (self.current, self.for_samples):
            if slot is not None:
                yield slot

    def ask_for(self, num_tokens: int, num_computed: int) -> int:
        """After how many tokens, at most these, there will be a snapshot, or 0."""
        is_new = num_tokens > num_computed and num_tokens not in self.wanted
        if is_new and len(self.wanted) < MAX_WANTED:
            insort(self.wanted, num_tokens)
        coming = (*self.snapshots, *self.wanted)
        return max((each for each in coming if each <= num_tokens), default=0)
