"""Cancels, exhausted pools and failing runners, at every step of a run: bars 5 and 11 on the fake.

Owns the faults. Each run must come to rest within a bounded number of steps, end every affected
request once, leave all others exact, leak no page, and serve the next request.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal, get_args

import numpy as np
import pytest

from cadenza.backends.fake import FakeStepHandle
from cadenza.batch.batch import Batch
from cadenza.batch.packing import Packer
from cadenza.batch.sequence import Sequence
from cadenza.batch.step_schema import NO_STATE, ModelInputs, StepOutput
from cadenza.config import EngineLimits, SchedulerLoop
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.kv.page_pool import PagePool
from cadenza.request import Request, SamplingParams
from tests.by_day import by_day
from tests.engine.simulation import (
    VOCAB_SIZE,
    ObservedRunner,
    Parts,
    Record,
    StreamId,
    make_engine,
    replayable,
    run_requests,
    solo_stream_of,
)

LOOPS: tuple[SchedulerLoop, ...] = ("plain", "overlap")
HERE = "tests/engine/test_faults.py"
NUM_RUN_STEPS = 200
POISON = 61
LIMITS = EngineLimits(
    max_num_seqs=3,
    max_num_batched_tokens=8,
    max_model_len=64,
    page_size=16,
    num_pages=6,
    max_num_queued_reqs=100,
)

FaultKind = Literal[
    "launch raises",
    "result raises",
    "result is None",
    "too few rows",
    "too few ranks",
    "too few top logprobs",
    "token too big",
    "token negative",
    "one row not finite",
    "no row finite",
]
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
ROW_FAULTS = frozenset({"one row not finite", "no row finite"})
WHOLE_STEP_FAULTS = frozenset({"launch raises", "result raises", "result is None"})
CLOSELY: frozenset[FaultKind] = frozenset({"launch raises", "result raises"})


class DeviceLost(Exception):
    """What a device may raise."""


def requests_of(seed: int, count: int, longest: int = 40) -> list[Request]:
    """Requests that share a prefix, so that what a fault leaves in the cache would be found."""
    rng = random.Random(f"requests {seed}")
    shared = rng.choices(range(VOCAB_SIZE), k=32)
    requests: list[Request] = []
    for _ in range(count):
        tail = rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 8))
        prompt = (*shared[: rng.choice([0, 10, 32])], *tail)
        params = SamplingParams(
            max_tokens=rng.randint(1, min(longest, LIMITS.max_model_len - len(prompt))),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.choice([None, 7]),
            logprobs=rng.choice([None, 2]),
            n=rng.choice([1, 1, 1, 2]),
        )
        requests.append(Request(prompt_token_ids=prompt, params=params))
    return requests


def stream_of(sequence: Sequence) -> StreamId:
    return sequence.request_id, sequence.sample


class RecordingPacker(Packer):
    """Notes which streams took part in each step, and which of them it samples."""

    def __init__(self, limits: EngineLimits, vocab_size: int) -> None:
        super().__init__(limits, vocab_size)
        self.batches: list[tuple[list[StreamId], list[StreamId]]] = []

    def pack(self, batch: Batch, bucket: int, *, masks_follow: bool = False) -> ModelInputs:
        everybody = [stream_of(entry.sequence) for entry in batch.entries]
        sampled = [stream_of(entry.sequence) for entry in batch.entries if entry.num_choices]
        self.batches.append((everybody, sampled))
        return super().pack(batch, bucket, masks_follow=masks_follow)


@dataclass(frozen=True, slots=True)
class FaultyHandle:
    output: StepOutput | None

    def result(self) -> StepOutput:
        if self.output is None:
            raise DeviceLost("the step was lost")
        return self.output


@dataclass(kw_only=True, eq=False)
class FaultyRunner(ObservedRunner):
    """Fails its `at`-th launch in one way; what it then leaves in the pages is garbage."""

    kind: FaultKind
    at: int
    num_launches: int = 0
    has_failed: bool = False

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        self.num_launches += 1
        if self.num_launches - 1 != self.at:
            return super().launch(inputs)
        handle = super().launch(inputs)
        if not inputs.num_logits and self.kind not in WHOLE_STEP_FAULTS:
            return handle
        self.has_failed = True
        self._spoil(inputs)
        if self.kind == "launch raises":
            raise DeviceLost("the step could not be launched")
        return _faulty_handle(self.kind, handle.output)

    def _spoil(self, inputs: ModelInputs) -> None:
        """What a step that fails, or a row that is not finite, has written is worth nothing."""
        if self.kind not in ROW_FAULTS:
            self._spoil_tokens(inputs, slice(inputs.num_tokens))
            return
        num_bad = 1 if self.kind == "one row not finite" else inputs.num_logits
        for row in inputs.logits.rows[:num_bad]:
            written = slice(inputs.rows.query_starts[row], inputs.rows.query_starts[row + 1])
            self._spoil_tokens(inputs, written)

    def _spoil_tokens(self, inputs: ModelInputs, written: slice) -> None:
        self._slots[inputs.tokens.slots[written]] = VOCAB_SIZE + 1
        kept = inputs.tokens.state_slots[written]
        self.states.spoil(kept[kept != NO_STATE].tolist())


def _faulty_handle(kind: FaultKind, output: StepOutput) -> FakeStepHandle:
    changes: dict[str, object] = {name: getattr(output, name) for name in output.__slots__}
    if kind == "result raises":
        return FaultyHandle(None)  # type: ignore[return-value]
    if kind == "result is None":
        return FakeStepHandle(None, lambda: None)  # type: ignore[arg-type]
    if kind == "too few rows":
        changes = {name: rows[:-1] for name, rows in changes.items()}  # type: ignore[index]
    elif kind == "too few ranks":
        changes["ranks"] = output.ranks[:-1]
    elif kind == "too few top logprobs":
        changes["top_logprobs"] = output.top_logprobs[:-1]
    elif kind == "token too big":
        changes["token_ids"] = np.full_like(output.token_ids, VOCAB_SIZE)
    elif kind == "token negative":
        changes["token_ids"] = np.full_like(output.token_ids, -1)
    elif kind == "one row not finite":
        changes["is_finite"] = np.arange(len(output.token_ids)) > 0
    else:
        changes["is_finite"] = np.zeros(len(output.token_ids), np.bool_)
    return FakeStepHandle(StepOutput(**changes), lambda: None)  # type: ignore[arg-type]


@cache
def workload() -> tuple[Request, ...]:
    """Requests that keep the engine busy for at least `NUM_RUN_STEPS` steps."""
    return tuple(requests_of(0, 22))


def run_with_fault(
    kind: FaultKind,
    at: int,
    loop: SchedulerLoop,
    parts: Parts,
    limits: EngineLimits = LIMITS,
) -> Record:
    """One run in which launch `at` fails; checks who paid for it.

    A step that fails once costs nobody, a row that is not finite its own stream.
    """
    packers: list[RecordingPacker] = []

    def make_packer(limits: EngineLimits, vocab_size: int) -> Packer:
        packers.append(RecordingPacker(limits, vocab_size))
        return packers[-1]

    engine = make_engine(
        limits,
        loop=loop,
        parts=Parts(
            runner=partial(FaultyRunner, kind=kind, at=at),
            packer=make_packer,
            scheduler=parts.scheduler,
            kv_cache=parts.kv_cache,
        ),
    )
    record = run_requests(engine, list(workload()))
    runner = engine.runner
    assert isinstance(runner, FaultyRunner)
    failed = frozenset(
        stream for stream, end in record.finished.items() if end.finish_reason == "error"
    )
    record.verify(failed=failed)
    _, sampled = packers[0].batches[at] if runner.num_launches > at else ([], [])
    affected = {"one row not finite": sampled[:1], "no row finite": sampled}.get(kind, [])
    if not runner.has_failed:
        affected = []
    assert failed <= set(affected), f"{failed} failed, but only {affected} took part"
    # Whoever took part and did not fail had ended with the step before, which was still in flight.
    for stream in set(affected) - failed:
        assert loop == "overlap"
        assert at > 0
        assert stream in packers[0].batches[at - 1][1]
    if runner.has_failed and loop == "plain":
        assert failed == set(affected)
    return record


def check_next_request(record: Record) -> None:
    request = workload()[0]
    engine = record.engine
    request_id = engine.submit(request)
    record.accept(request_id, request)
    for _ in range(200):
        if engine.is_idle:
            break
        for event in engine.step():
            record.take(event)
    failed = frozenset(i for i, end in record.finished.items() if end.finish_reason == "error")
    assert (request_id, 0) not in failed
    record.verify(failed=failed)


def _runner_of(record: Record) -> FaultyRunner:
    runner = record.engine.runner
    assert isinstance(runner, FaultyRunner)
    return runner


def check_faults(kind: FaultKind, loop: SchedulerLoop, steps: range, command: str) -> None:
    num_failed = 0
    for at in steps:
        with replayable(f"fault at step {at}", command):
            record = run_with_fault(kind, at, loop, Parts())
            check_next_request(record)
            num_failed += _runner_of(record).has_failed
    assert num_failed > len(steps) // 3, "the fault hardly ever happened"


def test_the_workload_lasts_for_as_many_steps_as_are_made_to_fail() -> None:
    for loop in LOOPS:
        engine = make_engine(LIMITS, loop=loop)
        record = run_requests(engine, list(workload()))
        record.verify()
        assert record.num_steps > NUM_RUN_STEPS
        assert engine.scheduler.num_preemptions > 0
        assert any(end.num_cached_tokens for end in record.finished.values())


@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_a_failing_step_is_retried_and_a_row_that_is_not_finite_fails_alone(
    kind: FaultKind,
) -> None:
    name = "test_a_failing_step_is_retried_and_a_row_that_is_not_finite_fails_alone"
    command = f"python -m pytest '{HERE}::{name}[{kind}]'"
    check_faults(kind, "overlap", range(0, NUM_RUN_STEPS, 33 if kind in CLOSELY else 61), command)
    check_faults(kind, "plain", range(30, NUM_RUN_STEPS, 97), command)


@pytest.mark.soak
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_every_failing_step_is_retried_and_a_row_that_is_not_finite_fails_alone(
    kind: FaultKind, loop: SchedulerLoop
) -> None:
    name = "test_every_failing_step_is_retried_and_a_row_that_is_not_finite_fails_alone"
    command = f"python -m pytest -m soak '{HERE}::{name}[{kind}-{loop}]'"
    check_faults(kind, loop, range(NUM_RUN_STEPS), command)


@dataclass(kw_only=True, eq=False)
class LostRunner(ObservedRunner):
    """Loses its device with launch `at`: nothing can be read or launched until it is reset."""

    at: int
    num_launches: int = 0
    is_lost: bool = False

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        if self.is_lost:
            raise DeviceLost("the device is lost")
        handle = super().launch(inputs)
        self.is_lost = self.num_launches == self.at
        self.num_launches += 1
        return FaultyHandle(None) if self.is_lost else handle  # type: ignore[return-value]

    def reset(self) -> None:
        super().reset()
        self.is_lost = False


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("at", [0, 3, 30, 80])
def test_a_device_that_is_lost_with_two_steps_in_flight_ends_nobody(
    at: int, loop: SchedulerLoop
) -> None:
    """The sequences of both have failed once."""
    engine = make_engine(LIMITS, loop=loop, parts=Parts(runner=partial(LostRunner, at=at)))
    run_requests(engine, list(workload())).verify()
    assert engine.loop.num_failed_steps == 1


@dataclass(kw_only=True, eq=False)
class PoisonedRunner(ObservedRunner):
    """Fails every step that reads the token `POISON`, at its launch or when it is read."""

    kind: FaultKind

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        handle = super().launch(inputs)
        if POISON not in inputs.tokens.ids[: inputs.num_tokens]:
            return handle
        self._slots[inputs.tokens.slots[: inputs.num_tokens]] = VOCAB_SIZE + 1
        if self.kind == "launch raises":
            raise DeviceLost("the step could not be launched")
        return _faulty_handle(self.kind, handle.output)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", ["launch raises", "result raises", "token too big"])
@pytest.mark.parametrize("place", by_day([0, 4, 11], {4}))
def test_a_request_that_fails_each_of_its_steps_fails_alone(
    kind: FaultKind, loop: SchedulerLoop, place: int
) -> None:
    """Others share its steps; they are retried and exact. No step makes the token by itself."""
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    requests = [each for each in workload() if POISON not in solo_tokens(each)][:12]
    requests[place] = Request(prompt_token_ids=(1, 2, POISON, 3), params=params)
    engine = make_engine(LIMITS, loop=loop, parts=Parts(runner=partial(PoisonedRunner, kind=kind)))
    record = run_requests(engine, requests)
    record.verify(failed=frozenset({(place, 0)}))
    assert record.finished[place, 0].error_kind == "step_failed"
    assert engine.loop.num_failed_steps == 2


@pytest.mark.parametrize("loop", LOOPS)
def test_the_steps_of_a_retried_prompt_are_its_own_to_the_last(loop: SchedulerLoop) -> None:
    """Its last one has room for two tokens of the next request, which fails that request's steps;
    in the first one the request before it has failed.
    """
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    prompts = (1, 2, POISON, 3), tuple(range(30)), (POISON, 4)
    requests = [Request(prompt_token_ids=prompt, params=params) for prompt in prompts]
    assert POISON not in solo_tokens(requests[1])
    make_runner = partial(PoisonedRunner, kind="result raises")
    record = run_requests(make_engine(LIMITS, loop=loop, parts=Parts(runner=make_runner)), requests)
    record.verify(failed=frozenset({(0, 0), (2, 0)}))


def test_one_that_fails_while_it_is_retried_would_be_found_out() -> None:
    """The negative control of both tests above: nobody has said that it fails."""
    params = SamplingParams(max_tokens=5, temperature=0.0)
    parts = Parts(runner=partial(PoisonedRunner, kind="result raises"))
    request = Request(prompt_token_ids=(POISON,), params=params)
    record = run_requests(make_engine(LIMITS, parts=parts), [request])
    with pytest.raises(AssertionError, match="is shorter than the solo stream"):
        record.verify()


def solo_tokens(request: Request) -> set[int]:
    """Of the prompt, and of every sample with the seeds that 12 requests may have."""
    found = set(request.prompt_token_ids)
    for request_id in range(12):
        for sample in range(request.params.n):
            stream = solo_stream_of(request, (request_id, sample), make_engine(LIMITS), 0)
            found.update(stream.token_ids)
    return found


class PublishesAtLaunch(KVCacheManager):
    """Makes pages findable before their step has succeeded."""

    def place(self, batch: Batch) -> None:
        super().place(batch)
        for entry in batch.entries:
            known = len(entry.sequence.token_ids)
            self.publish(entry.sequence, min(entry.end, known))


class KeepsTheCacheOfALostDevice(KVCacheManager):
    def forget_all(self) -> None:
        """Everything cached stays findable."""


def run_after_a_spoiled_prompt(kind: FaultKind, parts: Parts) -> Record:
    """The same prompt three times: the first computes it in a step that fails, the others after."""
    prompt = tuple(range(40))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    engine = make_engine(
        replace(LIMITS, max_num_seqs=1, max_num_batched_tokens=64),
        parts=replace(parts, runner=partial(FaultyRunner, kind=kind, at=0)),
    )
    record = run_requests(engine, [Request(prompt_token_ids=prompt, params=params)] * 3)
    record.verify(failed=frozenset({(0, 0)} if kind in ROW_FAULTS else ()))
    return record


@pytest.mark.parametrize(
    ("kind", "num_cached_tokens"),
    [
        ("one row not finite", [0, 0, 32]),
        ("result raises", [0, 32, 32]),
        ("too few rows", [0, 32, 32]),
    ],
)
def test_pages_of_a_step_that_did_not_succeed_are_not_found_again(
    kind: FaultKind, num_cached_tokens: list[int]
) -> None:
    """The prompt that is retried publishes its pages when it has succeeded."""
    record = run_after_a_spoiled_prompt(kind, Parts())
    ends = [record.finished[request_id, 0] for request_id in range(3)]
    assert [end.num_cached_tokens for end in ends] == num_cached_tokens


def test_publishing_at_launch_would_be_found_out() -> None:
    with pytest.raises(AssertionError, match="is not the solo stream"):
        run_after_a_spoiled_prompt("one row not finite", Parts(kv_cache=PublishesAtLaunch))


def run_all_faults(kind: FaultKind, parts: Parts) -> None:
    for at in range(0, NUM_RUN_STEPS, 5):
        run_with_fault(kind, at, "overlap", parts)


def test_keeping_the_cache_of_a_lost_device_would_be_found_out() -> None:
    with pytest.raises(AssertionError, match="is not the solo stream"):
        run_all_faults("result raises", Parts(kv_cache=KeepsTheCacheOfALostDevice))


def run_with_cancel(requests: list[Request], at: int, loop: SchedulerLoop, seed: int) -> Record:
    """One run in which somebody hangs up before step `at`."""
    rng = random.Random(f"cancel {seed} {at}")

    def hang_up(record: Record) -> None:
        open_streams = [stream for stream in record.streams if record.is_open(stream)]
        if record.num_steps == at and open_streams:
            request_id, sample = rng.choice(open_streams[:4])
            assert record.engine.cancel(request_id, sample)
            record.cancelled.add((request_id, sample))

    record = run_requests(make_engine(LIMITS, loop=loop), requests, before_step=hang_up)
    record.verify()
    return record


def check_cancels(seed: int, loop: SchedulerLoop) -> None:
    requests = requests_of(seed, 7, longest=16)
    num_steps = run_requests(make_engine(LIMITS, loop=loop), requests).num_steps
    num_cancels = sum(
        len(run_with_cancel(requests, at, loop, seed).cancelled) for at in range(num_steps)
    )
    assert num_cancels >= num_steps - 2, "before the last steps nobody may be left to hang up"


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("seed", range(1))
def test_a_cancel_before_any_step_leaks_nothing_and_changes_no_other_stream(
    seed: int, loop: SchedulerLoop
) -> None:
    name = "test_a_cancel_before_any_step_leaks_nothing_and_changes_no_other_stream"
    with replayable(f"seed {seed}", f"python -m pytest '{HERE}::{name}[{seed}-{loop}]'"):
        check_cancels(seed, loop)


@pytest.mark.soak
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("seed", range(500))
def test_a_cancel_before_any_step_of_500_schedules_leaks_nothing(
    seed: int, loop: SchedulerLoop
) -> None:
    name = "test_a_cancel_before_any_step_of_500_schedules_leaks_nothing"
    with replayable(f"seed {seed}", f"python -m pytest -m soak '{HERE}::{name}[{seed}-{loop}]'"):
        check_cancels(seed, loop)


class FailsOneAllocation(PagePool):
    """Has no pages for the `at`-th allocation, whatever it promised."""

    def __init__(self, num_pages: int, on_evict: Callable[[int], None], at: int) -> None:
        super().__init__(num_pages, on_evict)
        self.at = at
        self.num_allocations = 0

    def try_allocate(self, count: int) -> list[int] | None:
        self.num_allocations += 1
        if self.num_allocations - 1 == self.at:
            return None
        return super().try_allocate(count)


class WithFailingPool(KVCacheManager):
    def __init__(self, at: int, limits: EngineLimits, secret: bytes) -> None:
        super().__init__(limits, secret)
        self.pool = FailsOneAllocation(self.pool.num_pages, self._forget, at)


def run_with_failed_allocation(at: int, loop: SchedulerLoop) -> FailsOneAllocation:
    engine = make_engine(LIMITS, loop=loop, parts=Parts(kv_cache=partial(WithFailingPool, at)))
    run_requests(engine, list(workload()), most_empty_steps=1).verify()
    pool = engine.scheduler.kv_cache.pool
    assert isinstance(pool, FailsOneAllocation)
    return pool


@pytest.mark.soak
@pytest.mark.parametrize("loop", LOOPS)
def test_any_one_failed_allocation_is_only_not_now(loop: SchedulerLoop) -> None:
    num_allocations = run_with_failed_allocation(-1, loop).num_allocations
    assert num_allocations > 40
    for at in range(num_allocations):
        name = "test_any_one_failed_allocation_is_only_not_now"
        with replayable(f"allocation {at} failed", f"python -m pytest '{HERE}::{name}[{loop}]'"):
            assert run_with_failed_allocation(at, loop).num_allocations > at
