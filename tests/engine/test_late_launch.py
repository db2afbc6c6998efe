"""When steps are launched: late enough that what comes while one runs is in the next one, early
enough that the device never pauses. Over the token-storing runner, on a device that computes while
the clock goes on.
"""

import random
import time
from dataclasses import dataclass, field, replace

import pytest

from cadenza.backends.fake import FakeRunner, FakeStepHandle
from cadenza.batch.batch import Batch
from cadenza.batch.step_cost import StepBound, StepCost
from cadenza.batch.step_schema import ModelInputs
from cadenza.config import EngineLimits
from cadenza.engine.batch_engine import Command, Submit, run_steps
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.front import EngineFront, InProcessLink
from cadenza.events import Event, Token
from cadenza.request import Request, SamplingParams
from tests.engine.simulation import EOS_TOKEN_IDS, SECRET, VOCAB_SIZE, Record
from tests.engine.solo import solo_stream

STEP_MS = 40.0
COST = StepCost(fixed_ms=STEP_MS, token_ms=1e-6, logit_ms=1e-6, key_ms=1e-6)
LIMITS = EngineLimits(
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=256,
    page_size=16,
    num_pages=64,
    max_num_queued_reqs=100,
)


@dataclass(slots=True, eq=False, kw_only=True)
class Device(FakeRunner):
    """Computes its steps one after the other, each in `step_ms`; a read waits for its end."""

    step_ms: float = STEP_MS
    launch_ms: float = 0.0
    now_s: float = 0.0
    free_s: float = 0.0
    pauses_s: list[float] = field(default_factory=list)
    """Before each step: how long there was none."""
    sizes: list[int] = field(default_factory=list)
    """The tokens of each step."""

    def clock(self) -> float:
        return self.now_s

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        self.now_s += self.launch_ms / 1000
        self.pauses_s.append(max(0.0, self.now_s - self.free_s))
        self.sizes.append(inputs.num_tokens)
        end_s = self.free_s = max(self.now_s, self.free_s) + self.step_ms / 1000
        output = super(Device, self).launch(inputs).output

        def read() -> None:
            self.now_s = max(self.now_s, end_s)

        return FakeStepHandle(output, read)


def engine_of(cost: StepCost | None, step_ms: float = STEP_MS) -> tuple[EngineCore, Device]:
    device = Device(
        max_num_seqs=LIMITS.max_num_seqs,
        max_num_batched_tokens=LIMITS.max_num_batched_tokens,
        max_pages_per_seq=LIMITS.max_pages_per_seq,
        num_pages=LIMITS.num_pages,
        page_size=LIMITS.page_size,
        vocab_size=VOCAB_SIZE,
        step_ms=step_ms,
    )
    bound = None if cost is None else StepBound(max_ms=100.0, cost=cost)
    options = CoreOptions(
        eos_token_ids=EOS_TOKEN_IDS, secret=SECRET, step_bound=bound, clock=device.clock
    )
    return EngineCore(device, LIMITS, options), device


def request_of(max_tokens: int, seed: int = 0) -> Request:
    prompt = tuple(random.Random(seed).choices(range(VOCAB_SIZE), k=8))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(prompt_token_ids=prompt, params=params)


@dataclass(slots=True, eq=False)
class Source:
    """Requests that come at their times; waits on the device's clock, unless `waits` is False."""

    device: Device
    record: Record
    coming: list[tuple[float, Request]]
    waits: bool = True

    def receive(self, wait_s: float) -> list[Command] | None:
        engine, device = self.record.engine, self.device
        if not self.coming and engine.is_idle:
            return None
        until_s = device.now_s + (wait_s if self.waits else 0.0)
        if self.coming and (engine.is_idle or self.coming[0][0] <= until_s):
            until_s = max(device.now_s, self.coming[0][0])
        device.now_s = until_s
        commands: list[Command] = []
        while self.coming and self.coming[0][0] <= device.now_s:
            request_id, request = engine.new_request_id(), self.coming.pop(0)[1]
            self.record.accept(request_id, request)
            commands.append(Submit(request_id, request))
        return commands


def play(
    cost: StepCost | None,
    coming: list[tuple[float, Request]],
    *,
    step_ms: float = STEP_MS,
    waits: bool = True,
) -> tuple[Device, dict[int, list[float]]]:
    """Serves the requests; returns when each one's tokens came. All streams are verified."""
    engine, device = engine_of(cost, step_ms)
    record = Record(seed=0, engine=engine)
    source = Source(device, record, sorted(coming, key=lambda each: each[0]), waits)
    times_s: dict[int, list[float]] = {}
    for events in run_steps(engine, source.receive, engine.step):
        for event in events:
            record.take(event)
            if isinstance(event, Token):
                times_s.setdefault(event.request_id, []).append(device.now_s)
        record.num_steps += 1
    record.verify()
    return device, times_s


