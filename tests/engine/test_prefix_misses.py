"""Every prompt token that is not found in the prefix cache has one reason."""

import logging
import random
from dataclasses import replace

import pytest

from cadenza.config import EngineLimits
from cadenza.engine.core import EngineCore
from cadenza.kv.page_keys import Content, PageKeys
from cadenza.kv.prefix_cache import MAX_EVICTED_KEYS, PrefixCache
from cadenza.kv.prefix_misses import log_text
from cadenza.request import Request, SamplingParams
from tests.engine.simulation import VOCAB_SIZE, make_engine, run_requests

LIMITS = EngineLimits(
    max_num_seqs=2,
    max_num_batched_tokens=16,
    max_model_len=320,
    page_size=16,
    num_pages=24,
    max_num_queued_reqs=100,
)


def request_of(num_tokens: int, seed: int, **fields: object) -> Request:
    prompt = tuple(random.Random(seed).choices(range(VOCAB_SIZE), k=num_tokens))
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    return replace(Request(prompt_token_ids=prompt, params=params), **fields)  # type: ignore[arg-type]


def misses(engine: EngineCore, *requests: Request) -> str:
    """Why tokens of requests, run one after the other, were missing."""
    before = dict(engine.scheduler.prefix_counts.num_misses)
    for request in requests:
        run_requests(engine, [request]).verify()
    after = engine.scheduler.prefix_counts.num_misses
    return log_text({reason: after[reason] - before[reason] for reason in after})


def test_a_new_prompt_is_cold_and_a_known_one_lacks_its_tail() -> None:
    engine = make_engine(LIMITS)
    assert misses(engine, request_of(40, 1)) == "cold 32, tail 8"
    assert misses(engine, request_of(40, 1)) == "tail 8"
    assert misses(engine, request_of(48, 2), request_of(48, 2)) == "cold 32, tail 32"


def test_what_was_computed_and_overwritten_is_evicted_until_it_is_there_again() -> None:
    engine = make_engine(LIMITS)
    first = request_of(100, 1)
    misses(engine, first, request_of(300, 2), request_of(300, 3))
    assert misses(engine, first) == "evicted 96, tail 4"
    assert misses(engine, first) == "tail 4"


def test_another_tenants_prompt_is_cold() -> None:
    """As if nobody had computed it."""
    engine = make_engine(LIMITS)
    misses(engine, request_of(40, 1))
    assert misses(engine, request_of(40, 1, cache_salt="other")) == "cold 32, tail 8"


def test_pages_of_a_leader_that_is_too_far_behind_are_in_flight() -> None:
    engine = make_engine(LIMITS)
    long = request_of(300, 1)
    short = replace(long, prompt_token_ids=long.prompt_token_ids[:32] + (1,) * 8)
    run_requests(engine, [long, short]).verify()
    assert engine.scheduler.prefix_counts.num_misses["in_flight"] == 32


def test_prompt_logprobs_are_a_reason_of_their_own() -> None:
    engine = make_engine(LIMITS)
    request = request_of(40, 1)
    misses(engine, request)
    engine.submit(replace(request, params=replace(request.params, prompt_logprobs=0)))
    while not engine.is_idle:
        engine.step()
    assert engine.scheduler.prefix_counts.num_misses["prompt_logprobs"] == 40


def test_samples_of_one_prompt_are_looked_up_once() -> None:
    engine = make_engine(LIMITS)
    params = SamplingParams(temperature=1.0, max_tokens=2, n=2, seed=1)
    run_requests(engine, [replace(request_of(40, 1), params=params)])
    assert engine.scheduler.prefix_counts.num_queries == 40


def test_without_a_cache_nothing_is_looked_up() -> None:
    engine = make_engine(replace(LIMITS, enable_prefix_caching=False))
    assert misses(engine, request_of(40, 1)) == "none"


@pytest.mark.parametrize("unit", [1, 16])
def test_in_slots_all_but_the_last_token_may_be_found(unit: int) -> None:
    slots = replace(LIMITS, page_size=320, num_pages=2, slot_unit=unit)
    engine = make_engine(slots)
    assert misses(engine, request_of(40, 1)) == "cold 39, tail 1"
    assert misses(engine, request_of(40, 1)) == ("tail 1" if unit == 1 else "cold 7, tail 1")


def test_a_debug_line_says_what_was_found(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(LIMITS)
    with caplog.at_level(logging.DEBUG, "cadenza.engine.core"):
        misses(engine, request_of(40, 1), request_of(40, 1))
    lines = [record.message for record in caplog.records]
    assert lines == [
        "request 0: 0 of 40 prompt tokens were in the prefix cache; not found: cold 32, tail 8"
        "; reason: new",
        "request 1: 32 of 40 prompt tokens were in the prefix cache; not found: tail 8",
    ]


def test_only_so_many_removed_keys_are_remembered() -> None:
    cache = PrefixCache(PageKeys(page_size=1, secret=b"s"))
    first = None
    for at in range(MAX_EVICTED_KEYS + 10):
        content, keys = Content((at,)), list[bytes]()
        cache.page_keys.extend(keys, content)
        first = first or keys[0]
        cache.publish(0, 0, keys, content, 0)
        cache.forget(0)
        assert cache.was_evicted(keys[0])
    assert first is not None
    assert not cache.was_evicted(first)
