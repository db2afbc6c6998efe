"""The step schema: every declared field has its place in the one buffer, and none another's."""

from dataclasses import fields

import numpy as np
import pytest

from cadenza.batch.draw_keys import draw_keys
from cadenza.batch.prompt import Prompt, PromptRowsProgress
from cadenza.batch.step_schema import (
    NO_TARGET,
    NUM_EXTRA_LOGIT_ROWS,
    SETTINGS,
    LogitInputs,
    ModelInputs,
    RowInputs,
    RowSettings,
    StepCounts,
    StepLayout,
    TokenInputs,
    specs_of,
)
from cadenza.request import SamplingParams
from tests.scheduler.builders import add, output_of, packer_of, scheduler_of, sequence_of

GROUPS = {"counts": StepCounts, "tokens": TokenInputs, "rows": RowInputs, "logits": LogitInputs}
FIELDS = [(name, spec) for name, group in GROUPS.items() for spec in specs_of(group)]


@pytest.mark.parametrize(("group", "spec"), FIELDS, ids=lambda value: getattr(value, "name", value))
def test_a_field_is_the_only_one_to_change_when_it_is_written(group: str, spec):
    inputs, empty = (ModelInputs.empty(bucket=7, num_rows=3) for _ in range(2))
    written = getattr(getattr(inputs.groups, group), spec.name)
    written[...] = 41
    assert written.dtype == spec.dtype
    changed = inputs.words != empty.words
    assert changed.sum() == written.size
    for name, other in FIELDS:
        is_same = np.array_equal(
            getattr(getattr(inputs.groups, name), other.name),
            getattr(getattr(empty.groups, name), other.name),
        )
        assert is_same == ((name, other) != (group, spec)), other.name


def test_the_buffer_has_no_words_but_the_fields():
    layout = StepLayout(7, 3)
    groups = layout.views(layout.empty_words())
    sizes = [getattr(getattr(groups, name), spec.name).size for name, spec in FIELDS]
    assert sum(sizes) == layout.num_words == len(layout.empty_words())
    assert len(groups.logits.rows) == 3 + NUM_EXTRA_LOGIT_ROWS
    assert groups.logits.keys.shape == (3 + NUM_EXTRA_LOGIT_ROWS, 2)
    assert len(groups.rows.query_starts) == 4


def test_settings_are_the_last_columns_of_logit_rows():
    declared = [field.name for field in fields(LogitInputs)]
    assert [spec.name for spec in SETTINGS] == declared[-len(SETTINGS) :]


def test_a_rows_settings_stay_until_another_sequence_takes_it():
    settings = RowSettings(4)
    hot = sequence_of(0, 3, params=SamplingParams(temperature=0.75, top_k=5, min_p=0.25))
    settings.set_row(2, hot)
    inputs = ModelInputs.empty(bucket=4, num_rows=4)
    settings.write(inputs, slice(1, 3), np.array([2, 0]))
    logits = inputs.logits
    assert logits.temperature[:4].tolist() == [0.0, 0.75, 0.0, 0.0]
    assert logits.top_k[:4].tolist() == [0, 5, 0, 0]
    assert logits.min_p[:4].tolist() == [0.0, 0.25, 0.0, 0.0]
    assert logits.top_p[:4].tolist() == [1.0, 1.0, 1.0, 1.0]
    settings.set_row(2, sequence_of(1, 3, params=SamplingParams(temperature=0.0, logprobs=3)))
    settings.write(inputs, slice(1, 2), np.array([2]))
    assert (logits.temperature[1], logits.top_k[1], logits.num_logprobs[1]) == (0.0, 0, 3)


def test_a_described_row_is_chosen_by_no_setting_and_keyed_by_its_own_position():
    scheduler = scheduler_of(token_budget=24)
    params = SamplingParams(temperature=0.5, top_k=3, prompt_logprobs=2, logprobs=4)
    sequence = sequence_of(0, 6, params=params)
    sequence.prompt = Prompt(rows=PromptRowsProgress(num_prompt_tokens=6))
    add(scheduler, sequence)
    batch = scheduler.schedule()
    assert batch is not None
    inputs = packer_of().pack(batch, 24)
    logits = inputs.logits
    assert inputs.num_logits == 6
    assert logits.positions[:6].tolist() == [1, 2, 3, 4, 5, 6]
    assert logits.token_indices[:6].tolist() == [0, 1, 2, 3, 4, 5]
    assert logits.targets[:6].tolist() == [*sequence.token_ids[1:], NO_TARGET]
    assert logits.temperature[:6].tolist() == [0.0] * 5 + [0.5]
    assert logits.top_k[:6].tolist() == [0] * 5 + [3]
    assert logits.num_logprobs[:6].tolist() == [2] * 5 + [4]
    expected = draw_keys(np.full(6, sequence.seed, np.uint64), np.arange(1, 7, dtype=np.int32))
    assert np.array_equal(logits.keys[:6], expected)
    scheduler.update(batch, output_of(batch))
