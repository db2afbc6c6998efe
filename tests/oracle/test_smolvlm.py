"""SmolVLM and Idefics3 against transformers in float32: embeddings, logits and greedy tokens.

Models are tiny and random, saved by transformers; images are cut into tiles. Chunks end within
tiles, and quanta come in odd numbers.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.request import Attachment
from cadenza.vision.processor import ImageProcessor, Run, image_digest
from tests.oracle.tapped_engine import TABLES, TappedEngine

pytestmark = pytest.mark.oracle

OPS = [
    pytest.param(name, marks=[pytest.mark.native] if name == "native" else []) for name in TABLES
]
NUM_GREEDY = 32
TOLERANCE = 1e-4
"""Of the range of transformers' logits, or of an embedding's values."""

IMAGE_TOKEN, VOCAB_SIZE = 7, 331
PROCESSOR: dict[str, Any] = {
    "size": {"longest_edge": 48},
    "max_image_size": {"longest_edge": 24},
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.3, 0.4],
}
CONFIG: dict[str, Any] = {
    "image_token_id": IMAGE_TOKEN,
    "scale_factor": 2,
    "text_config": {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    "vision_config": {
        "hidden_size": 36,
        "intermediate_size": 52,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "image_size": 24,
        "patch_size": 4,
    },
}


def picture(width: int, height: int, seed: int) -> Image.Image:
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3))
    return Image.fromarray(levels.astype(np.uint8))


WIDE, TALL, SMALL = picture(75, 40, 1), picture(11, 61, 2), picture(24, 24, 3)
LAYOUTS: dict[str, list[int | Image.Image]] = {
    "first": [WIDE, 20],
    "last": [13, TALL],
    "two sizes": [5, SMALL, 3, WIDE, 9],
    "twice the same": [4, TALL, 2, TALL, 6],
    "three side by side": [11, WIDE, SMALL, TALL, 1],
    "text alone": [40],
}
"""Numbers of text tokens, and images."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, with runs of image tokens for the tiles of each image."""

    token_ids: list[int]
    images: list[Image.Image]
    attachments: list[Attachment]


@dataclass(frozen=True, slots=True)
class Theirs:
    """What transformers computes: the prompt with greedy tokens, and logits [T, V] of all but the
    last."""

    token_ids: list[int]
    logits: np.ndarray


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["smolvlm", "idefics3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint saved by transformers; the two kinds have either file of settings."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder = tmp_path_factory.mktemp(request.param)
    config = AutoConfig.for_model(request.param, **CONFIG)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(drawn(name, torch.randn(parameter.shape, generator=generator)))
    model.save_pretrained(folder)
    if request.param == "smolvlm":
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    else:
        content = {"image_processor": PROCESSOR, "image_seq_len": 9}
        (folder / "processor_config.json").write_text(json.dumps(content))
    return folder


def drawn(name: str, noise: Any) -> Any:
    if name.endswith("bias"):
        return 0.2 * noise
    if "norm" in name:
        return 1 + 0.2 * noise
    if "position_embedding" in name:
        return 0.5 * noise
    if "embed_tokens" in name:
        return noise
    gain = 2.0 if "q_proj" in name else 2.4 if "lm_head" in name else 1.0
    return noise * gain / noise[0].numel() ** 0.5


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def processor(folder: Path) -> ImageProcessor:
    vision = open_checkpoint(folder).config.vision
    assert vision is not None
    return vision.processor


@pytest.fixture(scope="module", params=OPS)
def engine(request: pytest.FixtureRequest, folder: Path) -> TappedEngine:
    return TappedEngine(folder, ops=request.param, dtype="float32")


@pytest.fixture(scope="module")
def prompts(processor: ImageProcessor) -> list[Prompt]:
    return [laid_out(processor, layout, seed) for seed, layout in enumerate(LAYOUTS.values())]


@pytest.fixture(scope="module")
def theirs(model: Any, prompts: list[Prompt]) -> list[Theirs]:
    return [decode_greedily(model, prompt) for prompt in prompts]


def laid_out(processor: ImageProcessor, layout: Sequence[int | Image.Image], seed: int) -> Prompt:
    """A prompt of random text and images; words around tiles are two tokens."""
    rng = np.random.default_rng(seed)
    prompt = Prompt([], [], [])
    for each in layout:
        if isinstance(each, int):
            prompt.token_ids.extend(rng.integers(11, VOCAB_SIZE, each).tolist())
            continue
        prompt.images.append(each)
        pixels = processor.prepare(each)
        plan = processor.plan(each.width, each.height)
        for piece in plan.pieces:
            if not isinstance(piece, Run):
                prompt.token_ids.extend(rng.integers(11, VOCAB_SIZE, 2).tolist())
                continue
            part = plan.parts[piece.part]
            start = len(prompt.token_ids)
            prompt.attachments.append(attached(processor, part, pixels[piece.part], start))
            prompt.token_ids.extend([IMAGE_TOKEN] * piece.count)
    return prompt


def attached(processor: ImageProcessor, part: Any, pixels: bytes, start: int) -> Attachment:
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


def preprocess(images: list[Image.Image]) -> dict[str, Any]:
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    found = SmolVLMImageProcessorPil(**PROCESSOR)([images], return_tensors="pt")
    return {name: found[name] for name in ("pixel_values", "pixel_attention_mask")}


def decode_greedily(model: Any, prompt: Prompt) -> Theirs:
    """Each token from the whole sequence before it."""
    import torch

    given = preprocess(prompt.images) if prompt.images else {}
    ids = list(prompt.token_ids)

    def logits() -> Any:
        return model(input_ids=torch.tensor([ids]), use_cache=False, **given).logits[0]

    with torch.inference_mode():
        for _ in range(NUM_GREEDY):
            ids.append(int(logits()[-1].argmax()))
        return Theirs(ids, logits()[:-1].numpy())


def test_embeddings_are_those_of_transformers(
    model: Any, processor: ImageProcessor, engine: TappedEngine
):
    import torch

    with torch.inference_mode():
        found = model.model.get_image_features(**preprocess([WIDE]), return_dict=True)
    expected = torch.cat(list(found.pooler_output)).numpy().reshape(-1, 9, 48)
    prompt = laid_out(processor, [WIDE], 0)
    assert len(prompt.attachments) == len(expected) == 5
    for part, rows in zip(prompt.attachments, expected, strict=True):
        assert np.abs(engine.embed(part) - rows).max() <= TOLERANCE * np.ptp(rows)


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


def test_tiles_in_another_order_would_be_noticed(
    engine: TappedEngine, theirs: list[Theirs], prompts: list[Prompt]
):
    """The negative control."""
    their, prompt = theirs[0], prompts[0]
    first, second, *others = prompt.attachments
    swapped = [
        replace(part, digest=other.digest, payload=other.payload)
        for part, other in ((first, second), (second, first))
    ]
    wrong = [*swapped, *others]
    (our,) = engine.force([their.token_ids[:-1]], [len(prompt.token_ids)], [wrong])
    assert np.abs(our.logits - their.logits).max() / np.ptp(their.logits) > 10 * TOLERANCE
