"""Conversations as clients send them back: broken calls, other servers' members and parts, and the
objects of this server unchanged."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from cadenza.frontend.text_frontend import TextFrontend
from cadenza.server.anthropic.blocks import block_messages
from cadenza.server.anthropic.messages import MESSAGES, MessageRequest
from cadenza.server.errors import ApiError
from cadenza.server.fields.messages import chat_messages
from cadenza.server.limits import ServerLimits
from cadenza.server.openai.response_items import input_items, messages_of
from tests.server.harness import RunningServer
from tests.server.scripted_engine import ScriptedEngine

USER = {"role": "user", "content": "the fox"}
ARGUMENTS: list[tuple[Any, Any]] = [
    ('{"a": 1}', {"a": 1}),
    ({"a": 1}, {"a": 1}),
    (None, {}),
    ("", {}),
    ("null", {}),
    ("{}", {}),
    ('{"path": "/x", "con', '{"path": "/x", "con'),
    ("[1, 2]", "[1, 2]"),
    ([1, 2], "[1, 2]"),
    ("go left", "go left"),
    ('"x"', '"x"'),
    (5, "5"),
    ("[" * 100_000, "[" * 100_000),
]
"""What clients have as a call's arguments, and what a template gets."""


@pytest.mark.parametrize(("given", "told"), ARGUMENTS, ids=lambda each: repr(each)[:20])
def test_arguments_that_are_no_object_are_the_text_that_they_are(given: Any, told: Any) -> None:
    function = {"name": "f", "arguments": given}
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    (found,) = chat_messages.check("messages", [message])
    assert found["tool_calls"][0]["function"] == {"name": "f", "arguments": told}
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": given}
    (turn,) = chat_messages.check("input", messages_of(input_items.check("input", [item])))
    assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": told}
    block = {"type": "tool_use", "id": "c", "name": "f", "input": given}
    blocks = block_messages.check("messages", [{"role": "assistant", "content": [block]}])
    (turn,) = chat_messages.check("messages", list(blocks))
    assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": told}


BROKEN: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
                {"role": "tool", "tool_call_id": "1", "content": None},
                {"role": "assistant", "tool_calls": [{"function": {"arguments": '{"a'}}, {}]},
                {"role": "tool", "tool_call_id": "of another conversation", "content": "x"},
                {"role": "assistant", "content": None, "function_call": {"name": "f"}},
                {"role": "function", "name": "f", "content": "r"},
                {"role": "assistant", "content": []},
                {"role": "user", "content": [{"type": "text", "text": None}]},
            ]
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": "the fox"},
                {"type": "reasoning", "id": "rs_1", "encrypted_content": "gAAA", "summary": []},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a'},
                {"type": "function_call_output", "call_id": "1", "output": None},
                {"type": "function_call_output", "call_id": "gone", "output": "x"},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
                {"role": "user", "content": "go on"},
            ]
        },
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 6,
            "messages": [
                {"role": "user", "content": "the fox"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "redacted_thinking", "data": "gAAA"},
                        {"type": "text", "text": None},
                        {"type": "tool_use", "id": "1", "name": "f", "input": '{"a'},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1"},
                        {"type": "tool_result", "tool_use_id": "gone", "content": "x"},
                    ],
                },
            ],
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), BROKEN, ids=[path for path, _ in BROKEN])
def test_a_conversation_with_broken_turns_is_answered(
    bundled: RunningServer, path: str, body: dict[str, Any]
) -> None:
    short = {"max_output_tokens": 6} if path == "/v1/responses" else {"max_tokens": 6}
    answer = bundled.post(path, {**body, **short})
    assert answer.status_code == 200, answer.text


def test_content_parts_are_one_text_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "Name"}, {"type": "text", "text": "a colour."}]
    given = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert chat_messages.check("messages", given) == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Name\na colour."},
    )


PARTS: list[tuple[list[Any], dict[str, Any]]] = [
    ([{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}], {"content": "a"}),
    ([{"type": "input_text", "text": "a"}, {"type": "text", "text": None}], {"content": "a\n"}),
    ([{"type": "refusal", "refusal": "no"}], {"content": "no"}),
    (["a", {"type": "text", "text": "b"}], {"content": "a\nb"}),
    (
        [{"type": "thinking", "thinking": "why", "signature": "x"}, {"type": "text", "text": "a"}],
        {"content": "a", "reasoning_content": "why"},
    ),
    ([{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}], {"content": "a"}),
    (
        [{"type": "reasoning", "reasoning": "why"}, {"type": "text", "text": "a"}],
        {"content": "a", "reasoning_content": "why"},
    ),
    (
        [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}],
        {
            "content": "",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
            ],
        },
    ),
]


