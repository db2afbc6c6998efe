"""Constrained sequences among free ones, on the token-storing runner: when steps are read, how a
constrained stream ends, and what happens before its constraint is compiled.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from cadenza.backends.base import Capability
from cadenza.backends.fake import FakeLateStepHandle, FakeStepHandle
from cadenza.batch.step_schema import ModelInputs, StepOutput
from cadenza.config import EngineLimits, SchedulerLoop
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.events import Event, Finished, Token
from cadenza.request import Request, SamplingParams
from cadenza.scheduler.step_budget import MAX_STEP_MASKS
from cadenza.scheduler.step_results import CONSTRAINT_FAILED
from cadenza.structured import ConstraintSpec
from tests.engine.hashed_constraint import (
    FAILS_AFTER,
    NEVER,
    PHRASES,
    SHORT,
    STEADY,
    Compiled,
    HashedConstraint,
    compile_hashed,
)
from tests.engine.simulation import ObservedRunner, Parts, make_engine
from tests.engine.solo import solo_stream_of

LIMITS = EngineLimits(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=64,
    page_size=16,
    num_pages=16,
    max_num_queued_reqs=3,
)
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


def free(first: int) -> Request:
    return Request(prompt_token_ids=(first, 2, 3), params=PARAMS)


def constrained(first: int, grammar: str = "a", params: SamplingParams = PARAMS) -> Request:
    spec = ConstraintSpec(grammar=grammar)
    return Request(prompt_token_ids=(first, 2, 3), params=params, constraint=spec)


def drain(engine: EngineCore) -> list[Event]:
    events: list[Event] = []
    while not engine.is_idle:
        events += engine.step()
        engine.check_invariants()
    return events


def tokens(events: list[Event], request_id: int) -> list[int]:
    found = [each for each in events if isinstance(each, Token) and each.request_id == request_id]
    return [each.token_id for each in found]


def ends(events: list[Event]) -> dict[int, Finished]:
    return {each.request_id: each for each in events if isinstance(each, Finished)}


def trace_of(engine: EngineCore) -> list[str]:
    assert isinstance(engine.runner, ObservedRunner)
    return [kind for kind, _ in engine.runner.trace]


@pytest.mark.parametrize("loop", ["plain", "overlap"])
def test_rows_of_both_kinds_give_what_each_gives_alone(loop: SchedulerLoop):
    requests = [free(1), constrained(2), constrained(3, "b"), free(4)]
    together = make_engine(LIMITS, loop=loop)
    ids = [together.submit(each) for each in requests[:3]]
    events = [event for _ in range(4) for event in together.step()]
    ids.append(together.submit(requests[3]))
    events += drain(together)
    for place, request in enumerate(requests):
        alone = make_engine(LIMITS, loop=loop)
        for _ in range(ids[place]):  # the seed of a request without one follows from its id
            alone.new_request_id()
        assert tokens(drain_one(alone, request), ids[place]) == tokens(events, ids[place])


def drain_one(engine: EngineCore, request: Request) -> list[Event]:
    engine.submit(request)
    return drain(engine)


@dataclass(kw_only=True, eq=False)
class WithMasksOnly(ObservedRunner):
    """A runner that needs a step's masks at its launch."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        return super().capabilities - {"late_masks"}

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        assert not inputs.masks_follow
        return super().launch(inputs)


def test_a_step_is_launched_before_the_tokens_that_decide_its_masks_are_read():
    engine = make_engine(LIMITS, loop="overlap")
    engine.submit(constrained(1))
    engine.submit(free(2))
    for _ in range(8):
        engine.step()
    assert isinstance(engine.runner, ObservedRunner)
    trace = engine.runner.trace
    _, first = trace[next(i for i, (kind, _) in enumerate(trace) if kind == "choose")]
    assert first < 6
    expected: list[tuple[str, int]] = []
    for step in range(first, 8):
        expected += [("launch", step), ("read", step - 1), ("choose", step)]
    assert trace[trace.index(("launch", first)) :] == expected


def test_tokens_that_decide_masks_are_read_before_the_next_launch_where_a_runner_needs_these():
    engine = make_engine(LIMITS, loop="overlap", parts=Parts(runner=WithMasksOnly))
    ids = [engine.submit(constrained(1)), engine.submit(free(2))]
    events = drain(engine)
    assert trace_of(engine)[-30:] == ["launch", "read"] * 15
    late = make_engine(LIMITS, loop="overlap")
    assert [late.submit(constrained(1)), late.submit(free(2))] == ids
    others = drain(late)
    assert [tokens(events, each) for each in ids] == [tokens(others, each) for each in ids]


@pytest.mark.parametrize("runner", [ObservedRunner, WithMasksOnly])
def test_steps_of_free_rows_do_not_wait(runner: type[ObservedRunner]):
    engine = make_engine(LIMITS, loop="overlap", parts=Parts(runner=runner))
    engine.submit(free(2))
    drain(engine)
    assert trace_of(engine)[:5] == ["launch", "launch", "read", "launch", "read"]
    assert "choose" not in trace_of(engine)


