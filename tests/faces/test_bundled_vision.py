"""The bundled model that sees: right answers about drawn shapes, and about no image."""

import pytest

from cadenza import LLM
from training.vision.scenes import COLOURS, Scene, Thing, draw_image


def thing(kind: str, colour: str, x: float, y: float, radius: float) -> Thing:
    rgb = COLOURS[colour]
    return Thing(kind=kind, colour=colour, x=x, y=y, radius=radius, angle=0.0, rgb=rgb)


SCENE = Scene(
    background="white",
    background_rgb=COLOURS["white"],
    things=(thing("circle", "red", 0.25, 0.3, 0.16), thing("square", "blue", 0.72, 0.6, 0.2)),
)
ANSWERS = {
    "What colour is the circle?": "red",
    "What shape is blue?": "square",
    "How many shapes are there?": "2",
    "Describe the image.": "A red circle and a blue square on a white background.",
}


@pytest.mark.slow
def test_the_bundled_model_answers_about_an_image_and_says_where_there_is_none():
    image = {"type": "image", "image": draw_image(SCENE, 320, 320)}
    asked = [
        [{"role": "user", "content": [image, {"type": "text", "text": text}]}] for text in ANSWERS
    ]
    llm = LLM("bundled-vision", max_num_seqs=5)
    try:
        outputs = llm.chat([*asked, [{"role": "user", "content": "What colour is the circle?"}]])
    finally:
        llm.close()
    assert [each.outputs[0].text for each in outputs] == [*ANSWERS.values(), "There is no image."]
