"""Calls that a model begins by itself are constrained from their beginning to their end."""

import json
import random
import re
from typing import Any

import jsonschema_rs
import pytest

from cadenza.frontend.answers import ToolUse
from cadenza.structured import ConstraintSpec
from cadenza.text.answers.input_grammar import InputGrammar
from cadenza.text.answers.part_parser import PartPlan
from cadenza.text.answers.tool_calls import TOOL_FORMATS, call_rule
from cadenza.text.answers.tool_format import CallGrammar, Tool, ToolFormat
from cadenza.text.schemas.grammar import ARGUMENTS_STYLE
from cadenza.text.schemas.json_schema import compile_schema
from tests.text.call_streams import (
    BEGINNINGS,
    LISTED,
    SCHEMA,
    TOOLS,
    WRITTEN,
    Stream,
    constraint_of,
    rule_of,
    stream_of,
)
from tests.text.marked_tokenizers import with_marks
from tests.text.parts import parse
from tests.text.walks import Judge, allowed_ids

FORMATS = ("hermes", "qwen3_coder", "mistral", "llama3_json", "json", "pythonic")
TAGGED = ("glm45", "functiongemma", "gemma4")


@pytest.mark.parametrize("name", [*FORMATS, *LISTED])
def test_a_call_that_begins_is_read_as_one_of_a_function_and_its_schema(judge: Judge, name: str):
    tools: ToolFormat = TOOL_FORMATS[name]
    plan = PartPlan(tools=tools, functions={tool.name: tool.parameters or {} for tool in TOOLS})
    for seed in range(4):
        rng = random.Random(seed)
        stream = Stream(
            judge.tokenizer, constraint_of(judge.compiler, rule_of(judge.tokenizer, name))
        )
        stream.write("Let me see.\n")
        assert stream.is_free
        stream.write(BEGINNINGS[name])
        assert not stream.is_free
        stream.finish_call(rng)
        assert not stream.constraint.is_complete
        stream.write("\n")
        if name != "mistral":
            stream.write(BEGINNINGS[name].removeprefix("```json\n"))
            stream.finish_call(rng)
        assert stream.is_free
        parts = parse(plan, stream.text)
        calls = [part for part in parts if part[0] == "tool_call"]
        is_list = name in ("mistral", "pythonic", *LISTED)
        assert len(calls) >= 1 if is_list else len(calls) == 2, stream.text
        for _, called, arguments in calls:
            found = json.loads(arguments)
            assert found == {} if called == "now" else jsonschema_rs.is_valid(SCHEMA, found)


def test_elements_have_texts_as_they_are_and_other_values_of_the_schema(judge: Judge):
    stream = Stream(
        judge.tokenizer, constraint_of(judge.compiler, rule_of(judge.tokenizer, "qwen3_coder"))
    )
    stream.write("<tool_call>\n<function=f>\n<parameter=city>\nIt's </a>\n\n</parameter>\n")
    stream.write("<parameter=n>\n")
    digits = [judge.tokenizer.id_of(digit) for digit in "0123456789"]
    allowed = set(stream.allowed)
    assert [each in allowed for each in digits] == [False, *[True] * 9]
    stream.write("7\n</parameter>\n</function>\n</tool_call>")
    assert stream.is_free
    plan = PartPlan(tools=TOOL_FORMATS["qwen3_coder"], functions={"f": SCHEMA})
    ((_, called, arguments),) = parse(plan, stream.text)
    assert (called, json.loads(arguments)) == ("f", {"city": "It's </a>\n", "n": 7})


def test_text_that_only_looks_like_a_call_goes_on_unconstrained(judge: Judge):
    for text in ('{"name": "Anna", "age": ', '["name", "f"', "<tool_cal", "<tool_call"):
        name = "hermes" if text.startswith("<") else "json"
        stream = Stream(
            judge.tokenizer, constraint_of(judge.compiler, rule_of(judge.tokenizer, name))
        )
        stream.write(text)
        assert stream.is_free


def test_nothing_is_constrained_within_reasoning(judge: Judge):
    rule = rule_of(judge.tokenizer, "hermes", reasoning="think")
    stream = Stream(judge.tokenizer, constraint_of(judge.compiler, rule))
    stream.write(" \n<think>I may write <tool_call> now")
    assert stream.is_free
    stream.write("</think>\n<tool_call>")
    assert not stream.is_free
    unmarked = Stream(judge.tokenizer, constraint_of(judge.compiler, rule))
    unmarked.write("No thought. <tool_call>")
    assert not unmarked.is_free


