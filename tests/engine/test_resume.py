"""A stream that another engine goes on with is the stream that one engine gives.

On the token-storing runner: the engine is thrown away before a step, with that step's events, and a
new one gets every open request with the tokens that had been passed on until then.
"""

import random
from collections.abc import Iterable

import pytest

from cadenza.config import EngineLimits, SchedulerLoop
from cadenza.engine.core import EngineCore
from cadenza.engine.new_sequences import ResumedSample, Resumption
from cadenza.engine.open_requests import OpenRequests
from cadenza.engine.timeouts import RequestTimeouts
from cadenza.events import Event, Finished, PromptLogprobs, Started, Token
from cadenza.request import Request, SamplingParams
from cadenza.structured import ConstraintSpec
from tests.by_day import by_day
from tests.engine.simulation import (
    MAX_STEPS_TO_DRAIN,
    REAL_PARTS,
    VOCAB_SIZE,
    Parts,
    Record,
    make_engine,
    replayable,
)

LOOPS: tuple[SchedulerLoop, ...] = ("plain", "overlap")
HERE = "tests/engine/test_resume.py"
NUM_RUN_STEPS = 180
LIMITS = EngineLimits(
    max_num_seqs=3,
    max_num_batched_tokens=8,
    max_model_len=64,
    page_size=16,
    num_pages=6,
    max_num_queued_reqs=100,
)


def requests_of(seed: int, count: int) -> list[Request]:
    """Greedy and seeded, with penalties, stop tokens and several samples."""
    rng = random.Random(f"resumed {seed}")
    shared = rng.choices(range(VOCAB_SIZE), k=32)
    requests: list[Request] = []
    for _ in range(count):
        prompt = (*shared[: rng.choice([0, 10, 32])], *rng.choices(range(VOCAB_SIZE), k=5))
        params = SamplingParams(
            max_tokens=rng.randint(1, min(30, LIMITS.max_model_len - len(prompt))),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.choice([None, 7]),
            frequency_penalty=rng.choice([0.0, 0.5]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            stop_token_ids=rng.choice([(), (5, 6, 7, 8)]),
            logprobs=rng.choice([None, 2]),
            n=rng.choice([1, 1, 1, 2, 3]),
        )
        grammar = random.Random(f"grammar {seed} {len(requests)}").choice([*[None] * 6, "a"])
        spec = None if grammar is None else ConstraintSpec(grammar=grammar)
        requests.append(Request(prompt_token_ids=prompt, params=params, constraint=spec))
    return requests


class Relay:
    """One front end's requests, and the engines that serve them one after the other."""

    def __init__(
        self, limits: EngineLimits, loop: SchedulerLoop, parts: Parts = REAL_PARTS
    ) -> None:
        self._limits, self._loop, self._parts = limits, loop, parts
        self.books = OpenRequests(RequestTimeouts(), lambda: 0.0)
        self.engine = make_engine(limits, loop=loop, parts=parts)
        self.record = Record(seed=0, engine=self.engine)
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.num_engines = 1

    def submit(self, request: Request) -> int:
        request_id = self.books.accept(request, self._limits)
        self.record.accept(request_id, request)
        self.engine.enqueue(request_id, request)
        return request_id

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Started) and event.request_id not in self.record.started:
                self.record.take(event)
        for event in self.books.record(events):
            if isinstance(event, PromptLogprobs):
                self.prompt_logprobs.append(event)
            else:
                self.record.take(event)

    def cancel(self, request_id: int, sample: int) -> None:
        """As a stop string does."""
        self.books.cancel(request_id, sample)
        self.engine.cancel(request_id, sample)
        self.record.cancelled.add((request_id, sample))

    def replace_engine(self) -> None:
        """What the engine does in its last step is never told."""
        self.engine.step()
        self.books.lose_engine(0.0)
        self.engine = make_engine(self._limits, loop=self._loop, parts=self._parts)
        self.record.engine = self.engine
        for request_id in self.books.open_ids():
            resumed = self.books.resume(request_id)
            assert resumed is not None
            self.engine.resume(request_id, *resumed)
        self.num_engines += 1

    def run(self, kills: Iterable[int]) -> Record:
        """Steps until all has ended; a new engine takes over before each step in `kills`."""
        steps = set(kills)
        while not self.engine.is_idle:
            assert self.record.num_steps < MAX_STEPS_TO_DRAIN, "the engine does not come to rest"
            if self.record.num_steps in steps:
                self.replace_engine()
            self.take(self.engine.step())
            self.record.num_steps += 1
            self.engine.check_invariants()
        return self.record


def relay_of(requests: list[Request], loop: SchedulerLoop) -> Relay:
    relay = Relay(LIMITS, loop)
    for request in requests:
        relay.submit(request)
    return relay


def kill_at(steps: Iterable[int], loop: SchedulerLoop, command: str) -> None:
    for at in steps:
        with replayable(f"killed before step {at}", command):
            relay = relay_of(requests_of(1, 30), loop)
            relay.run([at]).verify()
            assert relay.num_engines == 2
            assert relay.books.num_open == 0


