"""`cadenza serve` of the bundled model that sees: right answers in the APIs, and what they cost."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.serve_process import ServeProcess, serve_process
from training.vision.scenes import COLOURS, Scene, Thing, draw_image

IMAGE_TOKENS = 16
SIZES = ("--max-num-seqs", "4", "--max-model-len", "512")


@pytest.fixture(scope="module")
def serving() -> Iterator[ServeProcess]:
    with serve_process(Path("bundled-vision"), *SIZES) as found:
        found.wait_ready()
        yield found


def picture(kind: str, colour: str) -> str:
    """A PNG of one shape, in base64."""
    rgb = COLOURS[colour]
    shape = Thing(kind=kind, colour=colour, x=0.5, y=0.5, radius=0.2, angle=0.0, rgb=rgb)
    scene = Scene(background="white", background_rgb=COLOURS["white"], things=(shape,))
    file = io.BytesIO()
    draw_image(scene, 256, 256).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.slow
def test_the_openai_client_is_told_what_an_image_shows(serving: ServeProcess):
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none")
    image = f"data:image/png;base64,{picture('circle', 'red')}"
    parts: list[Any] = [
        {"type": "image_url", "image_url": {"url": image}},
        {"type": "text", "text": "What colour is the circle?"},
    ]
    answer = client.chat.completions.create(
        model="bundled-vision", messages=[{"role": "user", "content": parts}]
    )
    assert answer.choices[0].message.content == "red"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > IMAGE_TOKENS


@pytest.mark.slow
def test_a_message_of_anthropics_api_is_answered_alike(serving: ServeProcess):
    source = {"type": "base64", "media_type": "image/png", "data": picture("square", "blue")}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": "What shape is this?"}]
    body = {
        "model": "bundled-vision",
        "max_tokens": 16,
        "messages": [{"role": "user", "content": parts}],
    }
    answer = serving.post("/v1/messages", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"][0]["text"] == "square"
    assert answer.json()["usage"]["input_tokens"] > IMAGE_TOKENS


@pytest.mark.slow
def test_without_an_image_the_answer_says_so(serving: ServeProcess):
    body = {
        "model": "bundled-vision",
        "messages": [{"role": "user", "content": "What colour is the circle?"}],
    }
    answer = serving.post("/v1/chat/completions", body)
    assert answer.json()["choices"][0]["message"]["content"] == "There is no image."
