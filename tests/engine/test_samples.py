"""n > 1: the samples of one request share its prompt's pages, and each is a stream of its own."""

from dataclasses import replace

import pytest

from cadenza.batch.draw_keys import derive_sample_seed
from cadenza.config import EngineLimits, SchedulerLoop
from cadenza.engine.core import EngineCore
from cadenza.events import Finished
from cadenza.request import Request, SamplingParams
from tests.engine.simulation import (
    ObservedRunner,
    Record,
    make_engine,
    run_requests,
)
from tests.engine.solo import solo_stream

LOOPS: tuple[SchedulerLoop, ...] = ("plain", "overlap")
PROMPT = tuple((5 + index * 11) % 97 for index in range(40))


def limits_of(**changes: int | bool) -> EngineLimits:
    values: dict[str, int | bool] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 96,
        "page_size": 16,
        "num_pages": 24,
        "max_num_queued_reqs": 16,
        "enable_prefix_caching": True,
    }
    return EngineLimits(**(values | changes))  # type: ignore[arg-type]


def request_of(n: int, *, num_prompt_tokens: int = 40, max_tokens: int = 12) -> Request:
    params = SamplingParams(n=n, temperature=1.0, seed=7, max_tokens=max_tokens, ignore_eos=True)
    return Request(prompt_token_ids=PROMPT[:num_prompt_tokens], params=params)


def observed(engine: EngineCore) -> ObservedRunner:
    assert isinstance(engine.runner, ObservedRunner)
    return engine.runner


def steps_until_forked(engine: EngineCore, record: Record) -> None:
    while len(engine.scheduler.running) < 2:
        for event in engine.step():
            record.take(event)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("num_prompt_tokens", [1, 2, 16, 17, 32, 33, 40])
def test_samples_compute_their_prompt_once(
    num_prompt_tokens: int, loop: SchedulerLoop, caching: bool
) -> None:
    engine = make_engine(limits_of(enable_prefix_caching=caching), loop=loop)
    request = request_of(3, num_prompt_tokens=num_prompt_tokens)
    record = run_requests(engine, [request])
    record.verify()
    again = 2  # the prompt's last token, once for each other sample
    num_outputs = 3 * (12 - 1)
    overrun = 3 if loop == "overlap" else 0
    num_launched = observed(engine).num_launched_tokens
    assert num_launched - num_prompt_tokens - again - num_outputs in range(overrun + 1)
    partial = (num_prompt_tokens - 1) % 16 > 0
    assert observed(engine).num_copied_pages == (2 if partial else 0)


@pytest.mark.parametrize("loop", LOOPS)
def test_each_sample_is_the_stream_of_its_own_seed(loop: SchedulerLoop) -> None:
    record = run_requests(make_engine(limits_of(), loop=loop), [request_of(4)])
    for sample in range(4):
        alone = replace(request_of(1).params, seed=derive_sample_seed(7, sample))
        expected = solo_stream(replace(request_of(1), params=alone), alone.seed or 0, 96)
        assert record.token_ids((0, sample)) == expected.token_ids
    assert derive_sample_seed(7, 0) == 7, "sample 0 is what n = 1 gives"
    assert len({record.token_ids((0, sample)) for sample in range(4)}) == 4


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("max_num_seqs", "num_pages"), [(1, 4), (2, 4), (4, 4), (4, 5), (4, 7), (4, 24)]
)
def test_more_samples_than_rows_and_pages_are_served_one_after_another(
    max_num_seqs: int, num_pages: int, loop: SchedulerLoop
) -> None:
    limits = limits_of(max_num_seqs=max_num_seqs, num_pages=num_pages)
    record = run_requests(make_engine(limits, loop=loop), [request_of(9), request_of(2)])
    record.verify()
    assert len(record.finished) == 11


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("sample", [0, 1, 2, None])
def test_cancelling_a_sample_leaves_the_others(loop: SchedulerLoop, sample: int | None) -> None:
    for num_steps in range(9):
        engine = make_engine(limits_of(max_num_seqs=2), loop=loop)
        record = Record(seed=0, engine=engine)
        record.accept(engine.submit(request_of(3)), request_of(3))
        for _ in range(num_steps):
            for event in engine.step():
                record.take(event)
        record.cancelled.update(record.open_streams(0, sample))
        assert engine.cancel(0, sample)
        assert not engine.cancel(0, sample), "it was cancelled already"
        assert engine.is_open(0) is (sample is not None)
        while not engine.is_idle:
            engine.check_invariants()
            for event in engine.step():
                record.take(event)
        record.verify()


def test_a_sample_that_does_not_exist_cannot_be_cancelled() -> None:
    engine = make_engine(limits_of())
    request_id = engine.submit(request_of(2))
    assert not engine.cancel(request_id, 2)
    assert not engine.cancel(request_id + 1)
    assert engine.is_open(request_id)


def test_samples_run_beside_each_other_on_shared_pages() -> None:
    engine = make_engine(limits_of())
    record = Record(seed=0, engine=engine)
    record.accept(engine.submit(request_of(4)), request_of(4))
    steps_until_forked(engine, record)
    running = engine.scheduler.running
    assert len(running) == 4
    for sequence in running[1:]:
        assert sequence.page_table[:2] == running[0].page_table[:2]
        assert sequence.page_table[2] != running[0].page_table[2]
    assert engine.scheduler.kv_cache.pool.counts().live == 2 + 4


def test_others_wait_while_pages_are_promised_to_coming_samples() -> None:
    """Eight pages: two of the prompt and one for each of three samples leave three."""
    engine = make_engine(limits_of(num_pages=8), reserved_output=1.0)
    engine.submit(request_of(3, max_tokens=8))
    stranger = request_of(1, num_prompt_tokens=40, max_tokens=30)
    engine.submit(replace(stranger, cache_salt="another tenant"))
    for _ in range(8):
        engine.step()
        assert all(sequence.request_id == 0 for sequence in engine.scheduler.running)
    while not engine.is_idle:
        engine.step()
    assert engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize("loop", LOOPS)
def test_usage_of_every_sample_counts_the_prompt_and_its_cached_part(loop: SchedulerLoop) -> None:
    engine = make_engine(limits_of(), loop=loop)
    run_requests(engine, [request_of(1)])
    engine.submit(request_of(3))
    ends: list[Finished] = []
    while not engine.is_idle:
        ends += [event for event in engine.step() if isinstance(event, Finished)]
    assert sorted(end.sample for end in ends) == [0, 1, 2]
    for end in ends:
        assert (end.num_prompt_tokens, end.num_generated_tokens) == (40, 12)
        assert end.num_cached_tokens == 32
