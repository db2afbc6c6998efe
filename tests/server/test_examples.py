"""The loop of tool calls in examples/tool_loop.py, on the bundled model and by its functions."""

import openai

from examples import tool_loop
from tests.server.harness import RunningServer


def test_the_loop_calls_sends_the_result_back_and_ends_with_an_answer(
    bundled: RunningServer,
) -> None:
    base_url = f"{bundled.url}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        messages = tool_loop.conversation(client, tool_loop.QUESTION)
    user, called, result, *rest = messages
    assert user == {"role": "user", "content": tool_loop.QUESTION}
    (call,) = called["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert result == {
        "role": "tool",
        "tool_call_id": call["id"],
        "content": "It is sunny in Paris.",
    }
    assert rest[-1]["role"] == "assistant"
    assert not rest[-1].get("tool_calls")
    assert rest[-1]["content"]


def test_the_loop_ends_however_often_the_model_would_call() -> None:
    choices = [tool_loop.choice_of(place, 4) for place in range(4)]
    assert choices == ["required", "auto", "auto", "none"]


def test_what_is_wrong_with_a_call_becomes_its_result() -> None:
    unknown = {"name": "odd", "arguments": "{}"}
    assert "there is no function odd" in tool_loop.result_of(unknown)
    assert "unexpected" in tool_loop.result_of({"name": "weather", "arguments": '{"town": "x"}'})
    assert "Error: " in tool_loop.result_of({"name": "weather", "arguments": "{"})


def test_a_message_is_shown_with_its_calls() -> None:
    function = {"name": "weather", "arguments": "{}"}
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    assert tool_loop.shown(called) == "assistant: weather({})"
    assert tool_loop.shown({"role": "user", "content": "hi"}) == "user: hi"
