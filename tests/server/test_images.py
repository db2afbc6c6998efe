"""Images in every API: one prompt whatever it came by, usage, errors, limits."""

import base64
import json
import logging
import os
import signal
from collections.abc import Generator, Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from cadenza.config import ImageLimits
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.media.fetching import AllowedHosts, MediaFetcher
from cadenza.request import Request
from cadenza.server.limits import ServerLimits
from tests.faces.seeing import IMAGE, seeing_checkpoint
from tests.media.corpus import animated, data_url, header_bomb, quarters, saved
from tests.media.processors import GridImages
from tests.server import dialects
from tests.server.bodies import PATHS
from tests.server.dialects import ending, post, told_error
from tests.server.harness import RunningServer, options, running_server
from tests.server.scripted_engine import CAPABILITIES, ScriptedEngine

Json = dict[str, Any]
PNG = saved(quarters(), "PNG")
TALL = saved(quarters(8, 24), "PNG")
URL, TALL_URL = data_url(PNG), data_url(TALL)
REMOTE = "https://images.test/a.png"
DIALECTS = ("chat", "responses", "messages", "ollama_chat", "ollama_generate")
HANG_WIDTH = 40
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"


class FakeFetcher(MediaFetcher):
    """Has one file for every URL of its host."""

    def __init__(self) -> None:
        super().__init__(AllowedHosts(["images.test"]))
        self.fetched: list[str] = []

    async def fetch(self, url: str, try_add: Any) -> bytes:
        self.fetched.append(url)
        assert try_add(len(PNG))
        return PNG


@pytest.fixture(scope="module")
def seeing() -> TextFrontend:
    processor: Any = GridImages(hang_width=HANG_WIDTH)
    return TextFrontend(seeing_checkpoint(processor))


@pytest.fixture(scope="module")
def fetcher() -> FakeFetcher:
    return FakeFetcher()


def engine_of(text: TextFrontend) -> ScriptedEngine:
    return ScriptedEngine(
        text.encode("the fox"),
        vocab_size=100_000,
        capabilities=CAPABILITIES | {"attachments"},
        images=ImageLimits(token_id=image_token_of(text), num_slots=4096),
    )


def image_token_of(text: TextFrontend) -> int:
    assert text.tokenizer is not None
    found = text.tokenizer.id_of(IMAGE)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def server(seeing: TextFrontend, fetcher: FakeFetcher) -> Generator[RunningServer]:
    with running_server(engine_of(seeing), seeing, options(fetcher=fetcher)) as running:
        yield running


def source_of(url: str) -> Json:
    if not url.startswith("data:"):
        return {"type": "url", "url": url}
    head, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "base64", "media_type": head, "data": data}


def parts_of(name: str, *parts: str) -> list[Json]:
    """Parts of a content in an API; those with a colon are URLs of images."""
    made: list[Json] = []
    for part in parts:
        if ":" not in part:
            kind = "input_text" if name == "responses" else "text"
            made.append({"type": kind, "text": part})
        elif name == "responses":
            made.append({"type": "input_image", "image_url": part})
        elif name == "messages":
            made.append({"type": "image", "source": source_of(part)})
        else:
            made.append({"type": "image_url", "image_url": {"url": part}})
    return made


def body_of(name: str, *parts: str) -> Json:
    """A user's message with images and texts; Ollama's has its images in front."""
    message: Json = {"role": "user", "content": parts_of(name, *parts)}
    if name.startswith("ollama"):
        message["content"] = "\n".join(part for part in parts if ":" not in part)
        message["images"] = [part.rpartition(",")[2] for part in parts if ":" in part]
    body = dialects.body_of(name, [message], 4)
    return {**body, "images": message["images"]} if name == "ollama_generate" else body


def asked(server: RunningServer, name: str, body: Json) -> Request:
    """The request to the engine that a body becomes."""
    engine: Any = server.service.models.first.engine
    answer = server.post(PATHS[name], body)
    assert answer.status_code == 200, answer.text
    return engine.submitted[-1]


def refused(server: RunningServer, name: str, body: Json) -> str:
    answer = server.post(PATHS[name], body)
    assert answer.status_code == 400, answer.text
    return told_error(name, answer.json()).message


def payloads(request: Request) -> list[tuple[int, int, int, bytes]]:
    return [(each.start, each.rows, each.columns, each.payload) for each in request.attachments]


