"""`Packer`: known answers for the flat, ragged, padded arrays of a step."""

from dataclasses import replace

import numpy as np
import pytest

from cadenza.batch.batch import Batch
from cadenza.batch.draw_keys import draw_keys
from cadenza.batch.packing import rope_positions
from cadenza.batch.recurrent_state import KeptState
from cadenza.batch.step_schema import (
    LAST_SAMPLED,
    NO_ROPE_POSITION,
    NO_RULES,
    NO_STATE,
    PADDING,
    ModelInputs,
)
from cadenza.request import Attachment, SamplingParams
from cadenza.scheduler.scheduler import Scheduler
from cadenza.scheduler.scoring import prune
from cadenza.sparse_prefill import KeptTokens, SparsePrefill
from tests.scheduler.builders import add, output_of, packer_of, scheduler_of, sequence_of

BUCKET = 24


def next_batch(scheduler: Scheduler) -> Batch:
    batch = scheduler.schedule()
    assert batch is not None
    return batch


def test_a_ragged_step_is_laid_out_row_by_row_and_padded() -> None:
    scheduler = scheduler_of(token_budget=22)
    first, second = sequence_of(0, 18), sequence_of(1, 18)
    add(scheduler, first, second)
    inputs = packer_of().pack(next_batch(scheduler), BUCKET)
    assert (inputs.step_id, inputs.num_tokens, inputs.num_logits) == (0, 22, 1)
    prompt = [*first.token_ids, *second.token_ids[:4]]
    assert inputs.tokens.ids.tolist() == [*prompt, 0, 0]
    assert inputs.tokens.positions.tolist() == [*range(18), 0, 1, 2, 3, 0, 0]
    (page_0, page_1), (page_2, page_3) = first.page_table, second.page_table
    slots = [page_0 * 16 + at for at in range(16)] + [page_1 * 16, page_1 * 16 + 1]
    slots += [page_2 * 16 + at for at in range(4)]
    assert inputs.tokens.slots.tolist() == [*slots, PADDING, PADDING]
    assert inputs.rows.query_starts.tolist() == [0, 18, 22, 22, 22]
    assert inputs.rows.kv_lens.tolist() == [18, 4, 0, 0]
    assert inputs.logits.token_indices[0] == 17
    assert set(inputs.logits.token_indices[1:].tolist()) == {PADDING}
    assert inputs.logits.rows[:1].tolist() == [0]
    updates = [[0, 0, page_0], [0, 1, page_1], [1, 0, page_2], [1, 1, page_3]]
    assert inputs.page_updates.tolist() == updates


def test_rows_without_work_are_empty_and_entries_go_by_row() -> None:
    scheduler = scheduler_of(token_budget=24)
    sequences = [sequence_of(index, 3, max_tokens=1 if index == 1 else 9) for index in range(3)]
    add(scheduler, *sequences)
    pack = packer_of().pack
    for _ in range(2):
        batch = next_batch(scheduler)
        inputs = pack(batch, BUCKET)
        scheduler.update(batch, output_of(batch))
    assert inputs.rows.query_starts.tolist() == [0, 1, 1, 2, 2]
    assert inputs.rows.kv_lens.tolist() == [4, 0, 4, 0]
    assert inputs.logits.rows[:2].tolist() == [0, 2]
    assert inputs.logits.token_indices[:2].tolist() == [0, 1]


def test_a_token_that_is_still_on_the_device_is_named_and_not_sent() -> None:
    scheduler = scheduler_of()
    sequence = sequence_of(0, 3)
    add(scheduler, sequence)
    pack = packer_of().pack
    first = next_batch(scheduler)
    pack(first, BUCKET)
    ahead = pack(next_batch(scheduler), BUCKET)
    assert ahead.tokens.ids[:1].tolist() == [LAST_SAMPLED]
    assert ahead.tokens.positions[:1].tolist() == [3]
    assert ahead.rows.kv_lens.tolist() == [4, 0, 0, 0]


def test_a_token_that_was_read_back_is_sent() -> None:
    scheduler = scheduler_of()
    add(scheduler, sequence_of(0, 3))
    pack = packer_of().pack
    batch = next_batch(scheduler)
    pack(batch, BUCKET)
    scheduler.update(batch, output_of(batch, token_id=42))
    assert pack(next_batch(scheduler), BUCKET).tokens.ids[:1].tolist() == [42]


