"""Hand-written steps: makes `ModelInputs` from streams on chosen pages and rows.

The test chooses each stream's row, pages and number of tokens in a step. Does not use `Packer` or
`Scheduler`, so that the suite does not depend on their correctness.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cadenza.backends.base import Runner
from cadenza.batch.draw_keys import draw_keys
from cadenza.batch.sequence import PageCopy
from cadenza.batch.step_schema import (
    LAST_SAMPLED,
    PADDING,
    LogitInputs,
    ModelInputs,
    StepLayout,
    StepOutput,
    specs_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The static sizes of a step: T, R and S. Streams use their first `max_pages` pages, and of a
    pool of `num_pages` their pages modulo that."""

    bucket: int
    num_rows: int
    page_size: int
    max_pages: int | None = None
    num_pages: int | None = None

    def place(self, page: int) -> int:
        return page if self.num_pages is None else page % self.num_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How a stream's tokens are chosen; greedy by default."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    num_logprobs: int = -1


@dataclass(slots=True, eq=False, kw_only=True)
class Stream:
    """One row's tokens, whose KV lies in `pages`, in that order.

    The state behind the last token of each chunk is kept in the `state_slots` by turns, if there
    are any.
    """

    row: int
    pages: list[int]
    draw: Draw = field(default_factory=Draw)
    state_slots: tuple[int, ...] = ()
    state_start: int = PADDING
    num_computed: int = 0
    num_sent_pages: int = 0
    copies: list[PageCopy] = field(default_factory=list[PageCopy])

    def chunk(self, token_ids: Iterable[int], *, samples: bool, num_choices: int = 1) -> "Chunk":
        """The next tokens of the stream; those computed so far stay what they were.

        Where it samples, a token is chosen after each of the last `num_choices` tokens.
        """
        tokens = tuple(token_ids)
        start = self.num_computed
        self.num_computed += len(tokens)
        first_new_page, self.num_sent_pages = self.num_sent_pages, len(self.pages)
        copies, self.copies = tuple(self.copies), []
        return Chunk(self, tokens, start, samples, first_new_page, copies, num_choices)

    def next_token(self) -> "Chunk":
        """One decode: the token that the device sampled last for this row."""
        return self.chunk([LAST_SAMPLED], samples=True)


@dataclass(frozen=True, slots=True)
class Chunk:
    stream: Stream
    token_ids: tuple[int, ...]
    start: int
    samples: bool
    first_new_page: int
    copies: tuple[PageCopy, ...] = ()
    num_choices: int = 1

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


def build_inputs(chunks: Iterable[Chunk], geometry: Geometry, *, step_id: int = 0) -> ModelInputs:
    """The step that computes `chunks`, at most one for each row."""
    ordered = sorted(chunks, key=lambda chunk: chunk.stream.row)
    size, bucket, rows = geometry.page_size, geometry.bucket, geometry.num_rows
    inputs = ModelInputs.empty(bucket=bucket, num_rows=rows)
    end = num_logits = 0
    updates: list[tuple[int, int, int]] = []
    lengths = np.zeros(rows, np.int32)
    for chunk in ordered:
        stream = chunk.stream
        pages = [geometry.place(page) for page in stream.pages[: geometry.max_pages]]
        begin, end = end, end + len(chunk.token_ids)
        positions = np.arange(chunk.start, chunk.end)
        inputs.tokens.ids[begin:end] = chunk.token_ids
        inputs.tokens.positions[begin:end] = positions
        inputs.tokens.slots[begin:end] = (
            np.array(pages)[positions // size] * size + positions % size
        )
        inputs.rows.kv_lens[stream.row] = chunk.end
        lengths[stream.row] = len(chunk.token_ids)
        if stream.state_slots:
            kept, *others = stream.state_slots
            inputs.rows.state_starts[stream.row] = stream.state_start
            inputs.tokens.state_slots[end - 1] = kept
            stream.state_start, stream.state_slots = kept, (*others, kept)
        for index in range(chunk.first_new_page, len(pages)):
            updates.append((stream.row, index, pages[index]))
        if chunk.samples:
            for position in range(chunk.end - chunk.num_choices + 1, chunk.end + 1):
                inputs.logits.token_indices[num_logits] = begin + position - 1 - chunk.start
                inputs.logits.rows[num_logits] = stream.row
                _set_draw(inputs.logits, num_logits, stream.draw, position)
                num_logits += 1
    inputs.rows.query_starts[1:] = np.cumsum(lengths)
    copies = [
        (geometry.place(copy.source), geometry.place(copy.destination), copy.num_tokens)
        for chunk in ordered
        for copy in chunk.copies
    ]
    inputs.groups.counts.num_tokens[0] = end
    inputs.groups.counts.num_logits[0] = num_logits
    return replace(
        inputs,
        step_id=step_id,
        page_updates=np.array(updates, np.int32).reshape(-1, 3),
        page_copies=np.array(copies, np.int32).reshape(-1, 3),
    )


def run_step(runner: Runner, chunks: Iterable[Chunk], geometry: Geometry) -> StepOutput:
    return runner.launch(build_inputs(chunks, geometry)).result()


def padding_of(inputs: ModelInputs) -> np.ndarray:
    return inputs.tokens.slots == PADDING


def copy_of(inputs: ModelInputs) -> ModelInputs:
    layout = StepLayout(len(inputs.tokens.ids), len(inputs.rows.kv_lens))
    words = inputs.words.copy()
    return replace(inputs, words=words, groups=layout.views(words))


def logit_rows(count: int, **columns: Any) -> LogitInputs[Any]:
    """`count` logit rows of rows 0, 1, …; what is not given is off."""
    given = {"token_indices": np.arange(count, dtype=np.int32), "rows": np.arange(count)} | columns
    return LogitInputs(
        **{
            spec.name: np.asarray(given[spec.name], spec.dtype)
            if spec.name in given
            else np.full((count, spec.columns)[: spec.columns], spec.fill, spec.dtype)
            for spec in specs_of(LogitInputs)
        }
    )


def _set_draw(logits: LogitInputs[Any], index: int, draw: Draw, position: int) -> None:
    logits.positions[index] = position
    logits.temperature[index] = draw.temperature
    logits.top_k[index] = draw.top_k
    logits.top_p[index] = draw.top_p
    logits.min_p[index] = draw.min_p
    logits.num_logprobs[index] = draw.num_logprobs
    seeds, positions = np.array([draw.seed], np.uint64), np.array([position], np.int32)
    logits.keys[index] = draw_keys(seeds, positions)[0]
