"""Calls that a person can read, in whatever a family's models make of its notation."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.text.answers.argument_schema import closed
from cadenza.text.answers.json_calls import (
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_CALLS,
    DEEPSEEK_CALLS_END,
    DEEPSEEK_SEPARATOR,
    GENERIC,
)
from cadenza.text.answers.part_parser import REASONING_FORMATS, PartPlan
from cadenza.text.answers.tool_calls import TOOL_FORMATS, format_shown_by
from tests.text.parts import Joined, parse

FUNCTIONS: dict[str, dict[str, Any]] = {
    "f": {
        "properties": {
            "city": {"type": "string"},
            "n": {"type": "integer"},
            "x": {"type": ["number", "null"]},
            "on": {"type": "boolean"},
            "list": {"type": "array"},
            "any": {},
            "unit": {"enum": ["c", "f"]},
            "status": {"anyOf": [{"enum": ["done", "off"]}, {"const": "5"}]},
            "text": {"type": ["string", "null"]},
        }
    },
    "g": {},
    "get-mail": {},
}


def plan_of(name: str, **fields: Any) -> PartPlan:
    tools = GENERIC if name == "generic" else TOOL_FORMATS[name]
    return PartPlan(tools=tools, functions=FUNCTIONS, **fields)


def call(name: str = "f", **arguments: Any) -> tuple[str, str, str]:
    return ("tool_call", name, json.dumps(arguments, ensure_ascii=False))


def told(text: str) -> tuple[str, None, str]:
    return ("content", None, text)


XML = (
    "<tool_call>\n<function=f>\n<parameter=city>\nNew\nYork\n</parameter>\n<parameter=n>\n5\n"
    "</parameter>\n<parameter=x>\nnull\n</parameter>\n<parameter=on>\nTrue\n</parameter>\n"
    '<parameter=list>\n[1, {"a": 2}]\n</parameter>\n<parameter=unit>\nc\n</parameter>\n'
    "</function>\n</tool_call>"
)
XML_CALL = call(city="New\nYork", n=5, x=None, on=True, list=[1, {"a": 2}], unit="c")
CASES: list[tuple[str, str, list[tuple[str, str | None, str]]]] = [
    ("qwen3_coder", f"I look.\n{XML}", [told("I look."), XML_CALL]),
    ("hermes", XML, [XML_CALL]),
    (
        "qwen3_coder",
        "<function=f>\n<parameter=city>\n12\n</parameter>\n</function>\n</tool_call>\nDone",
        [call(city="12"), told("Done")],
    ),
    ("qwen3_coder", "<tool_call>\n<function=g>\n</function>\n</tool_call>", [call("g")]),
    ("qwen3_coder", '<tool_call>{"name": "g", "arguments": {}}</tool_call>', [call("g")]),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=any>{'a'}</parameter><parameter=n>many</parameter>"
        "</function></tool_call>",
        [call(any="{'a'}", n="many")],
    ),
    (
        "glm45",
        "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        [call(city="Rome", n=3)],
    ),
    (
        "qwen3_coder",
        '<tool_call><function=f><parameter=status>\n"done"\n</parameter><parameter=unit> f '
        '</parameter><parameter=text>\n"a"\n</parameter></function></tool_call>',
        [call(status="done", unit="f", text='"a"')],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=city>\na\n<parameter=n>\n1\n</function></tool_call>x",
        [call(city="a", n=1), told("x")],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=city>\n</tool_call> </function>\n\n</parameter>\n"
        "</function>\n</tool_call>",
        [call(city="</tool_call> </function>\n")],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=city>\nhalf a file",
        [told("<tool_call>\n<function=f>\n<parameter=city>\nhalf a file")],
    ),
    (
        "glm45",
        "<tool_call>f<arg_key>city</arg_key><arg_value>\n</tool_call>\n</arg_value><arg_key>status"
        "</arg_key><arg_value>5</arg_value></tool_call>",
        [call(city="\n</tool_call>\n", status="5")],
    ),
    (
        "glm45",
        "<tool_call>f<arg_key>city</arg_key><arg_value>half</tool_call>",
        [told("<tool_call>f<arg_key>city</arg_key><arg_value>half</tool_call>")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"city": "<function=g></function></tool_call>"}}'
        "</tool_call>",
        [call(city="<function=g></function></tool_call>")],
    ),
    (
        "mistral",
        '[TOOL_CALLS]f[CALL_ID]1[ARGS]{"city": "[TOOL_CALLS][ARGS][CALL_ID]x"}',
        [call(city="[TOOL_CALLS][ARGS][CALL_ID]x")],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[get-mail(from='a', to=[None, 'b'])]<|tool_call_end|>",
        [call("get-mail", **{"from": "a", "to": [None, "b"]})],
    ),
    ("pythonic", "[f(**{'city': 'a'}, n=2,)]", [call(city="a", n=2)]),
    ("pythonic", r"[f(city='\d', any=r'\d')]", [call(city=r"\d", any=r"\d")]),
    ("pythonic", '[f(list=["""it\'s""", "]"])]', [call(list=["it's", "]"])]),
    ("pythonic", "[f(city='a)]", [told("[f(city='a)]")]),
    (
        "mistral",
        '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"city": "Rome"}[TOOL_CALLS]g[CALL_ID]a[ARGS]{}',
        [call(city="Rome"), call("g")],
    ),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}}] That is all.',
        [call(n=1), told("That is all.")],
    ),
    (
        "functiongemma",
        "<start_function_call>call:f{city:<escape>a, n: {b: 1}<escape>,n:2,on:true}"
        "<end_function_call>",
        [call(city="a, n: {b: 1}", n=2, on=True)],
    ),
    (
        "gemma4",
        'I look.<|tool_call>call:f{city:<|"|>a, {n: "b"}<|"|>,list:[<|"|>x<|"|>,{b:1}],n:2,on:true}'
        "<tool_call|><|tool_call>call:g{}<tool_call|>",
        [told("I look."), call(city='a, {n: "b"}', list=["x", {"b": 1}], n=2, on=True), call("g")],
    ),
    (
        "gemma4",
        '<|tool_call>call:f{any:{a-b:<|"|><tool_call|><|"|>,<|"|>c d<|"|>:None},x:None}'
        "<tool_call|>",
        [call(any={"a-b": "<tool_call|>", "c d": None}, x=None)],
    ),
    ("gemma4", "<|tool_call>call:f{n:1}", [call(n=1)]),
    ("gemma4", '<|tool_call>call:f{city:<|"|>x}', [told('<|tool_call>call:f{city:<|"|>x}')]),
    (
        "lfm2",
        "I look. <|tool_call_start|>[f(city='a]', n=-1, list=[{'b': None}]), g()]"
        "<|tool_call_end|>Done",
        [told("I look."), call(city="a]", n=-1, list=[{"b": None}]), call("g"), told("Done")],
    ),
    (
        "lfm2",
        '<|tool_call_start|>[{"name": "f", "arguments": {"n": 1}}]<|tool_call_end|>',
        [call(n=1)],
    ),
    ("lfm2", "<|tool_call_start|>[f(n=1)]", [call(n=1)]),
    ("lfm2", "<|tool_call_start|>f(n=1)<|tool_call_end|>", [call(n=1)]),
    (
        "deepseek_v31",
        f'So:{DEEPSEEK_CALLS}{DEEPSEEK_CALL}f{DEEPSEEK_SEPARATOR}{{"city": "a"}}{DEEPSEEK_CALL_END}'
        f"{DEEPSEEK_CALL}g{DEEPSEEK_SEPARATOR}{{}}{DEEPSEEK_CALL_END}{DEEPSEEK_CALLS_END}",
        [told("So:"), call(city="a"), call("g")],
    ),
    (
        "deepseek_v3",
        f"{DEEPSEEK_CALLS}{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}f\n```json\n"
        f'{{"city": "```"}}\n```{DEEPSEEK_CALL_END}\n{DEEPSEEK_CALLS_END}',
        [call(city="```")],
    ),
    (
        "deepseek_v31",
        f'{DEEPSEEK_CALLS}{DEEPSEEK_CALL}f{DEEPSEEK_SEPARATOR}{{"n": 1}}{DEEPSEEK_CALL_END}',
        [call(n=1)],
    ),
    (
        "deepseek_v31",
        f"{DEEPSEEK_CALLS}{DEEPSEEK_CALL}f{DEEPSEEK_CALL_END}{DEEPSEEK_CALLS_END}",
        [told(f"{DEEPSEEK_CALLS}{DEEPSEEK_CALL}f{DEEPSEEK_CALL_END}{DEEPSEEK_CALLS_END}")],
    ),
    ("pythonic", "[f(on=true, x=null, n=-1)]", [call(on=True, x=None, n=-1)]),
    (
        "pythonic",
        "[g(), f(list=[true, 'a]'])] I look.",
        [call("g"), call(list=[True, "a]"]), told("I look.")],
    ),
    ("pythonic", "Let me see: [f(n=1)]", [told("Let me see:"), call(n=1)]),
    ("pythonic", "[1](link) and [see(this)]", [told("[1](link) and [see(this)]")]),
    (
        "llama3_json",
        'I call: {"name": "f", "parameters": {"city": "}"}} and wait',
        [told("I call:"), call(city="}"), told("and wait")],
    ),
    (
        "llama3_json",
        '```json\n{"name": "f", "parameters": {"n": 1}}\n```\nDone',
        [call(n=1), told("Done")],
    ),
    (
        "llama3_json",
        '<|python_tag|>{"name": "f", "parameters": {"n": 1}}; {"name": "g", "parameters": {}}',
        [call(n=1), call("g")],
    ),
    (
        "json",
        'Sure.\n```\n{"name": "f", "arguments": {"n": 1}}\n{"name": "g"}\n```',
        [told("Sure."), call(n=1), call("g")],
    ),
    (
        "json",
        '{"type": "function", "function": {"name": "f", "arguments": "{\\"n\\": 1}"}}',
        [call(n=1)],
    ),
    ("json", '[{"name": "f", "arguments": null}] ok', [call(), told("ok")]),
    ("generic", '{"name": "f", "arguments": {"n": 1}', [call(n=1)]),
    ("generic", '{"name": "Anna", "age": 3} is it', [told('{"name": "Anna", "age": 3} is it')]),
    ("generic", "```python\nprint({1})\n``` [x]", [told("```python\nprint({1})\n``` [x]")]),
    ("generic", '{"name": "f", "arguments": {"n": 1', [told('{"name": "f", "arguments": {"n": 1')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [call()]),
    ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', [call()]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [call()]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"city": "a\nb\tc"}}</tool_call>',
        [call(city="a\nb\tc")],
    ),
    (
        "hermes",
        r'<tool_call>{"name": "f", "arguments": {"city": "\d+ \\ \n it\'s"}}</tool_call>',
        [call(city="\\d+ \\ \n it\\'s")],
    ),
    (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"n": 1}\n</tool_call>\nDone',
        [call(n=1), told("Done")],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1}', [call(n=1)]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"n": 1',
        [told('<tool_call>{"name": "f", "arguments": {"n": 1')],
    ),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_a_call_that_can_be_read_is_a_call_however_it_is_cut(
    name: str, text: str, expected: Joined
):
    plan = plan_of(name)
    assert parse(plan, text) == expected
    assert parse(plan, *text) == expected
    for first, second in itertools.combinations(range(0, len(text) + 1, 1 + len(text) // 24), 2):
        assert parse(plan, text[:first], text[first:second], text[second:]) == expected


CALL = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'


def thought(text: str) -> tuple[str, None, str]:
    return ("reasoning", None, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"I call.\n{CALL}", [thought("I call."), call(n=1)]),
        (f"I call.\n{CALL}\n</think>\n", [thought("I call."), call(n=1)]),
        (f"{CALL}\n{CALL}</think>", [call(n=1), call(n=1)]),
        (f"I call.\n{CALL} or not", [thought(f"I call.\n{CALL} or not")]),
        (f"Say {CALL}</think>No.", [thought(f"Say {CALL}"), told("No.")]),
        (f"Say {CALL}</think>\n{CALL}", [thought(f"Say {CALL}"), call(n=1)]),
        (
            "The mark <tool_call> begins</think>so",
            [thought("The mark <tool_call> begins"), told("so")],
        ),
        (CALL.replace('"f"', '"h"'), [thought(CALL.replace('"f"', '"h"'))]),
        ("<tool_call>{</think>", [thought("<tool_call>{")]),
        ("a</think>b", [thought("a"), told("b")]),
    ],
    ids=str,
)
def test_a_call_within_reasoning_counts_if_nothing_follows_it(text: str, expected: Joined):
    plan = plan_of("hermes", reasoning=REASONING_FORMATS["think"], begins_in_reasoning=True)
    assert parse(plan, text) == expected
    assert parse(plan, *text) == expected
    for place in range(len(text)):
        assert parse(plan, text[:place], text[place:]) == expected


