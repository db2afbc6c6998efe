"""Dialogues about drawn images, as text with images, and as packed batches.

Owns how many images a dialogue has and where, how a turn is written (as the chat template of
`models/bundled-vision` writes it), and the arrays of a step.

Invariant: a batch is a function of its split and key.

Shapes: B rows, T tokens of a row, P images, N patches, C cells of an image (one image token each).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from training.corpus.example import TURN_END, TURN_START, Source, Split
from training.corpus.mixture import open_source
from training.vision.questions import Question, ask, ninth_of, of_two, without_image
from training.vision.scenes import COLOURS, KINDS, SIDE, Scene, draw_image, draw_scene
from training.vision.shape import CELLS_OF_A_SIDE, PATCH, PATCHES_OF_A_SIDE

FAKE, GLOBAL, IMAGE = "<fake_token_around_image>", "<global-img>", "<image>"
IMAGE_TEXT = FAKE + GLOBAL + IMAGE * CELLS_OF_A_SIDE**2 + FAKE
"""What stands in the prompt for an image, as the processor of Idefics3 writes it."""

NUM_ROWS = NUM_IMAGES = 32
ROW_LENGTH = 128
SHARE_OF_NO_IMAGE, SHARE_OF_TWO = 0.04, 0.1
SIDES = (80, 96, 96, 96, 128)
"""Of the drawn images, before they are resized for the model."""


@dataclass(slots=True)
class Dialogue:
    """Text with the spans of characters that are learned, and its images in order."""

    text: str = ""
    learned: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    scenes: list[Scene] = field(default_factory=list[Scene])

    def add(
        self, question: Question, scenes: Sequence[Scene] = (), *, behind: bool = False
    ) -> None:
        """Adds a turn with an answer; images are before the question, or `behind` it."""
        images = IMAGE_TEXT * len(scenes)
        asked = question.text + images if behind else images + question.text
        self.text += f"{TURN_START}user\n{asked}{TURN_END}\n{TURN_START}assistant\n"
        start = len(self.text)
        self.text += f"{question.answer}{TURN_END}"
        self.learned.append((start, len(self.text)))
        self.text += "\n"
        self.scenes += scenes


def make_dialogue(source: Source, max_images: int, max_turns: int) -> Dialogue:
    """A dialogue about no image, one, or two; later questions are about the newest."""
    dialogue, way = Dialogue(), source.rng.random()
    if max_images == 0 or way < SHARE_OF_NO_IMAGE:
        for _ in range(max_turns):
            dialogue.add(without_image(source))
        return dialogue
    is_behind = source.chance(0.2)
    scene = draw_scene(source)
    if max_images == 1 or way > SHARE_OF_NO_IMAGE + SHARE_OF_TWO:
        dialogue.add(ask(source, scene), [scene], behind=is_behind)
        for _ in range(max_turns - 1):
            dialogue.add(ask(source, scene))
        return dialogue
    second = draw_scene(source)
    if source.chance(0.5):
        both = scene, second
        dialogue.add(of_two(source, both), both, behind=is_behind)
        for _ in range(max_turns - 1):
            dialogue.add(of_two(source, both))
        return dialogue
    dialogue.add(ask(source, scene), [scene], behind=is_behind)
    dialogue.add(ask(source, second), [second], behind=is_behind)
    for _ in range(max_turns - 2):
        dialogue.add(ask(source, second))
    return dialogue


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBatch:
    """Rows of dialogues, and the images that their placeholders stand for."""

    token_ids: np.ndarray  # [B, T]
    segments: np.ndarray  # [B, T], 1 where there is a token
    weights: np.ndarray  # [B, T], 1 where the token itself counts in the loss
    sources: np.ndarray  # [B, T], a row of all images' cells (P C), or -1
    patches: np.ndarray  # [P, N, 3 PATCH PATCH] bytes, each channel, y, x
    kinds: np.ndarray  # [P, C], 0 for the background
    colours: np.ndarray  # [P, C], 0 for the background
    places: np.ndarray  # [P, C], 1 + the ninth of the image where the thing's centre is, or 0
    centres: np.ndarray  # [P, C], 1 where the centre of a thing is


def make_batch(tokenizer: Tokenizer, split: Split, key: object) -> ImageBatch:
    """A batch of `NUM_ROWS` dialogues about at most `NUM_IMAGES` images."""
    source = open_source(split, "images", key)
    dialogues: list[Dialogue] = []
    left = NUM_IMAGES
    for _ in range(NUM_ROWS):
        dialogues.append(make_dialogue(source, min(left, 2), max_turns=6))
        left -= len(dialogues[-1].scenes)
    return pack(tokenizer, dialogues, source)


def make_images(split: Split, key: object) -> ImageBatch:
    """A batch of images alone, without dialogues."""
    source = open_source(split, "images alone", key)
    batch = _empty(0)
    for index in range(NUM_IMAGES):
        _describe_image(batch, index, draw_scene(source), source)
    return batch


def pack(tokenizer: Tokenizer, dialogues: Sequence[Dialogue], source: Source) -> ImageBatch:
    """One row a dialogue, cut behind `ROW_LENGTH` tokens."""
    batch = _empty(len(dialogues))
    cells = CELLS_OF_A_SIDE**2
    next_image = 0
    for row, dialogue in enumerate(dialogues):
        encoding = tokenizer.encode(dialogue.text)
        ids = np.array(encoding.ids[:ROW_LENGTH])
        batch.token_ids[row, : len(ids)] = ids
        batch.segments[row, : len(ids)] = 1
        for index, (first, last) in enumerate(encoding.offsets[:ROW_LENGTH]):
            if any(start <= first and last <= end for start, end in dialogue.learned):
                batch.weights[row, index] = 1
        places = np.flatnonzero(np.array(encoding.ids) == tokenizer.token_to_id(IMAGE))
        rows = next_image * cells + np.arange(len(places))
        kept = places < ROW_LENGTH
        batch.sources[row, places[kept]] = rows[kept]
        for scene in dialogue.scenes:
            _describe_image(batch, next_image, scene, source)
            next_image += 1
    return batch


def _empty(num_rows: int) -> ImageBatch:
    rows, cells = (num_rows, ROW_LENGTH), (NUM_IMAGES, CELLS_OF_A_SIDE**2)
    return ImageBatch(
        token_ids=np.zeros(rows, np.int32),
        segments=np.zeros(rows, np.int32),
        weights=np.zeros(rows, np.float32),
        sources=np.full(rows, -1, np.int32),
        patches=np.zeros((NUM_IMAGES, PATCHES_OF_A_SIDE**2, 3 * PATCH * PATCH), np.uint8),
        kinds=np.zeros(cells, np.int32),
        colours=np.zeros(cells, np.int32),
        places=np.zeros(cells, np.int32),
        centres=np.zeros(cells, np.int32),
    )


def _describe_image(batch: ImageBatch, index: int, scene: Scene, source: Source) -> None:
    width = source.pick(SIDES)
    height = width if source.chance(0.8) else source.pick(SIDES)
    image = draw_image(scene, width, height)
    batch.patches[index] = patches_of(image)
    _label_cells(batch, index, scene)


def patches_of(image: Image.Image) -> np.ndarray:
    """Patch rows `[N, 3 PATCH PATCH]` of an image, squeezed to the model's size."""
    if image.size != (SIDE, SIDE):
        image = image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    side = PATCHES_OF_A_SIDE
    pixels = np.asarray(image).reshape(side, PATCH, side, PATCH, 3)
    return pixels.transpose(0, 2, 4, 1, 3).reshape(side * side, -1)


def _label_cells(batch: ImageBatch, index: int, scene: Scene) -> None:
    """Labels each cell with the thing at its middle, or whose centre is in it."""
    side = CELLS_OF_A_SIDE
    middles = (np.arange(side) + 0.5) / side
    for thing in scene.things:
        distances = np.hypot(middles[None, :] - thing.x, middles[:, None] - thing.y)
        is_inside = distances < 0.9 * thing.radius
        row, column = int(thing.y * side), int(thing.x * side)
        is_inside[row, column] = True
        cells = np.flatnonzero(is_inside)
        batch.kinds[index, cells] = 1 + KINDS.index(thing.kind)
        batch.colours[index, cells] = 1 + list(COLOURS).index(thing.colour)
        batch.places[index, cells] = 1 + ninth_of(thing)
        batch.centres[index, row * side + column] = 1