@pytest.mark.parametrize("loop", LOOPS)
def test_the_workload_lasts_for_as_many_steps_as_engines_are_killed_at(loop: SchedulerLoop) -> None:
    record = relay_of(requests_of(1, 30), loop).run([])
    record.verify()
    assert record.num_steps > NUM_RUN_STEPS
    assert record.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("loop", LOOPS)
def test_an_engine_killed_at_any_step_changes_no_stream(loop: SchedulerLoop) -> None:
    command = f"python -m pytest '{HERE}::test_an_engine_killed_at_any_step_changes_no_stream'"
    kill_at(range(1, NUM_RUN_STEPS, 37), loop, command)


@pytest.mark.soak
@pytest.mark.parametrize("loop", LOOPS)
def test_an_engine_killed_at_every_step_changes_no_stream(loop: SchedulerLoop) -> None:
    command = f"python -m pytest -m soak '{HERE}'"
    kill_at(range(NUM_RUN_STEPS), loop, command)


@pytest.mark.parametrize("loop", LOOPS)
def test_engines_killed_again_and_again_change_no_stream(loop: SchedulerLoop) -> None:
    relay = relay_of(requests_of(1, 10), loop)
    # Each engine gets further than the last one: 8 tokens a step, and at most 63 of a sequence.
    relay.run(range(0, 4000, 11)).verify()
    assert relay.num_engines > 10


@pytest.mark.parametrize("loop", LOOPS)
def test_usage_counts_each_token_once(loop: SchedulerLoop) -> None:
    """`verify` compares every end's usage; here the cached tokens, too, which it only bounds."""
    prompt = tuple(range(20, 40))
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    relay = Relay(LIMITS, loop)
    relay.submit(Request(prompt_token_ids=prompt, params=params))
    relay.run([])
    second = relay.submit(Request(prompt_token_ids=prompt, params=params))
    relay.run([relay.record.num_steps + 6]).verify()
    assert relay.num_engines == 2
    first_token = relay.record.streams[second, 0][0]
    end = relay.record.finished[second, 0]
    assert (first_token.num_cached_tokens, end.num_cached_tokens) == (16, 16)
    assert (end.num_prompt_tokens, end.num_generated_tokens) == (20, 10)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("at", by_day(range(2, 12), {3, 8}))
def test_a_sample_that_a_stop_string_ended_is_not_resumed(loop: SchedulerLoop, at: int) -> None:
    params = SamplingParams(max_tokens=20, n=3, temperature=1.0, seed=3, ignore_eos=True)
    relay = Relay(LIMITS, loop)
    request_id = relay.submit(Request(prompt_token_ids=(1, 2, 3), params=params))
    for _ in range(at):
        relay.take(relay.engine.step())
        relay.record.num_steps += 1
    relay.cancel(request_id, 0)
    relay.replace_engine()
    assert [each.sample for each in relay.engine.scheduler.sequences] == [1, 2]
    relay.run([]).verify()
    assert set(relay.record.finished) == {(request_id, 1), (request_id, 2)}


def prompt_logprobs_of(found: list[PromptLogprobs]) -> list[float]:
    """In order, each position once."""
    values: list[float] = []
    for event in found:
        assert event.start == 1 + len(values)
        values += [entry.logprob for entry in event.entries]
    return values


@pytest.mark.parametrize("loop", LOOPS)
def test_each_prompt_logprob_comes_once_wherever_the_engine_is_killed(loop: SchedulerLoop) -> None:
    prompt = tuple(random.Random(3).choices(range(VOCAB_SIZE), k=50))
    params = SamplingParams(max_tokens=6, n=2, temperature=1.0, prompt_logprobs=1, ignore_eos=True)
    request = Request(prompt_token_ids=prompt, params=params)
    expected: list[float] | None = None
    for at in (None, *range(14)):
        relay = relay_of([request], loop)
        relay.run([] if at is None else [at]).verify()
        found = prompt_logprobs_of(relay.prompt_logprobs)
        assert len(found) == len(prompt) - 1
        assert expected in (None, found)
        expected = found


def test_resumed_requests_keep_their_order_before_newer_ones() -> None:
    relay = relay_of(requests_of(2, 8), "plain")
    for _ in range(4):
        relay.take(relay.engine.step())
    assert [relay.books.is_running(each) for each in (0, 7)] == [True, False]
    relay.replace_engine()
    waiting = [each.request_id for each in relay.engine.scheduler.waiting]
    assert waiting == sorted(waiting)
    assert waiting[0] == 0


def test_a_repeated_token_is_not_passed_on_again() -> None:
    relay = relay_of(requests_of(0, 1), "plain")
    events: list[Event] = []
    while not any(isinstance(event, Token) for event in events):
        events += relay.engine.step()
    assert relay.books.record(events)
    assert relay.books.record(events) == []


def test_a_resumed_request_has_the_events_of_its_rest_only() -> None:
    engine: EngineCore = make_engine(LIMITS, loop="plain")
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    resumption = Resumption(samples=(ResumedSample(sample=0, token_ids=(1, 2, 3)),))
    engine.resume(4, Request(prompt_token_ids=(9, 8), params=params), resumption)
    events: list[Event] = []
    while not engine.is_idle:
        events += engine.step()
    assert [event.index for event in events if isinstance(event, Token)] == [3, 4]
    assert [event.num_generated_tokens for event in events if isinstance(event, Finished)] == [5]