def test_what_may_be_a_call_within_reasoning_is_held_back_up_to_a_bound():
    plan = plan_of("hermes", reasoning=REASONING_FORMATS["think"], begins_in_reasoning=True)
    text = "<tool_call>" + "x" * (1 << 17)
    assert parse(plan, text, "</think>so") == [thought(text), told("so")]


PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>"),
    *("<parameter=n>", "</parameter>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "```", "```json\n"),
    *('{"name": "f", "arguments": {}}', '{"name": "', 'f"', "[f(n=1)]", "[f(", ")]", "[", "{", "}"),
    *("<|tool_call>", "<tool_call|>", "call:f{", '<|"|>', "n:1", "<|channel>thought", "<channel|>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", DEEPSEEK_CALLS, DEEPSEEK_CALLS_END),
    *(DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_END, "f", "{}"),
    *("]", ";", "<|python_tag|>", "<", "`", "word", "é", "\n", " ", '"', "'", "\\"),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=10).map("".join)
NAMES = ("generic", *TOOL_FORMATS)


@given(st.sampled_from(NAMES), st.sampled_from([None, False, True]), TEXTS, st.data())
def test_any_answer_has_the_same_parts_however_it_is_cut(
    name: str, begins: bool | None, text: str, data: st.DataObject
):
    marks = "gemma4" if name == "gemma4" else "think"
    thinking = None if begins is None else REASONING_FORMATS[marks]
    plan = plan_of(name, reasoning=thinking, begins_in_reasoning=bool(begins))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    whole = parse(plan, text)
    assert parse(plan, *pieces) == whole
    assert parse(plan, *text) == whole