@pytest.mark.parametrize("name", DIALECTS)
def test_an_image_is_the_same_prompt_by_every_api(server: RunningServer, name: str):
    wanted = asked(server, "chat", body_of("chat", URL, "What is it?"))
    ((start, rows, columns, pixels),) = payloads(wanted)
    assert (rows, columns, pixels) == (2, 4, quarters().tobytes())
    assert len({*wanted.prompt_token_ids[start : start + 8]}) == 1
    found = asked(server, name, body_of(name, URL, "What is it?"))
    assert found.prompt_token_ids == wanted.prompt_token_ids
    assert found.attachments == wanted.attachments


@pytest.mark.parametrize("name", ["chat", "responses", "messages"])
def test_images_stand_where_the_parts_have_them(server: RunningServer, name: str):
    found = asked(server, name, body_of(name, "one", URL, "two", "three", TALL_URL, URL))
    sizes = [(rows, columns) for _, rows, columns, _ in payloads(found)]
    assert sizes == [(2, 4), (3, 1), (2, 4)]
    text: TextFrontend = server.service.models.first.text
    shown = text.decode(found.prompt_token_ids)
    assert shown.count("<image>") == 8 + 3 + 8
    assert shown.index("one") < shown.index("<image>") < shown.index("two\nthree")
    first, _, third = found.attachments
    assert (first.digest, first.payload) == (third.digest, third.payload)


@pytest.mark.parametrize(
    ("part", "columns"),
    [
        ({"type": "image_url", "image_url": URL}, 4),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "low"}}, 1),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "high"}}, 4),
        ({"type": "image_url", "image_url": URL, "detail": "low"}, 1),
        ({"type": "image_url", "image_url": {"url": URL, "detail": None}, "uuid": "x"}, 4),
        ({"type": "input_image", "image_url": URL, "detail": "low"}, 1),
        ({"type": "input_image", "image_url": URL, "detail": "original", "file_id": None}, 4),
    ],
)
def test_chats_take_the_forms_that_clients_send(server: RunningServer, part: Json, columns: int):
    message = {"role": "user", "content": [part, "What is it?"]}
    found = asked(server, "chat", {"messages": [message], "max_tokens": 2})
    assert [each.columns for each in found.attachments] == [columns]


@pytest.mark.parametrize("name", ["chat", "responses", "messages"])
def test_a_tool_may_give_an_image(server: RunningServer, name: str):
    parts = parts_of(name, "a picture", URL)
    match name:
        case "chat":
            function = {"name": "look", "arguments": "{}"}
            call = {"id": "c", "type": "function", "function": function}
            body: Json = {
                "messages": [
                    {"role": "user", "content": "Look."},
                    {"role": "assistant", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "c", "content": parts},
                ]
            }
        case "responses":
            body = {
                "input": [
                    {"role": "user", "content": "Look."},
                    {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": parts},
                ]
            }
        case _:
            call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
            result = {"type": "tool_result", "tool_use_id": "c", "content": parts}
            body = {
                "max_tokens": 4,
                "messages": [
                    {"role": "user", "content": "Look."},
                    {"role": "assistant", "content": [call]},
                    {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
                ],
            }
    found = asked(server, name, body)
    assert [each.payload for each in found.attachments] == [quarters().tobytes()]


def test_a_response_goes_on_from_a_conversation_with_images(server: RunningServer):
    body = {**body_of("responses", URL, "What is it?"), "store": True}
    first = server.post(PATHS["responses"], body).json()
    items = server.get(f"/v1/responses/{first['id']}/input_items").json()["data"]
    assert items[0]["content"][0] == {"type": "input_image", "image_url": URL, "detail": "auto"}
    body = {**body_of("responses", TALL_URL, "And this?"), "previous_response_id": first["id"]}
    found = asked(server, "responses", body)
    assert [each.payload for each in found.attachments] == [
        quarters().tobytes(),
        quarters(8, 24).tobytes(),
    ]


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("chat", "messages[0].content[3]"),
        ("responses", "input[0].content[3]"),
        ("messages", "messages[0].content[3]"),
        ("ollama_chat", "messages[0].images[1]"),
        ("ollama_generate", "images[1]"),
    ],
)
@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (header_bomb(), "it has 20000 x 20000 pixels, over the 25,000,000 that are allowed"),
        (animated("GIF"), "it is an animated GIF; send one frame"),
        (PNG[:-5], "the file is cut off or damaged"),
        (b"<svg/>", "its bytes are SVG or XML; JPEG, PNG, WebP and GIF are allowed"),
        (saved(quarters(), "JPEG")[:-40], "the file is cut off or damaged"),
    ],
    ids=["bomb", "animated", "header", "svg", "pixels"],
)
def test_a_bad_image_is_named_with_its_place_and_fault(
    server: RunningServer, name: str, where: str, data: bytes, problem: str
):
    found = refused(server, name, body_of(name, "a", URL, "b", data_url(data)))
    assert found.startswith(f"image 2 ({where}): {problem}"), found


