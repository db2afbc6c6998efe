"""Spans that attend both ways in an engine whose steps are bounded: computed in quanta, with the
streams of each request alone, whatever takes a span away meanwhile. In modelled time."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest

from cadenza.backends.fake import FakeRunner, FakeStepHandle
from cadenza.batch.image_cost import ImageCost
from cadenza.batch.sequence import Sequence
from cadenza.batch.step_cost import StepBound, StepCost, StepLoad
from cadenza.batch.step_schema import ModelInputs
from cadenza.batch.whole_spans import SpanShape
from cadenza.config import EngineLimits, ImageLimits, SchedulerLoop
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.new_sequences import ResumedSample, Resumption
from cadenza.engine.step_works import WorkOptions
from cadenza.errors import RunnerError
from cadenza.events import Token
from cadenza.request import Request, SamplingParams
from cadenza.scheduler.span_queue import SpanQueue
from tests.engine.seeing import image_at
from tests.engine.simulation import SECRET, VOCAB_SIZE, Record
from tests.engine.solo import IMAGE_TOKEN_ID

TEXT_COST = StepCost(fixed_ms=5.0, token_ms=2.0, logit_ms=0.2, key_ms=0.00005)
TRUE_SPAN_MS = 1.5
"""Of a quantum beside its share of a token's time."""
LOOPS: tuple[SchedulerLoop, ...] = ("plain", "overlap")
LIMITS = EngineLimits(
    max_num_seqs=10,
    max_num_batched_tokens=256,
    max_model_len=512,
    page_size=16,
    num_pages=256,
    max_num_queued_reqs=100,
    enable_prefix_caching=True,
    images=ImageLimits(token_id=IMAGE_TOKEN_ID, num_slots=512),
)


@dataclass(slots=True, eq=False, kw_only=True)
class TimedRunner(FakeRunner):
    """Advances its clock, when a step is read, by what the step truly costs; can fail at one."""

    now_s: float = 0.0
    num_span_steps: int = 0
    fails: Callable[[ModelInputs], bool] = lambda _: False
    shares_with_tokens: int = 0

    def clock(self) -> float:
        return self.now_s

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        if self.fails(inputs):
            raise RunnerError("the device was lost")
        starts, ends = inputs.rows.query_starts[:-1], inputs.rows.query_starts[1:]
        counts, kv_lens = ends - starts, inputs.rows.kv_lens
        keys = counts * (kv_lens - counts) + counts * (counts + 1) // 2
        load = StepLoad(
            num_tokens=inputs.num_tokens, num_logits=inputs.num_logits, num_keys=int(keys.sum())
        )
        ms = TEXT_COST.predict_ms(load)
        for call in inputs.span_calls:
            assert self.span_shape is not None
            num_rows = int(call.groups.counts.num_tokens[0])
            blocks = -(-num_rows // self.span_shape.block_rows)
            ms += blocks * TRUE_SPAN_MS + num_rows * 2.0 / self.span_shape.num_passes
        self.num_span_steps += bool(inputs.span_calls)
        self.shares_with_tokens += bool(inputs.span_calls and inputs.num_tokens)
        handle = super(TimedRunner, self).launch(inputs)

        def read() -> None:
            self.now_s += ms / 1000

        return FakeStepHandle(handle.output, read)


@dataclass(slots=True, eq=False, kw_only=True)
class WholeRunner(TimedRunner):
    """Computes spans in steps alone."""

    @property
    def span_shape(self) -> SpanShape | None:
        return None


def engine_of(
    limits: EngineLimits,
    bound: StepBound | None,
    loop: SchedulerLoop = "overlap",
    runner_of: type[TimedRunner] = TimedRunner,
) -> tuple[EngineCore, TimedRunner]:
    assert limits.images is not None
    runner = runner_of(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_pages_per_seq=limits.max_pages_per_seq,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        vocab_size=VOCAB_SIZE,
        num_image_slots=limits.images.num_slots,
        image_token_id=IMAGE_TOKEN_ID,
        whole_span=min(240, limits.max_num_batched_tokens),
    )
    options = CoreOptions(
        secret=SECRET,
        loop=loop,
        reserved_output=0.0,
        step_bound=bound,
        works=WorkOptions(
            image_cost=ImageCost(quantum_ms=1e-3, product_ms=1e-9, attention_ms=1e-9)
        ),
        clock=runner.clock,
    )
    return EngineCore(runner, limits, options), runner


def bound_of(max_ms: float) -> StepBound:
    return StepBound(max_ms=max_ms, cost=TEXT_COST)


def request_of(
    before: int, rows: int, behind: int, seed: int, *, max_tokens: int = 4, n: int = 1
) -> Request:
    """Text, an image of so many tokens, and text behind it."""
    tokens, parts = image_at(before, seed, 1, rows)
    text = np.random.default_rng(seed % 3).integers(12, 90, before + behind).tolist()
    return Request(
        prompt_token_ids=(*text[:before], *tokens, *text[before:]),
        attachments=parts,
        params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, n=n),
    )


