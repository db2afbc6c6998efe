"""Calls that must be made: in the family's own notation where that holds the schemas, else JSON."""

import json
import random
from dataclasses import replace
from typing import Any

import jsonschema_rs
import pytest

from cadenza.frontend.answers import AnswerParsers, AnswerPlan, AnswerPlanner, AskedAnswer, ToolUse
from cadenza.structured import ConstraintSpec
from cadenza.text import Tokenizer
from cadenza.text.answers.json_calls import DEEPSEEK_CALL, DEEPSEEK_CALL_END, DEEPSEEK_SEPARATOR
from cadenza.text.answers.part_parser import PartPlan
from cadenza.text.answers.tool_calls import TOOL_FORMATS
from cadenza.text.answers.tool_format import Tool
from cadenza.text.constraints.token_constraint import ConstraintCompiler
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
from tests.text.marked_tokenizers import with_marks
from tests.text.parts import joined, parse
from tests.text.walks import allowed_ids


def plan_with(
    tokenizer: Tokenizer, use: ToolUse, form: str | None = None, name: str = "qwen3_coder"
) -> AnswerPlan:
    planner = AnswerPlanner("", tokenizer, AnswerParsers(tool_calls=name))
    asked = None if form is None else ConstraintSpec(grammar=form)
    return planner.plan("", asked, AskedAnswer(use=use), check_grammar)


def written(tokenizer: Tokenizer, compiler: ConstraintCompiler, plan: AnswerPlan, text: str) -> Any:
    """The parts of a text that the plan's constraint allows, whole and in pieces."""
    assert plan.constraint is not None
    assert plan.make_parser is not None
    made = compiler.compile(plan.constraint).result()
    assert made is not None
    for token_id in with_marks(tokenizer, text):
        assert token_id in allowed_ids(made, tokenizer.vocab_size), text
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


def test_required_calls_are_elements_where_these_hold_the_schemas(
    tokenizer: Tokenizer, compiler: ConstraintCompiler
) -> None:
    use = ToolUse(tools=(WRITE, NONE), choice="required")
    calls = [
        ("tool_call", "write", '{"path": "a <b>\\nc", "n": 7}'),
        ("tool_call", "none", "{}"),
    ]
    assert written(tokenizer, compiler, plan_with(tokenizer, use), XML) == calls
    one = plan_with(tokenizer, replace(use, is_parallel=False))
    first, _, second = XML.partition("\n<tool_call>")
    assert written(tokenizer, compiler, one, first) == calls[:1]
    with pytest.raises(AssertionError):
        written(tokenizer, compiler, one, f"{first}\n<tool_call>{second}")
    either = ToolUse(tools=(WRITE, NONE))
    plan = plan_with(tokenizer, either, 'start: "no"')
    assert written(tokenizer, compiler, plan, XML) == calls
    assert written(tokenizer, compiler, plan, "no") == [("content", None, "no")]


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("is_parallel", [True, False])
def test_required_calls_are_in_their_own_notation_where_their_values_are_json(
    tokenizer: Tokenizer, compiler: ConstraintCompiler, name: str, is_parallel: bool
) -> None:
    use = ToolUse(tools=TOOLS, choice="required", is_parallel=is_parallel)
    plan = plan_with(tokenizer, use, name=name)
    both = "".join(WRITTEN[name]).replace("It's ", "It's")
    second = {
        "lfm2": ", now()",
        "deepseek_v31": f"{DEEPSEEK_CALL}now{DEEPSEEK_SEPARATOR}{{}}{DEEPSEEK_CALL_END}",
        "deepseek_v3": f"\n{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}now\n```json\n{{}}\n```"
        f"{DEEPSEEK_CALL_END}",
    }
    call = ("tool_call", "f", '{"city": "It\'s", "n": 7, "unit": "f"}')
    assert written(tokenizer, compiler, plan, both.replace(second[name], "")) == [call]
    if is_parallel:
        assert written(tokenizer, compiler, plan, both) == [call, ("tool_call", "now", "{}")]
    else:
        with pytest.raises(AssertionError):
            written(tokenizer, compiler, plan, both)


def test_required_calls_are_json_where_a_text_is_bounded(
    tokenizer: Tokenizer, compiler: ConstraintCompiler
) -> None:
    use = ToolUse(tools=TOOLS, choice="required")
    text = '[{"name": "f", "arguments": {"city": "a", "n": 1}}]'
    found = written(tokenizer, compiler, plan_with(tokenizer, use), text)
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


def test_values_of_gemma_4_stand_between_its_marks_in_lists_and_objects_too(
    tokenizer: Tokenizer, compiler: ConstraintCompiler
) -> None:
    tools = (Tool(name="g", parameters=NESTED), NONE)
    plan = plan_with(tokenizer, ToolUse(tools=tools, choice="required"), name="gemma4")
    value = {
        "code": ["a"],
        "mode": "on",
        "Place": {"at": 1.5, "name": 'Å {"x"}'},
        "tags": ["a, b", ""],
    }
    text = f"{CALLED_4}<|tool_call>call:none{{}}<tool_call|>"
    found = written(tokenizer, compiler, plan, text)
    assert [(called, json.loads(arguments)) for _, called, arguments in found] == [
        ("g", value),
        ("none", {}),
    ]
    for wrong in ('"d"', '<|"|>a<|"|>'):
        with pytest.raises(AssertionError):
            written(tokenizer, compiler, plan, CALLED_4.replace('"a"', wrong))
    with pytest.raises(AssertionError):
        written(tokenizer, compiler, plan, CALLED_4.replace(",name:", ",other:"))


def test_drawn_calls_of_gemma_4_are_of_their_schema(
    tokenizer: Tokenizer, compiler: ConstraintCompiler
) -> None:
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
        stream = Stream(tokenizer, constraint_of(compiler, rule_of(tokenizer, "gemma4", tools)))
        stream.write(BEGINNINGS["gemma4"])
        stream.finish_call(random.Random(seed))
        ((kind, _, arguments),) = parse(plan, *stream.text)
        assert kind == "tool_call", stream.text
        found = json.loads(arguments)
        assert jsonschema_rs.is_valid(schema, found), stream.text
        keys |= {*found, *found["In"]}
    assert keys == {"list", "In", "a", "b", "c"}
