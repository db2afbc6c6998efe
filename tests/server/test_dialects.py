"""One contract of all APIs that generate: equal requests to the engine, streams that are the whole
answer, stops, lengths, usage, reasoning, calls, forms, marks."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cadenza.frontend.text_frontend import TextFrontend
from cadenza.outputs import OutputPart
from tests.server.bodies import PATHS, USER, read
from tests.server.dialects import (
    CONVERSING,
    DIALECTS,
    Ending,
    body_of,
    encoder_of,
    ending,
    form_of,
    joined,
    output_of,
    post,
    sample,
    stream,
    told,
    told_error,
    told_in_stream,
    tools_of,
)
from tests.server.harness import RunningServer
from tests.server.scripted_engine import ScriptedEngine

SYSTEM = {"role": "system", "content": "quick"}
ASKED = {"role": "user", "content": "Once upon a time"}
TURN = {"role": "assistant", "content": "brown"}
NO_MEMBERS = {"type": "object", "properties": {}, "additionalProperties": False}
NOW = {"name": "now", "description": "The time.", "parameters": NO_MEMBERS}
LINES = "The quick brown fox jumps over the lazy dog, and a small red hen follows. "
each_dialect = pytest.mark.parametrize("name", DIALECTS)
each_conversing = pytest.mark.parametrize("name", CONVERSING)


@pytest.fixture(params=["scripted", "bundled"])
def either(request: pytest.FixtureRequest) -> RunningServer:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("name", CONVERSING[1:])
def test_the_engine_is_asked_what_a_chat_asks(
    server: RunningServer, engine: ScriptedEngine, name: str
) -> None:
    fields = {"top_k": 4, "seed": 7, "stop": ["zz"]}
    messages = [SYSTEM, USER, TURN, {"role": "user", "content": "jumps"}]
    chat = post(server, "chat", body_of("chat", messages, **fields))
    asked = body_of(name, messages, **fields)
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


@each_dialect
@pytest.mark.parametrize("fields", [{"seed": 7}, {"temperature": 0.0}], ids=str)
def test_the_parts_of_a_stream_are_the_whole_answer(
    either: RunningServer, name: str, fields: dict[str, Any]
) -> None:
    body = body_of(name, [ASKED], 24, **fields)
    whole, streamed = post(either, name, body), joined(name, stream(either, name, body))
    assert told(name, streamed) == told(name, whole)
    assert len(told(name, whole).content) > 9
    ends = [replace(ending(name, each), cached=None) for each in (whole, streamed)]
    assert ends[0] == ends[1]
    assert (ends[0].num_tokens < 24) == (ends[0].reason == "stop")


@each_dialect
def test_an_answer_ends_before_one_of_up_to_64_stop_strings(
    either: RunningServer, name: str
) -> None:
    def asked(stops: Sequence[str]) -> dict[str, Any]:
        return body_of(name, [ASKED], 24, temperature=0.0, stop=stops)

    text = told(name, post(either, name, asked([]))).content
    others, stop = [f"{place:02} " + "x" * 253 for place in range(63)], text[5:9]
    for stops in ([stop], [*others, stop]):
        whole = post(either, name, asked(stops))
        assert told(name, whole).content == text[: text.index(stop)]
        assert ending(name, whole).reason == "stop"
        assert stopped_by(name, whole) in (stop, None)
        assert told_in_stream(name, stream(either, name, asked(stops))) == told(name, whole)
    refused = either.post(PATHS[name], asked([*others, "y", "z"]))
    assert refused.status_code == 400
    assert "from 0 to 64 are allowed" in told_error(name, refused.json()).message


def stopped_by(name: str, answer: dict[str, Any]) -> str | None:
    """None where the API does not tell."""
    if name == "messages":
        assert answer["stop_reason"] == "stop_sequence"
        return answer["stop_sequence"]
    return answer["choices"][0]["stop_reason"] if "choices" in answer else None


@each_dialect
def test_an_answer_without_a_bound_goes_to_the_end_of_the_context(
    scripted: RunningServer, name: str
) -> None:
    end = ending(name, post(scripted, name, body_of(name, [USER], -1)))
    assert (end.reason, end.num_prompt_tokens + end.num_tokens) == ("length", 256)


@pytest.mark.parametrize("name", ["chat", "completions", "responses", "messages"])
def test_usage_says_that_a_prompt_is_new_then_found_then_differs(
    bundled: RunningServer, name: str
) -> None:
    """Each API has a salt of its own."""

    def asked(text: str) -> tuple[Ending, dict[str, Any] | None]:
        user = {"role": "user", "content": text}
        answer = post(bundled, name, body_of(name, [user], 1, cache_salt=name))
        return ending(name, answer), miss_of(name, answer["usage"])

    end, miss = asked(LINES * 3)
    assert (end.cached, miss) == (0, {"shared_tokens": 0, "reason": "new"})
    end, miss = asked(LINES * 3)
    assert miss is None
    assert end.cached is not None
    assert end.cached > end.num_prompt_tokens // 2
    end, miss = asked((LINES * 3).replace("hen", "cat"))
    assert miss is not None
    assert miss["reason"] == "differs"
    assert (end.cached or 0) <= miss["shared_tokens"] < end.num_prompt_tokens
    assert miss["shared_tokens"] > 5


def miss_of(name: str, usage: dict[str, Any]) -> dict[str, Any] | None:
    details = {"responses": "input_tokens_details"}.get(name, "prompt_tokens_details")
    return (usage if name == "messages" else usage[details]).get("cache_miss")


@each_conversing
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
@each_conversing
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


@each_dialect
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
    whole, streamed = post(bundled, name, body), joined(name, stream(bundled, name, body))
    assert told(name, whole).calls == [("now", {})]
    assert told(name, streamed) == told(name, whole)
    for each in (whole, streamed):
        wanted = "stop" if name == "responses" else "tool_calls"
        assert ending(name, each).reason == wanted
