"""Packed batches of examples, each a pure function of split, seed and step.

Owns how examples become rows: the row length of a step, how examples are packed into
rows, and which tokens count in the loss.  A resumed run reads the same batches as an
uninterrupted one.

Shapes: B rows, T tokens of a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from training.corpus.example import Example
from training.corpus.mixture import (
    COPY_SHARES,
    LONG_SHARES,
    MIXED_SHARES,
    SHARES,
    Split,
    make_example,
    open_source,
)

TOKENS_OF_A_STEP = 4096
SHORT, MEDIUM, LONG = 256, 512, 2048
ROW_LENGTHS = (SHORT, SHORT, MEDIUM, SHORT, SHORT, SHORT, MEDIUM, LONG)
MOST_MISFITS = 12
NO_SEGMENT = 0
COPY_LENGTHS = (SHORT, SHORT, MEDIUM, MEDIUM)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Rows of examples; tokens are predicted from earlier tokens of the same segment."""

    token_ids: np.ndarray  # [B, T]
    segments: np.ndarray  # [B, T], NO_SEGMENT where a row is padded
    weights: np.ndarray  # [B, T], 1 where the token itself counts in the loss


@dataclass(frozen=True, slots=True)
class EncodedExample:
    token_ids: list[int]
    weights: list[float]


def training_batch(
    tokenizer: Tokenizer, key: object, step: int, *, copy_steps: int, long_from: int
) -> PackedBatch:
    """The batch of a training step; the first `copy_steps` steps are the copying phase."""
    if step < copy_steps:
        length = COPY_LENGTHS[step % len(COPY_LENGTHS)]
        return make_batch(tokenizer, Split.TRAIN, key, length, COPY_SHARES)
    length = row_length(step, long_from=long_from)
    shares = LONG_SHARES if length == LONG else MIXED_SHARES
    return make_batch(tokenizer, Split.TRAIN, key, length, shares)


def row_length(step: int, *, long_from: int) -> int:
    """The row length of a step; long rows occur only from step `long_from` on."""
    length = ROW_LENGTHS[step % len(ROW_LENGTHS)]
    return MEDIUM if length == LONG and step < long_from else length


def make_batch(
    tokenizer: Tokenizer,
    split: Split,
    key: object,
    length: int,
    shares: Mapping[str, float] = SHARES,
) -> PackedBatch:
    """One batch of `TOKENS_OF_A_STEP` tokens in rows of `length`."""
    num_rows = TOKENS_OF_A_STEP // length
    rows: list[list[EncodedExample]] = [[] for _ in range(num_rows)]
    room = [length] * num_rows
    used = dict.fromkeys(shares, 0)
    source = open_source(split, key, length)
    misfits = 0
    while misfits < MOST_MISFITS:
        task = min(shares, key=lambda name: (used[name] + 50 * source.rng.random()) / shares[name])
        example = encode(tokenizer, make_example(task, source, max_tokens=length - 24))
        size = len(example.token_ids)
        used[task] += size
        row = next((i for i, left in enumerate(room) if left >= size), None)
        if row is None:
            misfits += 1
            continue
        rows[row].append(example)
        room[row] -= size
    return _pack(rows, length)


def encode(tokenizer: Tokenizer, example: Example) -> EncodedExample:
    """Token ids and loss weights: 1 for tokens in a learned span, else 0."""
    encoding = tokenizer.encode(example.text)
    spans = iter(example.learned)
    start, end = next(spans)
    weights = []
    for first, last in encoding.offsets:
        while first >= end and (span := next(spans, None)) is not None:
            start, end = span
        weights.append(float(start <= first and last <= end))
    return EncodedExample(encoding.ids, weights)


def _pack(rows: list[list[EncodedExample]], length: int) -> PackedBatch:
    shape = (len(rows), length)
    batch = PackedBatch(
        token_ids=np.zeros(shape, np.int32),
        segments=np.full(shape, NO_SEGMENT, np.int32),
        weights=np.zeros(shape, np.float32),
    )
    for row, examples in enumerate(rows):
        start = 0
        for segment, example in enumerate(examples, start=1):
            end = start + len(example.token_ids)
            batch.token_ids[row, start:end] = example.token_ids
            batch.segments[row, start:end] = segment
            batch.weights[row, start + 1 : end] = example.weights[1:]
            start = end
    return batch
