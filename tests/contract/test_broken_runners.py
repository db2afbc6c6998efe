"""Negative controls of the contract suite: for each check a runner that violates only it."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from cadenza.backends.fake import FakeLateStepHandle, FakeRunner, FakeStepHandle
from cadenza.core.step_schema import NO_RULES, NUM_EXTRA_LOGIT_ROWS, ModelInputs, StepOutput
from tests.contract.backends import LIMITS
from tests.contract.checks import CHECKS, Bench
from tests.contract.steps import copy_of

NUM_LOGITS = LIMITS.max_num_seqs + NUM_EXTRA_LOGIT_ROWS


def with_keys(inputs: ModelInputs, spoil: np.ndarray) -> ModelInputs:
    """The same step with other draw keys [L, 2]."""
    other = copy_of(inputs)
    other.logits.keys[:] += spoil.astype(np.uint32)
    return other


@dataclass(frozen=True, slots=True)
class Changed:
    """A handle whose output was tampered with."""

    handle: Any
    change: Any

    def result(self) -> Any:
        return self.change(self.handle.result())


class Nameless(FakeRunner):
    @property
    def name(self) -> str:
        return ""


class FallingBuckets(FakeRunner):
    @property
    def token_buckets(self) -> tuple[int, ...]:
        return (self.max_num_batched_tokens, 8)


class WideTokens(FakeRunner):
    def launch(self, inputs: ModelInputs) -> Any:
        def widen(output: StepOutput) -> StepOutput:
            return replace(output, token_ids=output.token_ids.astype(np.int64))

        return Changed(FakeRunner.launch(self, inputs), widen)


class LastTokenOfTheNextRow(FakeRunner):
    def launch(self, inputs: ModelInputs) -> Any:
        self._last_sampled = np.roll(self._last_sampled, 1)
        return FakeRunner.launch(self, inputs)


class ForgetsRowsThatSitOut(FakeRunner):
    def launch(self, inputs: ModelInputs) -> Any:
        self._last_sampled[inputs.rows.kv_lens == 0] = 0
        return FakeRunner.launch(self, inputs)


class RunsWhenRead(FakeRunner):
    def launch(self, inputs: ModelInputs) -> Any:
        return Lazy(self, inputs)


@dataclass(slots=True, eq=False)
class Lazy:
    runner: FakeRunner
    inputs: ModelInputs

    def result(self) -> StepOutput:
        return FakeRunner.launch(self.runner, self.inputs).result()


class ForgetsThePageTable(FakeRunner):
    def launch(self, inputs: ModelInputs) -> Any:
        handle = FakeRunner.launch(self, inputs)
        self._page_table[:] = -1
        return handle


class KeepsFirstPageUpdate(FakeRunner):
    def launch(self, inputs: ModelInputs) -> Any:
        fresh = [u for u in inputs.page_updates.tolist() if self._page_table[u[0], u[1]] < 0]
        updates = np.array(fresh, np.int32).reshape(-1, 3)
        return FakeRunner.launch(self, replace(inputs, page_updates=updates))


class CopiesAPageTooLate(FakeRunner):
    def launch(self, inputs: ModelInputs) -> Any:
        none = np.zeros((0, 3), np.int32)
        handle = FakeRunner.launch(self, replace(inputs, page_copies=none))
        empty = ModelInputs.empty(bucket=self.max_num_batched_tokens, num_rows=self.max_num_seqs)
        FakeRunner.launch(self, replace(empty, page_copies=inputs.page_copies))
        return handle


class KeysFromThePadding(FakeRunner):
    def launch(self, inputs: ModelInputs) -> Any:
        return FakeRunner.launch(
            self, with_keys(inputs, np.full((NUM_LOGITS, 2), inputs.tokens.ids[-1]))
        )


class KeysFromTheRow(FakeRunner):
    def launch(self, inputs: ModelInputs) -> Any:
        rows = np.repeat(inputs.logits.rows[:, None], 2, axis=1)
        return FakeRunner.launch(self, with_keys(inputs, rows))


class KeysFromTheCrowd(FakeRunner):
    def launch(self, inputs: ModelInputs) -> Any:
        crowd = np.full((NUM_LOGITS, 2), int((inputs.rows.kv_lens > 0).sum()))
        return FakeRunner.launch(self, with_keys(inputs, crowd))


class KeysFromTheChunk(FakeRunner):
    def launch(self, inputs: ModelInputs) -> Any:
        return FakeRunner.launch(
            self, with_keys(inputs, np.full((NUM_LOGITS, 2), inputs.num_tokens))
        )


class NoRandomness(FakeRunner):
    def launch(self, inputs: ModelInputs) -> Any:
        return FakeRunner.launch(self, with_keys(inputs, -inputs.logits.keys.astype(np.int64)))


class RemembersTheFirstChoice(FakeRunner):
    def launch(self, inputs: ModelInputs) -> Any:
        handle = FakeRunner.launch(self, inputs)
        chosen = handle.result().token_ids
        for index in reversed(range(inputs.num_logits)):
            self._last_sampled[inputs.logits.rows[index]] = chosen[index]
        return handle


class KeysFromTheLogprobs(FakeRunner):
    def launch(self, inputs: ModelInputs) -> Any:
        asked = np.repeat(inputs.logits.num_logprobs[:, None], 2, axis=1)
        return FakeRunner.launch(self, with_keys(inputs, asked))


class IgnoresMasks(FakeRunner):
    def launch(self, inputs: ModelInputs) -> Any:
        return FakeRunner.launch(self, replace(inputs, mask_updates=()))


class StatesOfTheFirstRows(FakeRunner):
    def launch(self, inputs: ModelInputs) -> Any:
        rows = np.arange(len(inputs.hidden_rows), dtype=np.int32)
        return FakeRunner.launch(self, replace(inputs, hidden_rows=rows))


class MasksOfTheRow(FakeRunner):
    def launch(self, inputs: ModelInputs) -> Any:
        other = copy_of(inputs)
        named = other.logits.rule_record
        named[:] = np.where(named == NO_RULES, NO_RULES, other.logits.rows)
        return FakeRunner.launch(self, other)


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
    "the_last_sampled_token_needs_no_host": LastTokenOfTheNextRow,
    "a_row_keeps_its_last_token_while_others_work": ForgetsRowsThatSitOut,
    "steps_run_in_the_order_of_their_launches": RunsWhenRead,
    "the_page_table_is_remembered": ForgetsThePageTable,
    "a_changed_page_table_entry_is_used": KeepsFirstPageUpdate,
    "a_copied_page_is_as_good_as_its_original": CopiesAPageTooLate,
    "padding_is_harmless": KeysFromThePadding,
    "a_rows_result_is_the_same_in_every_row": KeysFromTheRow,
    "a_rows_result_is_the_same_in_company": KeysFromTheCrowd,
    "a_prompts_chunks_do_not_matter": KeysFromTheChunk,
    "the_key_decides_and_greedy_rows_have_none": NoRandomness,
    "a_row_can_choose_several_tokens_in_a_step": RemembersTheFirstChoice,
    "asking_for_log_probabilities_changes_no_token": KeysFromTheLogprobs,
    "the_mask_of_a_rows_rules_is_replaced_by_itself": IgnoresMasks,
    "a_tokens_hidden_state_follows_from_its_prefix": StatesOfTheFirstRows,
    "each_choice_is_made_from_the_record_that_it_names": MasksOfTheRow,
    "masks_may_follow_a_launch": IgnoresMasksThatFollow,
    "a_step_without_its_masks_cannot_be_read": ChoosesAtOnce,
    "reset_forgets_everything": ForgetsNothing,
}


def bench_of(kind: type[FakeRunner]) -> Bench:
    return Bench(
        kind(
            max_num_seqs=LIMITS.max_num_seqs,
            max_num_batched_tokens=LIMITS.max_num_batched_tokens,
            max_pages_per_seq=LIMITS.max_pages_per_seq,
            num_pages=LIMITS.num_pages,
            page_size=LIMITS.page_size,
        )
    )


def test_every_check_has_a_runner_that_fails_it():
    assert set(BROKEN) == set(CHECKS)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_runner_fails_the_check(name: str):
    with pytest.raises(AssertionError):
        CHECKS[name](bench_of(BROKEN[name]))
