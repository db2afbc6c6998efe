"""Spans that attend both ways in passes, on real kernels: every cut has the bits of whole spans.
The reference operations, which XLA compiles, have none, and compute spans whole.

Owns small models of Gemma 3, whose layers all see spans, and of Gemma 4, whose layers with windows
alone do, and how their spans are cut into quanta. What takes a span away is in
`tests.engine.test_spans_in_quanta`.
"""

from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from cadenza.backends.base import RunnerSetup
from cadenza.backends.xla.backend import CompileCount
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.runner import XlaRunner
from cadenza.backends.xla.tables import MakeOps
from cadenza.batch.step_cost import StepBound, StepCost
from cadenza.batch.whole_spans import SpanShape
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.config import EngineLimits, ImageLimits, KVCacheDType
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.models.model_config import ModelConfig
from cadenza.request import Request
from cadenza.scheduler.span_queue import SpanQueue
from cadenza.vision.whole_images import Gemma3Images, Gemma4Images
from cadenza.weights.weight_format import WeightDType
from cadenza.weights.weights import Weights
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.xla.test_image_spans import Stream, request_of, run

COST = StepCost(fixed_ms=1.0, token_ms=1.0, logit_ms=0.0, key_ms=1e-6)
NUM_SLOTS = 160
# Tokens on a side of an image: together more than windows of the models, and than is granted.
SIDE = 7


class CutRunner(XlaRunner):
    block_rows = 32

    @property
    def span_shape(self) -> SpanShape | None:
        shape = XlaRunner.span_shape.fget(self)  # type: ignore[attr-defined]
        return None if shape is None else replace(shape, block_rows=self.block_rows)


def gemma3(model: ModelConfig) -> ModelConfig:
    vision = model.vision
    assert vision is not None
    tower, processor = vision.tower, vision.processor
    assert isinstance(processor, Gemma3Images)
    assert tower.table is not None
    vision = replace(
        vision,
        tower=replace(
            tower, projector=replace(tower.projector, side=1), table=replace(tower.table, side=SIDE)
        ),
        processor=replace(processor, merge_size=1, side=SIDE * processor.patch_size),
        max_part_tokens=SIDE**2,
    )
    return replace(model, vision=vision)


def gemma4(model: ModelConfig) -> ModelConfig:
    """With images of as many tokens, that attend both ways."""
    assert model.vision is not None
    processor = model.vision.processor
    assert isinstance(processor, Gemma4Images)
    vision = replace(
        model.vision,
        processor=replace(processor, max_tokens=SIDE**2),
        max_part_tokens=SIDE**2,
        reach="windowed",
    )
    return replace(model, vision=vision)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    shape: str
    make_ops: MakeOps = NativeOps
    dtype: WeightDType = "float32"
    kv_cache_dtype: KVCacheDType = "auto"

    @property
    def name(self) -> str:
        ops = "reference" if self.make_ops is OpTable else "native"
        return f"{self.shape} {ops} {self.dtype} {self.kv_cache_dtype}"

    def open(self, folder: Path) -> tuple[ModelConfig, Weights]:
        model = named_shape(self.shape)
        is_gemma3 = self.shape == "tiny-gemma3-vl"
        model = gemma3(model) if is_gemma3 else model
        write_random_checkpoint(model, folder, seed=3, dtype="float32")
        checkpoint = open_checkpoint(folder)
        config = checkpoint.config
        return config if is_gemma3 else gemma4(config), checkpoint.weights


CASES = [
    Case(shape="tiny-gemma3-vl"),
    Case(shape="tiny-gemma4-unified-vl"),
    Case(shape="tiny-gemma3-vl", make_ops=OpTable),
    Case(shape="tiny-gemma4-unified-vl", make_ops=OpTable),
    Case(shape="tiny-gemma3-vl", dtype="bfloat16", kv_cache_dtype="int8"),
    Case(shape="tiny-gemma4-moe-vl"),
    Case(shape="tiny-gemma4-vl"),  # per-layer embeddings, and layers that share KV
]
BY_NIGHT = {2, 3, 5}

LAYOUTS: list[list[int | tuple[int, int]]] = [
    [5, (70, 90), 9],
    [5, (70, 90), 9, (90, 30), 3],  # begins as the first does
    [(30, 60), 2],
    [30],
    [20, (40, 40)],  # ends with a span, and the second time with its other rows
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    limits: EngineLimits
    has_passes: bool
    runner: CutRunner
    requests: list[Request]
    solo: list[Stream]

    def engine(self, bound: StepBound | None = None) -> EngineCore:
        self.runner.reset()
        ticks = count()
        options = CoreOptions(step_bound=bound, clock=lambda: next(ticks) / 1000)
        return EngineCore(self.runner, self.limits, options)


def limits_of(model: ModelConfig) -> EngineLimits:
    assert model.vision is not None
    return EngineLimits(
        max_num_seqs=3,
        max_num_batched_tokens=64,
        max_model_len=192,
        page_size=48,
        num_pages=16,
        max_num_queued_reqs=8,
        enable_prefix_caching=True,
        images=ImageLimits(token_id=model.vision.image_token_id, num_slots=NUM_SLOTS),
    )


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, id=each.name, marks=[pytest.mark.soak] * (place in BY_NIGHT))
        for place, each in enumerate(CASES)
    ],
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    case: Case = request.param
    model, weights = case.open(tmp_path_factory.mktemp("spans") / "model")
    limits = limits_of(model)
    setup = RunnerSetup(
        limits=limits,
        dtype=case.dtype,
        kv_cache_dtype=case.kv_cache_dtype,
        num_image_slots=NUM_SLOTS,
        fill=float("nan") if case.kv_cache_dtype == "auto" else None,
    )
    with closing(CutRunner(model, weights, setup, case.make_ops)) as runner:
        runner.warmup()
        pairs = enumerate(LAYOUTS)
        requests = [request_of(model.vision, layout, seed) for seed, layout in pairs]
        has_passes = case.make_ops is NativeOps
        whole = Made(
            limits=limits, has_passes=has_passes, runner=runner, requests=requests, solo=[]
        )
        yield replace(whole, solo=[run(whole.engine(), [each])[0] for each in requests])


@pytest.mark.parametrize(
    ("block_rows", "max_ms"),
    [(5, 1.1), (32, 0.001), (7, 9.0), (16, 30.0)],
    ids=["a block a step", "what is granted", "some blocks a step", "several passes a step"],
)
def test_streams_have_the_bits_of_whole_spans_in_every_cut(
    made: Made, block_rows: int, max_ms: float
) -> None:
    made.runner.block_rows = block_rows
    engine = made.engine(StepBound(max_ms=max_ms, cost=COST))
    compiles = CompileCount()
    for _ in range(2):
        assert run(engine, made.requests) == made.solo
    if made.has_passes:
        assert engine.scheduler.work(SpanQueue).num_computed >= 3
    assert compiles() == 0, "something was compiled after warm-up"
