"""prompt_logprobs on the token-storing runner: each position once, from its own prefix."""

import random
from dataclasses import replace
from typing import Any

import pytest

from cadenza.backends.fake import next_token
from cadenza.batch.prompt import PLAIN, Prompt, PromptRowsProgress
from cadenza.batch.sequence import Sequence
from cadenza.batch.step_schema import NUM_EXTRA_LOGIT_ROWS
from cadenza.config import EngineLimits, SchedulerLoop
from cadenza.engine.core import EngineCore
from cadenza.events import Event, Finished, PromptLogprobs, Token
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.kv.prefix_cache import Prefix
from cadenza.request import Request, SamplingParams
from cadenza.scheduler.step_budget import StepBudget
from cadenza.verification.reference import Logits, ReferenceEngine
from tests.engine.simulation import VOCAB_SIZE, Parts, make_engine
from tests.scheduler.builders import sequence_of

LOOPS: tuple[SchedulerLoop, ...] = ("plain", "overlap")
LIMITS = EngineLimits(
    max_num_seqs=4,
    max_num_batched_tokens=100,
    max_model_len=256,
    page_size=16,
    num_pages=64,
    max_num_queued_reqs=16,
)


def prompt_of(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCAB_SIZE), k=count))


def with_prompt_logprobs(prompt: tuple[int, ...], **changes: Any) -> Request:
    values: dict[str, Any] = {
        "prompt_logprobs": 1,
        "temperature": 0.0,
        "max_tokens": 4,
        "ignore_eos": True,
    }
    return Request(prompt_token_ids=prompt, params=SamplingParams(**(values | changes)))


def run(engine: EngineCore, requests: list[Request]) -> list[Event]:
    for request in requests:
        engine.submit(request)
    events: list[Event] = []
    for _ in range(2000):
        if engine.is_idle:
            return events
        events += engine.step()
        engine.check_invariants()
    raise AssertionError("the engine did not come to an end")


def logprobs_of(events: list[Event], request_id: int) -> list[float]:
    """What was told of a prompt, in order; checks that it came before the first token."""
    found: list[float] = []
    for event in events:
        if event.request_id != request_id:
            continue
        if isinstance(event, PromptLogprobs):
            assert event.start == len(found) + 1, "a position was left out or told twice"
            found += [entry.logprob for entry in event.entries]
        elif isinstance(event, Token) and event.sample == 0 and event.index == 0:
            found.append(0.0)  # a mark: nothing may follow
    assert found[-1] == 0.0
    return found[:-1]


def expected_logprobs(prompt: tuple[int, ...]) -> list[float]:
    return [
        -next_token(list(prompt[:end]), (0, 0), vocab_size=VOCAB_SIZE) / 8
        for end in range(1, len(prompt))
    ]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("budget", [5, 16, 64, 100])
@pytest.mark.parametrize("count", [1, 2, 17, 63, 64, 65, 66, 130, 200])
def test_every_position_is_described_once_whatever_the_chunks(
    count: int, budget: int, loop: SchedulerLoop
) -> None:
    engine = make_engine(replace(LIMITS, max_num_batched_tokens=budget), loop=loop)
    prompt = prompt_of(count)
    assert logprobs_of(run(engine, [with_prompt_logprobs(prompt)]), 0) == expected_logprobs(prompt)


@pytest.mark.parametrize("loop", LOOPS)
def test_several_prompts_share_the_rows_of_a_step(loop: SchedulerLoop) -> None:
    engine = make_engine(LIMITS, loop=loop)
    prompts = [prompt_of(count, count) for count in (90, 40, 7, 70, 33, 2)]
    silent = Request(prompt_token_ids=prompt_of(80, 9), params=SamplingParams(max_tokens=30))
    events = run(engine, [silent, *map(with_prompt_logprobs, prompts)])
    for request_id, prompt in enumerate(prompts, start=1):
        assert logprobs_of(events, request_id) == expected_logprobs(prompt)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_cached_prefix_loses_no_position(loop: SchedulerLoop) -> None:
    engine = make_engine(LIMITS, loop=loop)
    prompt = prompt_of(100)
    silent = Request(prompt_token_ids=prompt, params=SamplingParams(max_tokens=2))
    run(engine, [silent])
    events = run(engine, [with_prompt_logprobs(prompt), silent])
    assert logprobs_of(events, 1) == expected_logprobs(prompt)
    ends = [event for event in events if isinstance(event, Finished)]
    assert [end.num_cached_tokens for end in sorted(ends, key=lambda end: end.request_id)] == [
        0,
        96,
    ], "the prompt with logprobs was computed, and the cache was there"


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("num_pages", [14, 16])
def test_preemption_repeats_no_position(num_pages: int, loop: SchedulerLoop) -> None:
    limits = replace(LIMITS, num_pages=num_pages, max_num_batched_tokens=40)
    engine = make_engine(limits, loop=loop)
    prompts = [prompt_of(60, seed) for seed in range(6)]
    events = run(engine, [with_prompt_logprobs(prompt, max_tokens=90) for prompt in prompts])
    assert engine.scheduler.num_preemptions > 0
    for request_id, prompt in enumerate(prompts):
        assert logprobs_of(events, request_id) == expected_logprobs(prompt)


@pytest.mark.parametrize("loop", LOOPS)
def test_of_several_samples_one_describes_the_prompt(loop: SchedulerLoop) -> None:
    engine = make_engine(LIMITS, loop=loop)
    prompt = prompt_of(90)
    events = run(engine, [with_prompt_logprobs(prompt, n=3, temperature=1.0, seed=4)])
    assert logprobs_of(events, 0) == expected_logprobs(prompt)
    assert sum(isinstance(event, Finished) for event in events) == 3


