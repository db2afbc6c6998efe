"""The gate: green on the sound engine, red on each injected fault, red when it shows nothing."""

import re
import time
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from cadenza.backends.base import Exactness
from cadenza.backends.fake import FakeRunner, FakeStepHandle
from cadenza.batch.step_schema import ModelInputs
from cadenza.config import EngineConfig, EngineLimits, Quantization
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.errors import ConfigError
from cadenza.verification.differences import Mismatch, first_difference
from cadenza.verification.modes import batched_modes
from cadenza.verification.play import Counts, Stream
from cadenza.verification.reference import ReferenceEngine
from cadenza.verification.run import KV_TOLERANCE, QUANTISED_TOLERANCE, VerifyOptions, verify
from cadenza.verification.verifier import (
    ModeResult,
    ReferenceCheck,
    Verifier,
    VerifierResult,
)
from cadenza.verification.workload import (
    LONGEST_PROMPT,
    LONGEST_SHORT_PROMPT,
    WorkloadShape,
    longest_prompt,
    make_workload,
)

OPTIONS = VerifyOptions(
    shape="tiny-qwen3", num_requests=8, max_tokens=32, config=EngineConfig(max_num_seqs=4)
)
SMALL = replace(OPTIONS, max_tokens=16, config=EngineConfig(max_num_seqs=4, max_model_len=300))
"""Without the prompts that pass every window, for gates that are not about them."""
SHAPE = WorkloadShape(num_requests=9, rows=4, max_tokens=32, context=256, vocab_size=50)


def ignore(_: str) -> None:
    """No progress wanted."""


