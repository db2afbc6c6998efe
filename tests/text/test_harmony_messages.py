"""Conversations as gpt-oss's template has room for them: nothing is passed over."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import InvalidRequestError, MessagesRefusedError
from cadenza.frontend.answers import AnswerParsers
from cadenza.frontend.model_prompts import ChatPrompt
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.request import SamplingParams
from cadenza.structured import StructuredOutput
from cadenza.text.answers.harmony import HARMONY_MARKS, harmony_messages, harmony_tools
from tests.text.marked_tokenizers import marked_checkpoint

TEMPLATE = (Path(__file__).parents[1] / "oracle/templates/channels.jinja").read_text()
USER = {"role": "user", "content": "Which weather?"}


def call(name: str, call_id: str | None = None) -> dict[str, Any]:
    made = {"type": "function", "function": {"name": name, "arguments": {"n": 1}}}
    return made if call_id is None else {"id": call_id, **made}


def result(text: str, call_id: str | None = None) -> dict[str, Any]:
    made = {"role": "tool", "content": text}
    return made if call_id is None else {**made, "tool_call_id": call_id}


def turn(*calls: dict[str, Any], **members: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", **members, "tool_calls": [*calls]}


@pytest.fixture(scope="module")
def text() -> TextFrontend:
    return TextFrontend(marked_checkpoint(HARMONY_MARKS, TEMPLATE))


def rendered(text: TextFrontend, messages: list[dict[str, Any]]) -> str:
    """Behind the system's message."""
    return text.render_chat(ChatPrompt(messages=messages))[0].partition("<|end|>")[2]


ANALYSIS = "<|start|>assistant<|channel|>analysis<|message|>"
CALL = '<|start|>assistant to=functions.{}<|channel|>commentary json<|message|>{{"n": 1}}<|call|>'
RESULT = '<|start|>functions.{} to=assistant<|channel|>commentary<|message|>"{}"<|end|>'
ASKED = "<|start|>user<|message|>Which weather?<|end|>"
END = "<|start|>assistant"


@pytest.mark.parametrize("ids", [("1", "2"), (None, None)])
def test_calls_of_one_turn_are_messages_with_their_results_behind_them(
    text: TextFrontend, ids: tuple[str | None, str | None]
):
    first, second = ids
    results = [result("a", first), result("b", second)]
    if first is not None:
        results.reverse()  # they are found by their ids
    calls = turn(call("f", first), call("g", second), reasoning_content="Both.")
    shown = f"{ANALYSIS}Both.<|end|>" + CALL.format("f") + RESULT.format("f", "a")
    shown += CALL.format("g") + RESULT.format("g", "b")
    assert rendered(text, [USER, calls, *results]) == ASKED + shown + END


def test_a_thought_stays_until_an_answer_follows_it(text: TextFrontend):
    begun = [USER, turn(call("f", "1"), reasoning_content="Look."), result("a", "1")]
    answer = {"role": "assistant", "content": "Sun.", "reasoning_content": "It is a."}
    called = CALL.format("f") + RESULT.format("f", "a")
    assert rendered(text, begun) == f"{ASKED}{ANALYSIS}Look.<|end|>{called}{END}"
    final = "<|start|>assistant<|channel|>final<|message|>Sun.<|end|>"
    whole = rendered(text, [*begun, answer, USER])
    assert whole == f"{ASKED}{called}{final}{ASKED}{END}"


def test_text_beside_a_call_follows_its_reasoning(text: TextFrontend):
    both = turn(call("f", "1"), reasoning_content="Look.", content="I look.")
    assert f"{ANALYSIS}Look.\n\nI look.<|end|>" in rendered(text, [USER, both])
    told = turn(call("f", "1"), content="I look.")
    assert f"{ANALYSIS}I look.<|end|>" in rendered(text, [USER, told])
    parts = turn(call("f", "1"), reasoning_content="Look.", content=[{"type": "text", "text": "x"}])
    with pytest.raises(MessagesRefusedError):
        rendered(text, [USER, parts])


