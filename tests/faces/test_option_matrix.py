"""The matrix of options: every pair is in it, and a gate over it sees any one option ignored."""

import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza.backends.base import Runner
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import EngineConfig, EngineLimits
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.loading.build import constraint_compiler, plan_model
from cadenza.loading.planned_engine import PlannedEngine
from cadenza.request import Request, SamplingParams
from cadenza.structured import StructuredOutput
from cadenza.verification.faults import MASK_FAULTS
from cadenza.verification.option_matrix import (
    BAD_WORD_FIELD,
    FORM_FIELD,
    JSON_FORMS,
    OPTIONS,
    TEXT_FORMS,
    Forms,
    MatrixVocabulary,
    OptionCoverage,
    OptionMatrix,
    all_pairs,
    covering_rows,
    make_forms,
    make_matrix,
    missing_pairs,
    spec_of,
)
from cadenza.verification.play import Counts
from cadenza.verification.reference import ReferenceEngine, build_reference, ruled_logits
from cadenza.verification.verifier import ModeResult, ReferenceCheck, Verifier, VerifierResult
from cadenza.verification.workload import Arrival, WorkloadShape, make_workload
from tests.by_day import by_day

CONFIG = EngineConfig(max_num_seqs=4, max_model_len=256)

NAMES = tuple(option.name for option in OPTIONS)
NUM_LEVELS = tuple(len(option.levels) for option in OPTIONS)
WITH_FORMS = OptionMatrix(rows=covering_rows(NUM_LEVELS, times=1))
SMALL = WITH_FORMS.without(FORM_FIELD)
"""For a model without a tokenizer."""

VOCAB_SIZE, EOS = 300, (0, 7)

EVERY_FIFTH = [
    name if i % 5 == 0 else pytest.param(name, marks=pytest.mark.soak)
    for i, name in enumerate(NAMES)
    if name != FORM_FIELD
]

ALONE_BY_DAY = {"allowed_token_ids", "n"}
"""A request with a mask and one with samples; in company more options are tried, which is quick."""

SEEN_ALONE = by_day([name for name in NAMES if name != FORM_FIELD], ALONE_BY_DAY)

Wrap = Callable[[Runner, EngineLimits, CoreOptions], EngineCore]


def workload(
    matrix: OptionMatrix, vocab_size: int, eos: tuple[int, ...], forms: Forms | None = None
) -> tuple[Arrival, ...]:
    shape = WorkloadShape(
        num_requests=len(matrix.rows), rows=4, max_tokens=16, context=96, vocab_size=vocab_size
    )
    going_on = frozenset[int]() if forms is None else forms.going_on
    vocabulary = MatrixVocabulary(size=vocab_size, eos_token_ids=eos, going_on=going_on)
    return matrix.apply(make_workload(shape), vocabulary)


def without(request: Request, name: str) -> Request:
    """The request as if its client had not named the option."""
    if name == BAD_WORD_FIELD:
        return replace(request, bad_word_token_ids=())
    if name == FORM_FIELD:
        unformed = replace(request.params, structured=None)
        return replace(request, params=unformed, constraint=None)
    default = getattr(SamplingParams(), name)
    return replace(request, params=replace(request.params, **{name: default}))


class Forgetful(EngineCore):
    """Ignores one option of every request."""

    def __init__(self, *parts: Any, forgets: str) -> None:
        super().__init__(*parts)
        self.forgets = forgets

    def enqueue(self, request_id: int, request: Request) -> None:
        super().enqueue(request_id, without(request, self.forgets))


