"""A prompt with gaps: pages and causality go by positions, and draws, windows, keys by indices."""

from dataclasses import replace
from typing import Any

import pytest

from cadenza.backends.base import BackendTraits, Runner, RunnerSetup
from cadenza.backends.fake import FakeRunner
from cadenza.checkpoint.folder import Checkpoint
from cadenza.config import EngineConfig, Ops
from cadenza.engine.core import EngineCore
from cadenza.engine.new_sequences import ResumedSample, Resumption
from cadenza.errors import ConfigError
from cadenza.events import Finished, Started, Token
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.loading.build import build_core, open_planned
from cadenza.loading.planned_engine import PlannedEngine
from cadenza.request import Request, SamplingParams
from cadenza.scheduler.scoring_queue import MAX_SCORINGS, ScoringQueue
from cadenza.sparse_prefill import LOOK_AHEAD_TOKENS, KeptTokens, SparsePrefill
from cadenza.verification.run import VerifyOptions, verify
from tests.engine.simulation import Record, run_requests
from tests.engine.sparse import (
    LIMITS,
    SECRET,
    FakeScorer,
    engine_of,
    owed,
    random_kept,
    request_of,
    tokens_of,
)
from tests.faces.stub_backend import STUBS, StubBackend

LENGTHS = (1, 31, 32, 33, 200, 201, 333)


def run(engine: EngineCore, *requests: Request, **options: Any) -> Record:
    return run_requests(engine, list(requests), **options)


def streams_of(record: Record) -> list[tuple[int, ...]]:
    return [record.token_ids(stream) for stream in record.streams]


@pytest.mark.parametrize("loop", ["plain", "overlap"])
@pytest.mark.parametrize("budget", [7, 64])
def test_streams_together_are_those_alone_in_any_cut_and_after_preemptions(
    budget: int, loop: str
) -> None:
    limits = replace(LIMITS, max_num_batched_tokens=budget, num_pages=28)
    cases = [
        request_of(tokens_of(n, n), random_kept(n, n), seed=n, max_tokens=100) for n in LENGTHS
    ]
    engine = engine_of(limits, loop=loop, reserved_output=0.0)
    record = run(engine, *cases)
    expected = [
        owed(case, random_kept(n, n)).token_ids for case, n in zip(cases, LENGTHS, strict=True)
    ]
    assert streams_of(record) == expected
    assert engine.scheduler.num_preemptions > 0
    record.verify_nothing_is_held()


def test_samples_fork_a_prompt_with_gaps() -> None:
    kept = random_kept(200, 1)
    request = request_of(tokens_of(200, 1), kept, n=3, temperature=1.0)
    record = run(engine_of(), request)
    streams = streams_of(record)
    assert streams[0] == owed(request, kept).token_ids
    assert len({*streams}) == 3
    assert {end.num_prompt_tokens for end in record.finished.values()} == {200}
    num_scheduled = record.engine.scheduler.num_scheduled_tokens
    assert num_scheduled < 2 * kept.num_tokens, "the prompt was computed once"


def test_with_everything_kept_the_stream_and_its_pages_are_the_whole_prompts() -> None:
    prompt = tokens_of(200, 3)
    whole = random_kept(200, 3)
    whole = replace(whole, chunks=(*range(7),))
    engine = engine_of()
    plain = request_of(prompt, None)
    first = run(engine, plain)
    second = run(engine, request_of(prompt, whole))
    assert streams_of(first) == streams_of(second) == [owed(plain, None).token_ids]
    (end,) = second.finished.values()
    assert end.num_cached_tokens == 192


def kept_of(chunks: tuple[int, ...], num_tokens: int = 200) -> KeptTokens:
    return KeptTokens(num_prompt_tokens=num_tokens, chunks=chunks)


def cached_tokens(engine: EngineCore, request: Request) -> int:
    (end,) = run(engine, request).finished.values()
    return end.num_cached_tokens


def test_pages_are_shared_before_the_first_gap_and_behind_it_with_the_same_tokens_alone() -> None:
    prompt = tokens_of(200, 4)
    engine = engine_of()
    gap = kept_of((0, 1, 2, 5, 6))
    assert cached_tokens(engine, request_of(prompt, gap)) == 0
    assert cached_tokens(engine, request_of(prompt, None)) == 96
    assert cached_tokens(engine, request_of(prompt, gap)) == 128, "its own pages, behind the gap"
    other = kept_of((0, 1, 2, 4, 5, 6))
    assert cached_tokens(engine, request_of(prompt, other)) == 96
    shorter = prompt[:96] + prompt[160:]
    assert cached_tokens(engine, request_of(shorter, None)) == 96, "no page behind a gap is exact"


def test_pages_behind_a_gap_are_evicted_first_though_they_were_taken_twice() -> None:
    limits = replace(LIMITS, num_pages=24)
    engine = engine_of(limits)
    plain, prompt, gap = tokens_of(100, 5), tokens_of(200, 6), kept_of((0, 5, 6))
    for _ in range(3):
        run(engine, request_of(plain, None, max_tokens=1))
        run(engine, request_of(prompt, gap, max_tokens=1))
    newest = request_of(tokens_of(100, 7), None, max_tokens=1)
    run(engine, newest)  # the newest quarter of the pages
    run(engine, request_of(tokens_of(160, 8), None, max_tokens=1))
    assert cached_tokens(engine, newest) == 96
    assert cached_tokens(engine, request_of(plain, None, max_tokens=1)) == 96
    assert cached_tokens(engine, request_of(prompt, gap, max_tokens=1)) == 32


