"""Calls that a model begins by itself are constrained from their beginning to their end."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema_rs
import pytest

from cadenza.checkpoint import open_checkpoint
from cadenza.frontend.answers import AnswerParsers, AnswerPlan, AnswerPlanner, AskedAnswer, ToolUse
from cadenza.loading.build import constraint_compiler
from cadenza.structured import CallRule, Constraint, ConstraintSpec
from cadenza.text import Tokenizer
from cadenza.text.answers.answer_grammar import Tool
from cadenza.text.answers.call_grammar import call_rule
from cadenza.text.answers.call_readers import (
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_CALLS,
    DEEPSEEK_CALLS_END,
    DEEPSEEK_SEPARATOR,
)
from cadenza.text.answers.called_tools import CallGrammar
from cadenza.text.answers.input_grammar import InputGrammar
from cadenza.text.answers.part_parser import PartPlan
from cadenza.text.answers.tool_calls import TOOL_FORMATS, ToolFormat
from cadenza.text.constraints.token_constraint import ConstraintCompiler
from cadenza.text.schemas.grammar import ARGUMENTS_STYLE
from cadenza.text.schemas.grammar_check import check_grammar
from cadenza.text.schemas.json_schema import compile_schema
from tests.text.marked_tokenizers import with_marks
from tests.text.parts import joined, parse
from tests.text.walks import allowed_ids

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "n": {"$ref": "#/$defs/n"},
        "unit": {"type": "string", "enum": ["c", "f"]},
    },
    "required": ["city", "n"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOLS = (Tool(name="f", parameters=SCHEMA), Tool(name="now"))
FORMATS = ("hermes", "qwen3_coder", "mistral", "llama3_json", "json", "pythonic")
TAGGED = ("glm45", "functiongemma", "gemma4")
LISTED = ("lfm2", "deepseek_v3", "deepseek_v31")
BEGINNINGS = {
    "hermes": "<tool_call>",
    "qwen3_coder": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "llama3_json": '{"name": "f"',
    "pythonic": "[f(",
    "glm45": "<tool_call>",
    "functiongemma": "<start_function_call>",
    "gemma4": "<|tool_call>",
    "lfm2": "<|tool_call_start|>",
    "deepseek_v3": DEEPSEEK_CALLS,
    "deepseek_v31": DEEPSEEK_CALLS,
    "json": '```json\n{ "name":"now"',
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    source = open_checkpoint(None).tokenizer_source
    assert source is not None
    return Tokenizer(source)


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    made = constraint_compiler(open_checkpoint(None))
    assert made is not None
    yield made
    made.close()


def rule_of(
    tokenizer: Tokenizer, name: str, tools: tuple[Tool, ...] = TOOLS, reasoning: str = "none"
) -> CallRule | None:
    planner = AnswerPlanner("", tokenizer, AnswerParsers(tool_calls=name, reasoning=reasoning))
    plan = planner.plan("", None, AskedAnswer(use=ToolUse(tools=tools)), check_grammar)
    return None if plan.constraint is None else plan.constraint.calls


def constraint_of(compiler: ConstraintCompiler, rule: CallRule | None) -> Constraint:
    made = compiler.compile(ConstraintSpec(calls=rule)).result()
    assert made is not None
    return made


class Stream:
    """A constraint and the text of what it accepted."""

    def __init__(self, tokenizer: Tokenizer, constraint: Constraint) -> None:
        self.tokenizer = tokenizer
        self.constraint = constraint
        self.ids: list[int] = []

    def write(self, text: str) -> None:
        for token_id in with_marks(self.tokenizer, text):
            self.take(token_id)

    def take(self, token_id: int) -> None:
        self.constraint.accept(token_id)
        self.ids.append(token_id)

    @property
    def text(self) -> str:
        return self.tokenizer.decode(self.ids, skip_special_tokens=False)

    @property
    def is_free(self) -> bool:
        return all(byte == 0xFF for byte in self.constraint.allowed())

    def finish_call(self, rng: random.Random) -> None:
        for _ in range(1500):
            if self.is_free:
                return
            forced = self.constraint.forced()
            allowed = allowed_ids(self.constraint, self.tokenizer.vocab_size)
            assert not forced or allowed == [forced[0]]
            self.take(rng.choice(allowed))
        raise AssertionError(f"the call does not end: {self.text}")


@pytest.mark.parametrize("name", [*FORMATS, *LISTED])
def test_a_call_that_begins_is_read_as_one_of_a_function_and_its_schema(
    tokenizer: Tokenizer, compiler: ConstraintCompiler, name: str
) -> None:
    tools: ToolFormat = TOOL_FORMATS[name]
    plan = PartPlan(tools=tools, functions={tool.name: tool.parameters or {} for tool in TOOLS})
    for seed in range(4):
        rng = random.Random(seed)
        stream = Stream(tokenizer, constraint_of(compiler, rule_of(tokenizer, name)))
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


def test_elements_have_texts_as_they_are_and_other_values_of_the_schema(
    tokenizer: Tokenizer, compiler: ConstraintCompiler
) -> None:
    stream = Stream(tokenizer, constraint_of(compiler, rule_of(tokenizer, "qwen3_coder")))
    stream.write("<tool_call>\n<function=f>\n<parameter=city>\nIt's </a>\n\n</parameter>\n")
    stream.write("<parameter=n>\n")
    digits = [tokenizer.id_of(digit) for digit in "0123456789"]
    allowed = set(allowed_ids(stream.constraint, tokenizer.vocab_size))
    assert [each in allowed for each in digits] == [False, *[True] * 9]
    stream.write("7\n</parameter>\n</function>\n</tool_call>")
    assert stream.is_free
    plan = PartPlan(tools=TOOL_FORMATS["qwen3_coder"], functions={"f": SCHEMA})
    ((_, called, arguments),) = parse(plan, stream.text)
    assert (called, json.loads(arguments)) == ("f", {"city": "It's </a>\n", "n": 7})


def test_text_that_only_looks_like_a_call_goes_on_unconstrained(
    tokenizer: Tokenizer, compiler: ConstraintCompiler
) -> None:
    for text in ('{"name": "Anna", "age": ', '["name", "f"', "<tool_cal", "<tool_call"):
        name = "hermes" if text.startswith("<") else "json"
        stream = Stream(tokenizer, constraint_of(compiler, rule_of(tokenizer, name)))
        stream.write(text)
        assert stream.is_free


def test_nothing_is_constrained_within_reasoning(
    tokenizer: Tokenizer, compiler: ConstraintCompiler
) -> None:
    rule = rule_of(tokenizer, "hermes", reasoning="think")
    stream = Stream(tokenizer, constraint_of(compiler, rule))
    stream.write(" \n<think>I may write <tool_call> now")
    assert stream.is_free
    stream.write("</think>\n<tool_call>")
    assert not stream.is_free
    unmarked = Stream(tokenizer, constraint_of(compiler, rule))
    unmarked.write("No thought. <tool_call>")
    assert not unmarked.is_free


def test_a_fork_follows_drafts_into_the_call_but_not_over_its_beginning(
    tokenizer: Tokenizer, compiler: ConstraintCompiler
) -> None:
    stream = Stream(tokenizer, constraint_of(compiler, rule_of(tokenizer, "hermes")))
    stream.write("So: ")
    free = stream.constraint.fork()
    assert free is not None
    for token_id in tokenizer.encode("text <tool_call>", add_special_tokens=False):
        assert not free.has_failed
        free.accept(token_id)
    assert free.has_failed, "what follows a beginning is not known in a fork"
    for _ in range(2):  # a second call has the same matcher as the first, and so has its fork
        stream.write("<tool_call>")
        while (fork := stream.constraint.fork()) is None:
            pass
        assert fork.allowed() == stream.constraint.allowed()
        token_id = allowed_ids(fork, tokenizer.vocab_size)[-1]
        fork.accept(token_id)
        stream.take(token_id)
        assert fork.allowed() == stream.constraint.allowed()
        stream.finish_call(random.Random(1))


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic", "functiongemma", "glm45", "gemma4"])
def test_a_constraint_is_rebuilt_from_its_tokens(
    tokenizer: Tokenizer, compiler: ConstraintCompiler, name: str
) -> None:
    rule = rule_of(tokenizer, name)
    stream = Stream(tokenizer, constraint_of(compiler, rule))
    stream.write(f"So.\n{BEGINNINGS[name]}")
    again = Stream(tokenizer, constraint_of(compiler, rule))
    for place in range(60):
        if place % 10 == 0:  # as after a preemption or a restart, which make the masks anew
            again = Stream(tokenizer, constraint_of(compiler, rule))
            for token_id in stream.ids:
                again.constraint.allowed()
                again.take(token_id)
        assert again.constraint.allowed() == stream.constraint.allowed()
        fork = stream.constraint.fork()
        assert fork is None or fork.allowed() == stream.constraint.allowed()
        if stream.is_free:
            break
        token_id = random.Random(place).choice(allowed_ids(stream.constraint, tokenizer.vocab_size))
        stream.take(token_id)
        again.take(token_id)


def test_a_schema_that_cannot_be_followed_allows_any_object(
    tokenizer: Tokenizer, compiler: ConstraintCompiler
) -> None:
    odd = Tool(name="g", parameters={"type": "object", "x-guidance": {}})
    stream = Stream(tokenizer, constraint_of(compiler, rule_of(tokenizer, "hermes", (*TOOLS, odd))))
    stream.write('<tool_call>\n{"name": "g", "arguments": {"a": [1')
    assert not stream.is_free
    assert tokenizer.id_of("]") in allowed_ids(stream.constraint, tokenizer.vocab_size)
    kept = Stream(tokenizer, constraint_of(compiler, rule_of(tokenizer, "hermes", (*TOOLS, odd))))
    kept.write('<tool_call>\n{"name": "f", "arguments": {"')
    assert tokenizer.id_of("q") not in allowed_ids(kept.constraint, tokenizer.vocab_size)


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
def test_a_custom_tools_text_is_of_its_grammar(
    tokenizer: Tokenizer, compiler: ConstraintCompiler, name: str
) -> None:
    use = ToolUse(tools=(CUSTOM,))
    rule = rule_of(tokenizer, name, use.tools)
    assert rule is not None
    assert ConstraintSpec(calls=rule).is_needed
    beginning = BEGINNINGS[name].replace('"now"', '"patch"').replace('"f"', '"patch"')
    beginning = beginning.replace("[f(", "[patch(")
    texts: list[str] = []
    for seed in range(4):
        stream = Stream(tokenizer, constraint_of(compiler, rule))
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


def test_a_needed_call_that_cannot_go_on_is_a_failure(
    tokenizer: Tokenizer, compiler: ConstraintCompiler
) -> None:
    for tools, has_failed in (((CUSTOM,), True), (TOOLS, False)):
        stream = Stream(tokenizer, constraint_of(compiler, rule_of(tokenizer, "hermes", tools)))
        stream.write("<tool_call>")
        assert not stream.is_free
        stream.write("nothing")
        assert stream.constraint.has_failed == has_failed


WRITTEN = {
    "glm45": (
        "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>It's </a> x</arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value>",
        "7</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>f</arg_value>\n</tool_call>",
    ),
    "functiongemma": (
        "<start_function_call>call:f{city:<escape>It's </a> x<escape>,n:",
        "7, unit:<escape>f<escape>}<end_function_call>",
    ),
    "gemma4": (
        '<|tool_call>call:f{city:<|"|>It\'s </a> x<|"|>,n:',
        '7,unit:<|"|>f<|"|>}<tool_call|>',
    ),
    "pythonic": ('[f(city="It\'s ", n=', '7, unit="f"), now()]'),
    "lfm2": (
        '<|tool_call_start|>[f(city="It\'s ", n=',
        '7, unit="f"), now()]<|tool_call_end|>',
    ),
    "deepseek_v31": (
        f'{DEEPSEEK_CALLS}{DEEPSEEK_CALL}f{DEEPSEEK_SEPARATOR}{{"city": "It\'s ", "n": ',
        f'7, "unit": "f"}}{DEEPSEEK_CALL_END}{DEEPSEEK_CALL}now{DEEPSEEK_SEPARATOR}{{}}'
        f"{DEEPSEEK_CALL_END}{DEEPSEEK_CALLS_END}",
    ),
    "deepseek_v3": (
        f"{DEEPSEEK_CALLS}{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}f\n```json\n"
        '{"city": "It\'s ", "n": ',
        f'7, "unit": "f"}}\n```{DEEPSEEK_CALL_END}\n{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}'
        f"now\n```json\n{{}}\n```{DEEPSEEK_CALL_END}{DEEPSEEK_CALLS_END}",
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_other_notations_have_the_types_of_the_schema(
    tokenizer: Tokenizer, compiler: ConstraintCompiler, name: str
) -> None:
    stream = Stream(tokenizer, constraint_of(compiler, rule_of(tokenizer, name)))
    before, behind = WRITTEN[name]
    stream.write("So:\n" + before)
    digits = [tokenizer.id_of(digit) for digit in "0123456789"]
    allowed = set(allowed_ids(stream.constraint, tokenizer.vocab_size))
    assert [each in allowed for each in digits] == [False, *[True] * 9]
    assert tokenizer.id_of('"') not in allowed
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
def test_arguments_that_may_be_left_out_are_read_as_they_are_drawn(
    tokenizer: Tokenizer, compiler: ConstraintCompiler, name: str
) -> None:
    tools = (Tool(name="g", parameters=OPTIONAL), Tool(name="now"))
    plan = PartPlan(tools=TOOL_FORMATS[name], functions=ToolUse(tools=tools).schemas)
    keys: set[tuple[str, ...]] = set()
    for seed in range(8):
        stream = Stream(tokenizer, constraint_of(compiler, rule_of(tokenizer, name, tools)))
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
def test_marks_within_calls_may_be_tokens(
    tokenizer: Tokenizer, compiler: ConstraintCompiler, name: str
) -> None:
    tools: ToolFormat = TOOL_FORMATS[name]
    spare = [each for each in tokenizer.added_tokens.values() if each > 3]
    marks = dict(zip(tools.inner_marks[-2:], spare, strict=False))
    assert len(marks) == min(2, len(tools.inner_marks))
    calls = CallGrammar(tools=TOOLS, format=tools, compile=lenient, inputs={})
    rule = call_rule(calls, marks)
    stream = Stream(tokenizer, constraint_of(compiler, rule))
    stream.write(tools.begin)
    text = WRITTEN[name][0].removeprefix(tools.begin)
    for part in re.split(f"({'|'.join(map(re.escape, marks))})", text):
        ids = [marks[part]] if part in marks else with_marks(tokenizer, part)
        for token_id in ids:
            assert token_id in allowed_ids(stream.constraint, tokenizer.vocab_size), part
            stream.take(token_id)
    assert not stream.is_free


def lenient(schema: str) -> str:
    return compile_schema(schema, ARGUMENTS_STYLE, is_strict=False).text


def test_a_name_that_python_does_not_take_is_not_constrained(tokenizer: Tokenizer) -> None:
    odd = {"type": "object", "properties": {"from": {"type": "string"}}}
    assert rule_of(tokenizer, "pythonic", (Tool(name="f", parameters=odd),)) is None
    assert rule_of(tokenizer, "pythonic", (Tool(name="my-f"),)) is None


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