def test_page_updates_hold_new_pages_only() -> None:
    scheduler = scheduler_of(token_budget=24)
    sequence = sequence_of(0, 15)
    add(scheduler, sequence)
    pack = packer_of().pack
    updates: list[list[list[int]]] = []
    for _ in range(4):
        batch = next_batch(scheduler)
        updates.append(pack(batch, BUCKET).page_updates.tolist())
        scheduler.update(batch, output_of(batch))
    first, second = sequence.page_table
    assert updates == [[[0, 0, first]], [], [[0, 1, second]], []]
    assert pack(next_batch(scheduler), BUCKET).page_updates.shape == (0, 3)


def test_a_readmitted_sequence_sends_all_its_pages_again() -> None:
    scheduler = scheduler_of(token_budget=24, caching=False)
    sequence = sequence_of(0, 20)
    add(scheduler, sequence)
    pack = packer_of().pack
    batch = next_batch(scheduler)
    pack(batch, BUCKET)
    scheduler.update(batch, output_of(batch))
    scheduler._preempt(sequence)
    inputs = pack(next_batch(scheduler), BUCKET)
    assert inputs.page_updates.tolist() == [
        [0, index, page] for index, page in enumerate(sequence.page_table)
    ]
    assert inputs.num_tokens == 21


def test_pages_of_a_hit_are_sent_and_its_tokens_are_not() -> None:
    scheduler = scheduler_of(token_budget=64)
    add(scheduler, sequence_of(0, tuple(range(40))))
    pack = packer_of(4).pack
    batch = next_batch(scheduler)
    pack(batch, 64)
    scheduler.update(batch, output_of(batch))
    follower = sequence_of(1, (*range(40), 7))
    add(scheduler, follower)
    inputs = pack(next_batch(scheduler), 64)
    assert inputs.num_tokens == 1 + 9
    assert inputs.tokens.positions[1:10].tolist() == list(range(32, 41))
    assert inputs.page_updates.tolist() == [
        [1, index, page] for index, page in enumerate(follower.page_table)
    ]


def test_sampling_data_belongs_to_the_row_and_follows_its_occupant() -> None:
    scheduler = scheduler_of(max_num_seqs=1)
    hot = SamplingParams(
        temperature=0.5,
        top_k=1 << 31,
        top_p=0.25,
        min_p=0.125,
        max_tokens=1,
        logprobs=0,
        presence_penalty=1.0,
    )
    cold = SamplingParams(temperature=1e-6, top_k=-1)
    pack = packer_of(1).pack
    add(scheduler, sequence_of(0, 3, max_tokens=1, params=hot), sequence_of(1, 3, params=cold))
    seen: list[ModelInputs] = []
    for _ in range(2):
        batch = next_batch(scheduler)
        seen.append(pack(batch, BUCKET))
        scheduler.update(batch, output_of(batch))
    rows = [
        [
            float(values[0])
            for values in (
                inputs.logits.temperature,
                inputs.logits.top_k,
                inputs.logits.top_p,
                inputs.logits.min_p,
                inputs.logits.num_logprobs,
                inputs.logits.rule_record,
            )
        ]
        for inputs in seen
    ]
    assert rows == [
        [0.5, 2**31 - 1, 0.25, 0.125, 0.0, 0.0],
        [0.0, 0.0, 1.0, 0.0, -1.0, NO_RULES],
    ]


def test_a_draws_key_is_of_the_requests_seed_and_the_position_drawn() -> None:
    scheduler = scheduler_of(token_budget=24)
    sequences = [sequence_of(index, 4 + index) for index in range(3)]
    add(scheduler, *sequences)
    pack = packer_of().pack
    for step in range(3):
        batch = next_batch(scheduler)
        inputs = pack(batch, BUCKET)
        seeds = np.array([sequence.seed for sequence in sequences], np.uint64)
        positions = np.array([4 + index + step for index in range(3)], np.int32)
        assert (inputs.logits.keys[:3] == draw_keys(seeds, positions)).all()
        scheduler.update(batch, output_of(batch))


