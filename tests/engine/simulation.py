"""A seeded simulation of an engine over the token-storing runner, and the oracle that judges it.

Owns the drive (`Simulation`) and what clients must see (`Record.verify`); the traffic is that of
`tests.engine.scenario`, the streams those of `tests.engine.solo`. Knows the core and the fake
runner, no real device. Invariant: where there is work and nothing is in flight, a step computes
something (`Record.step`).
"""

import random
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

import numpy as np

from cadenza.backends.fake import FakeLateStepHandle, FakeRunner, FakeStepHandle
from cadenza.batch.packing import Packer
from cadenza.batch.step_cost import StepBound
from cadenza.batch.step_schema import ModelInputs
from cadenza.config import Batching, EngineLimits, SchedulerLoop
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.loop import LOOP_DEPTHS, StepLoop, StepRunner
from cadenza.errors import InvalidRequestError, QueueFullError
from cadenza.events import Event, Finished, PromptLogprobs, Started, Token
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.request import Request
from cadenza.scheduler.admission import Admission
from cadenza.scheduler.image_queue import ImageQueue
from cadenza.scheduler.scheduler import Scheduler, SchedulerOptions
from cadenza.scheduler.step_drafts import StepDrafts
from cadenza.scheduler.turns import FCFS, TurnPolicy
from tests.engine.hashed_constraint import compile_hashed
from tests.engine.scenario import Scenario
from tests.engine.seeing import can_ever_fit, sees_with, spoil_free_slots
from tests.engine.solo import EOS_TOKEN_IDS, VOCAB_SIZE, SoloStream, StreamId, solo_stream_of

SECRET = b"a secret of the simulation's own"
MAX_STEPS_TO_DRAIN = 20_000
STEP_S = 0.05
"""A step's time by the simulation's clock."""
TICK_S = 0.002
"""Between two looks at the clock, where the time of steps is bounded."""


@dataclass(kw_only=True, eq=False)
class ObservedRunner(FakeRunner):
    """The token-storing runner, counting what its steps held."""

    num_launched_tokens: int = 0
    num_mixed_steps: int = 0
    num_cut_prompts: int = 0
    num_copied_pages: int = 0

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        assert inputs.num_tokens <= self.max_num_batched_tokens, "the token budget was exceeded"
        new_lens = np.diff(inputs.rows.query_starts)
        is_decode = (new_lens == 1) & (inputs.rows.kv_lens > 1)
        self.num_launched_tokens += inputs.num_tokens
        self.num_copied_pages += len(inputs.page_copies)
        self.num_mixed_steps += bool(is_decode.any() and (new_lens > 1).any())
        self.num_cut_prompts += int((new_lens > 0).sum()) - inputs.num_logits
        return super().launch(inputs)


class StepLostError(Exception):
    """What a device may raise."""


