"""A prompt with gaps: pages and causality go by positions, and draws, windows, keys by indices."""

from dataclasses import replace
from typing import Any

import pytest

from cadenza.engine.core import EngineCore
from cadenza.engine.new_sequences import ResumedSample, Resumption
from cadenza.errors import InvalidRequestError
from cadenza.events import Finished, Started, Token
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.request import Attachment, PoolingParams, Request, SamplingParams
from cadenza.sparse_prefill import KeptTokens, SparsePrefill
from tests.engine.simulation import Record, run_requests
from tests.engine.sparse import (
    LIMITS,
    SECRET,
    engine_of,
    fake_of,
    owed,
    random_kept,
    request_of,
    tokens_of,
)

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


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pooling": PoolingParams(pooling="last"), "params": SamplingParams()}, "pooling"),
        ({"params": SamplingParams(prompt_logprobs=1)}, "prompt_logprobs"),
        ({"params": SamplingParams(repetition_penalty=1.1)}, "repetition_penalty"),
        ({"attachments": (Attachment(start=0, length=1, digest=b"1"),)}, "attachments"),
        ({"sparse_prefill": SparsePrefill(keep=0.3)}, "no model that scores"),
        ({"sparse_prefill": SparsePrefill(keep=0.3, kept=b"\1")}, "which chunks"),
    ],
)
def test_what_cannot_be_thinned_out_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    engine = engine_of()
    request = replace(request_of(tokens_of(200, 1), random_kept(200, 1)), **changes)
    with pytest.raises(InvalidRequestError, match=named):
        engine.submit(request)


def test_a_runner_that_computes_no_gaps_takes_no_such_request() -> None:
    runner = fake_of(LIMITS)
    runner.is_sparse = False
    engine = EngineCore(runner, LIMITS)
    with pytest.raises(InvalidRequestError, match="gaps"):
        engine.submit(request_of(tokens_of(200, 1), random_kept(200, 1)))