@dataclass(kw_only=True, eq=False)
class LosesSteps(ObservedRunner):
    """Its `at`-th step that gets its masks late is lost: when it chooses, or the step before it,
    which is read while it waits."""

    at: int
    when: str
    num_late: int = 0
    last: FakeStepHandle | None = None

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        handle = super().launch(inputs)
        before, self.last = self.last, handle
        self.num_late += inputs.masks_follow
        if inputs.masks_follow and self.num_late == self.at:
            if self.when == "choose":
                assert isinstance(handle, FakeLateStepHandle)
                handle.sample = lose_choice
            else:
                assert before is not None
                before.on_read = lose_result
        return handle


def lose_choice(_: object) -> StepOutput:
    raise RuntimeError("the device lost the step")


def lose_result() -> None:
    raise RuntimeError("the device lost the step")


@pytest.mark.parametrize("when", ["choose", "read"])
@pytest.mark.parametrize("at", range(1, 18, 2))
def test_a_step_that_is_lost_around_its_choice_changes_no_stream(at: int, when: str):
    requests = [free(1), constrained(2, PHRASES), constrained(3, STEADY), constrained(4, SHORT)]
    limits = replace(LIMITS, max_num_queued_reqs=5)
    sound = make_engine(limits)
    faulty = make_engine(limits, parts=Parts(runner=partial(LosesSteps, at=at, when=when)))
    results: list[list[list[int]]] = []
    for engine in (sound, faulty):
        ids = [engine.submit(each) for each in requests[:3]]
        events = engine.step()
        ids += [engine.submit(each) for each in requests[3:]]
        events += drain(engine)
        assert all(end.finish_reason in {"length", "stop"} for end in ends(events).values())
        results.append([tokens(events, each) for each in ids])
    assert results[0] == results[1]
    assert (sound.loop.num_failed_steps, faulty.loop.num_failed_steps) == (0, 1)


@pytest.mark.parametrize("num_steps", range(1, 6))
def test_cancelled_rows_leave_those_beside_them_as_they_were(num_steps: int):
    engine = make_engine(LIMITS)
    cancelled, kept = engine.submit(constrained(1)), engine.submit(constrained(2))
    events = [event for _ in range(num_steps) for event in engine.step()]
    engine.cancel(cancelled)
    events += drain(engine)
    alone = make_engine(LIMITS)
    alone.new_request_id()
    assert tokens(drain_one(alone, constrained(2)), kept) == tokens(events, kept)


def test_a_free_row_advances_in_every_step_beside_a_constrained_one():
    engine = make_engine(LIMITS, loop="overlap")
    free_id = engine.submit(free(2))
    constrained_id = engine.submit(constrained(1))
    events: list[Event] = []
    while free_id not in ends(events):
        events += engine.step()
    assert engine.num_steps <= 22
    assert len(tokens(events, constrained_id)) >= 15


def test_a_complete_constraint_ends_its_stream_with_stop():
    engine = make_engine(LIMITS)
    request_id = engine.submit(constrained(5, SHORT, replace(PARAMS, max_tokens=60)))
    events = drain(engine)
    end = ends(events)[request_id]
    assert end.finish_reason == "stop"
    assert end.stop_token_id is None
    assert end.num_generated_tokens == len(tokens(events, request_id)) < 60


def test_a_constraint_that_fails_ends_its_stream_alone():
    engine = make_engine(LIMITS)
    failing = engine.submit(constrained(1, f"{FAILS_AFTER}0"))
    other = engine.submit(free(2))
    events = drain(engine)
    assert (ends(events)[failing].error_kind, ends(events)[failing].error) == (
        "constraint_failed",
        CONSTRAINT_FAILED,
    )
    assert tokens(events, failing) == []
    assert ends(events)[other].finish_reason == "length"


def test_a_constraint_that_cannot_be_compiled_ends_every_sample():
    engine = make_engine(LIMITS)
    params = SamplingParams(max_tokens=5, n=2)
    engine.submit(constrained(1, NEVER, params))
    events = drain(engine)
    assert [each.sample for each in events if isinstance(each, Finished)] == [0, 1]
    assert all(each.error_kind == "constraint_failed" for each in ends(events).values())


def test_a_request_can_be_cancelled_while_its_constraint_is_compiled():
    engine = make_engine(LIMITS)
    request_id = engine.submit(constrained(1, params=SamplingParams(max_tokens=5, n=2)))
    assert engine.is_open(request_id)
    assert engine.num_queue_slots == 1
    assert engine.cancel(request_id, 1)
    assert not engine.cancel(request_id, 1)
    assert engine.num_queue_slots == 2
    assert engine.cancel(request_id)
    assert engine.is_idle
    assert drain(engine) == []