def test_a_fork_follows_drafts_into_the_call_but_not_over_its_beginning(judge: Judge):
    stream = Stream(
        judge.tokenizer, constraint_of(judge.compiler, rule_of(judge.tokenizer, "hermes"))
    )
    stream.write("So: ")
    free = stream.constraint.fork()
    assert free is not None
    for token_id in judge.tokenizer.encode("text <tool_call>", add_special_tokens=False):
        assert not free.has_failed
        free.accept(token_id)
    assert free.has_failed, "what follows a beginning is not known in a fork"
    for _ in range(2):  # a second call has the same matcher as the first, and so has its fork
        stream.write("<tool_call>")
        while (fork := stream.constraint.fork()) is None:
            pass
        assert fork.allowed() == stream.constraint.allowed()
        token_id = allowed_ids(fork, judge.tokenizer.vocab_size)[-1]
        fork.accept(token_id)
        stream.take(token_id)
        assert fork.allowed() == stream.constraint.allowed()
        stream.finish_call(random.Random(1))


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic", "functiongemma", "glm45", "gemma4"])
def test_a_constraint_is_rebuilt_from_its_tokens(judge: Judge, name: str):
    rule = rule_of(judge.tokenizer, name)
    stream = Stream(judge.tokenizer, constraint_of(judge.compiler, rule))
    stream.write(f"So.\n{BEGINNINGS[name]}")
    again = Stream(judge.tokenizer, constraint_of(judge.compiler, rule))
    for place in range(60):
        if place % 10 == 0:  # as after a preemption or a restart, which make the masks anew
            again = Stream(judge.tokenizer, constraint_of(judge.compiler, rule))
            for token_id in stream.ids:
                again.constraint.allowed()
                again.take(token_id)
        assert again.constraint.allowed() == stream.constraint.allowed()
        fork = stream.constraint.fork()
        assert fork is None or fork.allowed() == stream.constraint.allowed()
        if stream.is_free:
            break
        token_id = random.Random(place).choice(stream.allowed)
        stream.take(token_id)
        again.take(token_id)


def test_a_schema_that_cannot_be_followed_allows_any_object(judge: Judge):
    odd = Tool(name="g", parameters={"type": "object", "x-guidance": {}})
    stream = Stream(
        judge.tokenizer,
        constraint_of(judge.compiler, rule_of(judge.tokenizer, "hermes", (*TOOLS, odd))),
    )
    stream.write('<tool_call>\n{"name": "g", "arguments": {"a": [1')
    assert not stream.is_free
    assert judge.tokenizer.id_of("]") in stream.allowed
    kept = Stream(
        judge.tokenizer,
        constraint_of(judge.compiler, rule_of(judge.tokenizer, "hermes", (*TOOLS, odd))),
    )
    kept.write('<tool_call>\n{"name": "f", "arguments": {"')
    assert judge.tokenizer.id_of("q") not in allowed_ids(
        kept.constraint, judge.tokenizer.vocab_size
    )


PATCH = 'start: line+\nline: ("+" | "-") /[a-z<"\\\\\\\\]{1,4}/ LF\n%import common.LF'
CUSTOM = Tool(
    name="patch",
    parameters={
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
    },
    input=InputGrammar(syntax="lark", definition=PATCH),
)


@pytest.mark.parametrize("name", [*FORMATS, *TAGGED, *LISTED])
def test_a_custom_tools_text_is_of_its_grammar(judge: Judge, name: str):
    use = ToolUse(tools=(CUSTOM,))
    rule = rule_of(judge.tokenizer, name, use.tools)
    assert rule is not None
    assert ConstraintSpec(calls=rule).is_needed
    beginning = BEGINNINGS[name].replace('"now"', '"patch"').replace('"f"', '"patch"')
    beginning = beginning.replace("[f(", "[patch(")
    texts: list[str] = []
    for seed in range(4):
        stream = Stream(judge.tokenizer, constraint_of(judge.compiler, rule))
        stream.write("So: ")
        assert stream.is_free
        stream.write(beginning)
        stream.finish_call(random.Random(seed))
        plan = PartPlan(tools=TOOL_FORMATS[name], functions=use.schemas)
        calls = [part for part in parse(plan, stream.text) if part[0] == "tool_call"]
        assert [called for _, called, _ in calls] == ["patch"] * len(calls)
        texts += [json.loads(arguments)["input"] for _, _, arguments in calls]
    assert len(texts) >= 4
    assert all(re.fullmatch(r'([+-][a-z<"\\]{1,4}\n)+', text) for text in texts), texts


