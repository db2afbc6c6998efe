"""Calls that must be made: in the family's own notation where that holds the schemas, else JSON."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from cadenza.frontend.answers import AnswerParsers, AnswerPlan, AnswerPlanner, AskedAnswer, ToolUse
from cadenza.frontend.model_prompts import ChatPrompt
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.request import SamplingParams
from cadenza.structured import ConstraintSpec
from cadenza.text import Tokenizer
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
from cadenza.text.answers.part_parser import PartPlan
from cadenza.text.answers.tool_calls import TOOL_FORMATS
from cadenza.text.answers.tool_format import Tool
from cadenza.text.schemas.grammar import check_grammar
from tests.text.call_streams import (
    BEGINNINGS,
    LISTED,
    TOOLS,
    WRITTEN,
    Stream,
    constraint_of,
    rule_of,
)
from tests.text.marked_tokenizers import marked_checkpoint, with_marks
from tests.text.parts import joined, parse
from tests.text.walks import Judge, allowed_ids


def plan_with(
    tokenizer: Tokenizer, use: ToolUse, form: str | None = None, name: str = "qwen3_coder"
) -> AnswerPlan:
    planner = AnswerPlanner("", tokenizer, AnswerParsers(tool_calls=name))
    asked = None if form is None else ConstraintSpec(grammar=form)
    return planner.plan("", asked, AskedAnswer(use=use), check_grammar)


def written(judge: Judge, plan: AnswerPlan, text: str) -> Any:
    """The parts of a text that the plan's constraint allows, whole and in pieces."""
    assert plan.constraint is not None
    assert plan.make_parser is not None
    made = judge.compiler.compile(plan.constraint).result()
    assert made is not None
    for token_id in with_marks(judge.tokenizer, text):
        assert token_id in allowed_ids(made, judge.tokenizer.vocab_size), text
        made.accept(token_id)
    whole, pieces = plan.make_parser(), plan.make_parser()
    found = joined([*whole.push(text), *whole.flush()])
    assert found == joined([*(p for each in text for p in pieces.push(each)), *pieces.flush()])
    return [part for part in found if part[2].strip()]


PLAIN = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "n": {"type": "integer", "maximum": 9}},
    "required": ["path"],
}
WRITE = Tool(name="write", parameters=PLAIN)
NONE = Tool(name="none", parameters={"type": "object", "properties": {}})
XML = """<tool_call>
<function=write>
<parameter=path>
a <b>
c
</parameter>
<parameter=n>
7
</parameter>
</function>
</tool_call>
<tool_call>
<function=none>
</function>
</tool_call>"""


def test_required_calls_are_elements_where_these_hold_the_schemas(judge: Judge):
    use = ToolUse(tools=(WRITE, NONE), choice="required")
    calls = [
        ("tool_call", "write", '{"path": "a <b>\\nc", "n": 7}'),
        ("tool_call", "none", "{}"),
    ]
    assert written(judge, plan_with(judge.tokenizer, use), XML) == calls
    one = plan_with(judge.tokenizer, replace(use, is_parallel=False))
    first, _, second = XML.partition("\n<tool_call>")
    assert written(judge, one, first) == calls[:1]
    with pytest.raises(AssertionError):
        written(judge, one, f"{first}\n<tool_call>{second}")
    either = ToolUse(tools=(WRITE, NONE))
    plan = plan_with(judge.tokenizer, either, 'start: "no"')
    assert written(judge, plan, XML) == calls
    assert written(judge, plan, "no") == [("content", None, "no")]


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("is_parallel", [True, False])
def test_required_calls_are_in_their_own_notation_where_their_values_are_json(
    judge: Judge, name: str, is_parallel: bool
):
    use = ToolUse(tools=TOOLS, choice="required", is_parallel=is_parallel)
    plan = plan_with(judge.tokenizer, use, name=name)
    both = "".join(WRITTEN[name]).replace("It's ", "It's")
    second = {
        "lfm2": ", now()",
        "deepseek_v31": f"{DEEPSEEK_CALL}now{DEEPSEEK_SEPARATOR}{{}}{DEEPSEEK_CALL_END}",
        "deepseek_v3": f"\n{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}now\n```json\n{{}}\n```"
        f"{DEEPSEEK_CALL_END}",
    }
    call = ("tool_call", "f", '{"city": "It\'s", "n": 7, "unit": "f"}')
    assert written(judge, plan, both.replace(second[name], "")) == [call]
    if is_parallel:
        assert written(judge, plan, both) == [call, ("tool_call", "now", "{}")]
    else:
        with pytest.raises(AssertionError):
            written(judge, plan, both)


