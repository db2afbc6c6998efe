"""`Packer`: a `Batch` of sequences becomes the flat, padded arrays of `ModelInputs`.

Legend as in `core.step_schema`. Knows no device. Invariant: what it writes grows with the step's
tokens and its new pages, never with `max_model_len`.
"""

import numpy as np

from cadenza.core.batch import Batch, BatchEntry
from cadenza.core.draw_keys import draw_keys
from cadenza.core.sequence import Sequence
from cadenza.core.step_schema import (
    LAST_SAMPLED,
    NO_TARGET,
    Int32Array,
    ModelInputs,
    RowSettings,
    RuleUpdate,
    StepLayout,
)
from cadenza.core.token_rules import RuleLayout


class Packer:
    """Packs batches of up to `max_num_seqs` rows over pages of `page_size` tokens.

    What a row keeps is written once, when a sequence takes the row, and gathered by step.
    """

    def __init__(self, *, max_num_seqs: int, page_size: int, vocab_size: int) -> None:
        self._num_rows = max_num_seqs
        self._page_size = page_size
        self._occupant: list[Sequence | None] = [None] * max_num_seqs
        self._settings = RowSettings(max_num_seqs)
        self._seeds = np.zeros(max_num_seqs, np.uint64)
        self._rule_layout = RuleLayout(vocab_size)
        self._empty: dict[int, Int32Array] = {}

    def forget_rows(self) -> None:
        """The device lost its state: every row's data is sent again."""
        self._occupant = [None] * self._num_rows

    def pack(self, batch: Batch, bucket: int) -> ModelInputs:
        """Inputs of `batch`, padded to `bucket` tokens."""
        rule_updates = self._seat(batch)
        layout = StepLayout(bucket, self._num_rows)
        if bucket not in self._empty:
            self._empty[bucket] = layout.empty_words()
        words = self._empty[bucket].copy()
        inputs = ModelInputs(
            step_id=batch.step_id,
            words=words,
            groups=layout.views(words),
            page_updates=_page_updates(batch),
            page_copies=_page_copies(batch),
            rule_updates=rule_updates,
        )
        self._write_tokens(inputs, batch)
        self._write_rows(inputs, batch)
        self._write_logits(inputs, batch)
        return inputs

    def _write_tokens(self, inputs: ModelInputs, batch: Batch) -> None:
        size = self._page_size
        ids: list[int] = []
        positions: list[int] = []
        pages: list[int] = []
        for entry in batch.entries:
            known, table = entry.sequence.token_ids, entry.sequence.page_table
            start, end = entry.start, entry.end
            if end - start == 1:
                ids.append(known[start] if start < len(known) else LAST_SAMPLED)
                positions.append(start)
                pages.append(table[start // size])
                continue
            ids += known[start:end]
            if end > len(known):
                ids.append(LAST_SAMPLED)
            positions += range(start, end)
            pages += [table[position // size] for position in range(start, end)]
        count = len(ids)
        tokens = inputs.tokens
        assert count <= len(tokens.ids), f"{count} tokens do not fit a bucket of {len(tokens.ids)}"
        inputs.groups.counts.num_tokens[0] = count
        tokens.ids[:count] = ids
        tokens.positions[:count] = positions
        tokens.slots[:count] = np.array(pages, np.int32) * size + tokens.positions[:count] % size

    def _write_rows(self, inputs: ModelInputs, batch: Batch) -> None:
        rows = [entry.row for entry in batch.entries]
        inputs.rows.kv_lens[rows] = [entry.end for entry in batch.entries]
        new_lens = np.zeros(self._num_rows, np.int32)
        new_lens[rows] = [entry.num_new_tokens for entry in batch.entries]
        np.cumsum(new_lens, out=inputs.rows.query_starts[1:])

    def _write_logits(self, inputs: ModelInputs, batch: Batch) -> None:
        """A logit row for each position that an entry describes, then for each that it chooses."""
        logits = inputs.logits
        positions: list[int] = []
        counts: list[int] = []
        for entry in batch.entries:
            first = len(positions)
            if entry.prompt_logprobs:
                positions += entry.prompt_logprobs
                _write_prompt_logprobs(inputs, slice(first, len(positions)), entry)
            positions += entry.choices
            counts.append(len(positions) - first)
        count = len(positions)
        entry_rows = [entry.row for entry in batch.entries]
        rows = np.repeat(np.array(entry_rows, np.intp), counts)
        # A position's logits are those of the token before it.
        starts = np.array([entry.start for entry in batch.entries], np.int32)
        offsets = inputs.rows.query_starts[entry_rows] - starts - 1
        inputs.groups.counts.num_logits[0] = count
        logits.rows[:count] = rows
        logits.positions[:count] = positions
        logits.token_indices[:count] = logits.positions[:count] + np.repeat(offsets, counts)
        logits.keys[:count] = draw_keys(self._seeds[rows], logits.positions[:count])
        choices = np.flatnonzero(logits.targets[:count] == NO_TARGET)
        self._settings.write(inputs, choices, rows[choices])

    def _seat(self, batch: Batch) -> tuple[RuleUpdate, ...]:
        """Takes the data of rows that changed hands; the rules that the device has to learn."""
        updates: list[RuleUpdate] = []
        for entry in batch.entries:
            row, sequence = entry.row, entry.sequence
            if self._occupant[row] is sequence:
                continue
            self._occupant[row] = sequence
            self._settings.seat(row, sequence)
            self._seeds[row] = sequence.seed
            record = self._rule_layout.encode(sequence)
            if record is not None:
                updates.append(RuleUpdate(row, record))
        return tuple(updates)


def _write_prompt_logprobs(inputs: ModelInputs, places: slice, entry: BatchEntry) -> None:
    """Logit rows that describe tokens of a prompt; nothing is chosen by a request's settings."""
    positions, sequence = entry.prompt_logprobs, entry.sequence
    inputs.logits.targets[places] = sequence.token_ids[positions.start : positions.stop]
    inputs.logits.num_logprobs[places] = sequence.params.prompt_logprobs


def _page_updates(batch: Batch) -> Int32Array:
    """[U, 3]: page-table entries the device has not seen."""
    updates = [
        (entry.row, index, entry.sequence.page_table[index])
        for entry in batch.entries
        if entry.first_new_page < len(entry.sequence.page_table)
        for index in range(entry.first_new_page, len(entry.sequence.page_table))
    ]
    return np.array(updates, np.int32).reshape(-1, 3)


def _page_copies(batch: Batch) -> Int32Array:
    """[C, 2]: pages that are copied before the step."""
    copies = [entry.page_copy for entry in batch.entries if entry.page_copy is not None]
    return np.array(copies, np.int32).reshape(-1, 2)
