"""`Packer`: converts a `Batch` to the flat, padded arrays of `ModelInputs`; keeps per-row state
between steps. Invariant: the work per step grows with its tokens and new pages, not with
`max_model_len`. Legend as in `core.step_schema`; B entries of a batch."""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from cadenza.batch.batch import Batch, BatchEntry, SeenImage, SpanStep
from cadenza.batch.draw_keys import keys_of_mixed, mix_seeds
from cadenza.batch.sequence import Sequence
from cadenza.batch.step_schema import (
    LAST_SAMPLED,
    Int32Array,
    MaskUpdate,
    ModelInputs,
    RowSettings,
    RuleUpdate,
    SpanCall,
    StepLayout,
)
from cadenza.batch.token_rules import RuleLayout
from cadenza.config import EngineLimits
from cadenza.request import Attachment

IndexArray = npt.NDArray[np.intp]


class Packer:
    """Packs batches within `limits`; `window`: of the model's window layers, for pruned prompts."""

    def __init__(self, limits: EngineLimits, vocab_size: int, window: int | None = None) -> None:
        max_num_seqs = limits.max_num_seqs
        self._num_rows = max_num_seqs
        self._page_size = limits.page_size
        self._images = limits.images
        self._occupant: list[Sequence | None] = [None] * max_num_seqs
        self._settings = RowSettings(max_num_seqs)
        self._mixed_seeds = np.zeros(max_num_seqs, np.uint64)  # [R]
        self._prompt_lens = np.zeros(max_num_seqs, np.int32)  # [R]
        self._num_skipped = np.zeros(max_num_seqs, np.int32)  # [R]
        self._decode_starts = np.zeros(max_num_seqs, np.int32)  # [R]
        self._page_table = np.zeros((max_num_seqs, limits.max_pages_per_seq), np.int32)  # [R, P]
        self._rule_layout = RuleLayout(vocab_size)
        self._masks: list[bytes | None] = [None] * max_num_seqs
        self._empty: dict[int, Int32Array] = {}
        self._has_spans = False
        self._window = window

    def forget_rows(self) -> None:
        """Sends every row's data again: the device's state was lost."""
        self._occupant = [None] * self._num_rows

    def forget_row(self, row: int) -> None:
        self._occupant[row] = None

    def pack(self, batch: Batch, bucket: int, *, masks_follow: bool = False) -> ModelInputs:
        """Inputs of `batch`, padded to `bucket` tokens; `masks_follow` leaves its masks out."""
        assert batch.num_tokens <= bucket, f"{batch.num_tokens} tokens exceed the bucket {bucket}"
        rule_updates = self._set_rows(batch)
        layout = StepLayout(bucket, self._num_rows)
        if bucket not in self._empty:
            self._empty[bucket] = layout.empty_words()
        words = self._empty[bucket].copy()
        inputs = ModelInputs(
            step_id=batch.step_id,
            words=words,
            groups=layout.views(words),
            page_updates=np.array(batch.page_updates, np.int32).reshape(-1, 3),
            page_copies=np.array(batch.page_copies, np.int32).reshape(-1, 3),
            rule_updates=rule_updates,
            hidden_rows=np.array(batch.hidden_rows, np.int32),
            masks_follow=masks_follow,
            image_calls=tuple(batch.image_calls),
        )
        for row, index, page_id in batch.page_updates:
            self._page_table[row, index] = page_id
        rows = np.array([entry.row for entry in batch.entries], np.intp)  # [B]
        starts = np.array([entry.start for entry in batch.entries], np.int32)  # [B]
        self._write_tokens(inputs, batch, rows, starts)
        if batch.has_states:
            _write_states(inputs, batch)
        if self._has_spans:
            _write_reaches(inputs, batch)
        self._write_images(inputs, batch)
        _write_indices(inputs, batch, self._window)
        self._write_logits(inputs, batch, rows, starts)
        if batch.span is not None:
            inputs = replace(inputs, span_calls=self._span_calls(batch.step_id, batch.span))
        if batch.needs_masks and not masks_follow:
            return replace(inputs, mask_updates=self._write_masks(inputs, batch))
        return inputs

    def _span_calls(self, step_id: int, span: SpanStep) -> tuple[SpanCall, ...]:
        """Equal rows of several passes share their words."""
        packed: dict[tuple[int, int], ModelInputs] = {}
        calls: list[SpanCall] = []
        for pass_index, first, end in span.rows:
            inputs = packed.get((first, end))
            if inputs is None:
                inputs = packed[first, end] = self._pack_rows(step_id, span, first, end)
            calls.append(
                SpanCall(
                    pass_index=pass_index, first=first, words=inputs.words, groups=inputs.groups
                )
            )
        return tuple(calls)

    def _pack_rows(self, step_id: int, span: SpanStep, first: int, end: int) -> ModelInputs:
        start, count = span.start + first, end - first
        entry = BatchEntry(span.sequence, span.row, start, count, 0, 0, images=span.images)
        part = Batch(step_id)
        part.add(entry)
        layout = StepLayout(span.max_rows, self._num_rows)
        words = layout.empty_words()
        inputs = ModelInputs(step_id=step_id, words=words, groups=layout.views(words))
        self._write_tokens(inputs, part, np.array([span.row]), np.array([start], np.int32))
        inputs.rows.kv_lens[span.row] = span.stop
        _write_reaches(inputs, part)
        self._write_images(inputs, part)
        return inputs

    def _write_images(self, inputs: ModelInputs, batch: Batch) -> None:
        if self._images is not None:
            _write_images(inputs, batch, self._images.token_id)
        if self._images is None or self._images.has_rope_axes:
            _write_rope_positions(inputs, batch)

    def late_masks(self, batch: Batch) -> tuple[MaskUpdate, ...]:
        """Of a batch packed without them, once the steps before it are read; none for sequences
        that have ended or whose next token is known."""
        assert not batch.has_drafts, "drafts are tried on masks that are known"
        updates: list[MaskUpdate] = []
        for entry in batch.entries:
            sequence = entry.sequence
            is_void = sequence.is_finished or sequence.num_void_choices > 0
            if sequence.constraint is None or not entry.num_choices or is_void:
                continue
            updates += self._replace_mask(entry.row, sequence, sequence.constraint.allowed())
        return tuple(updates)

    def _write_tokens(
        self, inputs: ModelInputs, batch: Batch, rows: IndexArray, starts: Int32Array
    ) -> None:
        tokens, count, size = inputs.tokens, batch.num_tokens, self._page_size
        lengths = np.array([entry.num_new_tokens for entry in batch.entries], np.int32)  # [B]
        query_ends = inputs.rows.query_starts[1:]
        query_ends[rows] = lengths
        np.cumsum(query_ends, out=query_ends)
        inputs.rows.kv_lens[rows] = starts + lengths
        inputs.groups.counts.num_tokens[0] = count
        tokens.ids[:count] = _token_ids(batch)
        positions = _count_up(starts, lengths, count)
        pages = self._page_table[np.repeat(rows, lengths), positions // size]
        tokens.positions[:count] = positions
        tokens.slots[:count] = pages * size + positions % size
        inputs.rows.prompt_lens[rows] = self._prompt_lens[rows]
        inputs.rows.decode_starts[rows] = self._decode_starts[rows]
        inputs.rows.score_lens[rows] = [entry.num_scored for entry in batch.entries]

    def _write_logits(
        self, inputs: ModelInputs, batch: Batch, rows: IndexArray, starts: Int32Array
    ) -> None:
        logits, first = inputs.logits, batch.num_prompt_rows
        if first:
            _write_prompt_rows(inputs, batch)
        num_choices = np.array([entry.num_choices for entry in batch.entries], np.int32)  # [B]
        choice_rows = np.repeat(rows, num_choices)
        count = first + len(choice_rows)
        ends = inputs.rows.kv_lens[rows]
        inputs.groups.counts.num_logits[0] = count
        logits.rows[first:count] = choice_rows
        logits.positions[first:count] = _count_up(
            ends + 1 - num_choices, num_choices, count - first
        )
        logit_rows = logits.rows[:count]
        # The logits for a position come from the token before it.
        offsets = np.zeros(self._num_rows, np.int32)
        offsets[rows] = inputs.rows.query_starts[rows] - starts - 1
        logits.token_indices[:count] = logits.positions[:count] + offsets[logit_rows]
        indices = logits.positions[:count] + self._num_skipped[logit_rows]
        logits.keys[:count] = keys_of_mixed(self._mixed_seeds[logit_rows], indices)
        self._settings.write(inputs, slice(first, count), choice_rows)

    def _set_rows(self, batch: Batch) -> tuple[RuleUpdate, ...]:
        updates: list[RuleUpdate] = []
        for entry in batch.entries:
            row, sequence = entry.row, entry.sequence
            if self._occupant[row] is sequence:
                continue
            self._occupant[row] = sequence
            self._settings.set_row(row, sequence)
            self._prompt_lens[row] = sequence.num_prompt_tokens
            self._num_skipped[row] = sequence.num_skipped_tokens
            self._decode_starts[row] = _decode_start(sequence)
            self._has_spans |= bool(sequence.prompt.spans)
            self._mixed_seeds[row] = mix_seeds(np.array([sequence.seed], np.uint64))[0]
            self._masks[row] = None
            record = self._rule_layout.encode(sequence)
            if record is not None:
                updates.append(RuleUpdate(row, record))
        return tuple(updates)

    def _write_masks(self, inputs: ModelInputs, batch: Batch) -> tuple[MaskUpdate, ...]:
        """Where they differ from the last: the first in the row's own record, others in records
        after the rows', named by its logit rows."""
        updates: list[MaskUpdate] = []
        index, num_records = batch.num_prompt_rows, self._num_rows
        for entry in batch.entries:
            row, sequence = entry.row, entry.sequence
            first, index = index, index + entry.num_choices
            if sequence.constraint is None or not entry.num_choices:
                continue
            masks = entry.masks or (sequence.constraint.allowed(),)
            updates += self._replace_mask(row, sequence, masks[0])
            records = {masks[0]: row}
            for logit_row, allowed in enumerate(masks[1:], first + 1):
                if allowed not in records:
                    records[allowed] = num_records
                    mask = self._mask_of(sequence, allowed)
                    updates.append(MaskUpdate(num_records, row, mask))
                    num_records += 1
                inputs.logits.rule_record[logit_row] = records[allowed]
        return tuple(updates)

    def _replace_mask(self, row: int, sequence: Sequence, allowed: bytes) -> list[MaskUpdate]:
        # A draft model with the same device state writes masks into the row's record, too.
        if sequence.drafting is None and allowed == self._masks[row]:
            return []
        self._masks[row] = allowed
        return [MaskUpdate(row, row, self._mask_of(sequence, allowed))]

    def _mask_of(self, sequence: Sequence, allowed: bytes) -> Int32Array:
        mask = self._rule_layout.read_mask(allowed)
        own = sequence.params.allowed_token_ids
        return mask if own is None else mask & self._rule_layout.mask_of(np.array(own))


def _decode_start(sequence: Sequence) -> int:
    return 0 if sequence.request.needs_prompt_rows else sequence.num_prompt_tokens - 1


def _token_ids(batch: Batch) -> list[int]:
    ids: list[int] = []
    for entry in batch.entries:
        start, known = entry.start, entry.sequence.token_ids
        if start == len(known):
            ids.append(LAST_SAMPLED)
            continue
        end = entry.end - len(entry.drafts)
        ids += known[start:end]
        if end > len(known):
            ids.append(LAST_SAMPLED)
        ids += entry.drafts
    return ids


def _count_up(starts: Int32Array, lengths: Int32Array, total: int) -> Int32Array:
    """Concatenates the ranges starts[i] … starts[i] + lengths[i] - 1: [total]."""
    firsts = np.cumsum(lengths, dtype=np.int32) - lengths
    return np.arange(total, dtype=np.int32) + np.repeat(starts - firsts, lengths)


def _write_images(inputs: ModelInputs, batch: Batch, token_id: int) -> None:
    if not batch.has_images:
        return
    for entry in batch.entries:
        offset = inputs.rows.query_starts[entry.row] - entry.start
        for seen in entry.images:
            places, slots = _placed(entry, seen, token_id)
            inputs.tokens.image_slots[offset + places] = slots


def _placed(entry: BatchEntry, seen: SeenImage, token_id: int) -> tuple[IndexArray, Int32Array]:
    span, slots = seen.attachment, seen.image.slots
    if len(slots) == span.length:
        places = np.arange(span.start, span.end)
    else:
        ids = entry.sequence.request.prompt_token_ids[span.start : span.end]
        places = span.start + np.flatnonzero(np.array(ids) == token_id)
    is_inside = (places >= entry.start) & (places < entry.end)
    return places[is_inside], slots[is_inside]


def _write_states(inputs: ModelInputs, batch: Batch) -> None:
    rows, slots = inputs.rows, inputs.tokens.state_slots
    for entry in batch.entries:
        if entry.state_start is not None:
            rows.state_starts[entry.row] = entry.state_start
        offset = rows.query_starts[entry.row] - entry.start
        for position, slot in entry.kept_states:
            slots[offset + position] = slot


def _write_reaches(inputs: ModelInputs, batch: Batch) -> None:
    for entry in batch.entries:
        offset = inputs.rows.query_starts[entry.row] - entry.start
        for start, stop in entry.sequence.prompt.spans:
            inside = slice(offset + max(start, entry.start), offset + min(stop, entry.end))
            if inside.start < inside.stop:
                inputs.tokens.reaches[inside] = stop - 1


def _write_rope_positions(inputs: ModelInputs, batch: Batch) -> None:
    for entry in batch.entries:
        attachments = entry.sequence.request.attachments
        if attachments:
            first = inputs.rows.query_starts[entry.row]
            places = slice(first, first + entry.num_new_tokens)
            found = rope_positions(attachments, entry.start, entry.end)
            inputs.tokens.rope_positions[places] = found


def _write_indices(inputs: ModelInputs, batch: Batch, window: int | None) -> None:
    for entry in batch.entries:
        kept = entry.sequence.prompt.kept
        if kept is None or not kept.num_skipped:
            continue
        first = inputs.rows.query_starts[entry.row]
        places = slice(first, first + entry.num_new_tokens)
        indices = kept.indices(entry.start, entry.end)
        inputs.tokens.rope_positions[places] = np.array(indices, np.int32)[:, None]
        if window is not None:
            starts = [kept.first_position_from(max(0, each - window + 1)) for each in indices]
            inputs.tokens.window_starts[places] = starts


def _write_prompt_rows(inputs: ModelInputs, batch: Batch) -> None:
    """Rows for log probabilities have targets; those of pooled sequences sample a token that is
    never read."""
    logits, stop = inputs.logits, 0
    for entry in batch.entries:
        positions = entry.prompt_rows
        if not positions:
            continue
        sequence, places = entry.sequence, slice(stop, stop + len(positions))
        stop = places.stop
        logits.rows[places] = entry.row
        logits.positions[places] = positions
        if sequence.prompt.pool is not None:
            continue
        logits.targets[places] = sequence.token_ids[positions.start : positions.stop]
        logits.num_logprobs[places] = sequence.params.prompt_logprobs


NUM_AXES = 3  # Time, row, column


def rope_positions(
    attachments: SequenceOf[Attachment], start: int, stop: int
) -> npt.NDArray[np.int32]:
    """[stop - start, 3] of the tokens at indices [start, stop); images without a grid count as
    text."""
    found = np.empty((stop - start, NUM_AXES), np.int32)
    shift = 0  # of positions against indices
    done = start
    for each in attachments:
        if each.start >= stop:
            break
        if not each.columns:
            continue
        end = each.start + each.length
        if done < each.start:
            found[done - start : each.start - start] = _text(done, each.start, shift)
            done = each.start
        if done < end:
            last = min(end, stop)
            found[done - start : last - start] = _image(each, done, last, shift)
            done = last
        shift += max(each.rows, each.columns) - each.length
    found[done - start :] = _text(done, stop, shift)
    return found


def _text(start: int, stop: int, shift: int) -> npt.NDArray[np.int32]:
    return np.arange(start + shift, stop + shift, dtype=np.int32)[:, None]


def _image(each: Attachment, start: int, stop: int, shift: int) -> npt.NDArray[np.int32]:
    places = np.arange(start - each.start, stop - each.start, dtype=np.int32)
    first = each.start + shift
    axes = (np.zeros_like(places), places // each.columns, places % each.columns)
    return first + np.stack(axes, axis=1)
