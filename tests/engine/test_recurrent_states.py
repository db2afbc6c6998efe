"""A model with recurrent state: streams are exact whatever they start from, and hits are counted.

On the token-storing runner, whose tokens depend on the state that was read through slots.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from cadenza.batch.sequence import Sequence
from cadenza.config import EngineLimits, SchedulerLoop
from cadenza.engine.core import EngineCore
from cadenza.engine.stats import StepMeter
from cadenza.errors import ConfigError
from cadenza.events import Finished
from cadenza.kv.page_pool import PageClass
from cadenza.kv.recurrent_states import RecurrentStates, snapshot_places
from cadenza.request import Request, SamplingParams
from cadenza.tenant import Tenant
from tests.by_day import by_day
from tests.engine.drafting import OWN_SOURCES
from tests.engine.recurrent import spoil_free_states
from tests.engine.simulation import Record, make_engine, run_requests
from tests.scheduler.builders import prompt_of, sequence_of

LOOPS: tuple[SchedulerLoop, ...] = ("plain", "overlap")
PROMPT = prompt_of(120, seed=3)
LIMITS = EngineLimits(
    max_num_seqs=4,
    max_num_batched_tokens=24,
    max_model_len=192,
    page_size=16,
    num_pages=64,
    max_num_queued_reqs=40,
    num_state_slots=24,
    state_snapshot_interval=48,
)


def request_of(
    prompt: Iterable[int] = PROMPT, *, max_tokens: int = 6, n: int = 1, **fields: Any
) -> Request:
    params = SamplingParams(
        temperature=1.0, seed=5, max_tokens=max_tokens, ignore_eos=True, n=n, **fields
    )
    return Request(prompt_token_ids=tuple(prompt), params=params)


def run(engine: EngineCore, *requests: Request) -> Record:
    record = Record(seed=0, engine=engine)
    first = engine.new_request_id()
    for number, request in enumerate(requests, first + 1):
        engine.enqueue(number, request)
        record.requests[number] = request
        for sample in range(request.params.n):
            record.streams[number, sample] = []
    while not engine.is_idle:
        assert record.num_steps < 5000, "the engine does not come to rest"
        for event in engine.step():
            record.take(event)
        record.num_steps += 1
        engine.check_invariants()
        spoil_free_states(engine)
    record.verify()
    return record


def cached(record: Record) -> list[int]:
    return [end.num_cached_tokens for end in record.finished.values()]


def end_of(record: Record) -> Finished:
    (end,) = record.finished.values()
    return end


def states_of(engine: EngineCore) -> RecurrentStates:
    states = engine.scheduler.kv_cache.states
    assert states is not None
    return states


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("length", by_day(range(1, 121), {1, 16, 17, 48, 49, 64, 65, 97, 120}))
def test_a_prompt_hits_its_own_last_page_at_every_length(length: int, loop: SchedulerLoop) -> None:
    engine = make_engine(LIMITS, loop=loop)
    request = request_of(PROMPT[:length])
    assert cached(run(engine, request)) == [0]
    assert cached(run(engine, request)) == [(length - 1) // 16 * 16]


@pytest.mark.parametrize("length", by_day(range(1, 121), {15, 16, 17, 47, 48, 49, 63, 80, 96, 119}))
def test_a_prompt_that_parts_early_starts_from_the_best_snapshot(length: int) -> None:
    engine = make_engine(LIMITS)
    run(engine, request_of())
    other = request_of((*PROMPT[:length], *prompt_of(30, seed=9)))
    record = run(engine, other)
    pages = [at for at in (0, 48, 96, 112) if at <= length]
    assert cached(record) == [pages[-1]]
    matched = length // 16 * 16
    miss = end_of(record).cache_miss
    assert miss is not None
    assert (miss.reason == "no_snapshot") == (matched > pages[-1])
    misses = engine.scheduler.prefix_counts.num_misses
    assert misses["no_snapshot"] == matched - pages[-1]
    again = run(engine, request_of((*PROMPT[:length], *prompt_of(30, seed=10))))
    assert cached(again) == [matched], "where two prompts part, the second leaves a snapshot"


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("max_tokens", by_day(range(1, 50), {1, 9, 10, 11, 25, 26, 27, 42}))
def test_a_conversation_goes_on_behind_its_last_full_page(
    max_tokens: int, loop: SchedulerLoop
) -> None:
    engine = make_engine(LIMITS, loop=loop)
    first = run(engine, request_of(PROMPT[:40], max_tokens=max_tokens))
    (stream,) = first.streams
    turn = (*PROMPT[:40], *first.token_ids(stream))
    second = run(engine, request_of((*turn, *prompt_of(20, seed=4))))
    known = len(turn) - 1  # the last token was not computed
    assert cached(second) == [known // 16 * 16]


def test_a_stream_keeps_one_snapshot_behind_its_prompt() -> None:
    engine = make_engine(LIMITS)
    run(engine, request_of(PROMPT[:40], max_tokens=100))
    states = states_of(engine)
    assert states.num_snapshots == 1 + 6
    assert states.pool.counts().cached == 2


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("length", [1, 2, 16, 17, 32, 33, 40])
def test_samples_start_from_the_state_of_the_first(
    length: int, loop: SchedulerLoop, caching: bool
) -> None:
    engine = make_engine(replace(LIMITS, enable_prefix_caching=caching), loop=loop)
    run(engine, request_of(PROMPT[:length], n=4, max_tokens=12))
    computed = engine.scheduler.num_scheduled_tokens
    # The prompt once, and then each sample from its last token on; the overlapping loop computes
    # one more of each before it knows that it has ended.
    assert computed <= length - 1 + 4 * 13
    assert states_of(engine).pool.counts().live == 0


@pytest.mark.parametrize("loop", LOOPS)
def test_samples_without_a_slot_for_their_start_compute_the_prompt_again(
    loop: SchedulerLoop,
) -> None:
    tight = replace(LIMITS, max_num_seqs=2, num_state_slots=2, enable_prefix_caching=False)
    run(make_engine(tight, loop=loop), request_of(n=3, max_tokens=12))


@pytest.mark.parametrize("num_slots", [8, 9, 12])
@pytest.mark.parametrize("loop", LOOPS)
def test_two_slots_a_row_are_enough(num_slots: int, loop: SchedulerLoop) -> None:
    engine = make_engine(replace(LIMITS, num_state_slots=num_slots), loop=loop)
    most = 0

    def count(record: Record) -> None:
        nonlocal most
        most = max(most, len(engine.scheduler.running))

    requests = [request_of((*PROMPT[:50], index), max_tokens=60) for index in range(9)]
    record = run_requests(engine, requests, before_step=count)
    record.verify()
    assert most == LIMITS.max_num_seqs
    assert engine.scheduler.num_preemptions == 0


def test_requests_at_once_wait_for_a_snapshot_where_they_part() -> None:
    engine = make_engine(LIMITS)
    shared = PROMPT[:85]
    requests = [request_of((*shared, *prompt_of(20, seed=index))) for index in range(3)]
    record = run(engine, *requests)
    assert cached(record) == [0, 80, 80]


def test_requests_at_once_do_not_wait_for_pages_without_a_snapshot() -> None:
    engine = make_engine(LIMITS)
    first = request_of(max_tokens=1)
    engine.submit(first)
    for _ in range(3):
        engine.step()
    (running,) = engine.scheduler.running
    assert running.num_computed_tokens == 72
    # The two part behind 37 tokens, which were computed before anybody asked for a snapshot.
    engine.submit(request_of((*PROMPT[:37], 1, 2, 3), max_tokens=1))
    engine.step()
    assert engine.scheduler.kv_cache.num_prefix_waits == 0
    while not engine.is_idle:
        engine.step()


def test_the_oldest_snapshots_make_room() -> None:
    engine = make_engine(replace(LIMITS, num_state_slots=10))
    prompts = [prompt_of(40, seed=20 + index) for index in range(12)]
    for prompt in prompts:
        run(engine, request_of(prompt, max_tokens=1))
    assert cached(run(engine, request_of(prompts[0], max_tokens=1))) == [0]
    assert cached(run(engine, request_of(prompts[-1], max_tokens=1))) == [32]
    states = states_of(engine)
    assert states.num_dropped > 0
    assert sum(vars_of(states.pool.counts())) == 10


def vars_of(counts: object) -> list[int]:
    return [getattr(counts, name) for name in ("free", "cached", "live", "pinned")]


def turns_of(engine: EngineCore, seed: int, num_turns: int) -> list[int]:
    """The prompt tokens that the turns of a conversation find."""
    tokens, found = (), list[int]()
    for turn in range(num_turns):
        tokens = (*tokens, *prompt_of(20, seed=100 * seed + turn))
        record = run(engine, request_of(tokens, max_tokens=12))
        (stream,) = record.streams
        tokens = (*tokens, *record.token_ids(stream))
        found += cached(record)
    return found


def test_states_that_a_conversation_has_passed_make_room_first() -> None:
    """Five turns leave ten snapshots, and the older prompt has one, in six slots."""
    engine = make_engine(replace(LIMITS, max_num_seqs=1, num_state_slots=6))
    prompt = prompt_of(40, seed=77)
    run(engine, request_of(prompt, max_tokens=1))
    assert turns_of(engine, 1, 5) == [0, 16, 48, 80, 112]
    assert cached(run(engine, request_of(prompt, max_tokens=1))) == [32]


def test_a_state_is_shared_where_prompts_part_and_passed_where_one_goes_on() -> None:
    engine = make_engine(LIMITS)
    pool = states_of(engine).pool

    def class_behind(num_tokens: int) -> PageClass:
        cache = engine.scheduler.kv_cache
        tokens = list(PROMPT[: num_tokens + 1])
        slot = cache.find_prefix(sequence_of(0, tuple(tokens))).state_slot
        assert slot is not None
        return pool.class_of(slot)

    run(engine, request_of(PROMPT[:85]))
    assert class_behind(80) is PageClass.PROMPT
    run(engine, request_of(PROMPT))
    assert class_behind(80) is PageClass.PASSED
    run(engine, request_of((*PROMPT[:85], *prompt_of(30, seed=8))))
    assert class_behind(80) is PageClass.SHARED, "of two that went on behind it"
    run(engine, request_of((*PROMPT[:70], *prompt_of(40, seed=9))))
    assert class_behind(64) is PageClass.SHARED, "made where the second of two prompts parted"


def test_what_a_stream_gives_up_does_not_count_as_evicted() -> None:
    engine = make_engine(LIMITS)
    for _ in range(2):
        run(engine, request_of(PROMPT[:40], max_tokens=1))
    run(engine, request_of(PROMPT[:20], max_tokens=100))
    reuse = states_of(engine).pool.reuse
    assert reuse.lag(PageClass.GENERATED, PageClass.PROMPT, 100) == 0


def test_a_snapshot_goes_with_its_page() -> None:
    engine = make_engine(replace(LIMITS, num_pages=12))
    run(engine, request_of(max_tokens=1))
    assert states_of(engine).pool.counts().cached > 0
    run(engine, request_of(prompt_of(180, seed=30), max_tokens=1))
    states = states_of(engine)
    cached_pages = engine.scheduler.kv_cache.pool.counts().cached
    assert states.pool.counts().cached <= cached_pages
    assert cached(run(engine, request_of(max_tokens=1))) == [0]


def test_a_tenant_without_a_share_of_the_cache_leaves_no_snapshot() -> None:
    engine = make_engine(LIMITS)
    tenant = Tenant(name="guest", cache_share=0.0)
    guest = Request(prompt_token_ids=PROMPT, params=request_of().params, tenant=tenant)
    run(engine, guest)
    assert states_of(engine).pool.counts().cached == 0


@pytest.mark.parametrize("num_slots", [8, 11, 40])
def test_drafts_take_no_more_slots_than_there_are(num_slots: int) -> None:
    limits = replace(LIMITS, num_state_slots=num_slots, max_num_batched_tokens=40)
    engine = make_engine(limits, parts=OWN_SOURCES)
    run_requests(engine, [request_of(PROMPT[:20], max_tokens=80) for _ in range(6)]).verify()
    assert engine.scheduler.num_preemptions == 0
    if num_slots > 8:
        assert engine.draft_counts.num_accepted_tokens > 0


def test_a_preempted_stream_goes_on_from_its_newest_snapshot() -> None:
    engine = make_engine(LIMITS)
    engine.submit(request_of(PROMPT[:40], max_tokens=60))
    while len(engine.scheduler.sequences[0].token_ids) < 75:
        engine.step()
    (sequence,) = engine.scheduler.running
    engine.scheduler._preempt(sequence)
    engine.check_invariants()
    assert engine.scheduler.kv_cache.find_prefix(sequence).num_tokens == 64


def test_scored_prompts_start_from_nothing_and_leave_snapshots() -> None:
    engine = make_engine(LIMITS)
    scored = request_of(max_tokens=1, prompt_logprobs=1)
    record = Record(seed=0, engine=engine)
    for _ in range(2):
        engine.submit(scored)
        while not engine.is_idle:
            engine.step()
            engine.check_invariants()
    assert engine.scheduler.prefix_counts.num_hits == 0
    assert cached(run(engine, request_of())) == [112]
    assert not record.streams


def test_the_dense_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-layout paged"):
        replace(LIMITS, slot_unit=1)


@pytest.mark.parametrize(
    ("prompt", "start", "expected"),
    [
        (1, 0, []),
        (16, 0, []),
        (17, 0, [16]),
        (97, 0, [48, 96]),
        (98, 48, [96]),
        (120, 0, [48, 96, 112]),
        (120, 112, []),
        (2000, 0, [384, 768, 1152, 1536, 1920, 1984]),
    ],
)
def test_a_prompt_has_few_snapshots_at_places_that_prompts_share(
    prompt: int, start: int, expected: list[int]
) -> None:
    assert snapshot_places(prompt, start, page_size=16, interval=48) == expected


def test_a_sequence_without_a_row_holds_no_slot() -> None:
    engine = make_engine(LIMITS)
    engine.submit(request_of())
    engine.step()
    sequence: Sequence = engine.scheduler.running[0]
    engine.cancel(0)
    assert sequence.state is None
    while not engine.is_idle:
        engine.step()
    assert states_of(engine).pool.counts().live == 0


def test_slots_and_snapshots_are_counted() -> None:
    engine = make_engine(LIMITS)
    meter = StepMeter(engine, lambda: 0.0)
    for _ in range(2):
        engine.submit(request_of(max_tokens=1))
        while not engine.is_idle:
            meter.step()
    counted = meter.stats()
    assert counted.by_label["state_slots"] == {"live": 0, "cached": 3, "free": 21}
    names = ("state_snapshots", "state_snapshot_hits", "state_snapshots_dropped")
    assert [counted.numbers[each] for each in names] == [3, 1, 0]