def test_each_of_many_rows_is_sampled_by_its_own_requests_settings() -> None:
    # Row 3 changes hands and then holds a cut prompt, so that rows and logit rows part there.
    count, budget = 24, 80
    scheduler = scheduler_of(max_num_seqs=count, token_budget=budget, num_pages=200)
    settings = [
        SamplingParams(
            temperature=0.5 + index / 64,
            top_k=1 + index,
            top_p=0.25 + index / 64,
            min_p=index / 64,
            logprobs=index % 20,
        )
        for index in range(count)
    ]
    sequences = [
        sequence_of(index, 3, max_tokens=1 if index == 3 else 9, params=params)
        for index, params in enumerate(settings)
    ]
    add(scheduler, *sequences, sequence_of(count, 200))
    pack = packer_of(count).pack
    for step in range(2):
        batch = next_batch(scheduler)
        inputs = pack(batch, budget)
        scheduler.update(batch, output_of(batch))
        rows = [row for row in range(count) if step == 0 or row != 3]
        used, sampling = inputs.num_logits, inputs.logits
        assert inputs.logits.rows[:used].tolist() == rows
        assert sampling.temperature[:used].tolist() == [settings[row].temperature for row in rows]
        assert sampling.top_k[:used].tolist() == [settings[row].top_k for row in rows]
        assert sampling.top_p[:used].tolist() == [settings[row].top_p for row in rows]
        assert sampling.min_p[:used].tolist() == [settings[row].min_p for row in rows]
        assert sampling.num_logprobs[:used].tolist() == [settings[row].logprobs for row in rows]
        seeds = np.array([sequences[row].seed for row in rows], np.uint64)
        positions = np.full(used, 3 + step, np.int32)
        assert (sampling.keys[:used] == draw_keys(seeds, positions)).all()


def test_what_is_packed_does_not_grow_with_the_context() -> None:
    scheduler = scheduler_of(token_budget=24)
    add(scheduler, sequence_of(0, 300))
    pack = packer_of().pack
    sizes: set[int] = set()
    for _ in range(10):
        batch = next_batch(scheduler)
        inputs = pack(batch, BUCKET)
        sizes.add(inputs.words.nbytes)
        scheduler.update(batch, output_of(batch))
    assert len(sizes) == 1


def test_the_empty_step_is_all_padding() -> None:
    empty = ModelInputs.empty(bucket=8, num_rows=4)
    assert (empty.num_tokens, empty.num_logits) == (0, 0)
    assert set(empty.tokens.slots.tolist()) == {PADDING}
    assert set(empty.logits.token_indices.tolist()) == {PADDING}
    assert not empty.rows.kv_lens.any()
    assert not empty.rows.query_starts.any()
    assert empty.page_updates.shape == (0, 3)


def test_rules_go_up_when_a_row_changes_hands_and_again_to_a_device_that_lost_them() -> None:
    scheduler = scheduler_of(token_budget=24)
    ruled = SamplingParams(presence_penalty=1.0)
    add(scheduler, sequence_of(0, 4, params=ruled), sequence_of(1, 4))
    packer = packer_of(4)
    sent: list[list[int]] = []
    for step in range(3):
        batch = scheduler.schedule()
        assert batch is not None
        inputs = packer.pack(batch, 24)
        sent.append([update.row for update in inputs.rule_updates])
        assert inputs.logits.rule_record[:2].tolist() == [0, NO_RULES]
        scheduler.update(batch, output_of(batch))
        if step == 1:
            packer.forget_rows()
    assert sent == [[0], [], [0]]


def test_states_are_written_by_row_and_position() -> None:
    scheduler = scheduler_of(token_budget=12)
    add(scheduler, sequence_of(0, 5), sequence_of(1, 6))
    batch = next_batch(scheduler)
    first, second = batch.entries
    first.state_start, first.kept_states = 7, (KeptState(2, 3), KeptState(4, 9))
    second.kept_states = (KeptState(5, 1),)
    batch.has_states = True
    inputs = packer_of().pack(batch, BUCKET)
    assert inputs.rows.state_starts.tolist() == [7, NO_STATE, NO_STATE, NO_STATE]
    kept = {place: slot for place, slot in enumerate(inputs.tokens.state_slots) if slot >= 0}
    assert kept == {2: 3, 4: 9, 10: 1}


def test_a_step_without_states_names_no_slot() -> None:
    scheduler = scheduler_of()
    add(scheduler, sequence_of(0, 5))
    batch = next_batch(scheduler)
    assert not batch.has_states
    inputs = packer_of().pack(batch, BUCKET)
    assert set(inputs.rows.state_starts.tolist()) == {NO_STATE}
    assert set(inputs.tokens.state_slots.tolist()) == {NO_STATE}


