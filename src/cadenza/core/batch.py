"""One step's work: `Batch` (who gets how many tokens) and the device seam's two dataclasses.

Legend: T tokens of the step padded to its bucket · R rows = `max_num_seqs` · L logit rows =
R + `NUM_SCORE_ROWS` · U changed page-table entries · C copied pages · S page size · V vocabulary.

Knows nothing of any array library but numpy. Invariant: padding is told by counts and by -1 in
`slot_mapping` and `logit_indices`, never by a token's value.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cadenza.core.sequence import Sequence

Int32Array = npt.NDArray[np.int32]
UInt32Array = npt.NDArray[np.uint32]
Float32Array = npt.NDArray[np.float32]

LAST_SAMPLED = -1
"""In `token_ids`: take the row's last sampled token, which is still on the device."""

PADDING = -1

NO_TARGET = -1

NUM_SCORE_ROWS = 64
"""Logit rows of a step beside the one of each row: for log probabilities of prompts."""


NOTHING_SCORED = range(0)


@dataclass(slots=True, eq=False, kw_only=True)
class BatchEntry:
    """`num_new_tokens` of `sequence`, from position `start` on.

    `samples` is true when the entry reaches the sequence's last token, so that the step yields
    the next one. `pinned_pages` are those the step writes. The device has seen the sequence's
    page table up to `first_new_page`. `page_copy` names a page to be copied before the step, and
    where to. `scored` are the prompt's positions that the step describes. `num_preemptions` is the
    sequence's at launch: when it has grown since, the entry's KV is void though its token counts.
    """

    sequence: Sequence
    row: int
    start: int
    num_new_tokens: int
    samples: bool
    pinned_pages: list[int]
    first_new_page: int
    num_preemptions: int
    page_copy: tuple[int, int] | None = None
    scored: range = NOTHING_SCORED

    @property
    def end(self) -> int:
        return self.start + self.num_new_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """The entries of one step, sorted by row."""

    step_id: int
    entries: tuple[BatchEntry, ...]

    def __iter__(self) -> Iterator[BatchEntry]:
        return iter(self.entries)

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_new_tokens for entry in self.entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInputs:
    """How each logit row's token is chosen; data of the row, never of the batch."""

    temperature: Float32Array  # [L], 0 is greedy
    top_k: Int32Array  # [L], 0 is off
    top_p: Float32Array  # [L]
    min_p: Float32Array  # [L]
    keys: UInt32Array  # [L, 2], from (request seed, absolute position)
    num_logprobs: Int32Array  # [L], -1 is off
    has_rules: Int32Array  # [L], 1 where the row's rules (`core.token_rules`) count
    targets: Int32Array  # [L], the token to describe instead of choosing one, or NO_TARGET


@dataclass(frozen=True, slots=True)
class RuleUpdate:
    """A row's rules from this step on."""

    row: int
    record: Int32Array  # [W]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """What a runner needs for one step: flat, ragged, padded to one bucket."""

    step_id: int
    num_tokens: int
    num_logits: int
    token_ids: Int32Array  # [T], LAST_SAMPLED or an id
    positions: Int32Array  # [T]
    slot_mapping: Int32Array  # [T], page * S + offset, PADDING past num_tokens
    query_starts: Int32Array  # [R + 1]
    kv_lens: Int32Array  # [R], this step's tokens included; 0 for rows without work
    page_updates: Int32Array  # [U, 3] of (row, index in the row's page table, page)
    page_copies: Int32Array  # [C, 2] of (page, page that becomes its copy before the step)
    logit_indices: Int32Array  # [L] into T, PADDING past num_logits
    logit_rows: Int32Array  # [L]
    sampling: SamplingInputs
    rule_updates: tuple[RuleUpdate, ...] = ()

    @classmethod
    def empty(cls, *, bucket: int, num_rows: int) -> "ModelInputs":
        """A step in which nobody takes part: all padding."""
        num_logits = num_rows + NUM_SCORE_ROWS
        return cls(
            step_id=-1,
            num_tokens=0,
            num_logits=0,
            token_ids=np.zeros(bucket, np.int32),
            positions=np.zeros(bucket, np.int32),
            slot_mapping=np.full(bucket, PADDING, np.int32),
            query_starts=np.zeros(num_rows + 1, np.int32),
            kv_lens=np.zeros(num_rows, np.int32),
            page_updates=np.zeros((0, 3), np.int32),
            page_copies=np.zeros((0, 2), np.int32),
            logit_indices=np.full(num_logits, PADDING, np.int32),
            logit_rows=np.zeros(num_logits, np.int32),
            sampling=SamplingInputs(
                temperature=np.zeros(num_logits, np.float32),
                top_k=np.zeros(num_logits, np.int32),
                top_p=np.ones(num_logits, np.float32),
                min_p=np.zeros(num_logits, np.float32),
                keys=np.zeros((num_logits, 2), np.uint32),
                num_logprobs=np.full(num_logits, -1, np.int32),
                has_rules=np.zeros(num_logits, np.int32),
                targets=np.full(num_logits, NO_TARGET, np.int32),
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What a step yields, one entry for each logit row in use (N of them)."""

    token_ids: Int32Array  # [N]
    is_finite: npt.NDArray[np.bool_]  # [N], false: the row's logits held a NaN or an infinity
    has_choice: npt.NDArray[np.bool_]  # [N], false: the row's rules allow no token
    logprobs: Float32Array  # [N], of the chosen token; 0 where nobody asked
    ranks: Int32Array  # [N], 1 is the likeliest
    top_ids: Int32Array  # [N, K]
    top_logprobs: Float32Array  # [N, K]
