"""Spans that attend both ways on the real kernels: streams are solo at every budget, from hits
within images too, and what images attend to matters."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cadenza.backends.base import RunnerSetup
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.runner import XlaRunner
from cadenza.batch.step_cost import StepBound
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.config import EngineLimits, ImageLimits
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.events import Token
from cadenza.request import Attachment, Request, SamplingParams
from cadenza.vision.tower_config import VisionConfig
from tests.checkpoint.config_writer import write_random_checkpoint

pytestmark = pytest.mark.native

# From the least with which an image fits beside the other rows.
BUDGETS = {"tiny-gemma3-vl": (18, 40), "tiny-gemma4-unified-vl": (72, 90)}
ALL = 256
NUM_SLOTS = 160

Stream = list[tuple[int, Any]]


SHAPES = ["tiny-gemma3-vl", pytest.param("tiny-gemma4-unified-vl", marks=pytest.mark.soak)]


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    write_random_checkpoint(named_shape(request.param), folder, seed=3, dtype="float32")
    return open_checkpoint(folder)


def engine_of(
    model: Checkpoint, budget: int, *, reach: Any = "as it is", step_bound: StepBound | None = None
) -> EngineCore:
    config, vision = model.config, model.config.vision
    assert vision is not None
    if reach != "as it is":
        config = replace(config, vision=replace(vision, reach=reach))
    limits = EngineLimits(
        max_num_seqs=3,
        max_num_batched_tokens=budget,
        max_model_len=208,
        page_size=16,
        num_pages=48,
        max_num_queued_reqs=8,
        enable_prefix_caching=True,
        images=ImageLimits(token_id=vision.image_token_id, num_slots=NUM_SLOTS),
    )
    setup = RunnerSetup(
        limits=limits, dtype="float32", num_image_slots=NUM_SLOTS, fill=float("nan")
    )
    runner = XlaRunner(config, model.weights, setup, NativeOps)
    runner.warmup()
    return EngineCore(runner, limits, CoreOptions(step_bound=step_bound))


def request_of(
    vision: VisionConfig | None, layout: list[int | tuple[int, int]], seed: int
) -> Request:
    assert vision is not None
    rng = np.random.default_rng(7)
    prompt: list[int] = []
    attachments: list[Attachment] = []
    for each in layout:
        if isinstance(each, int):
            prompt += rng.integers(11, 331, each).tolist()
            continue
        (part,) = vision.processor.plan(*each).parts
        pixels = rng.integers(0, 256, part.num_bytes, np.uint8).tobytes()
        attachments.append(
            Attachment(
                start=len(prompt),
                length=part.num_tokens,
                digest=f"{each} {len(prompt)}".encode(),
                payload=pixels,
                width=part.width,
                height=part.height,
                rows=part.rows,
                columns=part.columns,
            )
        )
        prompt += [vision.image_token_id] * part.num_tokens
    return Request(
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(
            max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=3, seed=seed
        ),
        attachments=tuple(attachments),
    )


def requests_of(model: Checkpoint) -> list[Request]:
    layouts: list[list[int | tuple[int, int]]] = [
        [5, (70, 90), 9],
        [5, (70, 90), 9, (90, 30), 3],  # begins as the first does
        [(30, 60), 2],
        [30],
    ]
    return [request_of(model.config.vision, layout, seed) for seed, layout in enumerate(layouts)]


def run(engine: EngineCore, requests: list[Request]) -> list[Stream]:
    found: dict[int, Stream] = {engine.submit(request): [] for request in requests}
    while not engine.is_idle:
        for event in engine.step():
            if isinstance(event, Token):
                found[event.request_id].append((event.token_id, event.logprobs))
    assert engine.loop.num_failed_steps == 0
    return list(found.values())


def test_streams_are_solo_at_every_budget_and_from_hits_within_images(model: Checkpoint) -> None:
    requests = requests_of(model)
    alone = engine_of(model, ALL)
    solo = [run(alone, [request])[0] for request in requests]
    vision = model.config.vision
    assert vision is not None
    budgets = next(own for name, own in BUDGETS.items() if vision == named_shape(name).vision)
    for budget in budgets:
        engine = engine_of(model, budget)
        for _ in range(2):
            assert run(engine, requests) == solo
    other = engine_of(model, ALL, reach=None)
    causal = [run(other, [request])[0] for request in requests]
    assert causal[3] == solo[3], "text alone is as it was"
    assert all(ours != theirs for ours, theirs in zip(solo[:3], causal[:3], strict=True))
