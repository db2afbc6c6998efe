"""Qwen models that see against transformers in float32: embeddings, rotary positions, logits of
prompts and decodes, and greedy tokens. Chunks end within images, and quanta come in odd numbers.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cadenza.batch.packing import rope_positions
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.models.towers.reader import VisionOptions
from cadenza.request import Attachment
from cadenza.vision.processor import ImageProcessor, image_digest
from tests.oracle import qwen_models
from tests.oracle.qwen_models import BANNED, IMAGE_TOKEN, VOCAB_SIZE, Prompt, Theirs
from tests.oracle.tapped_engine import TABLES, TappedEngine

pytestmark = pytest.mark.oracle

OPS = [
    pytest.param(name, marks=[pytest.mark.native] if name == "native" else []) for name in TABLES
]
NUM_GREEDY = 32
TOLERANCE = 1e-4
"""Of the range of transformers' logits, or of an embedding's values."""


def picture(width: int, height: int, seed: int) -> Image.Image:
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3))
    return Image.fromarray(levels.astype(np.uint8))


WIDE, TALL, SMALL = picture(75, 40, 1), picture(23, 61, 2), picture(9, 8, 3)
IMAGES = {"wide": WIDE, "tall": TALL, "small": SMALL}
LAYOUTS: dict[str, list[int | Image.Image]] = {
    "first": [WIDE, 20],
    "last": [13, TALL],
    "two sizes": [5, SMALL, 3, WIDE, 9],
    "twice the same": [4, TALL, 2, TALL, 6],
    "three in a row": [11, WIDE, 2, SMALL, 2, TALL, 1],
    "text alone": [40],
}
"""Numbers of text tokens, and images."""


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=qwen_models.CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    qwen_models.write_model(request.param, folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return qwen_models.load(folder)


@pytest.fixture(scope="module")
def processor(folder: Path) -> ImageProcessor:
    vision = open_checkpoint(folder).config.vision
    assert vision is not None
    return vision.processor


@pytest.fixture(scope="module", params=OPS)
def engine(request: pytest.FixtureRequest, folder: Path) -> TappedEngine:
    return TappedEngine(folder, ops=request.param, dtype="float32")


@pytest.fixture(scope="module")
def prompts(processor: ImageProcessor) -> list[tuple[Prompt, list[Attachment]]]:
    return [laid_out(processor, layout, seed) for seed, layout in enumerate(LAYOUTS.values())]


@pytest.fixture(scope="module")
def theirs(model: Any, prompts: list[tuple[Prompt, list[Attachment]]]) -> list[Theirs]:
    return [qwen_models.decode_greedily(model, prompt, NUM_GREEDY) for prompt, _ in prompts]


def laid_out(
    processor: ImageProcessor, layout: Sequence[int | Image.Image], seed: int
) -> tuple[Prompt, list[Attachment]]:
    """A prompt of random text and images."""
    rng = np.random.default_rng(seed)
    token_ids: list[int] = []
    images: list[Image.Image] = []
    attachments: list[Attachment] = []
    for each in layout:
        if isinstance(each, int):
            token_ids += rng.integers(11, VOCAB_SIZE, each).tolist()
            continue
        images.append(each)
        attachments.append(attached(processor, each, len(token_ids)))
        token_ids += [IMAGE_TOKEN] * attachments[-1].length
    return Prompt(token_ids, images), attachments


def attached(processor: ImageProcessor, image: Image.Image, start: int) -> Attachment:
    (part,) = processor.plan(image.width, image.height).parts
    (pixels,) = processor.prepare(image)
    return Attachment(
        start=start,
        length=part.num_tokens,
        digest=image_digest(processor.settings, part, pixels),
        payload=pixels,
        width=part.width,
        height=part.height,
        rows=part.rows,
        columns=part.columns,
    )


@pytest.mark.parametrize("name", IMAGES)
def test_embeddings_are_those_of_transformers(
    model: Any, processor: ImageProcessor, engine: TappedEngine, name: str
):
    expected = qwen_models.embed(model, IMAGES[name])
    found = engine.embed(attached(processor, IMAGES[name], 0))
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= TOLERANCE * np.ptp(expected)


def test_rope_positions_are_those_of_transformers(
    theirs: list[Theirs], prompts: list[tuple[Prompt, list[Attachment]]]
):
    for their, (_, attachments) in zip(theirs, prompts, strict=True):
        found = rope_positions(attachments, 0, len(their.token_ids))
        assert np.array_equal(found, their.positions)


def test_logits_and_greedy_tokens_are_those_of_transformers(
    engine: TappedEngine,
    theirs: list[Theirs],
    prompts: list[tuple[Prompt, list[Attachment]]],
):
    forced = engine.force(
        [their.token_ids[:-1] for their in theirs],
        [len(prompt.token_ids) for prompt, _ in prompts],
        [attachments for _, attachments in prompts],
    )
    for name, our, their, (prompt, _) in zip(LAYOUTS, forced, theirs, prompts, strict=True):
        error = np.abs(our.logits - their.logits).max() / np.ptp(their.logits)
        assert error <= TOLERANCE, name
        allowed = our.logits[len(prompt.token_ids) - 1 :].copy()
        allowed[:, list(BANNED)] = -np.inf
        greedy = allowed.argmax(axis=1)
        assert greedy.tolist() == their.token_ids[len(prompt.token_ids) :], name


def test_a_neighbours_image_or_swapped_axes_would_be_noticed(
    engine: TappedEngine,
    theirs: list[Theirs],
    prompts: list[tuple[Prompt, list[Attachment]]],
    processor: ImageProcessor,
):
    """The negative control: other pixels, and height for width."""
    their, (prompt, attachments) = theirs[1], prompts[1]
    (right,) = attachments
    mirrored = attached(processor, TALL.transpose(Image.Transpose.FLIP_LEFT_RIGHT), right.start)
    swapped = replace(
        right,
        digest=b"swapped",
        width=right.height,
        height=right.width,
        rows=right.columns,
        columns=right.rows,
    )
    for wrong in (mirrored, swapped):
        (our,) = engine.force([their.token_ids[:-1]], [len(prompt.token_ids)], [[wrong]])
        error = np.abs(our.logits - their.logits).max() / np.ptp(their.logits)
        assert error > 10 * TOLERANCE


def test_without_images_the_text_model_is_the_same(folder: Path):
    checkpoint = open_checkpoint(folder, vision=VisionOptions(has_images=False))
    assert checkpoint.config.vision is None