@dataclass(kw_only=True, eq=False)
class LosingRunner(ObservedRunner):
    """Loses the launches numbered in `lost`, and others with the chance `loss`: at once, when their
    tokens are chosen, or when they are read."""

    seed: int
    loss: float = 0.0
    lost: Collection[int] = ()
    num_launches: int = 0
    num_lost: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rng = random.Random(f"losses {self.seed}")

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        handle = super().launch(inputs)
        self.num_launches += 1
        if self._rng.random() >= self.loss and self.num_launches - 1 not in self.lost:
            return handle
        self.num_lost += 1
        if self._rng.random() < 0.3:
            self._lose()
        if isinstance(handle, FakeLateStepHandle) and self._rng.random() < 0.5:
            handle.sample = self._lose
        handle.on_read = self._lose
        return handle

    def _lose(self, *_: object) -> NoReturn:
        raise StepLostError("the step was lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an engine is assembled from, so that a mutant can stand in for one of them."""

    runner: Callable[..., FakeRunner] = ObservedRunner
    kv_cache: Callable[..., KVCacheManager] = KVCacheManager
    scheduler: Callable[..., Scheduler] = Scheduler
    packer: Callable[..., Packer] = Packer


REAL_PARTS = Parts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Who starts when, by which clock (in seconds), and how long a step may take."""

    policy: TurnPolicy = FCFS
    batching: Batching = "continuous"
    step_bound: StepBound | None = None
    clock: Callable[[], float] = time.perf_counter


IN_ORDER = Order()


class AssembledEngine(EngineCore):
    """An engine around a scheduler, pages and a packer that are given."""

    def __init__(
        self, runner: FakeRunner, limits: EngineLimits, options: CoreOptions, parts: Parts
    ) -> None:
        super().__init__(runner, limits, options)
        kv_cache = parts.kv_cache(limits, SECRET)
        admission = Admission(page_size=limits.page_size, reserved_output=options.reserved_output)
        order = SchedulerOptions(
            policy=options.policy,
            batching=options.batching,
            step_bound=options.step_bound,
            works=lambda _: (StepDrafts(limits, kv_cache, None),),
        )
        self.scheduler = parts.scheduler(limits, kv_cache, admission, order)
        packer = parts.packer(limits, runner.vocab_size)
        self.loop = StepLoop(
            self.scheduler,
            StepRunner(runner, packer),
            depth=LOOP_DEPTHS[options.loop],
            clock=options.clock,
        )


def make_engine(
    limits: EngineLimits,
    *,
    loop: SchedulerLoop = "overlap",
    parts: Parts = REAL_PARTS,
    seed: int = 0,
    reserved_output: float = 0.5,
    order: Order = IN_ORDER,
) -> EngineCore:
    """An engine over a runner from `parts`; as `EngineCore` assembles it itself, where it can."""
    runner = parts.runner(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_pages_per_seq=limits.max_pages_per_seq,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        vocab_size=VOCAB_SIZE,
        num_state_slots=limits.num_state_slots,
        **sees_with(limits),
    )
    options = CoreOptions(
        eos_token_ids=EOS_TOKEN_IDS,
        loop=loop,
        reserved_output=reserved_output,
        policy=order.policy,
        batching=order.batching,
        step_bound=order.step_bound,
        clock=order.clock,
        seed=seed,
        secret=SECRET,
        compile_constraint=compile_hashed,
    )
    if (parts.kv_cache, parts.scheduler, parts.packer) == (KVCacheManager, Scheduler, Packer):
        return EngineCore(runner, limits, options)
    return AssembledEngine(runner, limits, options, parts)


@dataclass(slots=True, kw_only=True)
class Record:
    """All that clients saw of one run, by stream, and the modes that occurred."""

    seed: int
    engine: EngineCore = field(repr=False)
    requests: dict[int, Request] = field(default_factory=dict, repr=False)
    streams: dict[StreamId, list[Token]] = field(default_factory=dict, repr=False)
    finished: dict[StreamId, Finished] = field(default_factory=dict, repr=False)
    started: set[int] = field(default_factory=set, repr=False)
    cancelled: set[StreamId] = field(default_factory=set, repr=False)
    retried: set[StreamId] = field(default_factory=set, repr=False)
    """Those that a lost step may end now."""
    loses_steps: bool = False
    """At random, so that one that is retried may be lost again."""
    failed: set[StreamId] = field(default_factory=set, repr=False)
    log: list[tuple[int, Event]] = field(default_factory=list, repr=False)
    most_empty_steps: int = 0
    """In a row, which compute nothing although there is work; for a fault that takes its pages."""
    num_steps: int = 0
    num_cancels: int = 0
    num_refused: int = 0
    num_queue_full: int = 0

    def is_open(self, stream: StreamId) -> bool:
        return stream not in self.finished and stream not in self.cancelled

    def open_streams(self, request_id: int, sample: int | None = None) -> list[StreamId]:
        """Those of a request that have not ended, or of them the one of `sample`."""
        samples = range(self.requests[request_id].params.n) if sample is None else [sample]
        return [(request_id, each) for each in samples if self.is_open((request_id, each))]

    def accept(self, request_id: int, request: Request) -> None:
        assert request_id not in self.requests, f"request id {request_id} was given twice"
        assert request_id >= len(self.requests), f"request id {request_id} did not grow"
        self.requests[request_id] = request
        for sample in range(request.params.n):
            self.streams[request_id, sample] = []

    def step(self) -> None:
        """One step of its engine, whose events it files. It computes something if there is work and
        nothing is in flight."""
        engine = self.engine
        self.retried, num_failed = retried_streams(engine), engine.loop.num_failed_steps
        events = engine.step()
        if engine.loop.num_failed_steps > num_failed + 1:  # it was lost and retried in between
            self.retried |= self.streams.keys()
        self.take_all(events)
        self.num_steps += 1
        assert engine.loop.num_empty_steps <= self.most_empty_steps, (
            f"nothing was computed, although there is work: {_state_of(engine)}"
        )

    def take_all(self, events: list[Event]) -> None:
        for event in events:
            self.take(event)

    def take(self, event: Event) -> None:
        """Files an event; it must belong to an open stream and continue it."""
        assert not isinstance(event, PromptLogprobs), f"nobody asked for {event}"
        if isinstance(event, Started):
            assert event.request_id not in self.started, f"{event} came twice"
            self.started.add(event.request_id)
            return
        is_token = isinstance(event, Token)
        assert not is_token or event.request_id in self.started, f"{event} came before its start"
        stream = event.request_id, event.sample
        assert stream in self.streams, f"an event of the unknown stream {stream}"
        assert self.is_open(stream), f"stream {stream} had an event after its end"
        self.log.append((self.num_steps, event))
        if isinstance(event, Finished):
            self.finished[stream] = event
            is_lost_again = event.error_kind == "step_failed" and stream in self.retried
            if self.loses_steps and is_lost_again:
                self.failed.add(stream)
            return
        tokens = self.streams[stream]
        assert event.index == len(tokens), (
            f"stream {stream}: token {event.index} came where {len(tokens)} was due"
        )
        tokens.append(event)

    def token_ids(self, stream: StreamId) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.streams[stream])

    def solo(self, stream: StreamId) -> SoloStream:
        return solo_stream_of(self.requests[stream[0]], stream, self.engine, self.seed)

    def verify(self, *, failed: frozenset[StreamId] = frozenset()) -> None:
        """Every stream is exact and ended once; those in `failed`, and with steps lost at random
        those that were lost again while they were retried, were cut by an error."""
        for stream in self.streams:
            self._verify_tokens(stream)
            if stream in self.cancelled:
                assert stream not in self.finished, f"{stream} was cancelled and finished"
            elif stream in failed | self.failed:
                self._verify_failure(stream)
            else:
                self._verify_end(stream)
        self.verify_nothing_is_held()

    def verify_nothing_is_held(self) -> None:
        engine = self.engine
        engine.check_invariants()
        counts = engine.scheduler.kv_cache.pool.counts()
        assert engine.is_idle, "the engine is not idle"
        assert counts.live == 0, f"{counts.live} pages leaked"
        assert counts.pinned == 0, f"{counts.pinned} pages stayed pinned"
        if engine.scheduler.kv_cache.states is not None:
            slots = engine.scheduler.kv_cache.states.pool.counts()
            assert (slots.live, slots.pinned) == (0, 0), f"slots of states leaked: {slots}"
        if engine.limits.images is not None:
            images = engine.scheduler.work(ImageQueue).slot_counts()
            assert images.live == 0, f"slots of images leaked: {images}"

    def _verify_tokens(self, stream: StreamId) -> None:
        expected, actual = self.solo(stream).token_ids, self.token_ids(stream)
        assert actual == expected[: len(actual)], (
            f"stream {stream}: the stream {actual} is not the solo stream {expected}"
        )
        count = self.requests[stream[0]].params.logprobs
        for token in self.streams[stream]:
            if count is None:
                assert token.logprobs is None, f"stream {stream} asked for no logprobs"
                continue
            assert token.logprobs is not None, f"stream {stream} asked for logprobs"
            assert token.logprobs.logprob == -token.token_id / 8, "another token's logprob"
            top_ids = token.logprobs.top_ids
            assert top_ids == (token.token_id,) * count, "another token's likeliest ones"

    def _verify_end(self, stream: StreamId) -> None:
        solo = self.solo(stream)
        assert self.token_ids(stream) == solo.token_ids, (
            f"stream {stream}: the stream {self.token_ids(stream)} is shorter than the "
            f"solo stream {solo.token_ids}"
        )
        assert stream in self.finished, f"stream {stream} never finished"
        end = self.finished[stream]
        assert end.error is None, f"stream {stream} failed: {end.error}"
        assert end.finish_reason == solo.finish_reason, f"{end} against {solo}"
        assert end.stop_token_id == solo.stop_token_id, f"{end} against {solo}"
        num_prompt_tokens = len(self.requests[stream[0]].prompt_token_ids)
        assert end.num_prompt_tokens == num_prompt_tokens, f"prompt tokens are wrong: {end}"
        num_generated_tokens = len(solo.token_ids) + solo.num_stop_tokens
        assert end.num_generated_tokens == num_generated_tokens, f"usage is wrong: {end}"
        assert 0 <= end.num_cached_tokens < num_prompt_tokens, f"cached tokens are wrong: {end}"
        limits = self.engine.limits
        is_whole = end.num_cached_tokens % (limits.slot_unit or limits.page_size) == 0
        assert is_whole, f"a part of a page counts as cached: {end}"

    def _verify_failure(self, stream: StreamId) -> None:
        assert stream in self.finished, f"stream {stream} failed without an event"
        end = self.finished[stream]
        assert end.finish_reason == "error", f"stream {stream} was expected to fail: {end}"
        assert end.error, f"a failure without an error: {end}"
        assert end.stop_token_id is None, f"a failure with a stop token: {end}"
        num_sent = len(self.streams[stream])
        assert end.num_generated_tokens == num_sent, f"{num_sent} tokens were sent: {end}"


class Simulation:
    """Drives one engine through one scenario. `audit` is called after each step."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        loop: SchedulerLoop,
        parts: Parts = REAL_PARTS,
        audit: Callable[[EngineCore], None] = EngineCore.check_invariants,
    ) -> None:
        self.scenario = scenario
        self._now_s = 0.0
        if scenario.loss and parts.runner is ObservedRunner:
            runner = partial(LosingRunner, seed=scenario.seed, loss=scenario.loss)
            parts = replace(parts, runner=runner)
        self.engine = make_engine(
            scenario.limits,
            loop=loop,
            parts=parts,
            seed=scenario.seed,
            reserved_output=scenario.reserved_output,
            order=Order(
                policy=scenario.policy,
                batching=scenario.batching,
                step_bound=scenario.step_bound(),
                clock=self._clock,
            ),
        )
        loses_steps = scenario.loss > 0
        self.record = Record(seed=scenario.seed, engine=self.engine, loses_steps=loses_steps)
        self._audit = audit
        self._rng = random.Random(f"arrivals {scenario.seed}")
        self._preemptions = random.Random(f"preemptions {scenario.seed}")
        self._next_client = 0
        self._cancels_due: dict[int, list[tuple[int, int | None]]] = {}

    def run(self) -> Record:
        """Steps until the scenario is over and the engine idle; every step is audited."""
        record = self.record
        most = self.scenario.num_steps + MAX_STEPS_TO_DRAIN
        while record.num_steps < self.scenario.num_steps or not self.engine.is_idle:
            assert record.num_steps < most, "the engine does not come to rest"
            if record.num_steps < self.scenario.num_steps:
                self._let_clients_come()
            for request_id, sample in self._cancels_due.pop(record.num_steps, ()):
                self._cancel(request_id, sample)
            self._preempt_one()
            record.step()
            self._now_s += STEP_S
            self._audit(self.engine)
            spoil_free_slots(self.engine)
        return record

    def _clock(self) -> float:
        if self.scenario.is_bounded:
            self._now_s += TICK_S
        return self._now_s

    def _preempt_one(self) -> None:
        """Somebody else takes the pages of a running sequence."""
        scheduler, rng = self.engine.scheduler, self._preemptions
        if rng.random() < self.scenario.preemption and scheduler.running:
            scheduler._preempt(rng.choice(scheduler.running))

    def _let_clients_come(self) -> None:
        comes, burst = self._rng.random() < self.scenario.arrival, self._rng.choice([1, 1, 4])
        for _ in range(burst if comes else 0):
            self._submit_next()
        while self.engine.is_idle:
            self._submit_next()

    def _submit_next(self) -> None:
        """The next client's request; where the queue is full, the client tries again later."""
        client = self.scenario.client(self._next_client)
        limits = self.engine.limits
        is_full = not self.engine.num_queue_slots
        before = _state_of(self.engine)
        try:
            request_id = self.engine.submit(client.request)
        except InvalidRequestError:
            assert not can_ever_fit(client.request, limits), "a request was refused without need"
            assert _state_of(self.engine) == before, "an invalid submit changed the engine"
            self.record.num_refused += 1
        except QueueFullError:
            assert is_full, "the queue was not full"
            assert _state_of(self.engine) == before, "a submit to a full queue changed the engine"
            self.record.num_queue_full += 1
            return
        else:
            assert can_ever_fit(client.request, limits), "accepted what can never fit"
            assert not is_full, "the queue grew beyond its bound"
            self.record.accept(request_id, client.request)
            if client.cancel_after is not None:
                due = self.record.num_steps + client.cancel_after
                cancel = request_id, client.cancelled_sample
                self._cancels_due.setdefault(due, []).append(cancel)
        self._next_client += 1

    def _cancel(self, request_id: int, sample: int | None) -> None:
        ended = self.record.open_streams(request_id, sample)
        answer = self.engine.cancel(request_id, sample)
        assert answer is bool(ended), f"cancel of {request_id}, {sample} answers {answer}"
        self.record.cancelled.update(ended)
        self.record.num_cancels += len(ended)
        self._audit(self.engine)


