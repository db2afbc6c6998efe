"""A model that sees, as the front end knows it: the bundled tokenizer with marks of images, a
template, and a processor whose parts and pieces a test chooses."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import InvalidRequestError
from cadenza.frontend.prepared_request import TextWorkers
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.media.image_input import ImageInput, OpenedImage
from cadenza.media.opening import PooledPixels
from cadenza.models.declaration import declare
from cadenza.models.towers.idefics3 import NAMES
from cadenza.vision.idefics3 import Idefics3Processor
from cadenza.vision.patches import Normalisation
from cadenza.vision.processor import Detail, ImagePart, ImagePlan, ImageProcessor, Run
from cadenza.vision.tower_config import (
    PatchTable,
    ProjectorConfig,
    ProjectorLinear,
    TowerConfig,
    VisionConfig,
)
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.cli.harness import TINY
from tests.text.marked_tokenizers import marked_checkpoint

IMAGE, BREAK, END = "<image>", "<row_end>", "<image_end>"
MARKS = (IMAGE, BREAK, END, "<|turn|>")
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\n' }}{% endfor %}<|turn|>assistant"
)
SIDE = 10
"""Pixels of a token."""


@dataclass(frozen=True, kw_only=True)
class GridProcessor:
    """One part: a token for each square of `SIDE` pixels, whose rows may end in a mark."""

    placeholder: str = IMAGE
    token: str = IMAGE
    settings: bytes = b"grid"
    begin: str = ""
    end: str = ""
    row_end: str = ""

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ImagePlan:
        if width > 20 * height:
            raise InvalidRequestError(f"it has {width} x {height} pixels, which is too flat")
        columns, rows = width // SIDE, 1 if detail == "low" else height // SIDE
        part = ImagePart(width=width, height=height, rows=rows, columns=columns)
        pieces: list[str | Run] = [Run(0, rows * columns)]
        if self.row_end:
            pieces = [each for _ in range(rows) for each in (Run(0, columns), self.row_end)]
        return ImagePlan(parts=(part,), pieces=(self.begin, *pieces, self.end))

    def prepare(self, image: Any, detail: Detail = "auto") -> tuple[bytes, ...]:
        return (image.tobytes(),)

    def check(self, part: ImagePart) -> None:
        assert part.rows * part.columns

    def patches(self, pixels: bytes, part: ImagePart) -> Any:
        raise AssertionError("only an engine makes patches")


@dataclass(frozen=True, kw_only=True)
class TiledProcessor(GridProcessor):
    """Two tiles side by side, and the whole."""

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ImagePlan:
        part = ImagePart(width=SIDE, height=SIDE, rows=2, columns=2)
        pieces = ("\n", Run(0, 4), BREAK, Run(1, 4), "\n\n", Run(2, 4), END)
        return ImagePlan(parts=(part, part, part), pieces=pieces)


@dataclass(eq=False)
class GivenSizes(PooledPixels):
    """Opens images whose "file" is their size, as b"30x20"; it counts what it opened."""

    opened: list[bytes] = field(default_factory=list[bytes])

    def measure(self, images: Sequence[ImageInput], processor: ImageProcessor) -> None:
        for image in [each for each in images if each.opened is None]:
            width, height = map(int, (image.data or b"").split(b"x"))
            image.opened = OpenedImage(width=width, height=height)

    def open(self, images: Sequence[ImageInput], processor: ImageProcessor) -> None:
        for image in images:
            assert image.data is not None
            assert image.opened is not None
            self.opened.append(image.data)
            width, height = image.opened.width, image.opened.height
            plan = processor.plan(width, height, image.detail)
            parts = tuple(
                bytes([number]) * each.num_bytes for number, each in enumerate(plan.parts)
            )
            image.opened = OpenedImage(width=width, height=height, parts=parts)

    def close(self) -> None:
        pass


def seeing_checkpoint(
    processor: GridProcessor | None = None, template: str = TEMPLATE
) -> Checkpoint:
    checkpoint = marked_checkpoint(MARKS, template)
    text = TextFrontend(checkpoint)
    assert text.tokenizer is not None
    chosen = processor or GridProcessor()
    image_id = text.tokenizer.id_of(chosen.token)
    assert image_id is not None
    linear = ProjectorLinear(name="projector", num_out=checkpoint.config.hidden_size)
    tower = TowerConfig(
        hidden_size=8,
        intermediate_size=16,
        num_layers=1,
        num_heads=1,
        head_dim=8,
        patch_size=1,
        patch_shape=(3, 1, 1),
        norm_eps=1e-6,
        projector=ProjectorConfig(side=1, linears=(linear,)),
    )
    vision = VisionConfig(
        family="grid",
        tower=tower,
        processor=chosen,
        image_token_id=image_id,
        fill_token_id=0,
        max_part_tokens=1 << 16,
    )
    config, weights = replace(checkpoint.config, vision=vision), checkpoint.weights
    some = next(iter(weights.tensors.values()))  # nothing reads the tower
    missing = {spec.name: some for spec in declare(config) if spec.name not in weights}
    known = config, replace(weights, tensors={**weights.tensors, **missing})
    return replace(checkpoint, known=known)


def seeing_text(
    processor: GridProcessor | None = None,
    template: str = TEMPLATE,
    pixels: Any = None,
    **options: Any,
) -> TextFrontend:
    workers = TextWorkers(pixels=pixels or GivenSizes())
    return TextFrontend(seeing_checkpoint(processor, template), workers=workers, **options)


def blind_text() -> TextFrontend:
    return TextFrontend(open_checkpoint(None))


def picture(size: str = "30x20", **more: Any) -> dict[str, Any]:
    """A part with an image of a size."""
    return {"type": "image", "image": ImageInput(data=size.encode(), **more)}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [text_part(p) if isinstance(p, str) else p for p in parts]}


TILE = 32
"""Pixels of a part's side of the tiny model, whose parts have 4 tokens."""