def test_the_gate_passes_on_random_weights_and_shows_every_mode():
    told: list[str] = []
    result, plan = verify(OPTIONS, told.append)
    assert any(re.match(r"alone: 8/8 done, 1 row, [\d.]+ tok/s", line) for line in told)
    assert any(re.match(r"plain loop: 3/\d+ done, 4 rows, [\d.]+ tok/s", line) for line in told)
    assert result.passed, result.last_line
    assert result.last_line.startswith("REFERENCE-EXACT PASS bitwise requests=8 modes=7 ")
    counts = result.counts
    shown = (counts.admitted_midstream, counts.rows_reused, counts.preempted, counts.cache_hits)
    assert all(count > 0 for count in shown)
    assert plan.traits.exactness == "bitwise"
    assert result.longest == LONGEST_PROMPT + OPTIONS.max_tokens
    assert result.last_line.endswith(f" longest={result.longest}")
    assert result.shortfall is None
    pages_of_full_rows = 4 * -(-plan.limits.max_model_len // plan.limits.page_size)
    assert plan.limits.num_pages < pages_of_full_rows, "the pool is larger than what can run"


@pytest.mark.native
def test_the_gate_passes_over_so_few_slots_of_states_that_one_is_soon_another_rows():
    """A slot that is handed out while a step reads it is seen here, and in no roomy pool."""
    options = replace(OPTIONS, shape="tiny-lfm2", max_tokens=48, reference="solo")
    result, plan = verify(options, ignore)
    assert result.passed, result.last_line
    assert plan.limits.num_state_slots > 9
    modes = batched_modes(plan.limits, make_workload(SHAPE))
    slots = {mode.name: mode.limits.num_state_slots for mode in modes}
    few = {name for name, count in slots.items() if count == 9}
    assert few == {"tight pool", "tight pool, prefix cache"}


@pytest.mark.native
@pytest.mark.soak
@pytest.mark.parametrize("quantization", list(QUANTISED_TOLERANCE))
def test_the_gate_scores_quantised_streams_with_the_unquantised_reference(
    quantization: Quantization,
):
    config = replace(SMALL.config, quantization=quantization)
    result, plan = verify(replace(SMALL, config=config), ignore)
    assert result.passed, result.last_line
    assert plan.quantization == quantization
    assert result.reference_difference is not None
    assert 0.001 < result.reference_difference < QUANTISED_TOLERANCE[quantization]
    assert result.last_line.endswith(f" reference_difference={result.reference_difference:.4f}")


@pytest.mark.native
@pytest.mark.soak
@pytest.mark.parametrize("options", [SMALL, OPTIONS], ids=["small", "long"])
def test_the_gate_passes_over_kv_in_int8_and_scores_it_with_the_unquantised_reference(
    options: VerifyOptions,
):
    config = replace(options.config, kv_cache_dtype="int8")
    result, plan = verify(replace(options, config=config), ignore)
    assert result.passed, result.last_line
    assert plan.kv_cache_dtype == "int8"
    assert result.reference_difference is not None
    assert 0.0001 < result.reference_difference < KV_TOLERANCE["int8"]


class OtherModel:
    """A reference that has nothing to do with the engine: every token is as likely."""

    vocab_size = 50

    def start(self) -> None:
        """Keeps no state."""

    def append(self, token_ids: list[int]) -> np.ndarray:
        return np.zeros(50, np.float32)


def test_streams_that_are_far_from_the_reference_are_a_mismatch():
    """Negative control of the scoring: the fake runner reports a log probability of its own."""
    gate = fake_verifier(FakeRunner)
    reference = ReferenceEngine(OtherModel(), max_model_len=256)
    check = ReferenceCheck(engine=reference, make_core=gate.make_core, tolerance=0.1)
    result = replace(gate, reference=check).run()
    assert result.mismatch is not None
    assert result.mismatch.mode == "independent reference"
    assert "a mean difference of at most 0.1" in result.mismatch.expected


def test_a_single_changed_bit_of_a_logprob_is_a_mismatch():
    expected = Stream([(1, -0.5, 1, (1,), (-0.5,))], "stop")
    changed = Stream([(1, -0.5000000001, 1, (1,), (-0.5,))], "stop")
    assert first_difference("m", expected, expected, bitwise=True) is None
    assert first_difference("m", expected, changed, bitwise=False) is None
    found = first_difference("m", expected, changed, bitwise=True)
    assert found is not None
    assert found.index == 0


def fake_verifier(kind: type[FakeRunner]) -> Verifier:
    """A gate over a runner without a model."""
    limits = EngineLimits(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=256,
        page_size=16,
        num_pages=64,
        max_num_queued_reqs=100,
    )
    runner = kind(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_pages_per_seq=limits.max_pages_per_seq,
        num_pages=64,
        page_size=16,
        vocab_size=50,
    )

    def make_core(limits: EngineLimits, options: CoreOptions) -> EngineCore:
        runner.reset()
        return EngineCore(runner, limits, options)

    return Verifier(
        make_core=make_core,
        limits=limits,
        arrivals=make_workload(SHAPE),
        reference=None,
        with_solo=True,
        clock=time.perf_counter,
    )


class CompanyInLogprobs(FakeRunner):
    """The log probabilities of a step depend on how many rows it has; no token does."""

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        handle = super().launch(inputs)
        shift = np.float32(np.count_nonzero(np.diff(inputs.rows.query_starts)))
        output = replace(handle.output, logprobs=handle.output.logprobs - shift)
        return replace(handle, output=output)


@pytest.mark.parametrize("exactness", get_args(Exactness))
def test_the_gate_compares_what_the_backend_promises(exactness: Exactness):
    result = replace(fake_verifier(CompanyInLogprobs), exactness=exactness).run()
    assert (result.mismatch is None) == (exactness == "token")
    if exactness == "token":
        assert result.last_line.startswith("REFERENCE-EXACT PASS token requests=9 ")


@pytest.mark.parametrize("other", [Stream([], "stop"), Stream([(1, 0.0, 1, (), ())], "length")])
def test_a_shorter_stream_or_another_reason_is_a_mismatch(other: Stream):
    expected = Stream([(1, 0.0, 1, (), ())], "stop")
    assert first_difference("m", expected, other, bitwise=False) is not None


def test_a_mode_that_shows_nothing_fails_the_gate():
    mode = ModeResult(name="tight", num_streams=1, num_equal=1, counts=Counts(), tokens_per_s=1.0)
    assert VerifierResult(num_requests=1, modes=[mode]).passed
    silent = replace(mode, missing=("preempted",))
    result = VerifierResult(num_requests=1, modes=[silent])
    assert (result.verdict, result.passed) == ("NOT SHOWN", False)
    assert result.last_line.startswith(
        "REFERENCE-EXACT NOT SHOWN preempted in tight: every stream was equal"
    )


def test_the_verdict_names_the_first_difference():
    found = Mismatch(mode="m", request=3, sample=1, index=7, expected="1", actual="2")
    result = VerifierResult(num_requests=1, mismatch=found)
    assert (result.verdict, result.passed) == ("MISMATCH", False)
    assert result.last_line.startswith("REFERENCE-EXACT MISMATCH")
    assert "request=3 sample=1 index=7" in result.last_line


def test_no_modes_is_no_pass():
    assert VerifierResult(num_requests=1).verdict == "NOT SHOWN"


def test_three_prompts_of_a_workload_are_long_and_one_shares_the_longest_ones_beginning():
    shape = replace(SHAPE, context=1400)
    prompts = [arrival.request.prompt_token_ids for arrival in make_workload(shape)]
    long = [prompt for prompt in prompts if len(prompt) > LONGEST_SHORT_PROMPT]
    assert [len(prompt) for prompt in long] == [LONGEST_PROMPT, 743, 1135]
    assert long[0] == prompts[1]
    assert long[2][:826] == long[0][:826]
    assert LONGEST_PROMPT > 2 * 512


def test_the_longest_prompt_passes_every_window():
    assert longest_prompt(512, [0, 512]) == LONGEST_PROMPT
    assert longest_prompt(64, []) == LONGEST_PROMPT - 2 * (512 - 64)
    assert longest_prompt(64, [512, 4096]) > 4096


@pytest.mark.soak
def test_a_short_context_is_used_up_and_the_verdict_says_how_far_it_went():
    result, plan = verify(replace(SMALL, reference="solo"), ignore)
    assert result.passed
    assert plan.limits.max_model_len == 300
    assert result.last_line.endswith(" longest=300")
    assert result.shortfall is not None
    assert "has 300 tokens" in result.shortfall


@pytest.mark.soak
def test_two_rows_are_enough_to_show_every_mode():
    """A long prompt fills most of a tight pool, and still another request is preempted."""
    options = replace(OPTIONS, num_requests=6, max_tokens=12, reference="solo")
    result, _ = verify(replace(options, config=EngineConfig(max_num_seqs=2)), ignore)
    assert result.passed, result.last_line
    assert result.counts.preempted > 0


def test_a_workload_is_a_pure_function_of_its_shape():
    assert make_workload(SHAPE) == make_workload(SHAPE)
    assert make_workload(SHAPE) != make_workload(replace(SHAPE, seed=1))


def test_about_half_of_a_workload_is_sampled_and_prompts_share_a_prefix():
    requests = [a.request for a in make_workload(replace(SHAPE, num_requests=200))]
    sampled = sum(not request.params.is_greedy for request in requests)
    assert 80 <= sampled <= 120
    prefixes = [request.prompt_token_ids[:32] for request in requests]
    assert max(prefixes.count(prefix) for prefix in prefixes) > 20


@pytest.mark.parametrize(
    "changes", [{"rows": 1}, {"num_requests": 4}, {"max_tokens": 2}, {"max_tokens": 200}]
)
def test_a_workload_that_could_show_nothing_is_refused(changes: dict[str, int]):
    with pytest.raises(ConfigError):
        replace(SHAPE, **changes)
