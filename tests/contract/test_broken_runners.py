"""Negative controls of the contract suite: for each check a runner that violates only it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from cadenza.backends.fake import FakeLateStepHandle, FakeRunner, FakeStepHandle
from cadenza.batch.step_schema import NO_RULES, ModelInputs, StepOutput
from tests.contract.backends import LIMITS, make_fake
from tests.contract.checks import CHECKS, Bench
from tests.contract.steps import copy_of

NO_PAGES = np.zeros((0, 3), np.int32)

Change = Callable[[FakeRunner, ModelInputs], ModelInputs]


def launching(change: Change) -> type[FakeRunner]:
    class Broken(FakeRunner):
        def launch(self, inputs: ModelInputs) -> Any:
            return FakeRunner.launch(self, change(self, inputs))

    return Broken


def keyed(spoil: Callable[[ModelInputs], Any]) -> type[FakeRunner]:
    """Adds to the draw keys [L, 2]: a number, or one for each logit row."""

    def change(_: FakeRunner, inputs: ModelInputs) -> ModelInputs:
        other, added = copy_of(inputs), np.asarray(spoil(inputs)).astype(np.uint32)
        other.logits.keys[:] += added if added.ndim != 1 else added[:, None]
        return other

    return launching(change)


class Nameless(FakeRunner):
    @property
    def name(self) -> str:
        return ""


class FallingBuckets(FakeRunner):
    @property
    def token_buckets(self) -> tuple[int, ...]:
        return (self.max_num_batched_tokens, 8)


@dataclass(frozen=True, slots=True)
class WideHandle:
    handle: Any

    def result(self) -> StepOutput:
        output = self.handle.result()
        return replace(output, token_ids=output.token_ids.astype(np.int64))


class WideTokens(FakeRunner):
    def launch(self, inputs: ModelInputs) -> Any:
        return WideHandle(FakeRunner.launch(self, inputs))


def last_token_of_the_next_row(runner: FakeRunner, inputs: ModelInputs) -> ModelInputs:
    runner._last_sampled = np.roll(runner._last_sampled, 1)
    return inputs


def forget_rows_that_sit_out(runner: FakeRunner, inputs: ModelInputs) -> ModelInputs:
    runner._last_sampled[inputs.rows.kv_lens == 0] = 0
    return inputs


@dataclass(slots=True, eq=False)
class Lazy:
    runner: FakeRunner
    inputs: ModelInputs

    def result(self) -> StepOutput:
        return FakeRunner.launch(self.runner, self.inputs).result()


class RunsWhenRead(FakeRunner):
    def launch(self, inputs: ModelInputs) -> Any:
        return Lazy(self, inputs)


class ForgetsThePageTable(FakeRunner):
    def launch(self, inputs: ModelInputs) -> Any:
        handle = FakeRunner.launch(self, inputs)
        self._page_table[:] = -1
        return handle


def keep_first_page_update(runner: FakeRunner, inputs: ModelInputs) -> ModelInputs:
    fresh = [each for each in inputs.page_updates.tolist() if runner._page_table[*each[:2]] < 0]
    return replace(inputs, page_updates=np.array(fresh, np.int32).reshape(-1, 3))


class CopiesAPageTooLate(FakeRunner):
    def launch(self, inputs: ModelInputs) -> Any:
        handle = FakeRunner.launch(self, replace(inputs, page_copies=NO_PAGES))
        empty = ModelInputs.empty(bucket=self.max_num_batched_tokens, num_rows=self.max_num_seqs)
        FakeRunner.launch(self, replace(empty, page_copies=inputs.page_copies))
        return handle


class RemembersTheFirstChoice(FakeRunner):
    def launch(self, inputs: ModelInputs) -> Any:
        handle = FakeRunner.launch(self, inputs)
        chosen = handle.result().token_ids
        for index in reversed(range(inputs.num_logits)):
            self._last_sampled[inputs.logits.rows[index]] = chosen[index]
        return handle


def states_of_the_first_rows(_: FakeRunner, inputs: ModelInputs) -> ModelInputs:
    return replace(inputs, hidden_rows=np.arange(len(inputs.hidden_rows), dtype=np.int32))


def without_masks(_: FakeRunner, inputs: ModelInputs) -> ModelInputs:
    return replace(inputs, mask_updates=())


def minus_the_keys(inputs: ModelInputs) -> Any:
    return -inputs.logits.keys.astype(np.int64)


def num_logprobs(inputs: ModelInputs) -> Any:
    return inputs.logits.num_logprobs


def masks_of_the_row(_: FakeRunner, inputs: ModelInputs) -> ModelInputs:
    other = copy_of(inputs)
    named = other.logits.rule_record
    named[:] = np.where(named == NO_RULES, NO_RULES, other.logits.rows)
    return other


class IgnoresMasksThatFollow(FakeRunner):
    def _choose(self, inputs: ModelInputs, generation: int, masks: Any) -> Any:
        return FakeRunner._choose(self, inputs, generation, ())


class ChoosesAtOnce(FakeRunner):
    def launch(self, inputs: ModelInputs) -> Any:
        handle = FakeRunner.launch(self, inputs)
        if isinstance(handle, FakeLateStepHandle):
            assert handle.sample is not None
            return FakeStepHandle(handle.sample(()), handle.on_read)
        return handle


class ForgetsNothing(FakeRunner):
    def reset(self) -> None:
        if not hasattr(self, "_slots"):
            FakeRunner.reset(self)


BROKEN: dict[str, type[FakeRunner]] = {
    "it_describes_itself": Nameless,
    "its_buckets_rise_to_the_budget": FallingBuckets,
    "its_outputs_have_the_promised_shapes_and_types": WideTokens,
    "the_last_sampled_token_needs_no_host": launching(last_token_of_the_next_row),
    "a_row_keeps_its_last_token_while_others_work": launching(forget_rows_that_sit_out),
    "steps_run_in_the_order_of_their_launches": RunsWhenRead,
    "the_page_table_is_remembered": ForgetsThePageTable,
    "a_changed_page_table_entry_is_used": launching(keep_first_page_update),
    "a_copied_page_is_as_good_as_its_original": CopiesAPageTooLate,
    "padding_is_harmless": keyed(lambda inputs: inputs.tokens.ids[-1]),
    "a_rows_result_is_the_same_in_every_row": keyed(lambda inputs: inputs.logits.rows),
    "a_rows_result_is_the_same_in_company": keyed(lambda inputs: (inputs.rows.kv_lens > 0).sum()),
    "a_prompts_chunks_do_not_matter": keyed(lambda inputs: inputs.num_tokens),
    "the_key_decides_and_greedy_rows_have_none": keyed(
        lambda inputs: -inputs.logits.keys.astype(np.int64)
    ),
    "a_row_can_choose_several_tokens_in_a_step": RemembersTheFirstChoice,
    "asking_for_log_probabilities_changes_no_token": keyed(
        lambda inputs: inputs.logits.num_logprobs
    ),
    "the_mask_of_a_rows_rules_is_replaced_by_itself": launching(
        lambda _, inputs: replace(inputs, mask_updates=())
    ),
    "a_tokens_hidden_state_follows_from_its_prefix": launching(states_of_the_first_rows),
    "each_choice_is_made_from_the_record_that_it_names": launching(masks_of_the_row),
    "masks_may_follow_a_launch": IgnoresMasksThatFollow,
    "a_step_without_its_masks_cannot_be_read": ChoosesAtOnce,
    "reset_forgets_everything": ForgetsNothing,
}


def test_every_check_has_a_runner_that_fails_it():
    assert set(BROKEN) == set(CHECKS)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_runner_fails_the_check(name: str):
    with pytest.raises(AssertionError):
        CHECKS[name](Bench(make_fake(LIMITS, kind=BROKEN[name])))