FINAL = "<|start|>assistant<|channel|>final<|message|>"
THOUGHT = "<|channel|>analysis<|message|>It is a."
LEAKED: list[tuple[str, dict[str, Any]]] = [
    (f"{THOUGHT}<|end|>{FINAL}Sun.<|return|>", {"reasoning_content": "It is a."}),
    (f"{THOUGHT}<|channel|>final<|message|>Sun.", {"reasoning_content": "It is a."}),
    ("<|channel|>final<|message|>Sun.<|end|>", {}),
    (f"Sun.<|end|><|start|>assistant{THOUGHT}", {"reasoning_content": "It is a."}),
    (
        f"{THOUGHT}<|end|>{FINAL}Sun.<|channel|>commentary to=functions.f <|constrain|>json"
        '<|message|>{"n": 1}<|call|>',
        {"reasoning_content": "It is a.", "tool_calls": [call("f")]},
    ),
]


@pytest.mark.parametrize(("content", "members"), LEAKED)
def test_a_text_with_headers_is_what_they_say(
    text: TextFrontend, content: str, members: dict[str, Any]
):
    """As a server that does not know the format leaves them in an answer, and a client sends it."""
    (made,) = harmony_messages([{"role": "assistant", "content": content}])
    meant = {"role": "assistant", "content": "Sun.", **members}
    assert [made] == harmony_messages([meant])
    history = [USER, {"role": "assistant", "content": content}, USER]
    shown = rendered(text, history)
    assert shown == rendered(text, [USER, meant, USER])
    assert "Sun." in shown
    begun = rendered(text, history[:2]).removesuffix(END).replace(f"{ANALYSIS}It is a.<|end|>", "")
    assert shown.startswith(begun) or "tool_calls" in members


def test_a_thought_with_headers_is_its_texts(text: TextFrontend):
    thought = f"I look.{THOUGHT}<|end|>{FINAL}Sun."
    given = turn(call("f", "1"), reasoning=thought, content=f"{THOUGHT}<|end|>")
    (made,) = harmony_messages([given])
    assert made["reasoning"] == "I look.\n\nIt is a.\n\nSun.\n\nIt is a."
    assert made["content"] == ""
    assert "<|end|>" in rendered(text, [USER, given, result("a", "1")])


@pytest.mark.parametrize("content", ["<|channel|> begins a header", "a <|message|> b<|end|>", None])
def test_marks_without_a_header_stay_as_they_are(content: str | None):
    given = {"role": "assistant", "content": content or ""}
    assert harmony_messages([given]) == [given]
    user = {"role": "user", "content": f"{THOUGHT} {content}"}
    assert harmony_messages([user]) == [user]


def test_no_system_text_is_passed_over(text: TextFrontend):
    system, developer = ({"role": role, "content": role} for role in ("system", "developer"))
    shown = rendered(text, [system, developer, USER, {**system, "content": "Be brief."}])
    assert shown.startswith("<|start|>developer<|message|># Words\n\nsystem\n\ndeveloper")
    assert "Which weather?\n\nBe brief.<|end|>" in shown


def test_every_turn_begins_with_the_one_before(text: TextFrontend):
    messages = [
        USER,
        turn(call("f", "1"), call("g", "2"), reasoning="Both."),
        result("a", "1"),
        result("b", "2"),
        turn(call("f", "3"), reasoning="Again."),
        result("c", "3"),
    ]
    ends = [rendered(text, messages[:count]).removesuffix(END) for count in (1, 4, 6)]
    assert ends[2].startswith(ends[1])
    assert ends[1].startswith(ends[0])


@pytest.mark.parametrize(
    "given",
    [
        [],
        [USER],
        [{"role": "assistant", "content": None}],
        [{"role": "assistant", "tool_calls": [], "content": "a"}],
        [turn(call("f", "1"), call("g", "1")), result("a", "1"), result("b", "1")],
        [turn("odd", {"id": 5}), result("a", "5"), result("b")],
    ],
)
def test_no_call_no_result_and_no_text_is_lost(given: list[dict[str, Any]]):
    made = harmony_messages(given)

    def of(messages: list[dict[str, Any]], key: str) -> list[Any]:
        found = [each[key] for each in messages if each.get(key)]
        ones = (one for each in found for one in (each if isinstance(each, list) else [each]))
        return sorted(ones, key=str)

    for key in ("tool_calls", "content"):
        assert of(made, key) == of(given, key)
    assert all(len(each.get("tool_calls", [0])) == 1 for each in made)
    assert harmony_messages(made) == made


