"""A prompt that is not found whole says how much of it earlier ones had, and why no more."""

import logging
import random
from dataclasses import replace

import pytest

from cadenza.config import EngineLimits
from cadenza.engine.core import EngineCore
from cadenza.events import CacheMiss, Finished, Token
from cadenza.kv.page_keys import Content, PageContent, PageKeys
from cadenza.kv.prefix_cache import MAX_COMPARED_PAGES, MAX_EVICTED_KEYS, PrefixCache
from cadenza.kv.prefix_misses import log_text
from cadenza.request import Request, SamplingParams
from tests.engine.simulation import VOCAB_SIZE, make_engine, run_requests

LIMITS = EngineLimits(
    max_num_seqs=2,
    max_num_batched_tokens=64,
    max_model_len=320,
    page_size=16,
    num_pages=24,
    max_num_queued_reqs=100,
)


def prompt(num_tokens: int, first: int = 1) -> tuple[int, ...]:
    """Tokens of which no two pages are equal."""
    return tuple(
        (first + place * 7 + place // 16) % 90 if place else first for place in range(num_tokens)
    )


def request_of(token_ids: tuple[int, ...], salt: str = "", **params: int) -> Request:
    sampling = SamplingParams(
        **{"temperature": 0.0, "max_tokens": 1, "ignore_eos": True, **params}  # type: ignore[arg-type]
    )
    return Request(prompt_token_ids=token_ids, params=sampling, cache_salt=salt)


def run(engine: EngineCore, *requests: Request) -> list[CacheMiss | None]:
    """What the first tokens, or else the ends, of requests that run together said."""
    ids = [engine.submit(request) for request in requests]
    told: dict[int, CacheMiss | None] = {}
    while not engine.is_idle:
        for event in engine.step():
            if isinstance(event, Token) and event.index:
                assert event.cache_miss is None, "told with a token behind the first"
            elif isinstance(event, Token | Finished):
                told.setdefault(event.request_id, event.cache_miss)
    return [told[each] for each in ids]


def miss(engine: EngineCore, token_ids: tuple[int, ...], **fields: int) -> CacheMiss | None:
    return run(engine, request_of(token_ids, **fields))[0]


def changed(token_ids: tuple[int, ...], place: int) -> tuple[int, ...]:
    return (*token_ids[:place], token_ids[place] + 1, *token_ids[place + 1 :])


def test_a_prompt_that_was_never_seen_is_new_and_one_found_whole_is_no_miss() -> None:
    engine = make_engine(LIMITS)
    assert miss(engine, prompt(40)) == CacheMiss(shared_tokens=0, reason="new")
    assert miss(engine, prompt(40)) is None


@pytest.mark.parametrize("place", [0, 1, 15, 16, 17, 37, 47, 95])
def test_a_prompt_that_differs_tells_the_exact_token_at_which_it_does(place: int) -> None:
    engine = make_engine(LIMITS)
    whole = prompt(100)
    miss(engine, whole)
    told = miss(engine, changed(whole, place))
    assert told == CacheMiss(shared_tokens=place, reason="differs")


def test_a_prompt_that_only_goes_on_is_new_behind_the_earlier_one() -> None:
    engine = make_engine(LIMITS)
    miss(engine, prompt(48))
    assert miss(engine, prompt(100)) == CacheMiss(shared_tokens=48, reason="new")


def test_the_most_similar_of_several_earlier_prompts_counts() -> None:
    engine = make_engine(LIMITS)
    whole = prompt(40)
    for place in (20, 30, 17):
        miss(engine, changed(whole, place))
    assert miss(engine, whole) == CacheMiss(shared_tokens=30, reason="differs")


def test_only_so_many_pages_are_compared() -> None:
    engine = make_engine(replace(LIMITS, num_pages=MAX_COMPARED_PAGES + 24))
    whole = prompt(20)
    miss(engine, changed(whole, 15))
    for place in range(MAX_COMPARED_PAGES):
        miss(engine, (50 + place, *whole[1:]))
    assert miss(engine, whole) == CacheMiss(shared_tokens=0, reason="differs")


def test_what_was_overwritten_is_evicted_and_still_shared() -> None:
    engine = make_engine(LIMITS)
    whole = prompt(100)
    miss(engine, whole)
    for first in (2, 3):
        miss(engine, prompt(300, first))
    assert miss(engine, changed(whole, 70)) == CacheMiss(shared_tokens=70, reason="evicted")


def test_a_prompt_differs_from_a_page_that_was_overwritten() -> None:
    engine = make_engine(LIMITS)
    whole = prompt(40)
    miss(engine, whole)
    for first in (2, 3):
        miss(engine, prompt(300, first))
    assert miss(engine, changed(whole, 5)) == CacheMiss(shared_tokens=5, reason="differs")


def test_another_salts_prompts_tell_nothing() -> None:
    engine = make_engine(LIMITS)
    whole = prompt(100)
    run(engine, request_of(whole))
    for told in (whole, changed(whole, 5), changed(whole, 40)):
        [other] = run(engine, request_of(told, salt=f"other {told[5]} {told[40]}"))
        assert other == CacheMiss(shared_tokens=0, reason="new")


def test_a_prompt_shorter_than_a_page_is_short() -> None:
    engine = make_engine(LIMITS)
    assert miss(engine, prompt(16)) == CacheMiss(shared_tokens=0, reason="short")
    assert miss(engine, prompt(9)) == CacheMiss(shared_tokens=9, reason="short")


def test_pages_of_a_sequence_that_is_too_far_behind_are_in_flight() -> None:
    engine = make_engine(replace(LIMITS, max_num_batched_tokens=16))
    long = prompt(300)
    told = run(engine, request_of(long), request_of((*long[:32], *prompt(8, 80))))
    assert told[1] == CacheMiss(shared_tokens=32, reason="in_flight")


def test_a_prompt_that_is_computed_in_any_case_is_not_used() -> None:
    engine = make_engine(LIMITS)
    whole = prompt(40)
    miss(engine, whole)
    told = miss(engine, changed(whole, 20), prompt_logprobs=0)
    assert told == CacheMiss(shared_tokens=20, reason="not_used")


def test_the_end_tells_it_where_no_token_comes() -> None:
    engine = make_engine(LIMITS)
    assert miss(engine, prompt(40), max_tokens=0) == CacheMiss(shared_tokens=0, reason="new")


def test_without_a_cache_there_is_no_miss() -> None:
    engine = make_engine(replace(LIMITS, enable_prefix_caching=False))
    assert miss(engine, prompt(40)) is None


@pytest.mark.parametrize("unit", [1, 16])
def test_in_slots_the_token_at_which_a_prompt_differs_is_exact(unit: int) -> None:
    engine = make_engine(replace(LIMITS, page_size=320, num_pages=2, slot_unit=unit))
    whole = prompt(100)
    assert miss(engine, whole) == CacheMiss(shared_tokens=0, reason="new")
    assert miss(engine, changed(whole, 37)) == CacheMiss(shared_tokens=37, reason="differs")
    [other] = run(engine, request_of(changed(whole, 37), salt="other"))
    assert other == CacheMiss(shared_tokens=0, reason="new")


def test_prompts_are_counted_by_reason_and_the_tokens_behind_a_difference() -> None:
    engine = make_engine(LIMITS)
    whole = prompt(100)
    for token_ids in (whole, whole, changed(whole, 70), changed(whole, 3), prompt(5)):
        miss(engine, token_ids)
    counts = engine.scheduler.prefix_counts
    assert counts.num_missed_prompts["new"] == 1
    assert counts.num_missed_prompts["differs"] == 2
    assert counts.num_missed_prompts["short"] == 1
    assert counts.num_differing_tokens == 30 + 97


def test_the_debug_line_says_where_a_prompt_differs(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(LIMITS)
    miss(engine, prompt(100))
    with caplog.at_level(logging.DEBUG, "cadenza.engine.core"):
        miss(engine, changed(prompt(100), 70))
    assert caplog.messages == [
        "request 1: 64 of 100 prompt tokens were in the prefix cache; not found: cold 32, tail 4; "
        "shares the first 70 of 100 tokens with an earlier prompt of the same tenant and salt, "
        "then differs"
    ]


def test_equal_tokens_of_two_pages_are_counted_up_to_their_marks() -> None:
    page = PageContent((1, 2, 3, 4), ((2, b"a"),))
    assert page.num_common(page) == 4
    assert page.num_common(PageContent((1, 2, 3, 4), ((2, b"b"),))) == 2
    assert page.num_common(PageContent((1, 2, 3, 4), ((-3, b"b"), (2, b"a")))) == 0
    assert page.num_common(PageContent((1, 9, 3, 4))) == 1
    assert page.num_common(PageContent((1, 2), ((2, b"a"),))) == 2


SMALL_LIMITS = EngineLimits(
    max_num_seqs=2,
    max_num_batched_tokens=16,
    max_model_len=320,
    page_size=16,
    num_pages=24,
    max_num_queued_reqs=100,
)


def random_request(num_tokens: int, seed: int, **fields: object) -> Request:
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
    engine = make_engine(SMALL_LIMITS)
    assert misses(engine, random_request(40, 1)) == "cold 32, tail 8"
    assert misses(engine, random_request(40, 1)) == "tail 8"
    assert misses(engine, random_request(48, 2), random_request(48, 2)) == "cold 32, tail 32"


def test_what_was_computed_and_overwritten_is_evicted_until_it_is_there_again() -> None:
    engine = make_engine(SMALL_LIMITS)
    first = random_request(100, 1)
    misses(engine, first, random_request(300, 2), random_request(300, 3))
    assert misses(engine, first) == "evicted 96, tail 4"
    assert misses(engine, first) == "tail 4"


def test_another_tenants_prompt_is_cold() -> None:
    """As if nobody had computed it."""
    engine = make_engine(SMALL_LIMITS)
    misses(engine, random_request(40, 1))
    assert misses(engine, random_request(40, 1, cache_salt="other")) == "cold 32, tail 8"


def test_pages_of_a_leader_that_is_too_far_behind_are_in_flight() -> None:
    engine = make_engine(SMALL_LIMITS)
    long = random_request(300, 1)
    short = replace(long, prompt_token_ids=long.prompt_token_ids[:32] + (1,) * 8)
    run_requests(engine, [long, short]).verify()
    assert engine.scheduler.prefix_counts.num_misses["in_flight"] == 32


def test_prompt_logprobs_are_a_reason_of_their_own() -> None:
    engine = make_engine(SMALL_LIMITS)
    request = random_request(40, 1)
    misses(engine, request)
    engine.submit(replace(request, params=replace(request.params, prompt_logprobs=0)))
    while not engine.is_idle:
        engine.step()
    assert engine.scheduler.prefix_counts.num_misses["prompt_logprobs"] == 40


def test_samples_of_one_prompt_are_looked_up_once() -> None:
    engine = make_engine(SMALL_LIMITS)
    params = SamplingParams(temperature=1.0, max_tokens=2, n=2, seed=1)
    run_requests(engine, [replace(random_request(40, 1), params=params)])
    assert engine.scheduler.prefix_counts.num_queries == 40


def test_without_a_cache_nothing_is_looked_up() -> None:
    engine = make_engine(replace(SMALL_LIMITS, enable_prefix_caching=False))
    assert misses(engine, random_request(40, 1)) == "none"


@pytest.mark.parametrize("unit", [1, 16])
def test_in_slots_all_but_the_last_token_may_be_found(unit: int) -> None:
    slots = replace(SMALL_LIMITS, page_size=320, num_pages=2, slot_unit=unit)
    engine = make_engine(slots)
    assert misses(engine, random_request(40, 1)) == "cold 39, tail 1"
    assert misses(engine, random_request(40, 1)) == ("tail 1" if unit == 1 else "cold 7, tail 1")


def test_a_debug_line_says_what_was_found(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(SMALL_LIMITS)
    with caplog.at_level(logging.DEBUG, "cadenza.engine.core"):
        misses(engine, random_request(40, 1), random_request(40, 1))
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
