"""The tokens of images in the usage of every API, and which models say that they take images."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import ImageLimits
from cadenza.frontend.text_frontend import TextFrontend
from tests.faces.seeing import IMAGE, seeing_checkpoint
from tests.media.corpus import data_url, quarters, saved
from tests.media.processors import GridImages
from tests.server.harness import RunningServer, running_server
from tests.server.scripted_engine import CAPABILITIES, ScriptedEngine

PNG = saved(quarters(), "PNG")
URL, BASE64 = data_url(PNG), base64.b64encode(PNG).decode()


@pytest.fixture(scope="module")
def face() -> TextFrontend:
    processor: Any = GridImages()
    return TextFrontend(seeing_checkpoint(processor))


@pytest.fixture(scope="module")
def server(face: TextFrontend) -> Iterator[RunningServer]:
    assert face.tokenizer is not None
    image_id = face.tokenizer.id_of(IMAGE)
    assert image_id is not None
    engine = ScriptedEngine(
        face.encode("the fox"),
        vocab_size=100_000,
        capabilities=CAPABILITIES | {"attachments"},
        images=ImageLimits(token_id=image_id, num_slots=4096),
    )
    with running_server(engine, face) as running:
        yield running


def usage_of(server: RunningServer, path: str, body: Any) -> Any:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]


def test_usage_counts_the_tokens_of_images_where_an_api_has_a_place(
    server: RunningServer, face: TextFrontend
):
    processor = face.prompts.image_processor
    assert processor is not None
    num_tokens = processor.plan(*quarters().size).num_tokens
    image = {"type": "image_url", "image_url": {"url": URL}}
    chat = {"messages": [{"role": "user", "content": [image, image]}], "max_tokens": 2}
    found = usage_of(server, "/v1/chat/completions", chat)
    assert found["prompt_tokens_details"]["image_tokens"] == 2 * num_tokens
    assert found["prompt_tokens"] > 2 * num_tokens

    own = {"role": "user", "content": [{"type": "input_image", "image_url": URL}]}
    found = usage_of(server, "/v1/responses", {"input": [own]})
    assert found["input_tokens_details"]["image_tokens"] == num_tokens

    source = {"type": "base64", "media_type": "image/png", "data": BASE64}
    block = {"role": "user", "content": [{"type": "image", "source": source}]}
    body = {"model": "scripted", "max_tokens": 2, "messages": [block]}
    found = usage_of(server, "/v1/messages", body)
    assert found["input_tokens_details"] == {"image_tokens": num_tokens}


def test_a_text_has_no_count_of_images(server: RunningServer):
    chat = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 2}
    found = usage_of(server, "/v1/chat/completions", chat)
    assert "image_tokens" not in found["prompt_tokens_details"]
    body = {"model": "scripted", **chat}
    assert "input_tokens_details" not in usage_of(server, "/v1/messages", body)


def test_models_say_whether_they_take_images(server: RunningServer):
    (card,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert card["input_modalities"] == ["text", "image"]
    blind = ScriptedEngine([1])
    with running_server(blind, TextFrontend(open_checkpoint(None))) as other:
        (card,) = httpx.get(f"{other.url}/v1/models").json()["data"]
    assert card["input_modalities"] == ["text"]