@pytest.mark.parametrize("name", NAMES)
def test_hostile_answers_are_read_in_bounded_time(name: str):
    """Many beginnings of calls, none of which is one."""
    for piece in ('{"type": ', '{"name": "f", "arguments": ', "<tool_call>", "[f(", "```", "[{"):
        text = piece * 2_000
        assert "".join(part[2] for part in parse(plan_of(name), text)) == text


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ('{"a": [1', '{"a": [1]}'),
        ('{"a": "}]"', '{"a": "}]"}'),
        (r'{"a": "\"}\\"', r'{"a": "\"}\\"}'),
        ('{"a": "b', None),
        (r'{"a": "b\"', None),
        ('{"a": "b\\', None),
        ('{"a": 1]', None),
        ('{"a": {"b": [1', None),
        ('{"a": 1}', None),
        ('{"a": "\n', None),
        ('{"a": "\\\n"', '{"a": "\\\n"}'),
    ],
)
def test_json_is_closed_where_few_brackets_are_missing(text: str, whole: str | None):
    assert closed(text, most=2) == whole


def test_a_template_shows_whether_its_calls_are_xml_or_json():
    coder = "<tool_call>\n<function=example_function_name>\n<parameter=p>"
    assert format_shown_by(coder) == "qwen3_coder"
    assert format_shown_by('<tool_call>\n{"name": <function-name>, "arguments":') == "hermes"
    assert format_shown_by("<tool_call>{name}\n<arg_key>{key}</arg_key>") == "glm45"