class ForgetfulInCompany(EngineCore):
    """Ignores it of requests that come while another is open: alone it is sound."""

    def __init__(self, *parts: Any, forgets: str) -> None:
        super().__init__(*parts)
        self.forgets = forgets

    def enqueue(self, request_id: int, request: Request) -> None:
        heard = request if self.is_idle else without(request, self.forgets)
        super().enqueue(request_id, heard)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One runner and one reference, for many gates."""

    runner: Runner
    reference: ReferenceEngine
    limits: EngineLimits
    checkpoint: Checkpoint
    forms: Forms | None = None

    def play(self, wrap: Wrap, fault: str | None = None) -> VerifierResult:
        eos = tuple(self.checkpoint.eos_token_ids)
        vocab_size, forms = self.checkpoint.config.vocab_size, self.forms
        matrix = SMALL if forms is None else WITH_FORMS
        arrivals = workload(matrix, vocab_size, eos, forms)

        def make_core(limits: EngineLimits, options: CoreOptions) -> EngineCore:
            self.runner.reset()
            compile_constraint = None if forms is None else forms.compile
            if fault is not None and compile_constraint is not None:
                compile_constraint = MASK_FAULTS[fault](compile_constraint)
            options = replace(options, compile_constraint=compile_constraint)
            return wrap(self.runner, limits, replace(options, eos_token_ids=frozenset(eos)))

        return Verifier(
            make_core=make_core,
            limits=self.limits,
            arrivals=arrivals,
            reference=ReferenceCheck(engine=self.reference, make_core=make_core),
            with_solo=True,
            clock=time.perf_counter,
            coverage=matrix.coverage(),
        ).run()


@pytest.fixture(scope="module")
def bench(tiny_folder: Path) -> Iterator[Bench]:
    checkpoint = open_checkpoint(tiny_folder)
    plan = plan_model(checkpoint, CONFIG)
    engine = PlannedEngine(checkpoint=checkpoint, plan=plan, config=CONFIG)
    with closing(engine.load_warm_runner(fill=float("nan"))) as runner:
        yield Bench(
            runner=runner,
            reference=build_reference(checkpoint, CONFIG, max_model_len=256),
            limits=replace(plan.limits, max_num_queued_reqs=100),
            checkpoint=checkpoint,
        )


@pytest.fixture(scope="module")
def formed(worded_folder: Path) -> Iterator[Bench]:
    """A model with a tokenizer, over whose tokens the matrix has structured outputs."""
    checkpoint = open_checkpoint(worded_folder)
    plan = plan_model(checkpoint, CONFIG)
    forms = make_forms(constraint_compiler(checkpoint))
    assert forms is not None
    engine = PlannedEngine(checkpoint=checkpoint, plan=plan, config=CONFIG)
    with closing(engine.load_warm_runner(fill=float("nan"))) as runner:
        yield Bench(
            runner=runner,
            reference=build_reference(
                checkpoint, CONFIG, max_model_len=256, compile_constraint=forms.compile
            ),
            limits=replace(plan.limits, max_num_queued_reqs=100),
            checkpoint=checkpoint,
            forms=forms,
        )


@pytest.mark.parametrize("form", [*JSON_FORMS, *TEXT_FORMS], ids=lambda form: form.kind)
def test_every_form_can_go_on_with_tokens_of_single_characters(form: StructuredOutput):
    """Whatever else a request bans, it allows those; the bundled tokenizer has longer ones, too."""
    compiler = constraint_compiler(open_checkpoint(None))
    forms = make_forms(compiler)
    assert forms is not None
    rng = random.Random(3)
    for _ in range(4):
        constraint = forms.compile(spec_of(form)).result(60)
        assert constraint is not None
        for _ in range(40):
            mask = int.from_bytes(constraint.allowed(), "little")
            allowed = [token for token in sorted(forms.going_on) if mask >> token & 1]
            assert allowed, f"of {form} only {mask.bit_count()} longer tokens may follow"
            constraint.accept(rng.choice(allowed))
            if constraint.is_complete:
                break


def test_structured_outputs_of_every_kind_pass_beside_all_other_options(formed: Bench):
    result = formed.play(EngineCore)
    assert result.passed, result.last_line
    assert f" pairs={len(all_pairs(NUM_LEVELS))} " in result.last_line
    vocab_size = formed.checkpoint.config.vocab_size
    requests = [each.request for each in workload(WITH_FORMS, vocab_size, EOS, formed.forms)]
    assert len({each.constraint for each in requests}) == 1 + len(JSON_FORMS) + len(TEXT_FORMS)


@pytest.mark.parametrize("fault", MASK_FAULTS)
def test_a_fault_of_masks_is_caught(formed: Bench, fault: str):
    assert formed.play(EngineCore, fault).mismatch is not None


def test_an_engine_that_ignores_structured_outputs_fails(formed: Bench):
    for make in (Forgetful, ForgetfulInCompany):
        result = formed.play(lambda *parts, make=make: make(*parts, forgets=FORM_FIELD))
        assert result.mismatch is not None


@pytest.mark.soak
def test_the_sound_engine_passes(bench: Bench):
    """By day the sound engine passes over the options and structured outputs together."""
    result = bench.play(EngineCore)
    assert result.passed, result.last_line
    assert result.last_line.endswith(
        f" options={len(set(SMALL.rows))} pairs={len(all_pairs(SMALL.num_levels))}"
        f" longest={result.longest}"
    )


@pytest.mark.parametrize("name", SEEN_ALONE)
def test_an_engine_that_ignores_one_option_fails(bench: Bench, name: str):
    result = bench.play(lambda *parts: Forgetful(*parts, forgets=name))
    assert result.mismatch is not None
    assert result.mismatch.mode in ("alone", "independent reference")


@pytest.mark.parametrize("name", EVERY_FIFTH)
def test_an_engine_that_ignores_one_option_in_company_fails(bench: Bench, name: str):
    result = bench.play(lambda *parts: ForgetfulInCompany(*parts, forgets=name))
    assert result.mismatch is not None
    assert result.mismatch.mode == "plain loop"


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("num_levels", [(2, 2), (3, 2, 4), (1, 5, 2, 2), NUM_LEVELS])
def test_covering_rows_hold_every_pair_as_often_as_asked(num_levels: tuple[int, ...], times: int):
    rows = covering_rows(num_levels, times=times)
    assert missing_pairs(num_levels, rows) == []
    for left, one, right, other in all_pairs(num_levels):
        assert sum(row[left] == one and row[right] == other for row in rows) >= times


def test_without_its_last_row_a_pair_is_missing():
    assert missing_pairs(NUM_LEVELS, WITH_FORMS.rows[:-1])
    coverage = replace(WITH_FORMS, rows=WITH_FORMS.rows[:-1]).coverage()
    assert coverage.num_pairs + len(coverage.missing) == len(all_pairs(NUM_LEVELS))
    assert " with " in coverage.missing[0]


def test_a_missing_pair_fails_the_gate_and_is_named():
    mode = ModeResult(name="m", num_streams=1, num_equal=1, counts=Counts(), tokens_per_s=1.0)
    whole = OptionCoverage(num_combinations=2, num_pairs=3)
    assert VerifierResult(num_requests=1, modes=[mode], coverage=whole).passed
    holed = replace(whole, missing=("top_k[1] with n[2]",))
    result = VerifierResult(num_requests=1, modes=[mode], coverage=holed)
    assert not result.passed
    assert "top_k[1] with n[2]" in result.last_line


def test_the_matrix_is_about_150_different_combinations_and_always_the_same():
    matrix = make_matrix()
    coverage = matrix.coverage()
    assert 140 <= coverage.num_combinations == len(matrix.rows) <= 160
    assert coverage.missing == ()
    assert matrix == make_matrix()


def test_every_field_that_chooses_or_describes_tokens_is_in_the_matrix():
    elsewhere = {"max_tokens", "truncate_prompt_tokens", "bad_words"}
    elsewhere |= {"structured"}  # as `constraint`, which is what it is resolved to
    elsewhere |= {"speculative"}  # changes no token: tests/engine/test_interplay.py
    elsewhere |= {"spec_prefill"}  # as `sparse_prefill`: tests/engine/test_sparse_prompts.py
    of_text = {"stop", "include_stop_str_in_output", "skip_special_tokens"}
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields - elsewhere - of_text == set(NAMES) - {BAD_WORD_FIELD, FORM_FIELD}


def test_no_request_of_the_matrix_forbids_every_token():
    logits = np.zeros(VOCAB_SIZE, np.float32)
    for arrival in workload(make_matrix().without(FORM_FIELD), VOCAB_SIZE, EOS):
        request = arrival.request
        stop = {*request.params.stop_token_ids, *EOS}
        starts = [token for *start, _ in request.bad_word_token_ids for token in start]
        for generated in ([], *([token] for token in starts)):
            assert np.isfinite(ruled_logits(logits, request, generated, stop)).any()


def test_a_request_that_fails_alike_in_every_mode_fails_the_gate(bench: Bench):
    class Forbids(EngineCore):
        def enqueue(self, request_id: int, request: Request) -> None:
            params = replace(request.params, allowed_token_ids=(1,))
            banned = replace(request, params=params, bad_word_token_ids=((1,),))
            super().enqueue(request_id, banned)

    found = bench.play(Forbids).mismatch
    assert found is not None
    assert (found.mode, found.expected) == ("alone", "stop or length")