def test_an_error_names_the_field(server: RunningServer):
    body = body_of("chat", data_url(b"no image"))
    error = server.post(PATHS["chat"], body).json()["error"]
    assert error["param"] == "messages[0].content[0]"
    assert error["code"] == "invalid_value"


@pytest.mark.parametrize("name", ["chat", "responses", "messages"])
@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("https://evil.test/a.png", "not one of this server's --allowed-media-domains"),
        ("http://images.test/a.png", "allowed are data: URLs, and https://HOST/PATH"),
        ("file:///etc/passwd", "allowed are data: URLs, and https://HOST/PATH"),
        ("https://images.test:8443/a.png", "not one of this server's"),
        ("https://me@images.test/a.png", "allowed are data: URLs, and https://HOST/PATH"),
    ],
)
def test_a_url_of_another_place_is_refused(
    server: RunningServer, fetcher: FakeFetcher, name: str, url: str, problem: str
):
    before = len(fetcher.fetched)
    assert problem in refused(server, name, body_of(name, REMOTE, url))
    assert len(fetcher.fetched) == before


@pytest.mark.parametrize("name", ["chat", "responses", "messages"])
def test_a_url_of_an_allowed_host_is_fetched_once(
    server: RunningServer, fetcher: FakeFetcher, name: str
):
    before = len(fetcher.fetched)
    found = asked(server, name, body_of(name, REMOTE, "What is it?"))
    assert [each.payload for each in found.attachments] == [quarters().tobytes()]
    assert fetcher.fetched[before:] == [REMOTE]


def test_nine_images_are_refused(server: RunningServer):
    found = refused(server, "chat", body_of("chat", *[URL] * 9))
    assert "image 9 (messages[0].content[8]): a request may have at most 8 images" in found


@pytest.mark.parametrize("name", DIALECTS)
def test_a_model_that_does_not_see_refuses_images(scripted: RunningServer, name: str):
    """And fetches none: it has no fetcher."""
    for url in (URL, *([REMOTE] if not name.startswith("ollama") else [])):
        assert "takes no images" in refused(scripted, name, body_of(name, url, "What is it?"))


@pytest.mark.parametrize("name", ["chat", "messages"])
def test_tokens_are_counted_by_the_header_alone(server: RunningServer, name: str):
    body = body_of(name, TALL_URL, "What is it?")
    wanted = len(asked(server, name, body).prompt_token_ids)
    # Its pixels are damaged, so that only the header can have been read.
    damaged = bytearray(TALL)
    damaged[-20:-12] = bytes(8)
    counted = body_of(name, data_url(bytes(damaged)), "What is it?")
    if name == "chat":
        del counted["max_tokens"]
        assert server.post("/tokenize", counted).json()["count"] == wanted
    else:
        found = server.post("/v1/messages/count_tokens", counted).json()
        assert found["input_tokens"] == wanted


def test_counting_fetches_and_names_what_is_wrong(server: RunningServer):
    counted = {"messages": body_of("chat", REMOTE)["messages"]}
    assert server.post("/tokenize", counted).status_code == 200
    bad = {"messages": body_of("chat", URL, data_url(b"?"))["messages"]}
    answer = server.post("/tokenize", bad)
    assert answer.status_code == 400
    assert "image 2 (messages[0].content[1])" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["chat", "responses", "messages"])
def test_usage_counts_the_tokens_of_images_and_else_has_no_count(server: RunningServer, name: str):
    details = "prompt_tokens_details" if name == "chat" else "input_tokens_details"

    def counted(*parts: str) -> tuple[int, int | None]:
        answer = post(server, name, body_of(name, *parts))
        found = answer["usage"].get(details, {}).get("image_tokens")
        return ending(name, answer).num_prompt_tokens, found

    num_tokens, num_of_images = counted(URL, TALL_URL, "What is it?")
    assert num_of_images == 8 + 3
    assert counted("What is it?") == (num_tokens - 8 - 3, None)


