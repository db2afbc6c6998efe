"""Calls and tools that a chat template passes over, as texts with the marks of the family."""

from pathlib import Path
from typing import Any

import pytest

from cadenza.frontend.answers import AskedAnswer, ToolUse
from cadenza.frontend.model_prompts import ChatPrompt
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.request import SamplingParams
from cadenza.text.answers.generic_tools import with_description, with_listed_calls
from cadenza.text.answers.json_calls import (
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_CALLS,
    DEEPSEEK_CALLS_END,
    DEEPSEEK_SEPARATOR,
    DEEPSEEK_V31,
)
from cadenza.text.answers.listed_calls import LFM2, read_pythonic
from cadenza.text.answers.tool_format import Tool
from tests.text.marked_tokenizers import marked_checkpoint

TESTS = Path(__file__).parents[1]
USER = {"role": "user", "content": "Which weather?"}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}},
}
LFM_MARKS = ("<|turn|>", "<|over|>", "<|tool_call_start|>", "<|tool_call_end|>")
DEEPSEEK_MARKS = (
    *(DEEPSEEK_CALLS, DEEPSEEK_CALLS_END, DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_END),
    *("<|user|>", "<|assistant|>", "</think>"),
)


def front_end(name: str, marks: tuple[str, ...]) -> TextFrontend:
    return TextFrontend(marked_checkpoint(marks, (TESTS / f"{name}.jinja").read_text()))


def call(arguments: Any, name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def turn(*calls: dict[str, Any], content: Any = "") -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [*calls]}


VALUES: dict[str, Any] = {"a": 'x"\n\\é', "b": [1, -2.5, None, True], "c": {"d e": {}}, "e": False}


def test_the_calls_of_a_turn_stand_behind_its_text_between_marks_that_are_tokens() -> None:
    text = front_end("oracle/templates/listed_tools", LFM_MARKS)
    assert text.tokenizer is not None
    begin, end = (text.tokenizer.added_tokens[mark] for mark in LFM_MARKS[2:])
    spelled = "Say <|tool_call_start|>."
    messages = [USER, turn(call(VALUES), call({}, "g"), content=spelled)]
    prompt, ids = text.render_chat(ChatPrompt(messages=messages))
    listed = prompt.rpartition(LFM_MARKS[2])[2].partition(LFM_MARKS[3])[0]
    found = read_pythonic(listed, {})
    assert found is not None
    assert [name for name, _ in found] == ["f", "g"]
    assert listed.startswith('[f(a="x\\"\\n\\\\é", b=[1, -2.5, None, True], c={"d e": {}}')
    assert (ids.count(begin), ids.count(end)) == (1, 1), "what the user spells is no mark"


@pytest.mark.parametrize(
    "message",
    [
        USER,
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "a", "tool_calls": []},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}], "tool_calls": [call({})]},
    ],
)
def test_a_message_without_calls_and_one_without_a_plain_text_stay(message: Any) -> None:
    assert with_listed_calls([message], LFM2) == [message]


def test_arguments_that_are_a_text_and_odd_calls_are_written_as_they_are() -> None:
    (made,) = with_listed_calls([turn(call("n=1"), {"name": "g"}, content=None)], LFM2)
    assert str(made["content"].text) == "<|tool_call_start|>[f(n=1), g()]<|tool_call_end|>"


def test_tools_without_a_place_are_described_with_a_call_of_the_familys_notation() -> None:
    text = front_end("text/joined_calls", DEEPSEEK_MARKS)
    assert text.tokenizer is not None
    assert text.prompts.takes_tools
    system = {"role": "system", "content": f"Be brief. {DEEPSEEK_CALLS}"}
    prompt, ids = text.render_chat(ChatPrompt(messages=[system, USER], tools=[TOOL]))
    assert "Be brief." in prompt
    assert f"reply only with {DEEPSEEK_V31.example}. When" in prompt
    assert ids.count(text.tokenizer.added_tokens[DEEPSEEK_CALLS]) == 1
    loop = [USER, turn(call({"n": 1})), {"role": "tool", "content": "Cold."}]
    rendered, _ = text.render_chat(ChatPrompt(messages=loop, tools=[TOOL]))
    assert f'{DEEPSEEK_CALL}f{DEEPSEEK_SEPARATOR}{{"n": 1}}{DEEPSEEK_CALL_END}' in rendered
    before, _ = text.render_chat(ChatPrompt(messages=[USER], tools=[TOOL]))
    assert rendered.startswith(before.partition("<|assistant|>")[0])


def test_a_description_is_a_system_text_of_its_own_where_there_is_none() -> None:
    first, second = with_description([USER], [TOOL], DEEPSEEK_V31)
    assert first["role"] == "system"
    assert second == USER
    (only,) = with_description([], [TOOL], DEEPSEEK_V31)
    assert only == first


def test_where_the_generic_form_is_asked_for_a_call_in_the_models_own_is_read_too() -> None:
    """As DeepSeek's V3 and R1 write it, whose templates have no place for tools."""
    template = (TESTS / "text/joined_calls.jinja").read_text().replace("<|user|>", "```json")
    text = TextFrontend(marked_checkpoint(DEEPSEEK_MARKS, template))
    assert text.tokenizer is not None
    use = ToolUse(tools=(Tool(name="f"),))
    prepared = text.prepare(
        ChatPrompt(messages=[USER], asked=AskedAnswer(use=use)), SamplingParams()
    )
    assert prepared.text is not None
    assert 'reply only with {"name": "tool name"' in prepared.text
    own = f"{DEEPSEEK_CALLS}{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}f\n```json\n{{}}\n```"
    for answer in ('{"name": "f", "arguments": {}}', own + DEEPSEEK_CALL_END + DEEPSEEK_CALLS_END):
        make_parser = prepared.make_parser
        assert make_parser is not None
        parser = make_parser()
        (part,) = (*parser.push(answer), *parser.flush())
        assert (part.kind, part.name, part.text) == ("tool_call", "f", "{}")