def test_required_calls_are_json_where_a_text_is_bounded(judge: Judge):
    use = ToolUse(tools=TOOLS, choice="required")
    text = '[{"name": "f", "arguments": {"city": "a", "n": 1}}]'
    found = written(judge, plan_with(judge.tokenizer, use), text)
    assert found == [("tool_call", "f", '{"city": "a", "n": 1}')]


NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"type": "string"}},
        "Place": {"$ref": "#/$defs/place"},
        "mode": {"type": "string", "enum": ["on", "off"]},
        "code": {"type": "array", "items": {"type": "string", "pattern": "^[a-c]$"}},
    },
    "required": ["Place"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "at": {"type": "number"}},
            "required": ["name"],
        }
    },
}
CALLED_4 = (
    '<|tool_call>call:g{code:["a"],mode:<|"|>on<|"|>,'
    'Place:{at:1.5,name:<|"|>Å {"x"}<|"|>},tags:[<|"|>a, b<|"|>,<|"|><|"|>]}<tool_call|>'
)


def test_values_of_gemma_4_stand_between_its_marks_in_lists_and_objects_too(judge: Judge):
    tools = (Tool(name="g", parameters=NESTED), NONE)
    plan = plan_with(judge.tokenizer, ToolUse(tools=tools, choice="required"), name="gemma4")
    value = {
        "code": ["a"],
        "mode": "on",
        "Place": {"at": 1.5, "name": 'Å {"x"}'},
        "tags": ["a, b", ""],
    }
    text = f"{CALLED_4}<|tool_call>call:none{{}}<tool_call|>"
    found = written(judge, plan, text)
    assert [(called, json.loads(arguments)) for _, called, arguments in found] == [
        ("g", value),
        ("none", {}),
    ]
    for wrong in ('"d"', '<|"|>a<|"|>'):
        with pytest.raises(AssertionError):
            written(judge, plan, CALLED_4.replace('"a"', wrong))
    with pytest.raises(AssertionError):
        written(judge, plan, CALLED_4.replace(",name:", ",other:"))


def test_drawn_calls_of_gemma_4_are_of_their_schema(judge: Judge):
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "list": {"type": "array", "items": {"enum": ["x", "y, {z}"]}},
            "In": {
                "type": "object",
                "properties": {"b": {"type": "boolean"}, "a": {"enum": ["q"]}, "c": {"const": 1}},
                "required": ["c"],
            },
        },
        "required": ["In"],
    }
    tools = (Tool(name="g", parameters=schema),)
    plan = PartPlan(tools=TOOL_FORMATS["gemma4"], functions=ToolUse(tools=tools).schemas)
    keys: set[str] = set()
    for seed in range(12):
        stream = Stream(
            judge.tokenizer,
            constraint_of(judge.compiler, rule_of(judge.tokenizer, "gemma4", tools)),
        )
        stream.write(BEGINNINGS["gemma4"])
        stream.finish_call(random.Random(seed))
        ((kind, _, arguments),) = parse(plan, *stream.text)
        assert kind == "tool_call", stream.text
        found = json.loads(arguments)
        assert jsonschema_rs.is_valid(schema, found), stream.text
        keys |= {*found, *found["In"]}
    assert keys == {"list", "In", "a", "b", "c"}


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


def test_the_calls_of_a_turn_stand_behind_its_text_between_marks_that_are_tokens():
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
def test_a_message_without_calls_and_one_without_a_plain_text_stay(message: Any):
    assert with_listed_calls([message], LFM2) == [message]


def test_arguments_that_are_a_text_and_odd_calls_are_written_as_they_are():
    (made,) = with_listed_calls([turn(call("n=1"), {"name": "g"}, content=None)], LFM2)
    assert str(made["content"].text) == "<|tool_call_start|>[f(n=1), g()]<|tool_call_end|>"


def test_tools_without_a_place_are_described_with_a_call_of_the_familys_notation():
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


def test_a_description_is_a_system_text_of_its_own_where_there_is_none():
    first, second = with_description([USER], [TOOL], DEEPSEEK_V31)
    assert first["role"] == "system"
    assert second == USER
    (only,) = with_description([], [TOOL], DEEPSEEK_V31)
    assert only == first


def test_where_the_generic_form_is_asked_for_a_call_in_the_models_own_is_read_too():
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
