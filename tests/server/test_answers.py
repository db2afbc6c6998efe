"""What is alike in all APIs that answer a conversation: equal prompts, streams that are the whole
answer, reasoning, calls, forms, marks, failures.
"""

import json
from typing import Any

import pytest

from cadenza.frontend.text_frontend import TextFrontend
from cadenza.outputs import OutputPart
from tests.server.bodies import PATHS, USER, read
from tests.server.dialects import (
    DIALECTS,
    body_of,
    encoder_of,
    events_of,
    form_of,
    output_of,
    post,
    sample,
    stream,
    told,
    told_in_stream,
    tools_of,
)
from tests.server.harness import RunningServer
from tests.server.scripted_engine import ScriptedEngine

SYSTEM = {"role": "system", "content": "quick"}
TURN = {"role": "assistant", "content": "brown"}
NO_MEMBERS = {"type": "object", "properties": {}, "additionalProperties": False}
NOW = {"name": "now", "description": "The time.", "parameters": NO_MEMBERS}
OTHERS = DIALECTS[1:]


@pytest.mark.parametrize("name", OTHERS)
def test_the_engine_is_asked_what_a_chat_asks(
    server: RunningServer, engine: ScriptedEngine, name: str
) -> None:
    fields = {"top_k": 4, "seed": 7}
    messages = [SYSTEM, USER, TURN, {"role": "user", "content": "jumps"}]
    chat = post(server, "chat", body_of("chat", messages, stop=["zz"], **fields))
    stop = "stop_sequences" if name == "messages" else "stop"
    asked = body_of(name, messages, **fields, **{stop: ["zz"]})
    if name == "messages":
        asked |= {"messages": messages[1:], "system": SYSTEM["content"]}
    answer = post(server, name, asked)
    first, second = engine.submitted
    assert first == second
    assert told(name, answer) == told("chat", chat)


@pytest.mark.parametrize("name", ["chat", "messages", "ollama_chat"])
def test_the_last_message_of_an_assistant_is_continued(
    server: RunningServer, engine: ScriptedEngine, text: TextFrontend, name: str
) -> None:
    more = {"continue_final_message": True} if name == "chat" else {}
    post(server, name, {**body_of(name, [USER, TURN]), **more})
    prompt = text.decode(engine.submitted[-1].prompt_token_ids)
    assert prompt == "<|user|>the fox<|end|><|assistant|>brown"


@pytest.mark.parametrize("name", DIALECTS)
def test_the_parts_of_a_stream_are_the_whole_answer(scripted: RunningServer, name: str) -> None:
    body = body_of(name, [USER], 8)
    whole = told(name, post(scripted, name, body))
    assert len(whole.content.split()) == 8
    assert told_in_stream(name, stream(scripted, name, body)) == whole


@pytest.mark.parametrize("name", DIALECTS)
def test_reasoning_and_calls_have_their_places_streamed_and_whole(name: str) -> None:
    samples = [
        sample(OutputPart("reasoning", "two and")),
        sample(OutputPart("reasoning", " three"), OutputPart("content", "I ")),
        sample(OutputPart("content", "add.")),
        sample(OutputPart("tool_call", '{"a": 2}', name="add")),
        sample(OutputPart("tool_call", '{"a": 3}', name="add"), end="stop"),
    ]
    request, output = read(name), output_of(samples)
    streaming = encoder_of(request)
    made = streaming.opening()
    for each in samples:
        made += streaming.take(0, output, [each])
    made += streaming.closing()
    whole = told(name, json.loads(encoder_of(request).whole([output])))
    assert (whole.reasoning, whole.content) == ("two and three", "I add.")
    assert whole.calls == [("add", {"a": 2}), ("add", {"a": 3})]
    assert told_in_stream(name, made) == whole


@pytest.mark.parametrize("is_valid", [True, False, None])
@pytest.mark.parametrize("name", DIALECTS)
def test_an_answer_that_was_checked_by_its_schema_is_marked_at_its_end(
    name: str, is_valid: bool | None
) -> None:
    samples = [sample(OutputPart("content", "1"), end="stop", is_valid=is_valid)]
    request, output = read(name), output_of(samples)
    streaming = encoder_of(request)
    opening = streaming.opening()
    made = streaming.take(0, output, samples) + streaming.closing()
    mark = b"" if is_valid is None else b'"x_schema_valid":' + json.dumps(is_valid).encode()
    assert b"x_schema_valid" not in opening
    for shown in (made, encoder_of(request).whole([output])):
        assert shown.count(b"x_schema_valid") == (is_valid is not None)
        assert mark in shown


@pytest.mark.parametrize("name", DIALECTS)
def test_the_answer_has_the_form_that_was_asked_for(bundled: RunningServer, name: str) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = form_of(name, {**schema, "additionalProperties": False})
    answer = post(bundled, name, {**body_of(name, [USER], 40), **form})
    assert json.loads(told(name, answer).content).keys() == {"ok"}


CHOICES: list[tuple[str, Any]] = [
    ("chat", "required"),
    ("chat", {"type": "function", "function": {"name": "now"}}),
    ("responses", "required"),
    ("responses", {"type": "function", "name": "now"}),
    ("messages", {"type": "any", "disable_parallel_tool_use": True}),
    ("messages", {"type": "tool", "name": "now", "disable_parallel_tool_use": True}),
]


@pytest.mark.parametrize(("name", "choice"), CHOICES)
def test_a_call_that_is_asked_for_is_made_streamed_and_whole(
    bundled: RunningServer, name: str, choice: Any
) -> None:
    alone = {} if name == "messages" else {"parallel_tool_calls": False}
    body = body_of(name, [USER], 60, temperature=0, **alone)
    body |= {"tools": tools_of(name, NOW), "tool_choice": choice}
    whole = told(name, post(bundled, name, body))
    assert whole.calls == [("now", {})]
    events = [*events_of(stream(bundled, name, body))]
    if name == "chat":
        assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert told_in_stream(name, stream(bundled, name, body)) == whole


FAILED: dict[str, tuple[str, Any]] = {
    "chat": ("error", {"code": "step_failed"}),
    "responses": ("response", {"status": "failed"}),
    "messages": ("error", {"type": "api_error"}),
    "ollama_chat": ("error", "the computation failed; the server's log has the cause"),
}


@pytest.mark.parametrize("name", DIALECTS)
def test_a_failed_stream_ends_with_what_says_so(
    server: RunningServer, engine: ScriptedEngine, name: str
) -> None:
    engine.failing = "step_failed"
    body = body_of(name, [USER])
    *_, last = events_of(stream(server, name, body))
    member, wanted = FAILED[name]
    assert wanted == last[member] or wanted.items() <= last[member].items()
    assert server.post(PATHS[name], body).status_code == 500
