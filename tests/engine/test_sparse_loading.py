"""From --spec-prefill to an engine that scores prompts, over the token-storing runners."""

from dataclasses import replace

import pytest

from cadenza.backends.base import BackendTraits, Runner, RunnerSetup
from cadenza.backends.fake import FakeRunner
from cadenza.checkpoint.folder import Checkpoint
from cadenza.config import EngineConfig, Ops
from cadenza.errors import ConfigError
from cadenza.events import Started
from cadenza.loading.build import build_core, open_planned
from cadenza.loading.planned_engine import PlannedEngine
from cadenza.request import Request, SamplingParams
from cadenza.scheduler.scoring_queue import MAX_SCORINGS, ScoringQueue
from cadenza.sparse_prefill import LOOK_AHEAD_TOKENS, SparsePrefill
from cadenza.verification.run import VerifyOptions, verify
from tests.engine.sparse import FakeScorer, tokens_of
from tests.faces.stub_backend import STUBS, StubBackend

HERE = "tests.engine.test_sparse_loading"


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