def test_rope_positions_are_written_for_sequences_with_images_alone() -> None:
    scheduler = scheduler_of(token_budget=24)
    image = Attachment(start=2, length=6, digest=b"d", rows=2, columns=3)
    seeing = sequence_of(1, 9)
    add(scheduler, sequence_of(0, 3), seeing)
    batch = next_batch(scheduler)
    seeing.request = replace(seeing.request, attachments=(image,))  # as if it had been encoded
    inputs = packer_of().pack(batch, BUCKET)
    found = inputs.tokens.rope_positions
    assert found[:3].tolist() == [[NO_ROPE_POSITION] * 3] * 3
    assert np.array_equal(found[3:12], rope_positions((image,), 0, 9))
    assert (found[12:] == NO_ROPE_POSITION).all()


def test_an_entry_says_how_many_tokens_its_last_one_scores() -> None:
    scheduler = scheduler_of(token_budget=24)
    add(scheduler, sequence_of(0, 6), sequence_of(1, 5))
    batch = next_batch(scheduler)
    batch.entries[1].num_scored = 5
    assert packer_of().pack(batch, BUCKET).rows.score_lens.tolist() == [0, 5, 0, 0]


def test_a_prompt_with_gaps_ends_with_what_is_kept_of_it() -> None:
    scheduler = scheduler_of(token_budget=64)
    sequence = sequence_of(0, 200)
    sparse = SparsePrefill(keep=0.3)
    sequence.request = replace(sequence.request, sparse_prefill=sparse)
    prune(sequence, KeptTokens(num_prompt_tokens=200, chunks=(0, 6)))
    add(scheduler, sequence)
    inputs = packer_of().pack(next_batch(scheduler), 64)
    assert (inputs.rows.prompt_lens[0], inputs.rows.decode_starts[0]) == (40, 39)
    assert inputs.logits.positions[0] == 40
    assert inputs.tokens.positions[:40].tolist() == [*range(40)]
    assert inputs.tokens.rope_positions[:40, 2].tolist() == [*range(32), *range(192, 200)]
    expected = draw_keys(np.array([sequence.seed], np.uint64), np.array([200], np.int32))
    assert inputs.logits.keys[:1].tolist() == expected.tolist()


def image(start: int, rows: int, columns: int) -> Attachment:
    return Attachment(start=start, length=rows * columns, digest=b"d", rows=rows, columns=columns)


IMAGES = (image(0, 2, 3), image(9, 3, 1), image(12, 1, 1), image(20, 4, 4))


def by_counting(attachments: tuple[Attachment, ...], stop: int) -> np.ndarray:
    """The definition, token by token."""
    found: list[tuple[int, int, int]] = []
    position = 0
    while len(found) < stop:
        own = next((each for each in attachments if each.start == len(found)), None)
        if own is None:
            found.append((position,) * 3)
            position += 1
            continue
        for row in range(own.rows):
            found += [(position, position + row, position + c) for c in range(own.columns)]
        position += max(own.rows, own.columns)
    return np.array(found[:stop], np.int32).reshape(-1, 3)


def test_an_image_has_positions_by_row_and_column_and_text_goes_on_behind_the_longer_side():
    found = rope_positions((image(2, 2, 3),), 0, 11)
    assert found.tolist() == [
        [0, 0, 0],
        [1, 1, 1],
        *([2, 2, 2], [2, 2, 3], [2, 2, 4]),
        *([2, 3, 2], [2, 3, 3], [2, 3, 4]),
        [5, 5, 5],
        [6, 6, 6],
        [7, 7, 7],
    ]


@pytest.mark.parametrize("attachments", [(), IMAGES[:1], IMAGES[1:3], IMAGES])
def test_any_part_of_a_prompt_has_the_positions_of_the_whole(attachments: tuple[Attachment, ...]):
    whole = by_counting(attachments, 50)
    for start in range(50):
        for stop in range(start, 50):
            assert np.array_equal(rope_positions(attachments, start, stop), whole[start:stop])


def test_an_attachment_without_a_grid_counts_as_text():
    plain = Attachment(start=3, length=4, digest=b"d")
    assert np.array_equal(rope_positions((plain,), 0, 9), rope_positions((), 0, 9))


def test_positions_never_exceed_indices():
    found = rope_positions(IMAGES, 0, 60)
    assert (found.max(axis=1) <= np.arange(60)).all()
