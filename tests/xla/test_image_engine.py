"""An engine over a tower: images among texts change no token."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cadenza.backends.xla.reference_tower import positions_of
from cadenza.batch.packing import rope_positions
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.config import EngineConfig
from cadenza.engine.core import EngineCore
from cadenza.errors import InvalidRequestError
from cadenza.events import Token
from cadenza.loading.build import build_core, open_planned
from cadenza.request import Attachment, Request, SamplingParams
from cadenza.scheduler.image_queue import ImageQueue
from cadenza.verification.reference import build_reference
from cadenza.vision.processor import ImagePart, image_digest
from tests.checkpoint.config_writer import write_random_checkpoint

TILE = ImagePart(width=84, height=84, rows=6, columns=6)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing") / "model"
    shape = replace(named_shape("tiny-smolvlm"), num_layers=1)
    write_random_checkpoint(shape, folder, seed=1, dtype="float32")
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> EngineCore:
    config = EngineConfig(
        max_itl_ms=20.0,
        max_num_seqs=3,
        max_num_batched_tokens=32,
        max_model_len=256,
        image_cache_bytes=40_000,  # two tiles
        enable_prefix_caching=False,
    )
    planned = open_planned(folder, config)
    core = build_core(planned)
    vision = planned.checkpoint.config.vision
    assert vision is not None
    assert core.limits.images is not None
    assert core.limits.images.token_id == vision.image_token_id
    return core


def request_of(engine: EngineCore, seed: int) -> Request:
    images = engine.limits.images
    assert images is not None
    pixels = np.random.default_rng(seed).integers(0, 256, 84 * 84 * 3, np.uint8).tobytes()
    part = Attachment(
        start=2,
        length=36,
        digest=image_digest(b"", TILE, pixels),
        payload=pixels,
        width=84,
        height=84,
        rows=6,
        columns=6,
    )
    ids = (20 + seed, 21, *[images.token_id] * 36, 22, 23)
    return Request(prompt_token_ids=ids, attachments=(part,), params=GREEDY)


def run(engine: EngineCore, requests: list[Request]) -> list[list[int]]:
    streams: dict[int, list[int]] = {engine.submit(request): [] for request in requests}
    while not engine.is_idle:
        for event in engine.step():
            if isinstance(event, Token):
                streams[event.request_id].append(event.token_id)
        engine.check_invariants()
    return list(streams.values())


def test_tokens_behind_images_are_those_of_each_request_alone(engine: EngineCore) -> None:
    text = Request(prompt_token_ids=tuple(range(20, 60)), params=GREEDY)
    requests = [request_of(engine, 1), text, *(request_of(engine, seed) for seed in (2, 1, 3))]
    alone = [run(engine, [request])[0] for request in requests]
    assert run(engine, requests) == alone
    assert alone[0] == alone[3]
    assert len({tuple(alone[at]) for at in (0, 2, 4)}) > 1, "the model sees nothing"
    counts = engine.scheduler.work(ImageQueue).counts
    assert counts.num_encoded > 3, "an image was never evicted"
    assert counts.num_slot_hits > 0
    assert engine.loop.num_failed_steps == 0


def test_the_reference_takes_images_and_gives_the_same_tokens(
    engine: EngineCore, folder: Path
) -> None:
    reference = build_reference(open_checkpoint(folder), EngineConfig(), max_model_len=256)
    for seed in (1, 2):
        request = request_of(engine, seed)
        assert reference.takes(request)
        assert [*reference.run(request).token_ids] == run(engine, [request])[0]


def test_the_reference_counts_positions_of_images_as_the_engine_does() -> None:
    parts = [
        Attachment(start=start, length=rows * columns, digest=b"a", rows=rows, columns=columns)
        for start, rows, columns in ((0, 2, 3), (6, 1, 4), (13, 5, 2))
    ]
    for stop in (4, 8, 20, 40):
        np.testing.assert_array_equal(positions_of(parts, stop), rope_positions(parts, 0, stop))


def test_what_encoding_costs_was_measured(engine: EngineCore) -> None:
    assert engine.scheduler.work(ImageQueue).cost.num_measured > 0


def test_a_grid_that_the_processor_makes_of_no_image_is_refused(engine: EngineCore) -> None:
    request = request_of(engine, 1)
    forged = replace(request.attachments[0], rows=4, columns=9)
    with pytest.raises(InvalidRequestError, match="parts of this model have 84 x 84 pixels"):
        engine.submit(replace(request, attachments=(forged,)))
