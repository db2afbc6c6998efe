"""`Batch`: who gets how many tokens in one step, and which logits the step needs of each.

Knows no arrays: `core.step_schema` has what a batch becomes. Invariant: what an entry describes and
chooses are positions of its own sequence, in rising order.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from cadenza.core.sequence import Sequence
from cadenza.request import Started

NO_POSITIONS = range(0)


@dataclass(slots=True, eq=False, kw_only=True)
class BatchEntry:
    """`num_new_tokens` of `sequence`, from position `start` on.

    The step describes the prompt's tokens at the positions `scored` and chooses those at the
    positions `choices`, each from the logits of the position before; it has a logit row for each,
    in that order. `choices` is empty where the entry does not reach the sequence's last token.
    `pinned_pages` are those the step writes. The device has seen the sequence's page table up to
    `first_new_page`. `page_copy` names a page to be copied before the step, and where to.
    `num_preemptions` is the sequence's at launch: when it has grown since, the entry's KV is void
    though its token counts.
    """

    sequence: Sequence
    row: int
    start: int
    num_new_tokens: int
    choices: range
    pinned_pages: list[int]
    first_new_page: int
    num_preemptions: int
    page_copy: tuple[int, int] | None = None
    scored: range = NO_POSITIONS

    @property
    def end(self) -> int:
        return self.start + self.num_new_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """The entries of one step, sorted by row; `started` are requests whose first row is in it."""

    step_id: int
    entries: tuple[BatchEntry, ...]
    started: tuple[Started, ...] = ()

    def __iter__(self) -> Iterator[BatchEntry]:
        return iter(self.entries)

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_new_tokens for entry in self.entries)
