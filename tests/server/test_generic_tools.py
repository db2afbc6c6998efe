"""Tools over HTTP with a chat template that has no place for them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import InvalidRequestError
from cadenza.frontend.answers import AnswerParsers, AskedAnswer, ToolUse
from cadenza.frontend.prepared_request import ChatPrompt
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.request import SamplingParams
from cadenza.text.answers.tool_format import Tool
from tests.server.dialects import CONVERSING, body_of, post, stream, told, told_in_stream, tools_of
from tests.server.harness import RunningServer, running_server
from tests.server.scripted_engine import ScriptedEngine

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": CITY}
TOOL = Tool(name="weather", description="The weather.", parameters=CITY)
QUESTION = {"role": "user", "content": "Which weather?"}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Oslo"}},
}
LOOP: list[dict[str, Any]] = [
    QUESTION,
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "Snow."},
]


def text_of(template: str, parsers: AnswerParsers | None = None) -> TextFrontend:
    checkpoint = open_checkpoint(None)
    files = replace(checkpoint.tokenizer, chat_templates={"default": template})
    changed = replace(checkpoint, tokenizer=files)
    return TextFrontend(changed, parsers=parsers or AnswerParsers())


@pytest.fixture(scope="module")
def generic() -> TextFrontend:
    return text_of(TEMPLATE)


def test_tools_are_said_to_be_taken_unless_that_is_strict(generic: TextFrontend) -> None:
    """By which Ollama's clients offer them."""
    strict = AnswerParsers(strict_tools=True)
    assert generic.prompts.takes_tools
    assert not text_of(TEMPLATE, strict).prompts.takes_tools
    assert TextFrontend(open_checkpoint(None), parsers=strict).prompts.takes_tools


CALLED = '{"name": "weather", "arguments": {"city": "Oslo"}}'


@pytest.fixture(scope="module")
def server(generic: TextFrontend) -> Iterator[RunningServer]:
    """Its model answers with a call."""
    assert generic.tokenizer is not None
    script = generic.encode(CALLED, add_special_tokens=False)
    engine = ScriptedEngine(
        script, vocab_size=generic.tokenizer.vocab_size, max_model_len=1024, hidden_size=None
    )
    with running_server(engine, generic) as running:
        yield running


def prompt_of(text: TextFrontend, messages: list[dict[str, Any]], use: ToolUse | None) -> str:
    prepared = text.prepare(
        ChatPrompt(messages=messages, asked=AskedAnswer(use=use)), SamplingParams()
    )
    assert prepared.text is not None
    return prepared.text


def test_the_system_message_describes_the_tools_and_results_are_user_turns(
    generic: TextFrontend,
) -> None:
    system = {"role": "system", "content": "Be brief."}
    prompt = prompt_of(generic, [system, *LOOP], ToolUse(tools=(TOOL,)))
    head, _, rest = prompt.partition("<user>")
    assert head.startswith("<system>Be brief.\n\nYou are a helpful assistant.")
    assert json.dumps([FUNCTION]) in head
    assert '{"name": "tool name", "arguments": {"parameter": "value"}}' in head
    assert f"<user>{rest}" == (
        "<user>Which weather?\n<assistant>I look.\n"
        '<user>Result of weather {"city": "Oslo"}: Snow.\n<assistant>'
    )


def test_a_conversation_with_results_needs_no_tools(generic: TextFrontend) -> None:
    prompt = prompt_of(generic, LOOP, None)
    assert prompt.startswith("<user>Which weather?\n<assistant>I look.\n<user>Result of weather")
    odd = [QUESTION, {"role": "tool", "tool_call_id": "none", "content": [{"text": "7"}]}]
    assert "<user>Result: 7\n" in prompt_of(generic, odd, None)


def test_each_turn_begins_with_all_of_the_one_before(generic: TextFrontend) -> None:
    use = ToolUse(tools=(TOOL,))
    before = prompt_of(generic, LOOP[:1], use).removesuffix("<assistant>")
    assert prompt_of(generic, LOOP, use).startswith(before)


def test_the_parser_that_is_named_decides_how_calls_are_asked_for() -> None:
    text = text_of(TEMPLATE, AnswerParsers(tool_calls="hermes"))
    prompt = prompt_of(text, [QUESTION], ToolUse(tools=(TOOL,)))
    assert 'reply only with <tool_call>\n{"name": "tool name"' in prompt


def test_strict_tools_are_refused_and_old_calls_are_left_as_they_are() -> None:
    text = text_of(TEMPLATE, AnswerParsers(strict_tools=True))
    with pytest.raises(InvalidRequestError, match="no place for tools") as refused:
        prompt_of(text, [QUESTION], ToolUse(tools=(TOOL,)))
    assert refused.value.param == "tools"
    assert "<tool>Snow." in prompt_of(text, LOOP, None)


def test_a_template_with_a_place_for_calls_gets_them() -> None:
    shown = "{% for m in messages %}{{ m.role }}{{ m.tool_calls | length }} {% endfor %}"
    assert prompt_of(text_of(shown), LOOP, None).startswith("user0 assistant1 tool0")


@pytest.mark.parametrize(("named", "num_calls"), [(None, 2), ("weather", 1)])
def test_a_required_call_is_constrained_to_a_name_and_arguments(
    generic: TextFrontend, named: str | None, num_calls: int
) -> None:
    tools = (TOOL, Tool(name="now"))
    use = ToolUse(tools=tools, choice="required", named=named, is_parallel=num_calls > 1)
    asked = AskedAnswer(use=use)
    prepared = generic.prepare(ChatPrompt(messages=[QUESTION], asked=asked), SamplingParams())
    assert prepared.request.constraint is not None
    grammar = prepared.request.constraint.grammar
    assert grammar is not None
    texts = [CALLED, '{"name": "now", "arguments": {}}', f"{CALLED}\n{CALLED}", "Hello"]
    allowed = [follows(grammar, text) for text in texts]
    assert allowed == [True, named is None, num_calls > 1, False]


def follows(grammar: str, text: str) -> bool:
    """Whether a grammar allows a text as a whole answer."""
    matcher = LLMatcher(LLTokenizer("byte"), grammar)
    data = text.encode()
    if matcher.validate_tokens([*data]) < len(data):
        return False
    return matcher.consume_tokens([*data]) and matcher.is_accepting()


@pytest.mark.parametrize("name", CONVERSING)
def test_every_api_tells_of_the_call(server: RunningServer, name: str) -> None:
    length = len(server.service.models.first.text.encode(CALLED, add_special_tokens=False))
    tools = tools_of(name, FUNCTION)
    body = {**body_of(name, [QUESTION], length), "tools": tools}
    assert told(name, post(server, name, body)).calls == [("weather", {"city": "Oslo"})]
    assert told_in_stream(name, stream(server, name, body)).calls == [("weather", {"city": "Oslo"})]
