"""The drawn images and what is asked about them: true answers, and a split without overlap."""

from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from training.corpus.example import Split
from training.corpus.mixture import open_source
from training.vision.dialogues import IMAGE, make_batch, make_dialogue, patches_of
from training.vision.questions import NO_IMAGE, SHARES, ask, place_of, without_image
from training.vision.scenes import COLOURS, SIDE, Scene, Thing, draw_image, draw_scene
from training.vision.shape import CELLS_OF_A_SIDE, PATCH, PATCHES_OF_A_SIDE, VOCAB_SIZE
from training.vision.tokenizer import load_vision_tokenizer


def thing(kind: str, colour: str, x: float, y: float, radius: float = 0.13) -> Thing:
    return Thing(kind=kind, colour=colour, x=x, y=y, radius=radius, angle=0.0, rgb=COLOURS[colour])


SCENE = Scene(
    background="white",
    background_rgb=COLOURS["white"],
    things=(thing("circle", "red", 0.2, 0.2), thing("square", "blue", 0.75, 0.5, 0.2)),
)
TRUTHS = {
    "What colour is the circle?": "red",
    "What shape is blue?": "square",
    "How many shapes are there?": "2",
    "How many crosses are there?": "0",
    "Where is the circle?": "top left",
    "Where is the square?": "right",
    "What is left of the square?": "a red circle",
    "What is left of the circle?": "nothing",
    "Is the circle above the square?": "yes",
    "Is the square left of the circle?": "no",
    "Is the circle large or small?": "small",
    "How large is the square?": "large",
    "What colour is the background?": "white",
    "Is there a red circle?": "yes",
    "Is there a star?": "no",
    "What do you see?": "A red circle and a blue square on a white background.",
}


def test_questions_have_the_answers_of_the_scene():
    source = open_source(Split.TRAIN, "truths")
    asked = {each.text: each.answer for each in (ask(source, SCENE) for _ in range(8000))}
    assert {text: asked[text] for text in TRUTHS} == TRUTHS


def test_every_task_is_asked_about_scenes():
    source = open_source(Split.TRAIN, "tasks")
    tasks = {ask(source, draw_scene(source)).task for _ in range(400)}
    assert tasks == set(SHARES)


def test_a_place_near_a_line_between_two_is_not_asked_for():
    assert place_of(thing("star", "red", 0.5, 0.5)) == "centre"
    assert place_of(thing("star", "red", 0.32, 0.5)) is None


def test_what_is_shown_is_on_one_side_of_the_split_alone():
    shown: dict[Split, set[object]] = {}
    for split in Split:
        source = open_source(split, "sides")
        shown[split] = {draw_scene(source).content for _ in range(300)}
    assert not shown[Split.TRAIN] & shown[Split.HELD_OUT]


def test_an_image_has_the_colours_of_its_scene_where_the_things_are():
    image = draw_image(SCENE)
    assert image.size == (SIDE, SIDE)
    assert image.getpixel((int(0.2 * SIDE), int(0.2 * SIDE))) == COLOURS["red"]
    assert image.getpixel((int(0.75 * SIDE), int(0.5 * SIDE))) == COLOURS["blue"]
    assert image.getpixel((SIDE // 2, SIDE - 2)) == COLOURS["white"]


def test_patches_are_rows_of_a_channels_pixels():
    pixels = np.arange(SIDE * SIDE * 3, dtype=np.uint32).reshape(SIDE, SIDE, 3).astype(np.uint8)
    patch = patches_of(Image.fromarray(pixels))[PATCHES_OF_A_SIDE + 2].reshape(3, PATCH, PATCH)
    expected = pixels[PATCH : 2 * PATCH, 2 * PATCH : 3 * PATCH].transpose(2, 0, 1)
    np.testing.assert_array_equal(patch, expected)


def test_without_an_image_the_answer_says_so():
    source = open_source(Split.TRAIN, "none")
    answers = [without_image(source).answer for _ in range(200)]
    assert answers.count(NO_IMAGE) > 100
    assert len(set(answers)) == 3


def test_a_batch_names_a_row_of_its_images_for_each_placeholder():
    tokenizer = load_vision_tokenizer()
    batch = make_batch(tokenizer, Split.HELD_OUT, 1)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    is_placeholder = batch.token_ids == tokenizer.token_to_id(IMAGE)
    np.testing.assert_array_equal(batch.sources >= 0, is_placeholder)
    named = batch.sources[is_placeholder]
    np.testing.assert_array_equal(named, np.unique(named))
    assert named.max() < len(batch.patches) * CELLS_OF_A_SIDE**2
    assert not batch.weights[is_placeholder].any()
    assert batch.weights.any(axis=1).all()
    again = make_batch(tokenizer, Split.HELD_OUT, 1)
    np.testing.assert_array_equal(batch.patches, again.patches)


@pytest.mark.parametrize(
    "has_images", [lambda n: n == 0, lambda n: n == 1, lambda n: n == 2], ids=["none", "one", "two"]
)
def test_dialogues_have_no_image_one_or_two(has_images: Callable[[int], bool]):
    source = open_source(Split.TRAIN, "dialogues")
    dialogues = [make_dialogue(source, 2, max_turns=4) for _ in range(200)]
    assert any(has_images(len(each.scenes)) for each in dialogues)
    cells = CELLS_OF_A_SIDE**2
    assert all(each.text.count(IMAGE) == cells * len(each.scenes) for each in dialogues)