def test_a_result_without_a_call_is_told_by_the_user(text: TextFrontend):
    """As a history has it that was cut."""
    named = {**result("a", "1"), "name": "f"}
    answer = {"role": "assistant", "content": "Sun."}
    shown = rendered(text, [named, USER, answer, result("b", "2")])
    assert "<|start|>user<|message|>Result of f: a<|end|>" in shown
    assert "Sun.<|end|><|start|>user<|message|>Result: b<|end|>" in shown
    (made,) = harmony_messages([{**named, "content": [{"type": "text", "text": "a"}]}])
    assert made == {"role": "user", "content": [{"type": "text", "text": "a"}]}
    called = [USER, turn(call("f", "1")), USER, result("a", "1")]
    assert RESULT.format("f", "a") in rendered(text, called)


def test_a_function_without_a_description_is_rendered(text: TextFrontend):
    tools = [{"type": "function", "function": {"name": "now", "parameters": None}}]
    assert "// \ntype now" in text.render_chat(ChatPrompt(messages=[USER], tools=tools))[0]
    odd: list[Any] = [{"type": "function"}]
    assert harmony_tools(odd) == odd


def test_strict_messages_are_rendered_alike():
    """What the template would pass over is rendered, whether or not it refuses it."""
    checkpoint = marked_checkpoint(HARMONY_MARKS, TEMPLATE)
    strict = TextFrontend(checkpoint, parsers=AnswerParsers(strict_messages=True))
    shown = rendered(strict, [USER, turn(call("f", "1"), call("g", "2"))])
    assert shown == ASKED + CALL.format("f") + CALL.format("g") + END


def test_an_offline_answer_is_split_into_parts_and_its_form_is_that_of_the_final_channel(
    text: TextFrontend,
):
    form = StructuredOutput(regex="[0-9]+")
    params = SamplingParams(structured=form)
    tools = [{"type": "function", "function": {"name": "f"}}]
    prepared = text.prepare(ChatPrompt(messages=[USER], tools=tools), params)
    assert not prepared.request.params.skip_special_tokens
    assert prepared.make_parser is not None
    answer = "<|channel|>analysis<|message|>a<|end|><|start|>assistant to=functions.f"
    answer += "<|channel|>commentary json<|message|>{}<|call|>"
    parser = prepared.make_parser()
    found = [(part.kind, part.name) for part in (*parser.push(answer), *parser.flush())]
    assert found == [("reasoning", None), ("tool_call", "f")]
    constraint = prepared.request.constraint
    assert constraint is not None
    assert constraint.grammar is not None
    assert "final" in constraint.grammar
    plain = TextFrontend(open_checkpoint(None)).prepare(ChatPrompt(messages=[USER]), params)
    assert plain.make_parser is None
    assert plain.request.params.skip_special_tokens


ODD: tuple[Any, ...] = (
    *(None, True, float("nan"), 7, "", "\ud800", b"x", [], [1], {}, {1: 2}, object(), set()),
    *(np.zeros(3), np.float32("nan"), [np.zeros(2)], "x" * 10, [{"type": "text"}]),
)


@pytest.mark.parametrize("name", ["channels", "listed_tools", "responses"])
def test_odd_messages_are_rendered_or_refused_by_name(name: str):
    folder = Path(__file__).parents[1] / "oracle/templates"
    template = "{% for m in messages %}{{ m.tool_responses }}{{ m.content }}{% endfor %}{{ tools }}"
    if name != "responses":
        template = (folder / f"{name}.jinja").read_text()
    odd = TextFrontend(marked_checkpoint(HARMONY_MARKS, template))
    num_rendered = 0
    for value in ODD:
        one = {"role": "assistant", "content": "", "tool_calls": [{**call("f"), "id": value}]}
        for messages in (
            [{"role": "user", "content": value}, {"role": "system", "content": value}],
            [{"role": "assistant", "content": value, "reasoning": value, "tool_calls": value}],
            [USER, turn(call("f", "1"), reasoning=value, content=value), result("a", "1")],
            [USER, one, {"role": "tool", "content": value, "tool_call_id": value, "name": value}],
            [USER, turn(value, {"function": value}, {"function": {"name": value}})],
            [USER, turn(call("f", "1")), {"role": value, "content": value}],
            value,
            [value],
        ):
            for tools in (None, [value], value):
                try:
                    odd.render_chat(ChatPrompt(messages=messages, tools=tools))
                    num_rendered += 1
                except InvalidRequestError:
                    continue
    assert num_rendered > 20