@pytest.mark.parametrize(("content", "told"), PARTS, ids=lambda each: repr(each)[:40])
def test_parts_of_other_apis_are_their_text(content: list[Any], told: dict[str, Any]) -> None:
    (found,) = chat_messages.check("messages", [{"role": "assistant", "content": content}])
    assert found == {"role": "assistant", **told}


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ({"content": None}, {"content": ""}),
        ({"content": None, "refusal": "no"}, {"content": "no"}),
        ({"content": "a", "refusal": None, "audio": None, "annotations": None}, {"content": "a"}),
        (
            {
                "content": "a",
                "reasoning_content": "why",
                "reasoning_details": [{"type": "reasoning.text", "text": "why"}],
                "thinking_blocks": [{"type": "thinking", "thinking": "why"}],
                "provider_specific_fields": {"x" * 300: ["y" * 20_000]},
                "images": [],
                "citations": None,
            },
            {"content": "a", "reasoning_content": "why"},
        ),
        ({"content": "a", "reasoning": {"effort": "low"}}, {"content": "a"}),
        (
            {"content": "a", "reasoning": "one", "reasoning_content": "two"},
            {"content": "a", "reasoning_content": "two"},
        ),
    ],
    ids=lambda each: repr(each)[:40],
)
def test_members_of_other_servers_are_labels(members: dict[str, Any], told: dict[str, Any]) -> None:
    (found,) = chat_messages.check("messages", [{"role": "assistant", **members}])
    assert found == {"role": "assistant", **told}


def test_what_the_openai_client_returns_is_sent_back_unchanged(
    server: RunningServer, engine: ScriptedEngine, text: TextFrontend
) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        first = client.chat.completions.create(model="scripted", messages=[USER], max_tokens=4)  # type: ignore[list-item]
        message = first.choices[0].message
        for sent in (message, message.model_dump(), message.to_dict()):
            again = [USER, sent, USER]
            client.chat.completions.create(model="scripted", messages=again, max_tokens=4)  # type: ignore[arg-type]
        whole = engine.submitted[-1].prompt_token_ids
        assert {each.prompt_token_ids for each in engine.submitted[1:]} == {whole}
        assert text.decode(whole).count(message.content or "?") == 1

        made: Response = client.responses.create(
            model="scripted", input="the fox", max_output_tokens=4, store=False
        )
        items = [{"role": "user", "content": "the fox"}, *made.output]
        for sent_items in (items, [items[0], *(item.model_dump() for item in made.output)]):
            given: Any = [*sent_items, {"role": "user", "content": "the fox"}]
            client.responses.create(model="scripted", input=given, max_output_tokens=4)
        assert engine.submitted[-1].prompt_token_ids == whole
        assert engine.submitted[-2].prompt_token_ids == whole


def test_a_message_of_this_server_is_sent_back_unchanged(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    message = server.post("/v1/messages", {"messages": [USER], "max_tokens": 4}).json()
    turn = {"role": message["role"], "content": message["content"]}
    again = {"messages": [USER, turn, USER], "max_tokens": 4}
    assert server.post("/v1/messages", again).status_code == 200
    text = message["content"][0]["text"]
    chat = {"messages": [USER, {"role": "assistant", "content": text}, USER], "max_tokens": 4}
    assert server.post("/v1/chat/completions", chat).status_code == 200
    assert engine.submitted[-1].prompt_token_ids == engine.submitted[-2].prompt_token_ids
    dumped = [{**block, "citations": None, "parsed_output": {}} for block in message["content"]]
    whole = {**message, "content": dumped}
    request = MESSAGES.read(
        json.dumps({"messages": [USER, whole, USER], "max_tokens": 4}).encode(), ServerLimits()
    )
    assert isinstance(request, MessageRequest)
    assert [each["role"] for each in request.messages] == ["user", "assistant", "user"]


def test_a_document_of_plain_text_is_text_with_its_title(scripted: RunningServer) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "the fox"}
    blocks = [
        {"type": "document", "source": source, "title": "A tale"},
        {"type": "text", "text": "Read."},
    ]
    (message,) = block_messages.check("messages", [{"role": "user", "content": blocks}])
    assert message == {"role": "user", "content": "A tale\nthe fox\nRead."}
    for source in ({"type": "text"}, {"type": "text", "data": None}):
        content = [{"type": "document", "source": source}]
        with pytest.raises(ApiError, match=r"content\.source\.data is missing"):
            block_messages.check("messages", [{"role": "user", "content": content}])
    pages = {"type": "base64", "media_type": "application/pdf", "data": "AA=="}
    body = {"messages": [{"role": "user", "content": [{"type": "document", "source": pages}]}]}
    answer = scripted.post("/v1/messages", {**body, "max_tokens": 4})
    assert answer.status_code == 400
    assert "source" in answer.json()["error"]["message"]


def test_what_hosted_tools_did_is_left_out_of_the_history() -> None:
    turn: list[Any] = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "fox"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "A fox."},
    ]
    said: list[Any] = [{"role": "assistant", "content": turn}, {"role": "user", "content": "More."}]
    assert block_messages.check("messages", said)[0] == {"role": "assistant", "content": "A fox."}
    items = [{"type": "web_search_call", "id": "w"}, {"role": "user", "content": "More."}]
    (item,) = input_items.check("input", items)
    assert item["content"] == [{"type": "input_text", "text": "More."}]
