"""Towers of the Qwen models on the op table that serves here: images of any size, deepstack, a
table between whose rows positions lie, and windows; as their witness computes them."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cadenza.backends.base import RunnerSetup
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.native_library import has_native_library
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.reference_tower import ReferenceTower
from cadenza.backends.xla.runner import XlaRunner
from cadenza.batch.step_schema import ImageCall, ModelInputs
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.config import EngineLimits
from cadenza.request import Attachment
from cadenza.vision.processor import ImagePart
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.xla.test_image_encoder import Rows, all_rows

UNIT = 8
GRIDS = [(5, 9), (9, 4), (1, 1), (2, 13)]  # rows and columns of tokens


@pytest.fixture(scope="module", params=["tiny-qwen3-vl", "tiny-qwen2.5-vl"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("seeing") / "model"
    shape = replace(named_shape(request.param), num_layers=3)
    write_random_checkpoint(shape, folder, seed=1, dtype="float32")
    return open_checkpoint(folder)


@pytest.fixture(scope="module")
def warm(model: Checkpoint) -> Iterator[XlaRunner]:
    limits = EngineLimits(
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=64,
        page_size=16,
        num_pages=8,
        max_num_queued_reqs=1,
    )
    setup = RunnerSetup(limits=limits, num_image_slots=100, fill=float("nan"))
    ops = NativeOps if has_native_library() else OpTable
    with closing(XlaRunner(model.config, model.weights, setup, ops)) as runner:
        runner.warmup()
        yield runner


@pytest.fixture
def runner(warm: XlaRunner) -> XlaRunner:
    warm.reset()
    return warm


def image(rows: int, columns: int, seed: int = 0) -> Attachment:
    width, height = columns * UNIT, rows * UNIT
    pixels = np.random.default_rng(seed).integers(0, 256, width * height * 3, np.uint8).tobytes()
    return Attachment(
        start=0,
        length=rows * columns,
        digest=bytes([rows, columns, seed]),
        payload=pixels,
        width=width,
        height=height,
        rows=rows,
        columns=columns,
    )


def encode(runner: XlaRunner, part: Attachment, *, size: int = 1000) -> Rows:
    slots = np.arange(3, 3 + part.length, dtype=np.int32)[::-1].copy()
    total = len(runner.image_work(part))
    bucket = runner.token_buckets[0]
    empty = ModelInputs.empty(bucket=bucket, num_rows=2)
    for start in range(0, total, size):
        stop = min(start + size, total)
        call = ImageCall(attachment=part, start=start, stop=stop, slots=slots)
        runner.launch(replace(empty, image_calls=(call,))).result()
    return all_rows(runner)[slots]


@pytest.mark.parametrize("grid", GRIDS)
def test_rows_of_an_image_are_those_of_the_witness(
    runner: XlaRunner, model: Checkpoint, grid: tuple[int, int]
) -> None:
    vision, each = model.config.vision, image(*grid)
    assert vision is not None
    part = ImagePart(width=each.width, height=each.height, rows=grid[0], columns=grid[1])
    expected = ReferenceTower(vision, model.weights).embed(part, each.payload)
    found = encode(runner, each)
    assert found.shape == (each.length, vision.num_parts * model.config.hidden_size)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_bits_do_not_depend_on_how_quanta_are_cut(runner: XlaRunner) -> None:
    encode(runner, image(9, 4))
    at_once = encode(runner, image(5, 9))
    runner.reset()
    assert encode(runner, image(5, 9), size=1).tobytes() == at_once.tobytes()


def test_an_image_on_its_side_has_other_rows(runner: XlaRunner) -> None:
    """The negative control: the same bytes in another shape."""
    first, second = image(4, 9), image(9, 4)
    turned = replace(second, payload=first.payload)
    assert np.abs(encode(runner, first) - encode(runner, turned)).max() > 0.1