def tiny_vision(image_token_id: int, hidden_size: int) -> VisionConfig:
    """SmolVLM's, of two layers; images have up to 2 x 2 tiles and the whole."""
    linear = ProjectorLinear(
        name="model.connector.modality_projection.proj", num_out=hidden_size, has_bias=False
    )
    tower = TowerConfig(
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=2,
        head_dim=8,
        patch_size=8,
        patch_shape=(3, 8, 8),
        norm_eps=1e-6,
        projector=ProjectorConfig(side=2, linears=(linear,)),
        names=NAMES,
        table=PatchTable(rule="raster", side=TILE // 8),
        has_post_norm=True,
    )
    processor = Idefics3Processor(
        longest_edge=2 * TILE,
        tile=TILE,
        patch_size=8,
        merge=2,
        splits=True,
        resample="lanczos",
        normalisation=Normalisation(),
    )
    return VisionConfig(
        family="smolvlm",
        tower=tower,
        processor=processor,
        image_token_id=image_token_id,
        fill_token_id=image_token_id,
        max_part_tokens=4,
    )


def write_seeing_model(folder: Path, seed: int = 3) -> Path:
    """A model of random weights that sees, with the tokenizer and template of the bundled one."""
    packaged = resources.files("cadenza").joinpath("models", "bundled-vision")
    described = json.loads(packaged.joinpath("tokenizer.json").read_text())
    tokens = {each["content"]: each["id"] for each in described["added_tokens"]}
    vocab_size = 1 + max(*described["model"]["vocab"].values(), *tokens.values())
    vision = tiny_vision(tokens["<image>"], TINY.hidden_size)
    config = replace(
        TINY, vocab_size=vocab_size, eos_token_ids=(tokens["<|im_end|>"],), vision=vision
    )
    write_random_checkpoint(config, folder, seed=seed, dtype=config.dtype)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes(packaged.joinpath(name).read_bytes())
    return folder
