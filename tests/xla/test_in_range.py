"""No step program relies on what XLA does with an index that is out of range.

Programs that are compiled elsewhere read and write wherever an index points, so every index of
every gather and scatter is checked while steps run on hostile inputs.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from cadenza.backends.token_choice import COLUMN_STATE, STATE_CHOSEN
from cadenza.backends.xla.device_state import DeviceState, state_function
from cadenza.backends.xla.ops.in_range import set_row, set_rows
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.runner import XlaRunner
from cadenza.backends.xla.step_program import StepProgram
from cadenza.batch.step_schema import ModelInputs, StepLayout
from tests.by_day import by_day
from tests.contract.checks import SAMPLED, Bench, record_of, soil
from tests.contract.steps import Geometry, Stream, build_inputs
from tests.xla.harness import Lab, Variant

SMALL = Variant(
    shape="one layer of hostile", ops=OpTable, bucket=32, num_rows=4, max_model_len=48, num_pages=9
)
NUM_STATES, RULED = 6, 3
VARIANTS = {
    "attention": SMALL,
    "experts": replace(SMALL, shape="one layer of tiny-qwen3-moe"),
    "states": replace(SMALL, shape="two layers of tiny-lfm2"),
    "int8 KV": replace(SMALL, kv_cache_dtype="int8"),
    "scores": SMALL,
}


def checked(function: Any) -> Any:
    program = jax.jit(checkify.checkify(function, errors=checkify.index_checks))

    def run(*arguments: Any) -> Any:
        error, result = program(*arguments)
        error.throw()
        return result

    return run


def hostile_steps(variant: Variant, *, has_states: bool) -> list[ModelInputs]:
    """A step without tokens, then prompts of all rows up to the last slot of the last page, with
    garbage in all padding, then one row's last token beside rows that do nothing."""
    geometry = Geometry(
        bucket=variant.bucket, num_rows=variant.num_rows, page_size=variant.page_size
    )
    size, last = variant.page_size, variant.num_pages - 1
    full = Stream(row=RULED, pages=[last - 2, last - 1, last], draw=SAMPLED)
    short = Stream(row=0, pages=[0], draw=SAMPLED)
    if has_states:
        full.state_slots, short.state_slots = (NUM_STATES - 1, NUM_STATES - 2), (0, 1)
    length = variant.max_model_len - 2
    steps = [ModelInputs.empty(bucket=variant.bucket, num_rows=variant.num_rows)]
    for start in range(0, length, size):
        tokens = range(3, 3 + min(size, length - start))
        chunks = [full.chunk(tokens, samples=start + size >= length)]
        if not start:
            chunks.append(short.chunk(range(9), samples=True, num_choices=9))
        steps.append(soil(build_inputs(chunks, geometry)))
    steps += [soil(build_inputs([full.next_token()], geometry)) for _ in range(2)]
    for each in steps[-2:]:
        each.logits.rule_record[0] = RULED
    return steps


def with_updates(state: DeviceState, step: ModelInputs, record: Any) -> DeviceState:
    table = np.array(state.rows.page_table)
    for row, index, page in step.page_updates:
        table[row, index] = page
    records = np.array(state.rows.rule_records)
    records[RULED] = record
    return state._replace(
        rows=state.rows._replace(page_table=jnp.asarray(table), rule_records=jnp.asarray(records))
    )


@pytest.mark.parametrize("name", by_day(VARIANTS, {"scores", "states"}))
def test_no_index_of_a_step_is_out_of_range(lab: Lab, name: str):
    variant, weights = VARIANTS[name], lab.weights(VARIANTS[name].shape)
    has_states = variant.config.recurrence is not None
    limits = replace(variant.limits, num_state_slots=NUM_STATES * has_states)
    setup = replace(variant.setup, limits=limits, capabilities=frozenset({"scores"} & {name}))
    runner = XlaRunner(variant.config, weights, setup, OpTable)
    layout = StepLayout(variant.bucket, variant.num_rows)
    program = StepProgram(ops=runner._ops, spec=runner._spec, layout=layout)
    step, state = checked(program.step), state_function(runner._ops, runner._spec, setup)()
    rules = {"presence_penalty": 1.5, "logit_bias": {7: 2.0}, "allowed_token_ids": range(90)}
    record = record_of(Bench(runner, limits), [5, 7], **rules)
    for inputs in hostile_steps(variant, has_states=has_states):
        state = with_updates(state, inputs, record)
        is_used = np.diff(inputs.rows.query_starts) > 0
        inputs.rows.score_lens[:] = np.where(is_used, inputs.rows.kv_lens, 1 << 20)
        state, result, _ = step(runner._weights, state, inputs.words)
    assert np.asarray(result)[0, COLUMN_STATE] == STATE_CHOSEN


def test_an_index_out_of_range_is_seen():
    dropped = checked(lambda array, index: array.at[index].set(1.0, mode="drop"))
    clipped = checked(lambda array, index: array.at[index].get(mode="clip"))
    array = jnp.zeros(64)
    for function in (dropped, clipped):
        function(array, jnp.array([0, 63]))
        with pytest.raises(checkify.JaxRuntimeError, match="out of bounds"):
            function(array, jnp.array([0, 64]))


def test_rows_are_set_where_they_are_kept_and_nothing_else_changes():
    array = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    rows = -jnp.arange(1.0, 10.0).reshape(3, 3)
    far = jnp.array([2, 1 << 22, 0])
    set_checked = checked(lambda kept: set_rows(jnp.asarray(array), (far, 1), rows, kept))
    for are_kept in ([True, False, True], [False, False, True], [False, False, False]):
        expected = array.copy()
        for place, row, is_kept in zip(far, rows, are_kept, strict=True):
            if is_kept:
                expected[place, 1] = row
        assert np.array_equal(set_checked(np.array(are_kept)), expected)
    set_one = checked(lambda place, kept: set_row(jnp.asarray(array[:, 0]), place, rows[0], kept))
    for place, is_kept in ((3, True), (-1, False), (4, False)):
        expected = array[:, 0].copy()
        if is_kept:
            expected[place] = rows[0]
        assert np.array_equal(set_one(place, np.array(is_kept)), expected)
