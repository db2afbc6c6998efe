"""Pooled requests on the token-storing runner: an embedding follows from its prompt alone.

The runner's hidden state of a token is a hash of all tokens up to it, read back through the page
table, so that any error in paging, chunking, sharing or preemption changes the embedding.
"""

import math
from collections.abc import Sequence
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest

from cadenza.backends.fake import FakeRunner, hidden_state
from cadenza.batch.prompt import Pool
from cadenza.batch.step_schema import ModelInputs, StepOutput
from cadenza.config import SchedulerLoop
from cadenza.engine.core import EngineCore
from cadenza.errors import InvalidRequestError
from cadenza.events import Event, Finished, PromptLogprobs, Started, Token
from cadenza.request import Pooling, PoolingParams, Request, SamplingParams
from cadenza.tenant import Tenant
from tests.engine.simulation import ObservedRunner, Parts, make_engine
from tests.engine.test_engine_prompt_logprobs import (
    LIMITS,
    LOOPS,
    UsesTheCacheAllTheSame,
    prompt_of,
    run,
)
from tests.engine.test_resume import LIMITS as RELAY_LIMITS
from tests.engine.test_resume import relay_of

POOLINGS: tuple[Pooling, ...] = ("last", "mean")


def pooled(prompt: SequenceOf[int], pooling: Pooling, **changes: Any) -> Request:
    params = PoolingParams(pooling=pooling, dimensions=changes.pop("dimensions", None))
    return Request(prompt_token_ids=tuple(prompt), pooling=params, **changes)


def expected(request: Request) -> bytes | None:
    """By the definition: the states of whole prefixes, one after another."""
    assert request.pooling is not None
    prompt = list(request.prompt_token_ids)
    is_mean = request.pooling.pooling == "mean"
    pool = Pool(dimensions=request.pooling.dimensions)
    for end in range(1 if is_mean else len(prompt), len(prompt) + 1):
        pool.add(hidden_state(prompt[:end])[None])
    pool.finish()
    return pool.embedding


def ends_of(events: SequenceOf[Event]) -> dict[int, Finished]:
    return {event.request_id: event for event in events if isinstance(event, Finished)}


def check(engine: EngineCore, requests: list[Request]) -> list[Event]:
    """Runs requests, of which the pooled ones must give their embeddings and nothing else."""
    first = engine.submit(requests[0])
    events = run(engine, requests[1:])
    ends = ends_of(events)
    for request_id, request in enumerate(requests, start=first):
        if request.pooling is None:
            continue
        end = ends[request_id]
        assert (end.finish_reason, end.num_generated_tokens) == ("stop", 0)
        assert end.embedding == expected(request), f"request {request_id}"
        told = [type(event) for event in events if event.request_id == request_id]
        assert told == [Started, Finished]
    return events


def generating(count: int, seed: int, **params: Any) -> Request:
    return Request(
        prompt_token_ids=prompt_of(count, seed), params=SamplingParams(seed=seed, **params)
    )


def without_drafts(token: Token) -> Token:
    """How many drafts there were depends on the load."""
    return msgspec.structs.replace(token, is_draft=False, num_rejected_drafts=0)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("budget", [5, 64, 100])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_chunks_change_no_embedding(pooling: Pooling, budget: int, loop: SchedulerLoop) -> None:
    engine = make_engine(replace(LIMITS, max_num_batched_tokens=budget), loop=loop)
    check(engine, [pooled(prompt_of(count, count), pooling) for count in (1, 2, 64, 66, 200, 256)])


@pytest.mark.parametrize("loop", LOOPS)
def test_pooled_and_generating_rows_change_nothing_of_each_other(loop: SchedulerLoop) -> None:
    engine = make_engine(LIMITS, loop=loop)
    streams = [
        generating(30, 1, max_tokens=40, prompt_logprobs=2),
        generating(90, 2, max_tokens=20, speculative=3, temperature=0.0),
        generating(7, 3, max_tokens=30, frequency_penalty=1.0, logprobs=2),
    ]
    requests = [*streams, *(pooled(prompt_of(50, seed), POOLINGS[seed % 2]) for seed in range(6))]
    found = check(engine, requests)
    alone = run(make_engine(LIMITS, loop=loop), streams)
    for request_id in range(len(streams)):
        ours, theirs = [
            [
                without_drafts(each)
                for each in events
                if isinstance(each, Token) and each.request_id == request_id
            ]
            for events in (found, alone)
        ]
        assert ours == theirs
        assert ours


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_preemption_changes_no_embedding(pooling: Pooling, loop: SchedulerLoop) -> None:
    limits = replace(LIMITS, num_pages=14, max_num_batched_tokens=24)
    engine = make_engine(limits, loop=loop)
    streams = [generating(40, seed, max_tokens=90, ignore_eos=True) for seed in range(3)]
    later = [pooled(prompt_of(200, seed), pooling) for seed in range(2)]
    check(engine, [*streams, *later, *streams])
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("loop", LOOPS)
def test_a_mean_is_of_all_tokens_though_they_are_cached(loop: SchedulerLoop) -> None:
    engine = make_engine(LIMITS, loop=loop)
    prompt = prompt_of(100)
    check(engine, [pooled(prompt, "last")])
    events = check(engine, [pooled(prompt, "last"), pooled(prompt, "mean")])
    assert [end.num_cached_tokens for end in ends_of(events).values()] == [96, 0]
    assert engine.scheduler.prefix_counts.num_misses["pooling"] == 100


