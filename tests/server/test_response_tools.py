"""Tools of responses that are no functions: custom ones, namespaces, those of OpenAI's servers."""

import json
import re
from typing import Any

import pytest

from cadenza.frontend.text_frontend import TextFrontend
from cadenza.server.fields.messages import chat_messages
from cadenza.server.fields.tools import text_of_input
from cadenza.server.openai.chat import ChatRequest
from cadenza.server.openai.response_items import input_items, messages_of, response_tools
from tests.server.harness import RunningServer, running_server
from tests.server.scripted_engine import ScriptedEngine
from tests.server.test_responses import NOW, PATH, respond, streamed

PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
SPACE = {
    "type": "namespace",
    "name": "mcp__files",
    "description": "Files.",
    "tools": [NOW, {**NOW, "name": "then"}],
}
TOOLS = [NOW, PATCH, SPACE, {"type": "local_shell"}, {"type": "web_search", "filters": None}]
WROTE = {"name": "apply_patch", "arguments": {"input": "*** Begin\n+é"}}
CALLED = {"name": "mcp__files__then", "arguments": {}}


def said(text: TextFrontend, *calls: dict[str, Any]) -> tuple[int, ...]:
    written = [f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>" for call in calls]
    return text.encode("\n".join(written), add_special_tokens=False)


@pytest.fixture(scope="module")
def calling(loaded: Any) -> Any:
    """A server of a model that calls a custom tool and one of a namespace."""
    ids = said(loaded.text, WROTE, CALLED)
    with running_server(
        ScriptedEngine(ids, vocab_size=4096, max_model_len=2048), loaded.text
    ) as server:
        yield server, {"tools": TOOLS, "max_output_tokens": len(ids)}


def test_tools_become_functions_of_their_own_names() -> None:
    found = response_tools.check("tools", TOOLS)
    assert [tool.name for tool in found] == [
        "now",
        "apply_patch",
        "mcp__files__now",
        "mcp__files__then",
    ]
    assert found[1].parameters == {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
        "additionalProperties": False,
    }
    assert [tool.namespace for tool in found] == [None, None, "mcp__files", "mcp__files"]


def test_a_custom_tools_call_is_an_item_with_its_text(calling: Any) -> None:
    server, fields = calling
    whole = respond(server, **fields)
    wrote, called = whole["output"]
    assert (wrote["type"], wrote["name"], wrote["input"]) == (
        "custom_tool_call",
        "apply_patch",
        "*** Begin\n+é",
    )
    assert (called["type"], called["name"], called["namespace"]) == (
        "function_call",
        "then",
        "mcp__files",
    )
    shown = [{**NOW, "strict": False}, PATCH, SPACE]
    assert whole["tools"] == shown


def test_its_events_have_the_text_and_the_names_that_were_given(calling: Any) -> None:
    server, fields = calling
    events = streamed(server, **fields)
    names = [event["type"].removeprefix("response.") for event in events]
    assert names == [
        "created",
        "in_progress",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        names[-1],
    ]
    assert events[2]["item"]["input"] == ""
    assert events[3]["delta"] == events[4]["input"] == events[5]["item"]["input"]
    assert events[3]["item_id"] == events[5]["item"]["id"]
    assert events[8]["name"] == events[9]["item"]["name"] == "then"
    assert [item["type"] for item in events[-1]["response"]["output"]] == [
        "custom_tool_call",
        "function_call",
    ]


def test_hosted_tools_are_left_out_and_told(scripted: RunningServer) -> None:
    body = {"input": "the fox", "max_output_tokens": 4, "tools": TOOLS[3:]}
    answer = scripted.post(PATH, body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-cadenza-ignored"] == "tools.local_shell, tools.web_search"


def test_calls_of_the_history_have_the_names_and_arguments_that_a_template_knows() -> None:
    items = [
        {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "+a"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "done"},
        {"type": "function_call", "call_id": "2", "name": "then", "namespace": "mcp__files"},
        {
            "type": "function_call_output",
            "call_id": "2",
            "output": [{"type": "input_text", "text": "x"}],
        },
    ]
    first, done, second, last = messages_of(input_items.check("input", items))
    calls = [turn["tool_calls"][0]["function"] for turn in (first, second)]
    assert calls == [
        {"name": "apply_patch", "arguments": '{"input": "+a"}'},
        {"name": "mcp__files__then", "arguments": ""},
    ]
    assert (done["name"], done["content"]) == ("apply_patch", "done")
    assert (last["name"], last["content"]) == ("mcp__files__then", "x")


def test_a_turn_goes_on_from_the_calls_of_a_stored_response(calling: Any) -> None:
    server, fields = calling
    first = respond(server, **fields)
    result = {
        "type": "custom_tool_call_output",
        "call_id": first["output"][0]["call_id"],
        "output": "patched",
    }
    second = respond(server, **fields, input=[result], previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('{"input": "a"}', "a"), ("a", "a"), ('{"in', '{"in'), ('{"input": 1}', '{"input": 1}')],
)
def test_the_text_of_a_call_is_its_input_or_what_the_model_wrote(arguments: str, text: str) -> None:
    assert text_of_input(arguments) == text


CHAT_TOOLS = [
    {"type": "function", "function": {"name": "now"}},
    {"type": "custom", "custom": {"name": "apply_patch", "description": "Edits files."}},
]


def test_a_chat_has_custom_tools_too(loaded: Any) -> None:
    ids = said(loaded.text, WROTE, {"name": "now", "arguments": {}})
    body = {
        "messages": [{"role": "user", "content": "fix it"}],
        "tools": CHAT_TOOLS,
        "max_tokens": len(ids),
    }
    engine = ScriptedEngine(ids, vocab_size=4096, max_model_len=2048)
    with running_server(engine, loaded.text) as server:
        whole = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        events = server.events("/v1/chat/completions", {**body, "stream": True})
        again = [*body["messages"], whole, {"role": "tool", "tool_call_id": "1", "content": "x"}]
        assert server.post("/v1/chat/completions", {**body, "messages": again}).status_code == 200
    streamed_calls = [
        call
        for event in events[:-1]
        for choice in event["choices"]
        for call in choice["delta"].get("tool_calls", ())
    ]
    for calls in (whole["tool_calls"], streamed_calls):
        assert [(call["type"], call[call["type"]]) for call in calls] == [
            ("custom", {"name": "apply_patch", "input": "*** Begin\n+é"}),
            ("function", {"name": "now", "arguments": "{}"}),
        ]


def test_a_custom_tool_may_be_chosen_by_its_name() -> None:
    asked = [{"role": "user", "content": "x"}]
    choice = {"type": "custom", "custom": {"name": "apply_patch"}}
    body = {"messages": asked, "tools": CHAT_TOOLS, "tool_choice": choice}
    use = ChatRequest(ChatRequest.check(body)).use
    assert use is not None
    assert use.named == "apply_patch"


LINES = {"syntax": "lark", "definition": 'start: ("+" /[a-c"]{1,3}/ LF){1,2}\n%import common.LF'}
RIGHT_LINES = re.compile(r'(\+[a-c"]{1,3}\n){1,2}')


def test_a_response_has_a_text_of_the_grammar_and_its_events(bundled: RunningServer) -> None:
    patch = {**PATCH, "format": {"type": "grammar", **LINES}}
    fields = {"tools": [NOW, patch], "tool_choice": {"type": "custom", "name": "apply_patch"}}
    fields |= {
        "max_output_tokens": 120,
        "temperature": 1.0,
        "seed": 3,
        "parallel_tool_calls": False,
    }
    (call,) = respond(bundled, **fields)["output"]
    assert (call["type"], call["name"], call["status"]) == (
        "custom_tool_call",
        "apply_patch",
        "completed",
    )
    assert RIGHT_LINES.fullmatch(call["input"]), call
    events = streamed(bundled, **fields)
    done = [each for each in events if each["type"].endswith("custom_tool_call_input.done")]
    assert [each["input"] for each in done] == [call["input"]]


def test_a_call_that_the_model_begins_has_a_text_of_the_grammar(
    bundled: RunningServer, loaded: Any
) -> None:
    begin = loaded.text.tokenizer.id_of("<tool_call>")
    custom = {"name": "edit", "format": {"type": "grammar", "grammar": LINES}}
    body = {
        "messages": [{"role": "user", "content": "fix it"}],
        "tools": [{"type": "custom", "custom": custom}],
        "max_tokens": 150,
        "logit_bias": {str(begin): 100},
        "temperature": 1.0,
        "seed": 5,
    }
    whole = bundled.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    texts = [call["custom"]["input"] for call in whole["tool_calls"]]
    assert len(texts) > 1
    assert all(map(RIGHT_LINES.fullmatch, texts[:-1])), "only the last one may be cut"
    events = bundled.events("/v1/chat/completions", {**body, "stream": True})
    deltas = [choice["delta"] for event in events[:-1] for choice in event["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["custom"]["input"] for call in calls] == texts


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ({"syntax": "gbnf", "definition": "x"}, "the syntax 'gbnf'; give lark or regex"),
        ({"syntax": "lark"}, "without a definition"),
        ({"syntax": "lark", "definition": "x" * (65 << 10)}, "over 65536 bytes"),
        ({"syntax": "lark", "definition": "start: A"}, "the grammar of the tool apply_patch is"),
        ({"syntax": "regex", "definition": "a(?=b)"}, "look-around"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused_by_its_tool(
    bundled: RunningServer, form: dict[str, str], told: str
) -> None:
    tools = [{**PATCH, "format": {"type": "grammar", **form}}]
    answer = bundled.post(PATH, {"input": "x", "tools": tools, "max_output_tokens": 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools"), answer.text
    assert told in answer.json()["error"]["message"]


def test_a_custom_call_of_a_chats_history_has_an_object_for_the_template() -> None:
    call = {"id": "1", "type": "custom", "custom": {"name": "apply_patch", "input": "+a"}}
    (turn,) = chat_messages.check("messages", [{"role": "assistant", "tool_calls": [call]}])
    function = {"name": "apply_patch", "arguments": {"input": "+a"}}
    assert turn["tool_calls"] == [{"id": "1", "type": "function", "function": function}]
