"""`Batch`: the sequences of one step, how many tokens each computes, and which logits it needs.

Knows no arrays: `core.packing` turns a batch into those of `core.step_schema`. Invariant: an
entry's logit positions are of its own sequence, in rising order.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from cadenza.core.sequence import Sequence
from cadenza.request import Started

NO_POSITIONS = range(0)


@dataclass(slots=True, eq=False, kw_only=True)
class BatchEntry:
    """`num_new_tokens` of `sequence`, from position `start` on.

    The step computes log probabilities of the prompt tokens at the positions `prompt_logprobs` and
    samples the tokens at the positions `choices`, each from the logits of the position before. It
    has one logit row for each, in that order. `choices` is empty when the entry ends before the
    sequence's last token. `pinned_pages` are the pages that the step writes. The device already has
    the sequence's page table up to index `first_new_page`. `page_copy` is a page to copy before the
    step, and its destination. `num_preemptions` is the sequence's at launch: if it has grown when
    the step is read, the entry's KV is gone, and its token is still valid.
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
    prompt_logprobs: range = NO_POSITIONS

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