def retried_streams(engine: EngineCore) -> set[StreamId]:
    sequences = engine.scheduler.sequences
    return {(each.request_id, each.sample) for each in sequences if each.is_retried}


def run_requests(
    engine: EngineCore,
    requests: list[Request],
    *,
    seed: int = 0,
    most_empty_steps: int = 0,
    before_step: Callable[[Record], None] = lambda _: None,
) -> Record:
    """Submits all requests at once and steps until the engine is idle."""
    record = Record(seed=seed, engine=engine, most_empty_steps=most_empty_steps)
    for request in requests:
        record.accept(engine.submit(request), request)
    while not engine.is_idle:
        assert record.num_steps < MAX_STEPS_TO_DRAIN, "the engine does not come to rest"
        before_step(record)
        record.step()
        engine.check_invariants()
        spoil_free_slots(engine)
    return record


@contextmanager
def replayable(what: str, command: str) -> Iterator[None]:
    """Whatever fails inside tells what it was (its seed) and how to see it fail again."""
    try:
        yield
    except BaseException as failure:
        failure.add_note(f"{what}; replay with: {command}")
        raise


def _state_of(engine: EngineCore) -> tuple[object, ...]:
    scheduler = engine.scheduler
    return (
        [(sequence.request_id, sequence.sample) for sequence in scheduler.waiting],
        [
            (sequence.request_id, sequence.sample, tuple(sequence.page_table))
            for sequence in scheduler.running
        ],
        scheduler.kv_cache.pool.counts(),
        engine.num_queue_slots,
    )
