"""An endpoint of another API than OpenAI's is one module: nothing else knows of it."""

import asyncio
import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from cadenza.frontend.prepared_request import AnyPrompt
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.outputs import CompletionOutput, RequestOutput
from cadenza.server.calls.endpoint import AnswerHead, GeneratingEndpoint, PromptInfo, StreamEncoder
from cadenza.server.errors import ApiError, invalid_value
from cadenza.server.fields.body import optional, required
from cadenza.server.fields.types import OneOf, String
from cadenza.server.generation import Generation
from cadenza.server.http.exchange import OPENAI, Exchange
from cadenza.server.openai.choices import ChoicesRequest
from cadenza.server.openapi import TEXT, AnswerSchema, describe_api, object_of
from tests.server.harness import TIMEOUT_S, options, serving_one
from tests.server.scripted_engine import ScriptedEngine


class InputRequest(ChoicesRequest):
    prompt_field = "input"

    input = required(String(min_chars=1, max_chars=100), "The text to go on with.")
    tone = optional(OneOf(("plain", "loud")), "How the answer is written.", default="plain")

    @property
    def num_top_logprobs(self) -> int | None:
        return None

    def check_fields(self) -> None:
        if self.tone == "loud" and self.n > 1:
            raise invalid_value("tone loud goes with n = 1", "tone")

    def prompts(self, text: TextFrontend) -> list[AnyPrompt]:
        return [self.input]

    def encoder(self, head: AnswerHead) -> StreamEncoder:
        return EventEncoder(head, is_loud=self.tone == "loud")


class EventEncoder(StreamEncoder):
    """Named events, and no [DONE]."""

    def __init__(self, head: AnswerHead, *, is_loud: bool) -> None:
        super().__init__(head)
        self._is_loud = is_loud

    def opening(self) -> bytes:
        return b"event: start\ndata: {}\n\n"

    def take(self, prompt: int, request: PromptInfo, outputs: Sequence[CompletionOutput]) -> bytes:
        return b"".join(
            b"event: delta\ndata: " + self._shown(output.text) + b"\n\n" for output in outputs
        )

    def closing(self) -> bytes:
        return b"event: end\ndata: {}\n\n"

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error.body() + b"\n\n"

    def whole(self, outputs: Iterable[RequestOutput]) -> bytes:
        texts = [each.text for output in outputs for each in output.outputs]
        return b'{"output":' + self._shown("".join(texts)) + b"}"

    def _shown(self, text: str) -> bytes:
        return json.dumps(text.upper() if self._is_loud else text).encode()


INPUTS = GeneratingEndpoint(
    "inputs",
    "/v1/inputs",
    "Go on with an input.",
    InputRequest,
    AnswerSchema(name="Output", schema=object_of({"output": TEXT})),
)


async def handled(
    engine: ScriptedEngine,
    text: TextFrontend,
    body: dict[str, Any],
    endpoint: GeneratingEndpoint = INPUTS,
) -> bytes:
    """The bytes of an answer. Raises ApiError, as the app is told."""
    service = serving_one(engine, text)
    service.start()
    sent: list[bytes] = []
    received = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> dict[str, Any]:
        if not received:
            await asyncio.sleep(TIMEOUT_S)
        return received.pop()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    exchange = Exchange(
        scope={"type": "http", "headers": [(b"content-type", b"application/json")]},
        receive=receive,
        send=send,
        limits=service.options.limits,
        bodies=service.bodies,
        request_id="1",
        tenant="",
    )
    try:
        await Generation(service, endpoint)(exchange)
    finally:
        await service.stop()
    return b"".join(sent)


def ask(engine: ScriptedEngine, text: TextFrontend, **fields: Any) -> bytes:
    return asyncio.run(handled(engine, text, {"input": "the fox", "max_tokens": 2, **fields}))


def test_a_new_endpoint_answers_in_its_own_shape(
    engine: ScriptedEngine, text: TextFrontend
) -> None:
    assert ask(engine, text, tone="loud") == b'{"output":"THE QUICK"}'
    assert engine.submitted[-1].prompt_token_ids == text.encode("the fox")


def test_a_new_endpoint_streams_its_own_events(engine: ScriptedEngine, text: TextFrontend) -> None:
    events = ask(engine, text, stream=True).decode()
    assert events.startswith("event: start\ndata: {}\n\nevent: delta\n")
    assert events.endswith("event: end\ndata: {}\n\n")
    assert "[DONE]" not in events


def test_a_new_endpoint_ends_a_failed_stream_in_its_own_way(
    engine: ScriptedEngine, text: TextFrontend
) -> None:
    engine.failing = "step_failed"
    events = ask(engine, text, stream=True)
    assert b"event: error\ndata: " in events
    assert b"step_failed" in events
    assert b"event: end" not in events


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": "x", "tone": "odd"}, "tone"),
        ({"input": "x", "tone": "loud", "n": 2}, "tone"),
        ({"input": "x", "temperature": -1}, "temperature"),
        ({"input": "x", "tones": 1}, "tones"),
    ],
)
def test_a_new_endpoints_fields_are_checked(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        INPUTS.read(json.dumps(body).encode(), options().limits)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_a_new_endpoints_fields_are_described() -> None:
    described = describe_api([INPUTS.route], lambda _: OPENAI, needs_key=True)
    operation = described["paths"]["/v1/inputs"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["input"]
    assert schema["properties"]["tone"]["default"] == "plain"
    assert "text/event-stream" in operation["responses"]["200"]["content"]