def test_models_say_whether_they_take_images(server: RunningServer, scripted: RunningServer):
    for each, inputs in ((server, ["text", "image"]), (scripted, ["text"])):
        (card,) = each.get("/v1/models").json()["data"]
        assert card["input_modalities"] == inputs


def test_an_image_that_takes_long_holds_up_nobody(server: RunningServer):
    stuck = data_url(saved(quarters(HANG_WIDTH, 8), "PNG"))
    request = json.dumps(body_of("chat", stuck)).encode()
    pool = server.service.images.pool
    with server.connect() as connection:
        connection.sendall(HEAD + b"\r\ncontent-length: %d\r\n\r\n" % len(request) + request)
        while not pool.pids:
            assert server.get("/live").status_code == 200
        # Others go on: without images, and with some.
        asked(server, "chat", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2})
        asked(server, "chat", body_of("chat", URL))
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
    asked(server, "chat", body_of("chat", URL, TALL_URL))


def test_a_model_that_sees_takes_larger_bodies(server: RunningServer, scripted: RunningServer):
    large = saved(quarters(1500, 1500), "PNG", compress_level=0)
    assert len(large) > 4 << 20
    part = {"type": "image_url", "image_url": {"url": data_url(large), "detail": "low"}}
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    assert asked(server, "chat", body).attachments[0].width == 1500
    assert scripted.post(PATHS["chat"], body).status_code == 413
    beyond = b"\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % ((64 << 20) + 1)
    assert server.raw(HEAD + beyond).startswith(b"HTTP/1.1 413")


def test_the_bound_of_bodies_is_below_that_of_all_of_them():
    limits = ServerLimits(max_bodies_bytes=32 << 20)
    assert limits.for_images().max_body_bytes == 32 << 20
    assert ServerLimits().for_images().max_body_bytes == 64 << 20


def test_no_line_of_the_log_has_anything_of_an_image(
    server: RunningServer, caplog: pytest.LogCaptureFixture, lines: list[Json]
):
    caplog.set_level(logging.DEBUG)
    encoded = base64.b64encode(PNG).decode()
    asked(server, "chat", body_of("chat", URL, "What is it?"))
    refused(server, "chat", body_of("chat", data_url(PNG[:-5])))
    assert len(lines) == 2
    logged = json.dumps(lines) + caplog.text
    assert encoded[:24] not in logged
    assert "data:" not in logged


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openais_client_sends_images_to_both_of_its_apis(client: openai.OpenAI):
    image: Any = {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}
    chat: Any = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}]
    answer = client.chat.completions.create(model="scripted", max_tokens=4, messages=chat)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    counted: Any = answer.usage.prompt_tokens_details
    assert counted.image_tokens == 8

    def respond(url: str) -> Response:
        seen: Any = {"type": "input_image", "image_url": url, "detail": "auto"}
        asked: Any = [{"role": "user", "content": [seen]}]
        return client.responses.create(model="scripted", max_output_tokens=16, input=asked)

    assert respond(URL).output_text
    with pytest.raises(openai.BadRequestError, match=r"image 1 \(input\[0\]\.content\[0\]\): its"):
        respond("data:x")


def test_anthropics_client_sends_images(server: RunningServer):
    anthropic = pytest.importorskip("anthropic", reason="the client anthropic is not installed")
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        said: Any = [
            {"type": "image", "source": source_of(URL)},
            {"type": "image", "source": {"type": "url", "url": REMOTE}},
            {"type": "text", "text": "What are they?"},
        ]
        messages = [{"role": "user", "content": said}]
        answer = client.messages.create(model="scripted", max_tokens=4, messages=messages)
        assert answer.content[0].text
        counted = client.messages.count_tokens(model="scripted", messages=messages)
        assert counted.input_tokens == answer.usage.input_tokens > 16
        said[0]["source"] = source_of(data_url(PNG[:-5]))
        with pytest.raises(anthropic.BadRequestError, match=r"image 1 \(messages\[0\]\.content\["):
            client.messages.create(model="scripted", max_tokens=4, messages=messages)
