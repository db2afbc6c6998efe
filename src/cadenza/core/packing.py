"""`pack()`: a `Batch` of sequences becomes the flat, padded arrays of `ModelInputs`.

Legend as in `core.batch`. Knows no device. Invariant: what it writes grows with the step's tokens
and its new pages, never with `max_model_len`.
"""

import numpy as np

from cadenza.core.batch import (
    LAST_SAMPLED,
    PADDING,
    Batch,
    Int32Array,
    ModelInputs,
    SamplingInputs,
)
from cadenza.core.randomness import draw_keys
from cadenza.request import SamplingParams


class Packer:
    """Packs batches of up to `max_num_seqs` rows over pages of `page_size` tokens.

    Each row's sampling data is written once, when a sequence takes the row, and gathered by step.
    """

    def __init__(self, *, max_num_seqs: int, page_size: int) -> None:
        self._num_rows = max_num_seqs
        self._page_size = page_size
        self._occupant: list[int | None] = [None] * max_num_seqs
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int32)
        self._top_p = np.ones(max_num_seqs, np.float32)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._seed = np.zeros(max_num_seqs, np.uint64)
        self._num_logprobs = np.full(max_num_seqs, -1, np.int32)

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
        logit_indices, logit_rows, num_logits = self._logits(batch)
        return ModelInputs(
            step_id=batch.step_id,
            num_tokens=num_tokens,
            num_logits=num_logits,
            token_ids=self._token_ids(batch, bucket),
            positions=positions,
            slot_mapping=slots,
            query_starts=np.cumsum(new_lens, dtype=np.int32),
            kv_lens=kv_lens,
            page_updates=_page_updates(batch),
            logit_indices=logit_indices,
            logit_rows=logit_rows,
            sampling=self._sampling(batch, logit_rows, kv_lens),
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

    def _logits(self, batch: Batch) -> tuple[Int32Array, Int32Array, int]:
        """Indices into T [L], their rows [L], and how many are in use."""
        indices = np.full(self._num_rows, PADDING, np.int32)
        rows = np.zeros(self._num_rows, np.int32)
        index_list: list[int] = []
        row_list: list[int] = []
        end = 0
        for entry in batch.entries:
            end += entry.num_new_tokens
            if entry.samples:
                index_list.append(end - 1)
                row_list.append(entry.row)
        indices[: len(index_list)] = index_list
        rows[: len(row_list)] = row_list
        return indices, rows, len(index_list)

    def _sampling(
        self, batch: Batch, logit_rows: Int32Array, kv_lens: Int32Array
    ) -> SamplingInputs:
        for entry in batch.entries:
            if self._occupant[entry.row] != entry.sequence.request_id:
                self._occupant[entry.row] = entry.sequence.request_id
                self._seed[entry.row] = entry.sequence.seed
                self._set_row(entry.row, entry.sequence.request.params)
        return SamplingInputs(
            temperature=self._temperature[logit_rows],
            top_k=self._top_k[logit_rows],
            top_p=self._top_p[logit_rows],
            min_p=self._min_p[logit_rows],
            keys=draw_keys(self._seed[logit_rows], kv_lens[logit_rows]),
            num_logprobs=self._num_logprobs[logit_rows],
        )

    def _set_row(self, row: int, params: SamplingParams) -> None:
        self._temperature[row] = 0.0 if params.is_greedy else params.temperature
        self._top_k[row] = min(max(params.top_k, 0), np.iinfo(np.int32).max)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._num_logprobs[row] = -1 if params.logprobs is None else params.logprobs


def _page_updates(batch: Batch) -> Int32Array:
    """[U, 3]: page-table entries the device has not seen."""
    updates = [
        (entry.row, index, entry.sequence.page_table[index])
        for entry in batch.entries
        if entry.first_new_page < len(entry.sequence.page_table)
        for index in range(entry.first_new_page, len(entry.sequence.page_table))
    ]
    return np.array(updates, np.int32).reshape(-1, 3)