@pytest.mark.parametrize("loop", LOOPS)
def test_describing_the_prompt_changes_no_token(loop: SchedulerLoop) -> None:
    prompt = prompt_of(120)
    streams = [
        [
            event.token_id
            for event in run(make_engine(LIMITS, loop=loop), [request])
            if isinstance(event, Token)
        ]
        for request in (
            with_prompt_logprobs(prompt, temperature=1.0, seed=3, max_tokens=20),
            with_prompt_logprobs(
                prompt, temperature=1.0, seed=3, max_tokens=20, prompt_logprobs=None
            ),
        )
    ]
    assert streams[0] == streams[1]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("count", [1, 16, 65, 200, 256])
def test_a_request_for_no_tokens_describes_its_prompt_and_ends(
    count: int, loop: SchedulerLoop
) -> None:
    """The prompt may fill the context to its last token."""
    engine = make_engine(LIMITS, loop=loop)
    prompt = prompt_of(count)
    events = run(engine, [with_prompt_logprobs(prompt, max_tokens=0)])
    *parts, end = events
    assert isinstance(end, Finished)
    assert (end.finish_reason, end.num_generated_tokens) == ("length", 0)
    told = [entry.logprob for part in parts for entry in getattr(part, "entries", ())]
    assert told == expected_logprobs(prompt)
    assert not [part for part in parts if isinstance(part, Token)]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_request_for_no_tokens_leaves_its_pages_to_the_next(loop: SchedulerLoop) -> None:
    engine = make_engine(LIMITS, loop=loop)
    prompt = prompt_of(100)
    silent = Request(prompt_token_ids=prompt, params=SamplingParams(max_tokens=0, n=3))
    ends = [event for event in run(engine, [silent]) if isinstance(event, Finished)]
    assert sorted(end.sample for end in ends) == [0, 1, 2]
    follower = Request(prompt_token_ids=prompt, params=SamplingParams(max_tokens=1))
    *_, end = run(engine, [follower])
    assert isinstance(end, Finished)
    assert end.num_cached_tokens == 96


@pytest.mark.parametrize("loop", LOOPS)
def test_a_request_for_no_tokens_needs_none_to_be_allowed(loop: SchedulerLoop) -> None:
    """What would follow is nobody's concern, unless the model's numbers are broken."""
    banned = {"allowed_token_ids": [5], "logit_bias": {5: -100.0}, "bad_words": ["five"]}
    params = SamplingParams(max_tokens=0, **banned)
    request = Request(prompt_token_ids=(1, 2), params=params, bad_word_token_ids=((5,),))
    _, end = run(make_engine(LIMITS, loop=loop), [request])
    assert isinstance(end, Finished)
    assert end.finish_reason == "length"


class NoModel:
    """Nobody asks it for logits."""

    vocab_size = 3

    def start(self) -> None:
        raise AssertionError("there is nothing to compute")

    def append(self, token_ids: list[int]) -> Logits:
        raise AssertionError(f"there is nothing to compute from {token_ids}")


def test_the_witness_gives_no_tokens_either() -> None:
    witness = ReferenceEngine(NoModel(), max_model_len=2)
    request = Request(prompt_token_ids=(1, 2), params=SamplingParams(max_tokens=0))
    found = witness.run(request)
    assert (found.token_ids, found.finish_reason) == ((), "length")


class UsesTheCacheAllTheSame(KVCacheManager):
    def find_prefix(self, sequence: Sequence) -> Prefix:
        prompt, sequence.prompt = sequence.prompt, PLAIN
        prefix = super().find_prefix(sequence)
        sequence.prompt = prompt
        return prefix


def test_a_prefix_that_is_taken_from_the_cache_is_caught() -> None:
    engine = make_engine(LIMITS, loop="plain", parts=Parts(kv_cache=UsesTheCacheAllTheSame))
    prompt = prompt_of(100)
    run(engine, [Request(prompt_token_ids=prompt, params=SamplingParams(max_tokens=2))])
    with pytest.raises(AssertionError, match="left out"):
        logprobs_of(run(engine, [with_prompt_logprobs(prompt)]), 1)


def test_a_step_computes_no_more_prompt_logprobs_than_it_has_rows() -> None:
    budget = StepBudget(64, None)
    found: list[int] = []
    for has_logprobs in (True, True, True, False):
        sequence = sequence_of(0, 50)
        if has_logprobs:
            sequence.prompt = Prompt(rows=PromptRowsProgress(num_prompt_tokens=50))
        found.append(budget.take_rows(sequence, 50))
    assert found == [50, NUM_EXTRA_LOGIT_ROWS - 49, 0, 50]
    assert budget.num_rows == 0


def test_positions_that_were_read_before_a_preemption_are_not_launched_again() -> None:
    progress = PromptRowsProgress(num_prompt_tokens=50)
    assert progress.launch(0, 20) == range(1, 21)
    assert progress.launch(20, 30) == range(21, 31)
    assert progress.read(range(1, 21)) == range(1, 21)
    progress.rewind()
    assert progress.launch(0, 30) == range(21, 31)
    assert progress.read(range(21, 31)) == range(21, 31)
    assert progress.read(range(21, 31)) == range(31, 31), "the step from before comes late"
    assert progress.launch(30, 50) == range(31, 50)
    assert not progress.is_complete
    progress.read(range(31, 50))
    assert progress.is_complete