def test_a_mean_of_what_was_not_cached_is_caught() -> None:
    engine = make_engine(LIMITS, loop="plain", parts=Parts(kv_cache=UsesTheCacheAllTheSame))
    prompt = prompt_of(100)
    check(engine, [pooled(prompt, "last")])
    with pytest.raises(AssertionError, match="request 1"):
        check(engine, [pooled(prompt, "mean")])


@pytest.mark.parametrize("loop", LOOPS)
def test_a_pooled_prompt_leaves_its_pages_to_the_next(loop: SchedulerLoop) -> None:
    engine = make_engine(LIMITS, loop=loop)
    prompt = prompt_of(100)
    check(engine, [pooled(prompt, "mean")])
    ends = ends_of(run(engine, [Request(prompt_token_ids=prompt)]))
    assert ends[1].num_cached_tokens == 96


@pytest.mark.parametrize("loop", LOOPS)
def test_an_engine_that_is_lost_changes_no_embedding(loop: SchedulerLoop) -> None:
    requests = [pooled(prompt_of(40, seed), POOLINGS[seed % 2]) for seed in range(4)]
    for kill in range(14):
        relay = relay_of(requests, loop)
        ended: dict[int, Finished] = {}
        record = relay.books.record

        def watch(events: Any, take: Any = record, ended: dict[int, Finished] = ended) -> Any:
            passed = take(events)
            ended |= ends_of(passed)
            return passed

        relay.books.record = watch  # type: ignore[method-assign]
        relay.run([kill])
        assert [ended[at].embedding for at in range(4)] == [expected(each) for each in requests]
    assert RELAY_LIMITS.max_model_len >= 40


class Failing(ObservedRunner):
    """Its `at`-th launch raises."""

    at = 2

    def launch(self, inputs: ModelInputs) -> Any:
        if sum(kind == "launch" for kind, _ in self.trace) == self.at:
            self.at = -1
            raise RuntimeError("the device is gone")
        return super().launch(inputs)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_step_that_failed_changes_no_embedding(pooling: Pooling, loop: SchedulerLoop) -> None:
    limits = replace(LIMITS, max_num_batched_tokens=20)
    engine = make_engine(limits, loop=loop, parts=Parts(runner=Failing))
    check(engine, [pooled(prompt_of(70, seed), pooling) for seed in range(2)])
    assert engine.loop.num_failed_steps == 1


@dataclass(frozen=True, slots=True)
class Spoiled:
    handle: Any
    change: Any

    def result(self) -> StepOutput:
        return self.change(self.handle.result())


class HiddenNaN(FakeRunner):
    """The hidden states are broken, and the logits are not."""

    def launch(self, inputs: ModelInputs) -> Any:
        def spoil(output: StepOutput) -> StepOutput:
            return replace(output, hidden=output.hidden * np.float32("nan"))

        return Spoiled(super().launch(inputs), spoil)


class LogitsNaN(FakeRunner):
    def launch(self, inputs: ModelInputs) -> Any:
        def spoil(output: StepOutput) -> StepOutput:
            return replace(output, is_finite=np.zeros_like(output.is_finite))

        return Spoiled(super().launch(inputs), spoil)


@pytest.mark.parametrize("runner", [HiddenNaN, LogitsNaN])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_states_that_are_not_finite_end_the_request(pooling: Pooling, runner: Any) -> None:
    engine = make_engine(LIMITS, parts=Parts(runner=runner))
    *_, end = run(engine, [pooled(prompt_of(70), pooling)])
    assert isinstance(end, Finished)
    assert (end.finish_reason, end.error_kind, end.embedding) == ("error", "not_finite", None)
    prompt = Request(prompt_token_ids=prompt_of(70), params=SamplingParams(max_tokens=0))
    assert ends_of(run(engine, [prompt]))[1].num_cached_tokens == 0, "its pages were published"


class TooFewStates(FakeRunner):
    def launch(self, inputs: ModelInputs) -> Any:
        return Spoiled(
            super().launch(inputs), lambda output: replace(output, hidden=output.hidden[1:])
        )


