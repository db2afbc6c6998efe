"""`pack()`: a `Batch` of sequences becomes the flat, padded arrays of `ModelInputs`.

Legend as in `core.batch`. Knows no device. Invariant: what it writes grows with the step's tokens
and its new pages, never with `max_model_len`.
"""

import numpy as np

from cadenza.core.batch import (
    LAST_SAMPLED,
    NO_TARGET,
    NUM_SCORE_ROWS,
    PADDING,
    Batch,
    Int32Array,
    ModelInputs,
    RuleUpdate,
    SamplingInputs,
)
from cadenza.core.randomness import draw_keys
from cadenza.core.sequence import Sequence
from cadenza.core.token_rules import RuleLayout


class Packer:
    """Packs batches of up to `max_num_seqs` rows over pages of `page_size` tokens.

    Each row's sampling data is written once, when a sequence takes the row, and gathered by step.
    """

    def __init__(self, *, max_num_seqs: int, page_size: int, vocab_size: int) -> None:
        self._num_rows = max_num_seqs
        self._page_size = page_size
        self._occupant: list[Sequence | None] = [None] * max_num_seqs
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int32)
        self._top_p = np.ones(max_num_seqs, np.float32)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._seed = np.zeros(max_num_seqs, np.uint64)
        self._num_logprobs = np.full(max_num_seqs, -1, np.int32)
        self._num_scores = np.zeros(max_num_seqs, np.int32)
        self._has_rules = np.zeros(max_num_seqs, np.int32)
        self._rule_layout = RuleLayout(vocab_size)

    def forget_rows(self) -> None:
        """The device lost its state: every row's data is sent again."""
        self._occupant = [None] * self._num_rows

    def pack(self, batch: Batch, bucket: int) -> ModelInputs:
        """Inputs of `batch`, padded to `bucket` tokens."""
        num_tokens = batch.num_tokens
        assert num_tokens <= bucket, f"{num_tokens} tokens do not fit a bucket of {bucket}"
        kv_lens = np.zeros(self._num_rows, np.int32)  # [R]
        new_lens = np.zeros(self._num_rows + 1, np.int32)
        rows = [entry.row for entry in batch.entries]
        kv_lens[rows] = [entry.end for entry in batch.entries]
        new_lens[1:][rows] = [entry.num_new_tokens for entry in batch.entries]
        positions, slots = self._places(batch, bucket)
        rule_updates = self._seat(batch)
        logits = self._logits(batch)
        return ModelInputs(
            step_id=batch.step_id,
            num_tokens=num_tokens,
            num_logits=logits.count,
            token_ids=self._token_ids(batch, bucket),
            positions=positions,
            slot_mapping=slots,
            query_starts=np.cumsum(new_lens, dtype=np.int32),
            kv_lens=kv_lens,
            page_updates=_page_updates(batch),
            page_copies=_page_copies(batch),
            logit_indices=logits.indices,
            logit_rows=logits.rows,
            sampling=self._sampling(logits, kv_lens),
            rule_updates=rule_updates,
        )

    def _token_ids(self, batch: Batch, bucket: int) -> Int32Array:
        token_ids: list[int] = []
        for entry in batch.entries:
            known = entry.sequence.token_ids
            token_ids += known[entry.start : entry.end]
            if entry.end > len(known):
                token_ids.append(LAST_SAMPLED)
        padded = np.zeros(bucket, np.int32)  # [T]
        padded[: len(token_ids)] = token_ids
        return padded

    def _places(self, batch: Batch, bucket: int) -> tuple[Int32Array, Int32Array]:
        """Positions [T] and slots [T]."""
        size = self._page_size
        positions = np.zeros(bucket, np.int32)
        slots = np.full(bucket, PADDING, np.int32)
        position_list: list[int] = []
        page_list: list[int] = []
        for entry in batch.entries:
            table = entry.sequence.page_table
            start = entry.start
            if entry.num_new_tokens == 1:
                position_list.append(start)
                page_list.append(table[start // size])
                continue
            for position in range(start, entry.end):
                position_list.append(position)
                page_list.append(table[position // size])
        count = len(position_list)
        positions[:count] = position_list
        slots[:count] = np.array(page_list, np.int32) * size + positions[:count] % size
        return positions, slots

    def _logits(self, batch: Batch) -> "_LogitRows":
        """Which logits the step needs: of each entry those that describe its prompt, then the one
        that the next token is chosen from.
        """
        logits = _LogitRows(self._num_rows + NUM_SCORE_ROWS)
        begin = 0
        for entry in batch.entries:
            for position in entry.scored:
                target = entry.sequence.token_ids[position]
                logits.add(begin + position - 1 - entry.start, entry.row, target)
            begin += entry.num_new_tokens
            if entry.samples:
                logits.add(begin - 1, entry.row, NO_TARGET)
        return logits

    def _seat(self, batch: Batch) -> tuple[RuleUpdate, ...]:
        """Notes the data of rows that changed hands; the rules that the device has to learn."""
        updates: list[RuleUpdate] = []
        for entry in batch.entries:
            row, sequence = entry.row, entry.sequence
            if self._occupant[row] is sequence:
                continue
            self._occupant[row] = sequence
            self._set_row(row, sequence)
            record = self._rule_layout.encode(sequence)
            self._has_rules[row] = record is not None
            if record is not None:
                updates.append(RuleUpdate(row, record))
        return tuple(updates)

    def _sampling(self, logits: "_LogitRows", kv_lens: Int32Array) -> SamplingInputs:
        rows, is_score = logits.rows, logits.targets != NO_TARGET
        return SamplingInputs(
            temperature=np.where(is_score, np.float32(0), self._temperature[rows]),
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            keys=draw_keys(self._seed[rows], kv_lens[rows]),
            num_logprobs=np.where(is_score, self._num_scores[rows], self._num_logprobs[rows]),
            has_rules=np.where(is_score, np.int32(0), self._has_rules[rows]),
            targets=logits.targets,
        )

    def _set_row(self, row: int, sequence: Sequence) -> None:
        params = sequence.request.params
        self._seed[row] = sequence.seed
        self._temperature[row] = 0.0 if params.is_greedy else params.temperature
        self._top_k[row] = min(max(params.top_k, 0), np.iinfo(np.int32).max)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self._num_scores[row] = params.prompt_logprobs or 0


class _LogitRows:
    """Logit rows as they are found, in arrays of the step's size."""

    def __init__(self, size: int) -> None:
        self.count = 0
        self.indices = np.full(size, PADDING, np.int32)  # [L]
        self.rows = np.zeros(size, np.int32)  # [L]
        self.targets = np.full(size, NO_TARGET, np.int32)  # [L]

    def add(self, index: int, row: int, target: int) -> None:
        self.indices[self.count] = index
        self.rows[self.count] = row
        self.targets[self.count] = target
        self.count += 1


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