def stream_of(seed: int, max_tokens: int = 300) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(prompt_token_ids=(seed, 5, 6), params=params)


def drain(engine: EngineCore, record: Record, most: int = 4000) -> None:
    for _ in range(most):
        record.step()
        engine.check_invariants()
        if engine.is_idle:
            return
    raise AssertionError("the engine did not come to rest")


def send(engine: EngineCore, record: Record, *requests: Request) -> list[int]:
    ids = [engine.submit(request) for request in requests]
    for request_id, request in zip(ids, requests, strict=True):
        record.accept(request_id, request)
    return ids


def worst_gap_ms(runner_of: type[TimedRunner], loop: SchedulerLoop) -> tuple[float, TimedRunner]:
    """Of eight streams, to which two images of 240 tokens and a text come."""
    engine, runner = engine_of(LIMITS, bound_of(50.0), loop, runner_of)
    record = Record(seed=0, engine=engine)
    ids = send(engine, record, *map(stream_of, range(8)))
    times: dict[int, list[float]] = {each: [] for each in ids}
    for step in range(4000):
        if step == 20:
            send(engine, record, request_of(9, 240, 5, 1), request_of(3, 239, 40, 2))
        for event in engine.step():
            record.take(event)
            if isinstance(event, Token) and event.request_id in times:
                times[event.request_id].append(runner.now_s)
        if engine.is_idle:
            break
    record.verify()
    return 1000 * max(b - a for each in times.values() for a, b in pairwise(each)), runner


@pytest.mark.parametrize("loop", LOOPS)
def test_a_step_beside_a_long_span_stays_within_the_bound(loop: SchedulerLoop) -> None:
    """Although a quantum takes longer than the costs of text say."""
    worst_ms, runner = worst_gap_ms(TimedRunner, loop)
    assert worst_ms <= 1.35 * 50.0
    assert runner.shares_with_tokens > 10


def test_without_quanta_a_span_stops_all_streams() -> None:
    worst_ms, _ = worst_gap_ms(WholeRunner, "overlap")
    assert worst_ms > 400.0


def test_without_a_bound_a_span_is_computed_in_one_step() -> None:
    engine, runner = engine_of(LIMITS, None)
    record = Record(seed=0, engine=engine)
    send(engine, record, request_of(9, 240, 5, 1))
    drain(engine, record)
    record.verify()
    assert runner.num_span_steps == 0


def test_a_span_that_fits_a_step_is_computed_in_it() -> None:
    engine, runner = engine_of(LIMITS, bound_of(700.0))
    record = Record(seed=0, engine=engine)
    send(engine, record, request_of(9, 240, 5, 1))
    drain(engine, record)
    record.verify()
    assert runner.num_span_steps == 0


