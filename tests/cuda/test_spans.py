"""Spans that attend both ways in passes of the kernels for GPUs, which compute a pass whole."""

from contextlib import closing
from pathlib import Path

import pytest

from cadenza.backends.base import RunnerSetup
from cadenza.backends.xla.ops.cuda_library import CudaLibrary
from cadenza.backends.xla.runner import XlaRunner
from cadenza.batch.step_cost import StepBound
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.scheduler.span_queue import SpanQueue
from tests.cuda.test_engine import FewBuckets
from tests.xla.test_image_spans import request_of, run
from tests.xla.test_span_passes import COST, NUM_SLOTS, Case, limits_of

pytestmark = [pytest.mark.native, pytest.mark.kernels]


def test_streams_have_the_bits_of_whole_spans(library: CudaLibrary, tmp_path: Path) -> None:
    model, weights = Case(shape="tiny-gemma3-vl").open(tmp_path / "model")
    limits = limits_of(model)
    setup = RunnerSetup(limits=limits, num_image_slots=NUM_SLOTS, fill=float("nan"))
    make_ops = FewBuckets(library, (4, limits.max_num_batched_tokens))
    with closing(XlaRunner(model, weights, setup, make_ops)) as runner:
        runner.warmup()
        request = request_of(model.vision, [5, (70, 90), 9], 1)
        (whole,) = run(EngineCore(runner, limits, CoreOptions()), [request])
        runner.reset()
        bound = StepBound(max_ms=0.001, cost=COST)
        engine = EngineCore(runner, limits, CoreOptions(step_bound=bound))
        assert run(engine, [request]) == [whole]
        assert engine.scheduler.work(SpanQueue).num_computed == 1
