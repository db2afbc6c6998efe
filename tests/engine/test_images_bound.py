"""The bound on a step's time holds while images are encoded, in modelled time."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from cadenza.backends.fake import FakeRunner, FakeStepHandle
from cadenza.backends.fake_memory import fake_image_work
from cadenza.batch.image_cost import (
    ImageCost,
    ImageLoad,
    ImageWork,
    MeasuredQuanta,
    fit_image_cost,
)
from cadenza.batch.step_cost import StepBound, StepCost, StepLoad
from cadenza.batch.step_schema import ModelInputs
from cadenza.config import EngineLimits, ImageLimits, SchedulerLoop
from cadenza.engine.calibration import measure_image_cost
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.step_works import WorkOptions
from cadenza.events import Token
from cadenza.request import Attachment, Request, SamplingParams
from tests.engine.seeing import image_at
from tests.engine.simulation import SECRET, VOCAB_SIZE, Record
from tests.engine.solo import IMAGE_TOKEN_ID

TEXT_COST = StepCost(fixed_ms=5.0, token_ms=0.25, logit_ms=0.2, key_ms=0.00005)
IMAGE_COST = ImageCost(quantum_ms=0.05, product_ms=1e-9, attention_ms=3e-9)
BOUND_MS = 50.0
LIMITS = EngineLimits(
    max_num_seqs=20,
    max_num_batched_tokens=512,
    max_model_len=4096,
    page_size=16,
    num_pages=2048,
    max_num_queued_reqs=100,
    images=ImageLimits(token_id=IMAGE_TOKEN_ID, num_slots=4096),
)
NUM_STREAMS, NUM_IMAGES = 8, 8


@dataclass(slots=True, eq=False, kw_only=True)
class TimedRunner(FakeRunner):
    """Advances its clock, when a step is read, by what the step truly costs: an image has 60 quanta
    of 4 ms and 60 of 8 ms."""

    now_s: float = 0.0
    step_ms: list[float] = field(default_factory=list)
    has_both: int = 0

    def clock(self) -> float:
        return self.now_s

    def image_work(self, part: Attachment) -> ImageWork:
        kinds = np.arange(len(fake_image_work(part)), dtype=np.float64) % 2
        return ImageWork(products=4e9 * (1 - kinds), attention=kinds * (8e9 / 3))

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        starts, ends = inputs.rows.query_starts[:-1], inputs.rows.query_starts[1:]
        counts, kv_lens = ends - starts, inputs.rows.kv_lens
        keys = counts * (kv_lens - counts) + counts * (counts + 1) // 2
        load = StepLoad(
            num_tokens=inputs.num_tokens, num_logits=inputs.num_logits, num_keys=int(keys.sum())
        )
        ms = TEXT_COST.predict_ms(load)
        for call in inputs.image_calls:
            work = self.image_work(call.attachment)
            ms += IMAGE_COST.predict_ms(work.load(call.start, call.stop))
        self.has_both += bool(inputs.image_calls and counts.max() > 1)
        handle = super(TimedRunner, self).launch(inputs)

        def read() -> None:
            self.now_s += ms / 1000
            self.step_ms.append(ms)

        return FakeStepHandle(handle.output, read)


def runner_of(limits: EngineLimits) -> TimedRunner:
    assert limits.images is not None
    return TimedRunner(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_pages_per_seq=limits.max_pages_per_seq,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        vocab_size=VOCAB_SIZE,
        num_image_slots=limits.images.num_slots,
        image_token_id=IMAGE_TOKEN_ID,
    )


def big_image(seed: int) -> Request:
    tokens, parts = image_at(3, seed, 16, 15)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    return Request(prompt_token_ids=(1, 2, seed, *tokens, 4), attachments=parts, params=params)


def stream_of(seed: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    return Request(prompt_token_ids=(seed, 5, 6), params=params)


def long_text() -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    tokens = tuple(each % 90 for each in range(3000))
    return Request(prompt_token_ids=tokens, params=params)


def run_streams(
    bound: StepBound | None, loop: SchedulerLoop, cost: ImageCost
) -> tuple[float, TimedRunner]:
    """The worst gap of eight streams, to which eight images and a long prompt come."""
    runner = runner_of(LIMITS)
    options = CoreOptions(
        secret=SECRET,
        loop=loop,
        step_bound=bound,
        works=WorkOptions(image_cost=cost),
        clock=runner.clock,
    )
    engine = EngineCore(runner, LIMITS, options)
    record = Record(seed=0, engine=engine)
    times: dict[int, list[float]] = {}
    requests = [stream_of(seed) for seed in range(NUM_STREAMS)]
    for step in range(4000):
        if step == 20:
            requests = [*map(big_image, range(NUM_IMAGES)), long_text()]
        for request in requests:
            record.accept(engine.submit(request), request)
        requests = []
        for event in engine.step():
            record.take(event)
            if isinstance(event, Token):
                times.setdefault(event.request_id, []).append(runner.now_s)
        if engine.is_idle and step > 30:
            break
    record.verify()
    own = [times[request_id] for request_id in range(NUM_STREAMS)]
    gaps = [b - a for each in own for a, b in pairwise(each)]
    return 1000 * max(gaps), runner


@pytest.mark.parametrize("loop", ["plain", "overlap"])
def test_streams_keep_to_the_bound_while_eight_images_arrive(loop: SchedulerLoop) -> None:
    """Although the rates are believed half of what they are."""
    wrong = ImageCost(quantum_ms=0.02, product_ms=5e-10, attention_ms=1.5e-9)
    bound = StepBound(max_ms=BOUND_MS, cost=TEXT_COST)
    worst_ms, runner = run_streams(bound, loop, wrong)
    assert worst_ms <= 1.7 * BOUND_MS
    assert sorted(runner.step_ms)[-5] <= 1.2 * BOUND_MS
    assert runner.has_both > 5, "prompts and images never shared a step"
    assert bound.cost == TEXT_COST or abs(bound.cost.token_ms / TEXT_COST.token_ms - 1) < 0.1


def test_streams_go_on_without_a_bound_too() -> None:
    worst_ms, _ = run_streams(None, "overlap", ImageCost())
    assert worst_ms < 800, "an image of 720 ms was encoded in one step"


def test_measured_quanta_give_the_rates() -> None:
    runner = runner_of(LIMITS)
    part = image_at(0, 1, 16, 15)[1][0]
    cost = measure_image_cost(runner, LIMITS, part, runner.clock)
    work = runner.image_work(part)
    true_ms = IMAGE_COST.predict_ms(work.load(0, 120))
    fixed_ms = TEXT_COST.fixed_ms  # of a step, which here computes nothing else
    assert true_ms < cost.predict_ms(work.load(0, 120)) < true_ms + 121 * fixed_ms
    assert cost.attention_ms > cost.product_ms


def test_steps_correct_the_rates_until_predictions_are_right() -> None:
    cost, truth = ImageCost(), ImageCost(quantum_ms=0.1, product_ms=1e-9, attention_ms=4e-9)
    for at in range(400):
        load = ImageLoad(num_quanta=8, products=1e10 * (at % 3), attention=4e9 * (1 + at % 2))
        cost = cost.corrected(load, 10.0, 10.0 + truth.predict_ms(load))
    load = ImageLoad(num_quanta=8, products=1e10, attention=4e9)
    assert cost.predict_ms(load) == pytest.approx(truth.predict_ms(load), rel=0.1)


def test_work_of_one_kind_gives_a_rate_of_the_other_that_is_no_less() -> None:
    load = ImageLoad(num_quanta=1, products=1e9)
    cost = fit_image_cost([MeasuredQuanta(load=load, ms=2.0)])
    assert cost.product_ms == cost.attention_ms == pytest.approx(2e-9)
    assert fit_image_cost([]) == ImageCost()
