"""`Batch`: the sequences of one step, how many tokens each computes, and which logits it needs.

Knows no arrays: `core.packing` turns a batch into those of `core.step_schema`. Invariant: an
entry's logit positions are of its own sequence, in rising order.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from cadenza.core.sequence import PageCopy, Sequence
from cadenza.request import Started

NO_POSITIONS = range(0)


@dataclass(slots=True, eq=False)
class BatchEntry:
    """`num_new_tokens` of `sequence`, from position `start` on.

    The step computes log probabilities of the prompt tokens at the positions `prompt_logprobs` and
    samples `num_choices` tokens, each from the logits of the position before: none when the entry
    ends before the sequence's last token. `num_preemptions` is the sequence's at launch: if it has
    grown when the step is read, the entry's KV is gone, and its token is still valid.
    """

    sequence: Sequence
    row: int
    start: int
    num_new_tokens: int
    num_choices: int
    num_preemptions: int
    prompt_logprobs: range = NO_POSITIONS

    @property
    def end(self) -> int:
        return self.start + self.num_new_tokens


class PageUpdate(NamedTuple):
    """An entry of a row's page table."""

    row: int
    table_index: int
    page_id: int


@dataclass(slots=True, eq=False)
class Batch:
    """One step. The scheduler fills it; nothing changes it once it is launched.

    Its logit rows are those for prompt log probabilities, then those for choices, each by entry.

    Args:
        entries: sorted by row.
        started: requests that got their first row.
        written_pages: pages that the step writes, pinned until it is read.
        page_updates: page-table entries that the device does not have yet.
        page_copies: copied before the step.
    """

    step_id: int
    entries: list[BatchEntry] = field(default_factory=list[BatchEntry])
    started: list[Started] = field(default_factory=list[Started])
    written_pages: list[int] = field(default_factory=list[int])
    page_updates: list[PageUpdate] = field(default_factory=list[PageUpdate])
    page_copies: list[PageCopy] = field(default_factory=list[PageCopy])
    num_tokens: int = 0
    num_prompt_logprobs: int = 0