@pytest.mark.parametrize("behind", [0, 1, 20])
def test_samples_of_a_request_share_a_span_that_was_computed_in_quanta(behind: int) -> None:
    engine, runner = engine_of(LIMITS, bound_of(30.0))
    record = Record(seed=0, engine=engine)
    send(engine, record, request_of(9, 100, behind, 1, n=3))
    drain(engine, record)
    record.verify()
    assert engine.scheduler.work(SpanQueue).num_computed == 1
    assert runner.num_span_steps > 5


def test_a_hit_within_a_span_leaves_only_its_other_rows() -> None:
    engine, runner = engine_of(replace(LIMITS, page_size=48, num_pages=64), bound_of(30.0))
    record = Record(seed=0, engine=engine)
    request = request_of(20, 70, 2, 1, max_tokens=1)
    send(engine, record, request)
    drain(engine, record)
    first = runner.spans.num_calls
    send(engine, record, request)
    drain(engine, record)
    record.verify()
    assert record.finished[1, 0].num_cached_tokens == 48
    assert engine.scheduler.work(SpanQueue).num_computed == 2
    assert len(runner.spans.slots) == 42
    assert 0 < runner.spans.num_calls - first < first


def mid_span(engine: EngineCore, record: Record) -> Sequence:
    """Steps until some quanta of a span are launched, but not all."""
    for _ in range(200):
        for event in engine.step():
            record.take(event)
        engine.check_invariants()
        holder = engine.scheduler.work(SpanQueue).holder
        if holder is not None:
            return holder
    raise AssertionError("no span was computed in quanta")


@pytest.mark.parametrize("loop", LOOPS)
def test_a_cancel_within_a_span_frees_all_and_lets_the_next_one_begin(loop: SchedulerLoop) -> None:
    engine, _ = engine_of(LIMITS, bound_of(30.0), loop)
    record = Record(seed=0, engine=engine)
    send(engine, record, request_of(9, 200, 5, 1), request_of(3, 150, 4, 2))
    holder = mid_span(engine, record)
    engine.cancel(holder.request_id)
    record.cancelled.add((holder.request_id, 0))
    engine.check_invariants()
    assert engine.scheduler.work(SpanQueue).holder is None
    drain(engine, record)
    record.verify()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_sequence_preempted_within_a_span_computes_it_again(loop: SchedulerLoop) -> None:
    engine, _ = engine_of(LIMITS, bound_of(30.0), loop)
    record = Record(seed=0, engine=engine)
    send(engine, record, request_of(9, 200, 5, 1))
    holder = mid_span(engine, record)
    engine.scheduler._preempt(holder)
    engine.check_invariants()
    assert engine.scheduler.work(SpanQueue).holder is None
    drain(engine, record)
    record.verify()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_step_that_fails_within_a_span_loses_it_and_no_stream(loop: SchedulerLoop) -> None:
    engine, runner = engine_of(LIMITS, bound_of(30.0), loop)
    failed: list[int] = []

    def fails(inputs: ModelInputs) -> bool:
        is_due = not failed and any(call.pass_index == 1 for call in inputs.span_calls)
        failed.extend([inputs.step_id] * is_due)
        return is_due

    runner.fails = fails
    record = Record(seed=0, engine=engine)
    send(engine, record, request_of(9, 200, 5, 1), request_of(3, 150, 4, 2), stream_of(7, 40))
    drain(engine, record)
    record.verify()
    assert len(failed) == engine.loop.num_failed_steps == 1


def test_an_engine_lost_within_a_span_leaves_its_request_to_another() -> None:
    lost, _ = engine_of(LIMITS, bound_of(30.0))
    request = request_of(9, 200, 5, 1)
    request_id = lost.submit(request)
    record = Record(seed=0, engine=lost)
    record.accept(request_id, request)
    mid_span(lost, record)
    lost.close()
    engine, _ = engine_of(LIMITS, bound_of(30.0))
    record = Record(seed=0, engine=engine)
    record.accept(request_id, request)
    sample = ResumedSample(sample=0, token_ids=(), num_cached_tokens=None)
    engine.resume(request_id, request, Resumption(samples=(sample,)))
    drain(engine, record)
    record.verify()
