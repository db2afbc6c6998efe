"""/v1/responses: items in and out, events in order, stored responses, and the official client."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from cadenza.server.access import ApiKeys
from cadenza.server.calls.conversation import with_system
from cadenza.server.limits import ServerLimits
from cadenza.server.openai.response_items import input_items, messages_of
from cadenza.server.openai.responses import ResponseRequest
from cadenza.server.response_store import ResponseStore, StoreBounds, StoredResponse
from tests.server.dialects import context_of, events_of, post, stream
from tests.server.harness import RunningServer, Serve, wait_until
from tests.server.scripted_engine import ScriptedEngine

PATH = "/v1/responses"
BODY = {"input": "the fox", "max_output_tokens": 6}
PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
NOW = {"type": "function", "name": "now", "description": "The time.", "parameters": PARAMETERS}
ASKED = {"input": "What time is it?", "tools": [NOW], "max_output_tokens": 60, "temperature": 0}


def respond(server: RunningServer, **fields: Any) -> dict[str, Any]:
    return post(server, "responses", {**BODY, **fields})


def streamed(server: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    return [*events_of(stream(server, "responses", {**BODY, **fields}))]


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


def test_a_response_has_the_text_and_repeats_what_was_asked(scripted: RunningServer) -> None:
    answer = respond(scripted, metadata={"a": "b"}, temperature=0.5, instructions="quick")
    assert answer["id"].startswith("resp_")
    assert answer["object"] == "response"
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    (part,) = item["content"]
    assert part["type"] == "output_text"
    chat = {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 6}
    whole = scripted.post("/v1/chat/completions", chat).json()
    assert part["text"] == whole["choices"][0]["message"]["content"]
    assert answer["usage"]["output_tokens"] == 6
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + 6
    asked = ("metadata", "temperature", "instructions", "max_output_tokens", "store")
    assert [answer[name] for name in asked] == [{"a": "b"}, 0.5, "quick", 6, True]


def test_events_come_in_order_and_hold_the_whole_response(scripted: RunningServer) -> None:
    events = streamed(scripted)
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(names[4:-4]) == {"output_text.delta"}
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    text = "".join(event.get("delta", "") for event in events)
    assert events[-4]["text"] == events[-3]["part"]["text"] == text
    last = events[-1]["response"]
    assert last["output"] == [events[-2]["item"]]
    assert last["output"][0]["id"] == events[2]["item"]["id"] == events[4]["item_id"]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    assert without_ids(last["output"]) == without_ids(respond(scripted)["output"])


def test_a_call_is_an_item_with_its_events(bundled: RunningServer) -> None:
    fields = {**ASKED, "tool_choice": {"type": "function", "name": "now"}}
    events = streamed(bundled, **fields)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    whole = events[-1]["response"]
    (call,) = whole["output"]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "now", "{}")
    assert (whole["status"], whole["tool_choice"]) == ("completed", fields["tool_choice"])
    assert whole["tools"] == [{**NOW, "strict": False}]
    assert events[2]["item"]["arguments"] == ""
    assert events[2]["item"]["call_id"] == call["call_id"]


def test_a_response_goes_on_from_the_stored_conversation(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    first = respond(server, instructions="quick")
    second = respond(server, input="jumps", previous_response_id=first["id"])
    respond(server, input="over", previous_response_id=second["id"])
    said = first["output"][0]["content"][0]["text"]
    messages = [
        {"role": "user", "content": "the fox"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "jumps"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "over"},
    ]
    server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 6})
    assert engine.submitted[2] == engine.submitted[3]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_stored_response_is_read_listed_and_deleted(
    scripted: RunningServer, is_streamed: bool
) -> None:
    items = [{"role": "user", "content": text} for text in ("the", "quick", "fox")]
    if is_streamed:
        answer = streamed(scripted, input=items)[-1]["response"]
    else:
        answer = respond(scripted, input=items)
    url = f"{PATH}/{answer['id']}"
    assert scripted.get(url).json() == answer
    listed = scripted.get(f"{url}/input_items?order=asc&limit=2").json()
    texts = [item["content"][0]["text"] for item in listed["data"]]
    assert (texts, listed["has_more"]) == (["the", "quick"], True)
    rest = scripted.get(f"{url}/input_items?order=asc&after={listed['last_id']}").json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["fox"]
    newest = scripted.get(f"{url}/input_items").json()["data"]
    assert newest == [*rest["data"], *listed["data"][::-1]]
    with scripted.client() as client:
        assert client.delete(url).json() == {
            "id": answer["id"],
            "object": "response",
            "deleted": True,
        }
        assert client.delete(url).status_code == 404
    assert scripted.get(url).json()["error"]["code"] == "response_not_found"
    gone = scripted.post(PATH, {**BODY, "previous_response_id": answer["id"]})
    assert (gone.status_code, gone.json()["error"]["param"]) == (400, "previous_response_id")
    assert gone.json()["error"]["code"] == "previous_response_not_found"


def test_items_of_stored_responses_are_referred_to_by_their_ids(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    """As clients send a conversation whose items they know to be stored."""
    first = respond(server)
    url = f"{PATH}/{first['id']}/input_items"
    asked = server.get(url).json()["data"][0]["id"]
    said = first["output"][0]
    items = [
        {"type": "item_reference", "id": asked},
        {"id": said["id"]},
        {"role": "user", "content": "jumps"},
    ]
    second = respond(server, input=items)
    messages = [
        {"role": "user", "content": "the fox"},
        {"role": "assistant", "content": said["content"][0]["text"]},
        {"role": "user", "content": "jumps"},
    ]
    server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 6})
    assert engine.submitted[1] == engine.submitted[2]
    listed = server.get(f"{PATH}/{second['id']}/input_items?order=asc").json()["data"]
    assert [item["type"] for item in listed] == ["message"] * 3
    assert listed[1] == said
    with server.client() as client:
        assert client.delete(f"{PATH}/{first['id']}").status_code == 200
    gone = server.post(PATH, {**BODY, "input": items})
    assert (gone.status_code, gone.json()["error"]["param"]) == (400, "input")


def test_items_that_are_referred_to_have_together_the_bytes_of_a_body(serve: Serve) -> None:
    limits = ServerLimits(max_body_bytes=4096)
    server = serve(max_model_len=1 << 14, limits=limits)
    long = respond(server, input="x" * 1500)
    listed = server.get(f"{PATH}/{long['id']}/input_items").json()["data"]
    reference = {"id": listed[0]["id"]}
    twice = respond(server, input=[reference] * 2)
    assert server.get(f"{PATH}/{twice['id']}/input_items").json()["data"] == listed * 2
    num_bytes = server.service.responses.num_bytes
    refused = server.post(PATH, {**BODY, "input": [reference] * 3})
    assert server.service.responses.num_bytes == num_bytes
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "input")
    assert "input[2]" in error["message"]
    assert "over 4096 bytes" in error["message"]


def test_what_a_call_takes_from_the_store_counts_as_its_text() -> None:
    """It decides about the lane, so that no short prompt waits for a long conversation."""
    store = ResponseStore(StoreBounds(), lambda: 0.0)
    body = b'{"output": []}'
    for name in ("a", "b"):
        old = StoredResponse(id=f"resp_{name}", previous_id=None, input=b"[]", body=body)
        store.put("me", old)
    given = {
        "input": [{"id": "msg_a_0"}, {"id": "msg_a_1"}, {"id": "msg_b_0"}],
        "previous_response_id": "resp_a",
    }
    request = ResponseRequest.read(json.dumps(given).encode())
    before = request.num_bytes
    request.enter(context_of(store, "me"))
    assert request.num_bytes - before == store.num_bytes


def test_a_response_is_stored_unless_that_is_not_wanted(scripted: RunningServer) -> None:
    answer = respond(scripted, store=False)
    assert answer["store"] is False
    assert scripted.get(f"{PATH}/{answer['id']}").status_code == 404


def test_a_response_in_progress_can_be_cancelled(serve: Serve) -> None:
    server = serve(step_s=0.01)
    with server.client() as client:
        body = {**BODY, "max_output_tokens": 200, "stream": True}
        with client.stream("POST", PATH, json=body) as response:
            lines = response.iter_lines()
            first = next(line for line in lines if line.startswith("data: "))
            url = f"{PATH}/{json.loads(first[6:])['response']['id']}"
            assert server.get(url).json()["status"] == "in_progress"
            cancelled = server.post(f"{url}/cancel").json()
            assert cancelled["status"] == "cancelled"
            last = [line for line in lines if line.startswith("data: ")][-1]
        assert json.loads(last[6:])["response"] == cancelled == server.get(url).json()
        again = server.post(f"{url}/cancel")
        assert (again.status_code, again.json()["error"]["param"]) == (400, "id")
        assert server.post(f"{PATH}/resp_none/cancel").status_code == 404


def test_a_response_that_is_left_is_forgotten(serve: Serve) -> None:
    server = serve(step_s=0.01)
    engine = server.engine
    with server.client() as client:
        body = {**BODY, "max_output_tokens": 200, "stream": True}
        with client.stream("POST", PATH, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            assert len(server.service.responses) == 1
        wait_until(lambda: len(server.service.responses) == 0)
        assert engine.num_open == 0


def test_a_failed_stream_ends_with_a_failed_response(serve: Serve) -> None:
    server = serve()
    engine = server.engine
    engine.failing = "step_failed"
    last = streamed(server)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert server.get(f"{PATH}/{last['response']['id']}").json() == last["response"]


def test_a_tenant_reaches_only_its_own_responses(serve: Serve) -> None:
    keys = ("first-key-1", "second-key-2")
    server = serve(keys=ApiKeys(keys))
    own, other = ({"authorization": f"Bearer {key}"} for key in keys)
    answer = server.post(PATH, BODY, headers=own).json()
    url = f"{PATH}/{answer['id']}"
    assert server.get(url, headers=own).status_code == 200
    assert server.get(url, headers=other).status_code == 404
    assert server.get(url).status_code == 401
    body = {**BODY, "previous_response_id": answer["id"]}
    assert server.post(PATH, body, headers=other).status_code == 400
    referring = {**BODY, "input": [{"type": "item_reference", "id": answer["output"][0]["id"]}]}
    assert server.post(PATH, referring, headers=other).status_code == 400
    assert server.post(PATH, referring, headers=own).status_code == 200
    assert server.post(PATH, body, headers=own).status_code == 200


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "order=up", "after=none", "odd=1"])
def test_a_wrong_query_is_refused(scripted: RunningServer, query: str) -> None:
    url = f"{PATH}/{respond(scripted)['id']}"
    answer = scripted.get(f"{url}/input_items?{query}")
    assert answer.status_code == 400, answer.text
    assert scripted.get(f"{url}?stream=true").json()["error"]["param"] == "stream"


def test_items_of_one_turn_are_one_message() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    given = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [
            {"type": "reasoning_text", "text": "why"}
        ]},
        {"type": "message", "role": "assistant", "content": "b"},
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c2", "output": "2"},
        {"type": "function_call_output", "call_id": "c1", "output": [
            {"type": "input_text", "text": "1"}
        ]},
        {"type": "message", "role": "assistant", "content": "c"},
        {"type": "message", "role": "assistant", "content": "d"},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "so"}]},
        {"type": "message", "role": "assistant", "content": "e"},
    ]  # fmt: skip
    user, turn, second, first, *said = messages_of(input_items.check("input", given))
    assert user == {"role": "user", "content": "a"}
    assert (turn["reasoning_content"], turn["content"]) == ("why", "b")
    assert [each["id"] for each in turn["tool_calls"]] == ["c1", "c2"]
    assert second == {"role": "tool", "tool_call_id": "c2", "name": "f", "content": "2"}
    assert first["content"] == "1"
    assert [each["content"] for each in said] == ["c", "d", "e"]
    assert [each.get("reasoning_content") for each in said] == [None, None, "so"]
    assert with_system("s", []) == [{"role": "system", "content": "s"}]
    assert with_system(None, [user]) == [user]


def test_every_field_of_the_official_client_is_known() -> None:
    params = ResponseCreateParamsBase.__annotations__
    assert {*params, "stream"} <= ResponseRequest.fields.keys()


# The store.


def stored(name: str, previous: str | None = None, size: int = 10) -> StoredResponse:
    return StoredResponse(id=name, previous_id=previous, input=b"", body=b"x" * size)


def test_the_store_keeps_what_was_used_last_within_its_bounds() -> None:
    now = [0.0]
    store = ResponseStore(StoreBounds(max_count=3, max_bytes=50, ttl_s=10), lambda: now[0])
    for name in "abc":
        store.put("t", stored(name))
    assert store.find("t", "a") is not None
    store.put("t", stored("d"))
    assert store.find("t", "b") is None, "it was used longest ago"
    store.put("t", stored("e", size=41))
    assert (len(store), store.num_bytes) == (1, 41)
    store.put("t", stored("f", size=51))
    assert (len(store), store.num_bytes) == (0, 0)
    store.put("t", stored("g"))
    now[0] = 9.0
    assert store.find("t", "g") is not None
    now[0] = 18.0
    assert store.find("t", "g") is not None
    assert store.find("u", "g") is None
    now[0] = 29.0
    assert store.find("t", "g") is None


def test_a_conversation_is_whole_or_not_found() -> None:
    store = ResponseStore(StoreBounds(), lambda: 0.0)
    store.put("t", stored("a"))
    store.put("t", stored("b", "a"))
    store.put("t", stored("c", "b"))
    assert [each.id for each in store.conversation("t", "c") or ()] == ["a", "b", "c"]
    assert store.conversation("u", "c") is None
    store.delete("t", "a")
    assert store.conversation("t", "c") is None


# The official client.


@pytest.fixture
def client(bundled: RunningServer) -> Iterator[openai.OpenAI]:
    url = f"{bundled.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


def test_the_official_client_has_a_whole_tool_loop(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    asked: Any = {**ASKED, "model": model}
    first = client.responses.create(**asked, tool_choice="required", parallel_tool_calls=False)
    Response.model_validate(first.to_dict())
    (call,) = first.output
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Noon."}
    with client.responses.stream(
        model=model,
        input=[result],
        previous_response_id=first.id,
        tools=asked["tools"],
        tool_choice="none",
        max_output_tokens=20,
    ) as stream:
        text = "".join(each.delta for each in stream if each.type == "response.output_text.delta")
    assert text
    items = client.responses.input_items.list(first.id)
    assert [item.type for item in items] == ["message"]
    retrieved = client.responses.retrieve(first.id)
    assert retrieved.output == first.output
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