def test_a_needed_call_that_cannot_go_on_is_a_failure(judge: Judge):
    for tools, has_failed in (((CUSTOM,), True), (TOOLS, False)):
        stream = Stream(
            judge.tokenizer,
            constraint_of(judge.compiler, rule_of(judge.tokenizer, "hermes", tools)),
        )
        stream.write("<tool_call>")
        assert not stream.is_free
        stream.write("nothing")
        assert stream.constraint.has_failed == has_failed


@pytest.mark.parametrize("name", WRITTEN)
def test_other_notations_have_the_types_of_the_schema(judge: Judge, name: str):
    stream = stream_of(judge, name)
    before, behind = WRITTEN[name]
    stream.write("So:\n" + before)
    digits = [judge.tokenizer.id_of(digit) for digit in "0123456789"]
    allowed = set(stream.allowed)
    assert [each in allowed for each in digits] == [False, *[True] * 9]
    assert judge.tokenizer.id_of('"') not in allowed
    stream.write(behind)
    assert stream.is_free
    plan = PartPlan(tools=TOOL_FORMATS[name], functions={"f": SCHEMA, "now": {}})
    found = [part for part in parse(plan, stream.text) if part[0] == "tool_call"]
    assert found == [part for part in parse(plan, *stream.text) if part[0] == "tool_call"]
    is_list = name in ("pythonic", *LISTED)
    city = "It's " if is_list else "It's </a> x"
    assert json.loads(found[0][2]) == {"city": city, "n": 7, "unit": "f"}
    assert [called for _, called, _ in found[1:]] == ["now"] * is_list


OPTIONAL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "boolean"},
        "b": {"type": "array", "items": {"enum": ["x, y: <", "z"]}, "maxItems": 2},
        "c": {"type": ["integer", "null"], "maximum": 3, "minimum": 1},
    },
    "required": ["b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", WRITTEN)
def test_arguments_that_may_be_left_out_are_read_as_they_are_drawn(judge: Judge, name: str):
    tools = (Tool(name="g", parameters=OPTIONAL), Tool(name="now"))
    plan = PartPlan(tools=TOOL_FORMATS[name], functions=ToolUse(tools=tools).schemas)
    keys: set[tuple[str, ...]] = set()
    for seed in range(8):
        stream = Stream(
            judge.tokenizer, constraint_of(judge.compiler, rule_of(judge.tokenizer, name, tools))
        )
        stream.write(BEGINNINGS[name].replace("[f(", "[g("))
        stream.finish_call(random.Random(seed))
        calls = [part for part in parse(plan, *stream.text) if part[0] == "tool_call"]
        assert calls, stream.text
        for _, called, arguments in calls:
            found = json.loads(arguments)
            assert found == {} if called == "now" else jsonschema_rs.is_valid(OPTIONAL, found)
            keys.add(tuple(found))
    assert len(keys) >= 3, keys


@pytest.mark.parametrize("name", TAGGED)
def test_marks_within_calls_may_be_tokens(judge: Judge, name: str):
    tools: ToolFormat = TOOL_FORMATS[name]
    spare = [each for each in judge.tokenizer.added_tokens.values() if each > 3]
    marks = dict(zip(tools.inner_marks[-2:], spare, strict=False))
    assert len(marks) == min(2, len(tools.inner_marks))
    calls = CallGrammar(tools=TOOLS, format=tools, compile=lenient, inputs={})
    rule = call_rule(calls, marks)
    stream = Stream(judge.tokenizer, constraint_of(judge.compiler, rule))
    stream.write(tools.begin)
    text = WRITTEN[name][0].removeprefix(tools.begin)
    for part in re.split(f"({'|'.join(map(re.escape, marks))})", text):
        ids = [marks[part]] if part in marks else with_marks(judge.tokenizer, part)
        for token_id in ids:
            assert token_id in stream.allowed, part
            stream.take(token_id)
    assert not stream.is_free


def lenient(schema: str) -> str:
    return compile_schema(schema, ARGUMENTS_STYLE, is_strict=False).text
