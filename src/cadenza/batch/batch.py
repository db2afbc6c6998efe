"""`Batch`: the sequences of one step, how many tokens each computes, and which logits it needs. Has
no arrays: `core.packing` converts a batch to those of `core.step_schema`. Invariant: an entry's
logit positions belong to its own sequence, in ascending order."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cadenza.batch.image_cost import NO_LOAD, ImageLoad
from cadenza.batch.recurrent_state import KeptState
from cadenza.batch.sequence import PageCopy, Sequence
from cadenza.batch.step_cost import StepLoad, num_keys
from cadenza.batch.step_schema import NO_SCORES, ImageCall
from cadenza.batch.whole_spans import SpanRows
from cadenza.events import Preparing, Started
from cadenza.request import Attachment

ImageKey = tuple[str, bytes]

NO_POSITIONS = range(0)


@dataclass(slots=True, eq=False)
class EncodedImage:
    """An image with `slots` [N], one for each placeholder, in order."""

    key: ImageKey
    slots: npt.NDArray[np.int32]
    is_ready: bool = False  # steps that are launched from now on may read the slots
    num_pins: int = 0  # launched steps that read or write them and have not been read
    is_dropped: bool = False  # not found any more; its slots are free once nothing pins it
    first_user: int | None = None  # the request whose tokens were the first to read them


class SeenImage(NamedTuple):
    """An image of which a step computes tokens, and its slots."""

    attachment: Attachment
    image: EncodedImage


@dataclass(slots=True, eq=False)
class BatchEntry:
    """`num_new_tokens` tokens of `sequence` from position `start`; until it is added to a batch,
    without `drafts`. It samples `num_choices` tokens: one after the sequence's last token and one
    after each draft; 0 if it ends before the last token."""

    sequence: Sequence
    row: int
    start: int
    num_new_tokens: int
    num_choices: int  # 0 if it ends before the sequence's last token
    # at launch; if it has increased by the reading, the KV is gone, the token valid
    num_preemptions: int
    drafts: tuple[int, ...] = ()
    # of a constrained sequence, one a choice; without drafts they may be left out
    masks: tuple[bytes, ...] = ()
    prompt_rows: range = NO_POSITIONS  # positions of the prompt with a logit row each
    # the slot of the recurrent state that it begins with; None: zeros
    state_start: int | None = None
    kept_states: tuple[KeptState, ...] = ()  # in ascending order
    num_accepted: int = 0  # of the drafts, once the step is applied
    images: tuple[SeenImage, ...] = ()  # of which it computes tokens
    num_scored: int = NO_SCORES  # of the prompt, scored by the last of a prompt scorer's tokens

    @property
    def end(self) -> int:
        return self.start + self.num_new_tokens

    @property
    def samples(self) -> bool:
        """Whether it reaches the sequence's last token; before its launch."""
        return self.end == self.sequence.num_tokens

    def launch(self) -> None:
        """Counts its tokens, drafts among them, as launched; what it samples is known then."""
        sequence, num_drafts = self.sequence, len(self.drafts)
        end = self.start + self.num_new_tokens
        if end == sequence.num_tokens:  # `samples`, without two calls for each row of each step
            self.num_choices = 1 + num_drafts
            sequence.num_pending_tokens += self.num_choices
        self.num_new_tokens += num_drafts
        sequence.num_computed_tokens = end = end + num_drafts
        if sequence.prompt.rows is not None:
            self.prompt_rows = sequence.prompt.rows.launch(self.start, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanStep:
    """Work items that a step computes before its tokens: `rows` of passes over [start, stop) of
    `sequence`."""

    sequence: Sequence
    row: int
    start: int
    stop: int
    rows: tuple[SpanRows, ...]
    is_first: bool
    max_rows: int
    images: tuple[SeenImage, ...] = ()


class PageUpdate(NamedTuple):
    """Sets one entry of a row's page table."""

    row: int
    table_index: int
    page_id: int


@dataclass(slots=True, eq=False)
class Batch:
    """One step, filled by the scheduler and not modified after launch. Logit rows of prompts come
    first, then those for sampling, both in entry order."""

    step_id: int
    entries: list[BatchEntry] = field(default_factory=list[BatchEntry])  # sorted by row
    # one for each request that got its first row
    started: list[Started] = field(default_factory=list[Started])
    # pages written by the step, pinned until it is read
    written_pages: list[int] = field(default_factory=list[int])
    # slots of states that the step reads or writes, pinned likewise
    state_slots: list[int] = field(default_factory=list[int])
    # page-table entries not yet on the device
    page_updates: list[PageUpdate] = field(default_factory=list[PageUpdate])
    # copies made before the step
    page_copies: list[PageCopy] = field(default_factory=list[PageCopy])
    # encoding done before its tokens, of which there may then be none
    image_calls: list[ImageCall] = field(default_factory=list[ImageCall])
    image_load: ImageLoad = NO_LOAD  # what that computes
    # the sequences that images are encoded for, and that of `span`
    quanta_for: list[Sequence] = field(default_factory=list[Sequence])
    # work items of a span, computed before its tokens, of which there may then be none
    span: SpanStep | None = None
    span_load: ImageLoad = NO_LOAD  # what these compute
    # that it reads or writes, pinned until it is read
    images: list[EncodedImage] = field(default_factory=list[EncodedImage])
    # one for each waiting request whose prompt begins to be scored, or whose next image begins to
    # be encoded
    preparing: list[Preparing] = field(default_factory=list[Preparing])
    # what the prompt scorer computes with it, as a step of its own; None for nothing
    scored: "Batch | None" = None
    num_tokens: int = 0
    num_keys: int = 0  # that its tokens attend to (`StepLoad`)
    num_choices: int = 0
    num_prompt_rows: int = 0
    # how far the sequences have got is known only when the step has been read
    has_drafts: bool = False
    # it samples tokens of constrained sequences, which their tokens so far decide
    needs_masks: bool = False
    has_pooled: bool = False  # it has a logit row of a pooled sequence
    has_states: bool = False  # its sequences have a recurrent state
    has_images: bool = False  # it computes tokens of images

    def add(self, entry: BatchEntry) -> None:
        """Adds an entry, whose numbers of tokens, choices and rows are final."""
        sequence, count, num_choices = entry.sequence, entry.num_new_tokens, entry.num_choices
        self.entries.append(entry)
        self.num_tokens += count
        self.num_keys += num_keys(entry.start, count)
        self.num_choices += num_choices
        self.num_prompt_rows += len(entry.prompt_rows)
        if entry.drafts:
            self.has_drafts = True
        if num_choices and sequence.constraint is not None:
            self.needs_masks = True
        if sequence.prompt.pool is not None:
            self.has_pooled = True
        if entry.images:
            self.has_images = True

    @property
    def has_quanta(self) -> bool:
        return bool(self.image_calls) or self.span is not None

    @property
    def has_side_work(self) -> bool:
        return self.has_quanta or self.scored is not None

    def write_pages(self, sequence: Sequence, start: int, end: int, page_size: int) -> None:
        """Writes the KV of tokens [start, end); sends pages that the device does not know."""
        table = sequence.page_table
        self.written_pages += table[start // page_size : (end - 1) // page_size + 1]
        if sequence.num_sent_pages < len(table):
            assert sequence.row is not None, "a sequence without a row computes nothing"
            self.send_pages(sequence.row, table, sequence.num_sent_pages)
            sequence.num_sent_pages = len(table)

    def send_pages(self, row: int, table: list[int], first: int) -> None:
        new = range(first, len(table))
        self.page_updates += [PageUpdate(row, index, table[index]) for index in new]

    @property
    def hidden_rows(self) -> list[int]:
        """Logit rows of pooled sequences, ascending."""
        if not self.has_pooled:
            return []
        found: list[int] = []
        stop = 0
        for num_rows in (
            [len(entry.prompt_rows) for entry in self.entries],
            [entry.num_choices for entry in self.entries],
        ):
            for entry, count in zip(self.entries, num_rows, strict=True):
                start, stop = stop, stop + count
                if entry.sequence.prompt.pool is not None:
                    found += range(start, stop)
        return found

    @property
    def load(self) -> StepLoad:
        return StepLoad(
            num_tokens=self.num_tokens,
            num_logits=self.num_choices + self.num_prompt_rows,
            num_keys=self.num_keys,
        )