def test_what_is_cancelled_is_not_compiled():
    made = list[Compiled]()

    def compile(spec: ConstraintSpec) -> Compiled:
        made.append(compile_hashed(spec))
        return made[-1]

    options = CoreOptions(compile_constraint=compile)
    engine = EngineCore(make_engine(LIMITS).runner, LIMITS, options)
    request_id = engine.submit(constrained(1, params=SamplingParams(max_tokens=5, n=3)))
    engine.cancel(request_id, 1)
    assert [each.is_cancelled for each in made] == [False, True, False]
    engine.cancel(request_id)
    assert [each.is_cancelled for each in made] == [True] * 3
    assert engine.is_idle


def test_a_step_whose_masks_follow_has_no_drafts():
    """A prompt that can draft ends in a step beside a constrained row whose token is not read."""
    limits = replace(LIMITS, max_num_batched_tokens=64, max_model_len=128, num_pages=32)
    engine = make_engine(limits)
    first = engine.submit(constrained(1, params=replace(PARAMS, max_tokens=60)))
    events = [event for _ in range(8) for event in engine.step()]
    assert "choose" in trace_of(engine)
    params = replace(PARAMS, speculative=True)
    repeated = Request(prompt_token_ids=(1, 2, 3, 4, 5, 6) * 5, params=params)
    second = engine.submit(repeated)
    events += drain(engine)
    assert engine.loop.num_failed_steps == 0
    alone = make_engine(limits)
    alone.new_request_id()
    assert tokens(drain_one(alone, repeated), second) == tokens(events, second)
    masked = constrained(1, params=replace(PARAMS, max_tokens=60))
    assert tokens(drain_one(make_engine(limits), masked), first) == tokens(events, first)
    assert len(tokens(events, first)) > 8


def test_rows_that_cannot_have_masks_for_drafts_do_not_wait_for_tokens():
    """Too many constrained rows share a step's masks, so that none drafts."""
    count = MAX_STEP_MASKS + 4
    limits = replace(LIMITS, max_num_seqs=count, max_num_batched_tokens=64, num_pages=4 * count)
    limits = replace(limits, max_num_queued_reqs=count)
    engine = make_engine(limits)
    params = replace(PARAMS, speculative=True, max_tokens=40)
    for place in range(count):
        engine.submit(constrained(place, STEADY, params))
    for _ in range(12):
        engine.step()
    assert len(engine.scheduler.running) > MAX_STEP_MASKS
    assert trace_of(engine)[-6:] == ["launch", "read", "choose"] * 2


@pytest.mark.parametrize("loop", ["plain", "overlap"])
@pytest.mark.parametrize(
    "reason", [None, "logprobs", "min_tokens", "allowed_token_ids", "bad words"]
)
def test_forced_tokens_are_computed_together_unless_each_must_be_sampled(
    loop: SchedulerLoop, reason: str | None
):
    changed: dict[str, Any] = {
        "logprobs": {"logprobs": 2},
        "min_tokens": {"min_tokens": 40},
        "allowed_token_ids": {"allowed_token_ids": tuple(range(50))},
    }.get(reason or "", {})
    request = constrained(1, PHRASES, replace(PARAMS, max_tokens=40, seed=7, **changed))
    if reason == "bad words":
        request = replace(request, bad_word_token_ids=((90, 91),))
    engine = make_engine(replace(LIMITS, num_pages=64), loop=loop)
    number = engine.submit(request)
    events = drain(engine)
    found = tokens(events, number)
    assert len(found) > 10
    if reason != "allowed_token_ids":  # of which the oracle knows nothing
        assert (*found,) == solo_stream_of(request, (number, 0), engine, 0).token_ids
    constraint = HashedConstraint(PHRASES)
    for token_id in found:
        forced = constraint.forced()
        assert not forced or token_id == forced[0]
        constraint.accept(token_id)
    num_launched = trace_of(engine).count("launch")
    assert (num_launched < 0.7 * len(found)) == (reason is None), num_launched
    assert reason is None or num_launched >= len(found)


@dataclass(kw_only=True, eq=False)
class WithoutDrafts(ObservedRunner):
    """A runner that computes several tokens of a row by themselves."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        return super().capabilities - {"drafts"}


def test_forced_tokens_are_sampled_where_rows_are_computed_by_themselves():
    engine = make_engine(LIMITS, loop="overlap", parts=Parts(runner=WithoutDrafts))
    number = engine.submit(constrained(1, PHRASES))
    found = tokens(drain(engine), number)
    assert trace_of(engine).count("launch") >= len(found) > 10


def test_forced_tokens_take_no_time_from_others_beyond_the_bound():
    """In a step of 5 tokens four rows have one each, and forced tokens wait for what is left."""
    limits = replace(LIMITS, max_num_batched_tokens=5, num_pages=64, max_num_queued_reqs=4)
    engine = make_engine(limits, loop="overlap")
    ids = [engine.submit(constrained(first, PHRASES)) for first in range(1, 4)]
    ids.append(engine.submit(free(4)))
    while len(engine.scheduler.running) < 4:
        engine.step()
    before = engine.num_steps
    events = drain(engine)
    assert len(tokens(events, ids[3])) >= 14
    assert engine.num_steps - before < 20 + 3
    assert all(end.finish_reason in {"length", "stop"} for end in ends(events).values())