class KeepsKeys:
    """A store that has nothing, and notes what it is given."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []

    def is_reading(self, sequence: Any, now_s: float, missing: Any) -> bool:
        return False

    def keep(self, key: bytes, page_id: int) -> None:
        self.keys.append(key)

    def keep_state(self, key: bytes, slot: int) -> None:
        raise AssertionError("there are no states")


def test_pages_behind_a_gap_are_not_stored() -> None:
    engine = engine_of()
    store = engine.scheduler.kv_cache.page_store = KeepsKeys()
    request = request_of(tokens_of(200, 8), kept_of((0, 1, 4, 5, 6)), max_tokens=1)
    for _ in range(2):
        run(engine, request)
    whole = KVCacheManager(LIMITS, SECRET)
    record = run(engine_of(), request_of(tokens_of(200, 8), None))
    # Its keys are those of the whole prompt.
    (sequence,) = engine._new_sequences.of_request(0, record.requests[0])
    assert {*store.keys} == {*whole.page_keys(sequence)[:4]}


def test_a_stream_goes_on_in_another_engine_with_what_the_first_kept() -> None:
    prompt, kept = tokens_of(200, 9), random_kept(200, 9)
    asked = request_of(prompt, kept)
    expected = owed(asked, kept).token_ids
    engine = engine_of()
    events = []
    request_id = engine.submit(asked)
    while len(events) < 8:
        events += engine.step()
    (started,) = [each for each in events if isinstance(each, Started)]
    assert started.kept == kept.mask
    tokens = tuple(each.token_id for each in events if isinstance(each, Token))
    unknown = replace(asked, sparse_prefill=SparsePrefill(keep=0.3))
    second = engine_of()
    sample = ResumedSample(sample=0, token_ids=tokens)
    second.resume(request_id, unknown, Resumption(samples=(sample,), kept=started.kept))
    while not second.is_idle:
        events += [each for each in second.step() if not isinstance(each, Started)]
    assert tuple(each.token_id for each in events if isinstance(each, Token)) == expected
    (end,) = [each for each in events if isinstance(each, Finished)]
    assert (end.num_prompt_tokens, end.num_generated_tokens) == (200, 12)


HERE = "tests.engine.test_sparse_prompts"


class SparseStub(StubBackend):
    """Computes prompts with gaps, and scores prompts."""

    def describe(self, device: str, ops: Ops, checkpoint: Checkpoint) -> BackendTraits:
        traits = super().describe(device, ops, checkpoint)
        return replace(traits, capabilities=traits.capabilities | {"sparse_prompts", "scores"})

    def load_runner(self, checkpoint: Checkpoint, setup: RunnerSetup) -> Runner:
        runner = super().load_runner(checkpoint, setup)
        assert isinstance(runner, FakeRunner)
        runner.is_sparse = "sparse_prompts" in setup.capabilities
        if "scores" not in setup.capabilities:
            return runner
        limits = setup.limits
        return FakeScorer(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_pages_per_seq=limits.max_pages_per_seq,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            vocab_size=checkpoint.outline.vocab_size,
        )


def config_of(**changes: object) -> EngineConfig:
    chosen = {"keep": 0.3, "threshold": 1000, "force": True, **changes}
    return EngineConfig(backend="stub", max_num_seqs=4, spec_prefill=chosen, max_itl_ms="none")


def planned(config: EngineConfig) -> PlannedEngine:
    return open_planned(None, config, {"stub": f"{HERE}:SparseStub"})


def test_the_scorer_is_planned_loaded_and_used() -> None:
    engine = planned(config_of())
    plan = engine.plan
    assert plan.scorer is not None
    pages = plan.limits.num_pages * plan.limits.page_size
    scorer_bytes = plan.scorer.weight_bytes + pages * plan.scorer.kv_bytes_per_token
    assert plan.kv_bytes_beside(plan.scorer) == scorer_bytes - plan.scorer.weight_bytes
    plain = open_planned(None, replace(engine.config, spec_prefill=None), engine.backends).plan
    assert (
        plan.planned_bytes - plain.planned_bytes
        >= scorer_bytes
        - (plain.limits.num_pages - plan.limits.num_pages)
        * plan.limits.page_size
        * plain.kv_bytes_per_token
    )
    assert plan.scorer_limits.max_num_seqs == MAX_SCORINGS
    core = build_core(engine)
    assert core.request_check.scored_tokens == (
        plan.scorer_limits.max_model_len - LOOK_AHEAD_TOKENS
    )
    request = Request(
        prompt_token_ids=tokens_of(1200, 1),
        params=SamplingParams(max_tokens=2),
        sparse_prefill=SparsePrefill(keep=0.3),
    )
    core.submit(request)
    events = []
    while not core.is_idle:
        events += core.step()
    (started,) = [each for each in events if isinstance(each, Started)]
    assert started.kept is not None
    assert core.scheduler.work(ScoringQueue).counts.num_scored == 1
    core.close()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"threshold": 8192}, "at most 2048 tokens"),
        ({"keep": 0.9, "force": False}, "predicted to take"),
    ],
)
def test_a_pair_that_cannot_pay_is_refused(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        planned(config_of(**changes))


def test_a_backend_that_computes_no_gaps_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="stub:cpu"):
        open_planned(None, config_of(), STUBS)


def test_the_gate_plays_prompts_that_are_scored() -> None:
    config = replace(config_of(threshold=100), max_itl_ms="auto", max_model_len=700)
    options = VerifyOptions(
        config=config, num_requests=9, reference="solo", backends={"stub": f"{HERE}:SparseStub"}
    )
    result, _ = verify(options, lambda _: None)
    assert result.passed, result.last_line
    assert all(mode.counts.scored for mode in result.modes)
