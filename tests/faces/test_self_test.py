"""`verify --self-test`: which faults are planted in a shape, caught, and left out, and why."""

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cadenza.backends.fake import FakeRunner
from cadenza.backends.xla.mutants import faults_of
from cadenza.batch.packing import Packer
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.config import EngineConfig, EngineLimits
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.loop import StepRunner
from cadenza.verification.faults import (
    DRAFT_FAULTS,
    MASK_FAULTS,
    STATE_FAULTS,
    STATES,
    FaultyPacker,
    Spoil,
)
from cadenza.verification.run import VerifyOptions
from cadenza.verification.self_test import (
    DRAFTS,
    FaultResult,
    Outcome,
    SelfTestResult,
    self_test,
)
from cadenza.verification.verifier import Verdict, Verifier, VerifierResult
from cadenza.verification.workload import WorkloadShape, make_workload

OPTIONS = VerifyOptions(
    shape="tiny-qwen3", num_requests=8, max_tokens=32, config=EngineConfig(max_num_seqs=4)
)
ALWAYS = {"attention", "draws"}
KINDS: Mapping[str, set[str]] = {
    "tiny-qwen3": set(),
    "tiny-qwen3.5": {STATES},
    "tiny-lfm2": {STATES},
    "tiny-granite4": {STATES},
    "tiny-deepseek-v3": {"latents", "experts"},
    "tiny-gpt-oss": {"sliding windows", "attention sinks", "experts"},
    "tiny-gemma4": {"sliding windows", "shared KV", "per-layer embeddings"},
}
"""Of each shape: what it has besides attention."""


def ignore(_: str) -> None:
    """No progress wanted."""


@pytest.mark.parametrize("shape", KINDS)
def test_a_fault_of_each_kind_of_layer_that_a_shape_has_is_planted(shape: str):
    found = faults_of("reference", named_shape(shape), are_built=False).faults
    planted = {each.layer for each in found if each.absent is None}
    assert planted == KINDS[shape] - {STATES} | ALWAYS
    for each in found:
        assert each.absent in (None, f"the model has no {each.layer}")


def test_the_self_test_says_so_where_it_cannot_test_the_kernels_that_serve():
    model = named_shape("tiny-qwen3")
    instead = faults_of("native", model, are_built=False)
    assert instead.ops == "reference"
    assert instead.note is not None
    assert "`make -C csrc faults`" in instead.note
    assert faults_of("reference", model, are_built=False).note is None
    native = faults_of("native", model, are_built=True)
    own = [each for each in native.faults if each.absent is None]
    assert (native.ops, native.note, len(own)) == ("native", None, 5)


def test_a_window_is_passed_by_a_prompt_that_is_longer():
    found = faults_of("reference", named_shape("tiny-gpt-oss"), are_built=False).faults
    assert [each.min_tokens for each in found if each.layer == "sliding windows"] == [38]


LIMITS = EngineLimits(
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=256,
    page_size=16,
    num_pages=64,
    max_num_queued_reqs=100,
    num_state_slots=40,
    state_snapshot_interval=32,
)


def run_verifier(spoil: Spoil | None) -> VerifierResult:
    """Over a runner without a model, whose tokens follow from the states that it is given."""
    vocab_size = 8  # so that tokens repeat, and drafts are accepted
    runner = FakeRunner(
        max_num_seqs=LIMITS.max_num_seqs,
        max_num_batched_tokens=LIMITS.max_num_batched_tokens,
        max_pages_per_seq=LIMITS.max_pages_per_seq,
        num_pages=LIMITS.num_pages,
        page_size=LIMITS.page_size,
        vocab_size=vocab_size,
        num_state_slots=LIMITS.num_state_slots,
    )
    make_packer = Packer if spoil is None else partial(FaultyPacker, spoil=spoil)

    def make_core(limits: EngineLimits, options: CoreOptions) -> EngineCore:
        runner.reset()
        return EngineCore(
            runner, limits, options, StepRunner(runner, make_packer(limits, vocab_size))
        )

    shape = WorkloadShape(num_requests=9, rows=4, max_tokens=32, context=256, vocab_size=vocab_size)
    return Verifier(
        make_core=make_core,
        limits=LIMITS,
        arrivals=make_workload(shape),
        reference=None,
        with_solo=True,
        clock=time.perf_counter,
        speculation=DRAFTS,
        drafts_show="rejected_drafts",
    ).run()


def test_the_gate_passes_over_states_and_drafts():
    assert run_verifier(None).passed


@pytest.mark.parametrize("name", [*STATE_FAULTS, *DRAFT_FAULTS])
def test_the_gate_catches_each_fault_of_states(name: str):
    assert run_verifier({**STATE_FAULTS, **DRAFT_FAULTS}[name]).verdict == "MISMATCH"


@pytest.mark.parametrize(
    ("sound", "outcomes", "verdict", "line"),
    [
        ("PASS", ("caught", "skipped"), "PASS", "SELF-TEST PASS caught=1 skipped=1 ops=native"),
        ("PASS", ("caught", "missed"), "MISMATCH", "SELF-TEST MISMATCH missed=fault 1"),
        ("PASS", ("skipped",), "NOT SHOWN", "SELF-TEST NOT SHOWN caught=0 skipped=1 ops=native"),
        ("NOT SHOWN", (), "NOT SHOWN", "SELF-TEST NOT SHOWN without any fault: the line"),
        ("MISMATCH", (), "MISMATCH", "SELF-TEST MISMATCH without any fault: the line"),
    ],
)
def test_the_verdict_follows_from_the_control_and_from_what_was_planted(
    sound: Verdict, outcomes: tuple[Outcome, ...], verdict: Verdict, line: str
):
    faults = tuple(
        FaultResult(name=f"fault {place}", layer="attention", outcome=outcome)
        for place, outcome in enumerate(outcomes)
    )
    result = SelfTestResult(ops="native", sound=sound, sound_line="the line", faults=faults)
    assert (result.verdict, result.last_line) == (verdict, line)


@pytest.mark.soak
@pytest.mark.parametrize("shape", KINDS)
def test_the_self_test_catches_a_fault_of_each_kind_of_layer(shape: str):
    config = replace(OPTIONS.config, ops="reference")
    result = self_test(replace(OPTIONS, shape=shape, config=config), ignore)
    assert result.verdict == "PASS", result.last_line
    caught = [each for each in result.faults if each.outcome == "caught"]
    assert {each.layer for each in caught} == KINDS[shape] | ALWAYS
    assert len([each for each in caught if each.layer == STATES]) == 2 * (STATES in KINDS[shape])
    assert all(each.why for each in result.faults)


@pytest.mark.soak
def test_the_self_test_catches_faults_of_masks_on_a_model_with_a_tokenizer(worded_folder: Path):
    config = EngineConfig(ops="reference", max_num_seqs=2, max_model_len=64)
    options = VerifyOptions(model=str(worded_folder), num_requests=8, max_tokens=16, config=config)
    result = self_test(options, ignore)
    assert result.sound == "PASS"
    assert set(MASK_FAULTS) <= {*result.named("caught")}
