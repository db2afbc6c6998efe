"""/v1/messages and its count of tokens: blocks in and out, events in order, errors, agents."""

import json
from pathlib import Path
from typing import Any

import pytest

from cadenza.outputs import OutputPart
from cadenza.server.anthropic.blocks import block_messages
from cadenza.server.anthropic.messages import ANTHROPIC_VERSIONS, MESSAGES, MessageRequest
from cadenza.server.limits import ServerLimits
from cadenza.server.openai.responses import RESPONSES
from tests.server.dialects import check_error, encoder_of, events_of, output_of, sample
from tests.server.harness import RunningServer

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
BODY = {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 6}
NOW = {
    "name": "now",
    "description": "The time.",
    "input_schema": {"type": "object", "properties": {}, "additionalProperties": False},
}
ASKED = {
    "messages": [{"role": "user", "content": "What time is it?"}],
    "tools": [NOW],
    "max_tokens": 60,
    "temperature": 0,
}
AGENTS = json.loads((Path(__file__).parent / "agent_requests.json").read_text())


def message_of(server: RunningServer, **fields: Any) -> dict[str, Any]:
    answer = server.post(PATH, {**BODY, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_message_has_the_fields_of_its_kind(scripted: RunningServer) -> None:
    message = message_of(scripted)
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert (message["model"], message["stop_reason"]) == ("scripted", "max_tokens")
    counted = scripted.post(COUNT, {"messages": BODY["messages"]}).json()
    assert message["usage"]["input_tokens"] == counted["input_tokens"]
    assert message["usage"]["output_tokens"] == 6


@pytest.mark.parametrize("display", [None, "omitted"])
def test_events_come_in_order_each_with_what_is_new(display: str | None) -> None:
    thinking = {"type": "enabled", "display": display}
    request = MESSAGES.read(json.dumps({**BODY, "thinking": thinking}).encode(), ServerLimits())
    samples = [
        sample(OutputPart("reasoning", "why"), OutputPart("content", "I call.")),
        sample(OutputPart("tool_call", "{}", name="now"), end="stop"),
    ]
    encoder = encoder_of(request)
    made = encoder.opening() + encoder.take(0, output_of(samples), samples) + encoder.closing()
    start, ping, *blocks, delta, stop = events_of(made)
    assert (start["type"], start["message"]["content"]) == ("message_start", [])
    assert start["message"]["stop_reason"] is None
    assert [ping, stop] == [{"type": "ping"}, {"type": "message_stop"}]
    call = {"type": "tool_use", "id": blocks[-3]["content_block"]["id"], "name": "now"}
    thought = {"type": "thinking_delta", "thinking": "why"}
    wanted = [
        ({"type": "thinking", "thinking": "", "signature": ""}, thought),
        ({"type": "text", "text": ""}, {"type": "text_delta", "text": "I call."}),
        ({**call, "input": {}}, {"type": "input_json_delta", "partial_json": "{}"}),
    ]
    told = [
        {"type": f"content_block_{kind}", "index": index, **members}
        for index, (block, new) in enumerate(wanted)
        for kind, members in (
            ("start", {"content_block": block}),
            ("delta", {"delta": new}),
            ("stop", {}),
        )
        if not (display and new is thought and kind == "delta")
    ]
    assert blocks == told
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    whole = json.loads(encoder_of(request).whole([output_of(samples)]))
    assert whole["content"][0]["thinking"] == ("" if display else "why")
    assert (whole["usage"], whole["stop_reason"]) == (delta["usage"], "tool_use")


def test_an_answer_that_fills_the_context_says_so(scripted: RunningServer) -> None:
    message = message_of(scripted, max_tokens=5000)
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert message["usage"]["output_tokens"] == 256 - message["usage"]["input_tokens"]


def test_blocks_become_the_messages_of_a_chat() -> None:
    found = block_messages.check("messages", AGENTS["messages"]["messages"])
    user, system, turn, first, second, last = found
    assert user == {"role": "user", "content": "<reminder>today</reminder>\nfix it"}
    assert system["role"] == "system"
    assert (turn["content"], turn["reasoning_content"]) == ("I read it.", "look first")
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["Read", "Bash"]
    assert first == {
        "role": "tool",
        "tool_call_id": "toolu_01",
        "name": "Read",
        "content": "1\tx = 1",
    }
    assert second["content"] == "Error: no such folder"
    assert last == {"role": "user", "content": "go on"}
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert block_messages.check("messages", twice) == ({"role": "user", "content": "a\nb"},)


def test_a_label_in_the_system_text_is_left_out() -> None:
    body = json.dumps(AGENTS["messages"]).encode()
    request = MESSAGES.read(body, ServerLimits())
    assert isinstance(request, MessageRequest)
    first = request.conversation().messages[0]
    assert first == {"role": "system", "content": "You write code.\nUse the tools."}
    assert request.user_label == "user_0a1b_account__session_2c3d"


@pytest.mark.parametrize("name", ["messages", "responses"])
def test_requests_as_coding_agents_send_them_are_answered(
    bundled: RunningServer, name: str
) -> None:
    path = {"messages": PATH, "responses": "/v1/responses"}[name]
    body = {**AGENTS[name], "model": None}
    endpoint = {"messages": MESSAGES, "responses": RESPONSES}[name]
    endpoint.read(json.dumps(body).encode(), ServerLimits())
    with bundled.client() as client:
        answer = client.post(path, json=body, headers={"anthropic-beta": "a,b"})
    assert answer.status_code == 200, answer.text
    assert f'"{"message_stop" if name == "messages" else "response."}' in answer.text


def test_the_count_is_that_of_the_message(bundled: RunningServer) -> None:
    body = {name: AGENTS["messages"][name] for name in ("messages", "system", "tools", "thinking")}
    counted = bundled.post(COUNT, body)
    assert counted.status_code == 200, counted.text
    usage = message_of(bundled, **body)["usage"]
    num_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted.json() == {"input_tokens": num_tokens}
    without = bundled.post(COUNT, {"messages": body["messages"]}).json()["input_tokens"]
    assert without < num_tokens
    whole = bundled.post(COUNT, {**body, "max_tokens": 5})
    assert whole.json() == counted.json(), "what changes no count is ignored"
    assert whole.headers["x-cadenza-ignored"] == "max_tokens"


def test_a_prompt_beyond_the_context_is_still_counted(scripted: RunningServer) -> None:
    long = {"messages": [{"role": "user", "content": "the fox " * 200}]}
    assert scripted.post(COUNT, long).json()["input_tokens"] > 256
    refused = scripted.post(PATH, {**long, "max_tokens": 5})
    assert refused.status_code == 400
    said = refused.json()["error"]["message"]
    assert said.startswith("prompt is too long: ")
    assert "maximum context length is 256 tokens" in said
    for num_words in (100, 256, 500, 20_000):
        long = {"messages": [{"role": "user", "content": "fox" + " fox" * num_words}]}
        count = scripted.post(COUNT, long).json()["input_tokens"]
        answer = scripted.post(PATH, {**long, "max_tokens": 5})
        if count <= 255:
            assert answer.status_code == 200
        else:
            said = answer.json()["error"]["message"]
            assert said.startswith(f"prompt is too long: {count} tokens > 255 maximum. ")


def test_a_client_that_wants_a_conversation_held_is_told_to_send_the_whole(
    scripted: RunningServer,
) -> None:
    answer = scripted.post(PATH, {**BODY, "thread": {"type": "create"}})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith("thread: ")
    assert error["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


def test_examples_of_a_tool_are_shown_to_the_model(bundled: RunningServer) -> None:
    def count(**members: Any) -> int:
        body = {**ASKED, "max_tokens": None, "temperature": None}
        return bundled.post(COUNT, {**body, "tools": [{**NOW, **members}]}).json()["input_tokens"]

    plain = count()
    assert count(input_examples=[]) == plain
    assert count(input_examples=[{"zone": "Europe/Paris"}]) > plain
    shown = {**ASKED, "tools": [{**NOW, "input_examples": [{}]}], "tool_choice": {"type": "any"}}
    assert message_of(bundled, **shown)["stop_reason"] == "tool_use"


def test_only_versions_of_the_api_that_are_known_are_served(scripted: RunningServer) -> None:
    for version in (*ANTHROPIC_VERSIONS, "2022-01-01"):
        answer = scripted.post(PATH, BODY, headers={"anthropic-version": version})
        assert answer.status_code == (200 if version in ANTHROPIC_VERSIONS else 400)
    check_error(answer, 400, "invalid_value", None, "2022-01-01", name="messages")
    check_error(scripted.post(f"{PATH}/batches", BODY), 404, "unknown_url", name="messages")
