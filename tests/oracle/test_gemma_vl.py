"""Models of Gemma and Mistral that see against transformers in float32: embeddings, logits of
prompts and decodes, greedy tokens. Quanta come in odd numbers, and chunks end within images unless
these attend both ways.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.request import Attachment
from cadenza.vision.processor import Run, image_digest
from cadenza.vision.tower_config import VisionConfig
from tests.oracle import seeing_models
from tests.oracle.seeing_models import Picture, Theirs
from tests.oracle.tapped_engine import MAX_TOKENS, TABLES, TappedEngine

pytestmark = pytest.mark.oracle

OPS = [
    pytest.param(name, marks=[pytest.mark.native] if name == "native" else []) for name in TABLES
]
NUM_GREEDY = 32
TOLERANCE = 1e-4
"""Of the range of transformers' logits, or of an embedding's values."""

BREAK, END = 8, 9
"""Tokens of text within Mistral's images, and behind them."""

SIZES = {"wide": (75, 40), "tall": (23, 61), "small": (30, 31)}
LAYOUTS: dict[str, list[int | str]] = {
    "first": ["wide", 20],
    "last": [13, "tall"],
    "two sizes": [5, "small", 3, "wide", 9],
    "twice the same": [4, "tall", 2, "tall", 6],
    "three images": [11, "wide", 2, "small", 2, "tall", 1],
    "text alone": [40],
}
"""Numbers of text tokens, and images."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, the images of transformers, and ours."""

    token_ids: list[int]
    pictures: list[Picture]
    attachments: list[Attachment]


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=seeing_models.SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(shape: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(shape)
    seeing_models.write_model(shape, folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return seeing_models.load(folder)


@pytest.fixture(scope="module")
def vision(folder: Path) -> VisionConfig:
    vision = open_checkpoint(folder).config.vision
    assert vision is not None
    return vision


@pytest.fixture(scope="module", params=OPS)
def engine(request: pytest.FixtureRequest, folder: Path, vision: VisionConfig) -> TappedEngine:
    if vision.whole_span > MAX_TOKENS[request.param]:
        pytest.skip(f"a step of the {request.param} operations does not hold an image")
    return TappedEngine(folder, ops=request.param, dtype="float32")


@pytest.fixture(scope="module")
def prompts(vision: VisionConfig) -> list[Prompt]:
    return [laid_out(vision, layout, seed) for seed, layout in enumerate(LAYOUTS.values())]


@pytest.fixture(scope="module")
def theirs(model: Any, shape: str, prompts: list[Prompt]) -> list[Theirs]:
    return [
        seeing_models.decode_greedily(model, shape, each.token_ids, each.pictures, NUM_GREEDY)
        for each in prompts
    ]


def laid_out(vision: VisionConfig, layout: Sequence[int | str], seed: int) -> Prompt:
    """A prompt of random text and images."""
    rng = np.random.default_rng(seed)
    found = Prompt([], [], [])
    for each in layout:
        if isinstance(each, int):
            found.token_ids.extend(rng.integers(11, 331, each).tolist())
            continue
        attachment, ids = attached(vision, each, len(found.token_ids))
        levels = np.frombuffer(attachment.payload, np.uint8)
        found.pictures.append(Picture(levels.reshape(attachment.height, attachment.width, 3)))
        found.attachments.append(attachment)
        found.token_ids.extend(ids)
    return found


def attached(vision: VisionConfig, name: str, start: int) -> tuple[Attachment, list[int]]:
    """An image at a place of a prompt, and its tokens with the words around."""
    width, height = SIZES[name]
    plan = vision.processor.plan(width, height)
    (part,) = plan.parts
    rng = np.random.default_rng(list(SIZES).index(name))
    pixels = rng.integers(0, 256, part.num_bytes, np.uint8).tobytes()
    token_ids: list[int] = []
    for piece in plan.pieces:
        if isinstance(piece, Run):
            token_ids += [vision.image_token_id] * piece.count
        else:
            token_ids.append(BREAK if piece == "[IMG_BREAK]" else END)
    first = token_ids.index(vision.image_token_id)
    last = len(token_ids) - token_ids[::-1].index(vision.image_token_id)
    return Attachment(
        start=start + first,
        length=last - first,
        digest=image_digest(vision.processor.settings, part, pixels),
        payload=pixels,
        width=part.width,
        height=part.height,
        rows=part.rows,
        columns=part.columns,
    ), token_ids


@pytest.mark.parametrize("name", SIZES)
def test_embeddings_are_those_of_transformers(
    model: Any, shape: str, vision: VisionConfig, engine: TappedEngine, name: str
):
    attachment, _ = attached(vision, name, 0)
    levels = np.frombuffer(attachment.payload, np.uint8)
    picture = Picture(levels.reshape(attachment.height, attachment.width, 3))
    expected = seeing_models.embed(model, shape, picture)
    found = engine.embed(attachment)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= TOLERANCE * np.ptp(expected)


def test_logits_and_greedy_tokens_are_those_of_transformers(
    engine: TappedEngine, theirs: list[Theirs], prompts: list[Prompt]
):
    forced = engine.force(
        [their.token_ids[:-1] for their in theirs],
        [len(prompt.token_ids) for prompt in prompts],
        [prompt.attachments for prompt in prompts],
    )
    for name, our, their, prompt in zip(LAYOUTS, forced, theirs, prompts, strict=True):
        error = np.abs(our.logits - their.logits).max() / np.ptp(their.logits)
        assert error <= TOLERANCE, name
        greedy = our.logits[len(prompt.token_ids) - 1 :].argmax(axis=1)
        assert greedy.tolist() == their.token_ids[len(prompt.token_ids) :], name


def test_another_image_would_be_noticed(
    engine: TappedEngine, theirs: list[Theirs], prompts: list[Prompt]
):
    """The negative control: the same pixels, mirrored."""
    their, prompt = theirs[1], prompts[1]
    (right,) = prompt.attachments
    levels = np.frombuffer(right.payload, np.uint8).reshape(right.height, right.width, 3)
    wrong = replace(right, payload=levels[:, ::-1].tobytes(), digest=b"mirrored")
    (our,) = engine.force([their.token_ids[:-1]], [len(prompt.token_ids)], [[wrong]])
    assert np.abs(our.logits - their.logits).max() / np.ptp(their.logits) > 10 * TOLERANCE


@pytest.mark.parametrize("reach", [None, "all", "windowed"])
def test_spans_that_reach_otherwise_would_be_noticed(
    shape: str, folder: Path, theirs: list[Theirs], prompts: list[Prompt], reach: Any
):
    """The negative control: tokens of images attend both ways in other layers."""
    config = open_checkpoint(folder).config
    assert config.vision is not None
    if config.vision.reach in (None, reach) or named_shape(shape).vision is None:
        return
    other = replace(config, vision=replace(config.vision, reach=reach))
    engine = TappedEngine(folder, ops="native", dtype="float32", config=other)
    their, prompt = theirs[3], prompts[3]
    (our,) = engine.force([their.token_ids[:-1]], [len(prompt.token_ids)], [prompt.attachments])
    assert np.abs(our.logits - their.logits).max() / np.ptp(their.logits) > 10 * TOLERANCE