def test_what_comes_while_a_step_runs_is_in_the_next_one() -> None:
    coming = [(0.0, request_of(20)), (0.41, request_of(2, seed=1))]  # a step runs from 0.4 s
    for waits, num_steps in ((True, 2), (False, 3)):
        _, times_s = play(COST, list(coming), waits=waits)
        assert times_s[1][0] == pytest.approx(0.4 + num_steps * STEP_MS / 1000)


def test_what_comes_after_the_launch_waits_for_one_step_more() -> None:
    coming = [(0.0, request_of(20)), (0.435, request_of(2, seed=1))]
    _, times_s = play(COST, coming)
    assert times_s[1][0] == pytest.approx(0.4 + 3 * STEP_MS / 1000)


@pytest.mark.parametrize("error", [0.75, 1.0, 1.25])
def test_the_device_does_not_pause_where_predictions_are_wrong_by_a_quarter(error: float) -> None:
    rng = random.Random(f"late {error}")
    predicted = replace(COST, fixed_ms=error * STEP_MS)
    coming = [(0.0, request_of(200))]
    coming += [(rng.uniform(0.0, 6.0), request_of(rng.randint(1, 8), seed)) for seed in range(40)]
    device, _ = play(predicted, coming)
    assert device.pauses_s[1:-1] == pytest.approx([0.0] * (len(device.pauses_s) - 2))


@pytest.mark.parametrize(("cost", "step_ms"), [(None, STEP_MS), (COST, STEP_MS), (COST, 1.0)])
def test_a_step_is_put_off_only_while_a_longer_one_runs(
    cost: StepCost | None, step_ms: float
) -> None:
    engine, device = engine_of(cost and replace(cost, fixed_ms=step_ms))
    assert engine.launch_in_s() == 0.0
    engine.enqueue(engine.new_request_id(), request_of(8))
    assert engine.launch_in_s() == 0.0
    engine.step()
    wait_s = engine.launch_in_s()
    if cost is None or step_ms < STEP_MS:
        assert wait_s == 0.0
        return
    assert 0.5 * STEP_MS / 1000 < wait_s < STEP_MS / 1000
    device.now_s += wait_s / 2
    assert engine.launch_in_s() == pytest.approx(wait_s / 2)
    device.now_s += wait_s
    assert engine.launch_in_s() == 0.0


def test_a_step_behind_one_with_drafts_is_not_put_off() -> None:
    engine, device = engine_of(COST)
    stream = solo_stream(request_of(20), 0, LIMITS.max_model_len).token_ids
    request = replace(request_of(20), prediction=tuple(stream))
    engine.enqueue(engine.new_request_id(), request)
    waits_s: dict[bool, list[float]] = {True: [], False: []}
    while not engine.is_idle:
        engine.step()
        if len(device.sizes) > 1:
            waits_s[device.sizes[-1] > 1].append(engine.launch_in_s())
    assert engine.draft_counts.num_accepted_tokens > 0
    assert waits_s[True]
    assert max(waits_s[True]) == 0.0


def test_a_prediction_of_hours_does_not_stop_the_engine() -> None:
    engine, _ = engine_of(replace(COST, fixed_ms=3.6e6))
    engine.enqueue(engine.new_request_id(), request_of(8))
    engine.step()
    assert engine.launch_in_s() == 1.0


def test_a_service_waits_between_its_steps() -> None:
    engine, device = engine_of(COST)
    service = EngineFront(InProcessLink(engine))
    service.submit(request_of(6))
    service.drain(within_s=60)
    events: list[Event] = []
    start_s = time.perf_counter()
    service.serve(events.extend)
    # The device's clock stands still between two steps: each is waited for by the service's own.
    assert time.perf_counter() - start_s >= 5 * 0.6 * STEP_MS / 1000
    assert len([event for event in events if isinstance(event, Token)]) == 6
    assert len(device.pauses_s) == 6


def test_the_launch_of_a_step_that_waits_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is time in which the device idles, and no part of what the step takes."""
    engine, device = engine_of(COST)
    device.launch_ms = 8.0
    seen: list[tuple[float, float | None]] = []

    def observe(batch: Batch, measured_ms: float, idle_ms: float | None = None) -> None:
        seen.append((measured_ms, idle_ms))

    monkeypatch.setattr(engine.scheduler.times, "observe", observe)
    params = SamplingParams(max_tokens=20, ignore_eos=True, speculative=True)
    engine.submit(Request(prompt_token_ids=(1, 2, 3) * 4, params=params))
    while not engine.is_idle:
        engine.step()
    waited = [(ms, idle_ms) for ms, idle_ms in seen if idle_ms is not None]
    assert len(waited) > 3
    for ms, idle_ms in waited:
        assert ms == pytest.approx(STEP_MS)
        assert idle_ms == pytest.approx(device.launch_ms)