def test_a_runner_that_gives_too_few_states_fails_the_step() -> None:
    engine = make_engine(LIMITS, parts=Parts(runner=TooFewStates))
    *_, end = run(engine, [pooled(prompt_of(20), "last")])
    assert isinstance(end, Finished)
    assert end.error_kind == "step_failed"


def test_a_cancelled_one_says_nothing() -> None:
    engine = make_engine(replace(LIMITS, max_num_batched_tokens=16))
    request_id = engine.submit(pooled(prompt_of(200), "mean"))
    for _ in range(3):
        engine.step()
    assert engine.cancel(request_id)
    assert [event for event in run(engine, []) if isinstance(event, Finished)] == []


def test_a_steps_other_rows_give_no_states() -> None:
    engine = make_engine(LIMITS)
    runner = engine.runner
    assert isinstance(runner, ObservedRunner)
    asked: list[int] = []
    launch = runner.launch

    def watch(inputs: ModelInputs) -> Any:
        asked.append(len(inputs.hidden_rows))
        return launch(inputs)

    runner.launch = watch  # type: ignore[method-assign]
    run(engine, [generating(70, 1, prompt_logprobs=1), generating(9, 2)])
    assert not any(asked)
    run(engine, [generating(9, 3), pooled(prompt_of(30), "mean"), pooled(prompt_of(8), "last")])
    assert sum(asked) == 31


def test_a_tenants_pages_bound_it_as_any_other() -> None:
    engine = make_engine(LIMITS)
    small = Tenant(name="small", page_share=0.1)
    with pytest.raises(InvalidRequestError, match="page_share"):
        engine.submit(pooled(prompt_of(200), "last", tenant=small))
    check(engine, [pooled(prompt_of(90), "mean", tenant=small)] * 2)


def test_prompt_logprobs_are_no_part_of_it() -> None:
    engine = make_engine(LIMITS)
    events = check(engine, [pooled(prompt_of(90), "mean"), generating(40, 5, prompt_logprobs=1)])
    told = {event.request_id for event in events if isinstance(event, PromptLogprobs)}
    assert told == {1}


STATES = np.random.default_rng(3).normal(size=(150, 24)).astype(np.float32)
STATES[::7] *= np.float32(1e6)
"""Of magnitudes so different that a sum in another order has other bits."""


def pool_of(parts: Sequence[np.ndarray], dimensions: int | None = None) -> bytes:
    pool = Pool(dimensions=dimensions)
    for part in parts:
        pool.add(part)
    assert pool.finish()
    assert pool.embedding is not None
    return pool.embedding


def test_a_state_that_is_not_scaled_is_as_it_was() -> None:
    pool = Pool(dimensions=None, normalize=False)
    pool.add(STATES[-1:])
    assert pool.finish()
    assert pool.embedding == STATES[-1].astype("<f4").tobytes()
    assert pool_of([STATES[-1:]]) != pool.embedding


def values_of(embedding: bytes) -> np.ndarray:
    return np.frombuffer(embedding, "<f4")


@pytest.mark.parametrize("cuts", [[1], [149], [10, 20, 30], list(range(1, 150))])
def test_the_bits_do_not_depend_on_the_cuts(cuts: list[int]) -> None:
    assert pool_of(np.split(STATES, cuts)) == pool_of([STATES])


class SumsEachPart(Pool):
    def add(self, states: np.ndarray) -> None:
        super().add(states.sum(axis=0, dtype=np.float32)[None])


def test_a_sum_of_sums_is_caught() -> None:
    found = []
    for cuts in ([], [10, 20, 30]):
        pool = SumsEachPart(dimensions=None)
        for part in np.split(STATES, cuts):
            pool.add(part)
        pool.finish()
        found.append(pool.embedding)
    assert found[0] != found[1]


def test_it_is_the_mean_at_unit_length() -> None:
    mean = STATES.astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(
        values_of(pool_of([STATES])), mean / np.linalg.norm(mean), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("dimensions", [1, 5, 24])
def test_what_is_kept_has_unit_length(dimensions: int) -> None:
    values = values_of(pool_of([STATES[:1]], dimensions))
    assert len(values) == dimensions
    assert math.isclose(float(np.linalg.norm(values)), 1.0, rel_tol=1e-6)
    assert (np.sign(values) == np.sign(STATES[0, :dimensions])).all()


def test_a_mean_of_zeros_stays_as_it_is() -> None:
    assert not values_of(pool_of([np.zeros((2, 4), np.float32)])).any()


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_states_that_are_not_finite_have_no_embedding(odd: float) -> None:
    pool = Pool(dimensions=None)
    pool.add(np.array([[1.0, odd], [2.0, 3.0]], np.float32))
    assert not pool.finish()
    assert pool.embedding is None
