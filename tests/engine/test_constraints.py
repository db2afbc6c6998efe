"""Constrained sequences among free ones, on the token-storing runner: when steps are read, how a
constrained stream ends, and what happens before its constraint is compiled.
"""

from dataclasses import replace

import pytest

from cadenza.config import EngineLimits, SchedulerLoop
from cadenza.core.step_reader import CONSTRAINT_FAILED
from cadenza.engine.core import EngineCore
from cadenza.errors import InvalidRequestError
from cadenza.events import Event, Finished, Token
from cadenza.request import Request, SamplingParams
from cadenza.structured import ConstraintSpec, StructuredOutput
from tests.engine.hashed_constraint import FAILS_AFTER, NEVER, SHORT
from tests.engine.simulation import ObservedRunner, make_engine

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


def test_a_step_with_a_constrained_token_is_read_before_the_next_launch():
    engine = make_engine(LIMITS, loop="overlap")
    engine.submit(constrained(1))
    engine.submit(free(2))
    drain(engine)
    trace = trace_of(engine)
    first = trace.index("read")
    assert trace[first - 1 : first + 3] == ["launch", "read", "launch", "read"]
    only_free = make_engine(LIMITS, loop="overlap")
    only_free.submit(free(2))
    drain(only_free)
    assert trace_of(only_free)[:3] == ["launch", "launch", "read"]


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


def test_an_engine_without_constraints_refuses_them():
    engine = make_engine(LIMITS)
    plain = EngineCore(engine.runner, LIMITS)
    with pytest.raises(InvalidRequestError, match=r"no tokenizer\.json") as refused:
        plain.submit(constrained(1))
    assert refused.value.param == "structured"
    unresolved = SamplingParams(structured=StructuredOutput(regex="a"))
    with pytest.raises(InvalidRequestError, match="was not turned into a constraint"):
        engine.submit(Request(prompt_token_ids=(1,), params=unresolved))
