"""Reasoning and tool calls in answers, in whatever pieces they come."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.text.answers.element_calls import read_glm, read_hermes, read_xml
from cadenza.text.answers.json_calls import read_mistral, read_objects
from cadenza.text.answers.listed_calls import read_function_gemma, read_pythonic
from cadenza.text.answers.part_parser import REASONING_FORMATS, PartPlan
from cadenza.text.answers.tool_calls import TOOL_FORMATS, format_shown_by
from tests.text.parts import Joined, parse

THINK = REASONING_FORMATS["think"]
HERMES, MISTRAL = TOOL_FORMATS["hermes"], TOOL_FORMATS["mistral"]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>"}}\n</tool_call>'
PLANS = [
    PartPlan(reasoning=reasoning, begins_in_reasoning=begins, tools=tools)
    for reasoning, begins in ((None, False), (THINK, False), (THINK, True))
    for tools in (None, *TOOL_FORMATS.values())
]

READERS = [
    *(read_objects, read_hermes, read_mistral, read_pythonic),
    *(read_function_gemma, read_xml, read_glm),
]

WHOLE = [
    (PartPlan(), " any <think> text", [("content", None, " any <think> text")]),
    (
        PartPlan(reasoning=THINK),
        "\n<think>\nwhy \n</think>\n\nso ",
        [("reasoning", None, "why"), ("content", None, "so ")],
    ),
    (PartPlan(reasoning=THINK), "no thought", [("content", None, "no thought")]),
    (PartPlan(reasoning=THINK), "<think>cut", [("reasoning", None, "cut")]),
    (
        PartPlan(reasoning=THINK, begins_in_reasoning=True),
        "why</think>so</think>",
        [("reasoning", None, "why"), ("content", None, "so</think>")],
    ),
    (
        PartPlan(tools=HERMES),
        f"I look. {CALL}\n{CALL}\nDone",
        [
            ("content", None, "I look."),
            ("tool_call", "f", '{"a": "</tool_call>"}'),
            ("tool_call", "f", '{"a": "</tool_call>"}'),
            ("content", None, "Done"),
        ],
    ),
    (
        PartPlan(tools=HERMES),
        '<tool_call>{"name": "f", "arguments": {}}',
        [("tool_call", "f", "{}")],
    ),
    (PartPlan(tools=HERMES), "<tool_call>no", [("content", None, "<tool_call>no")]),
    (
        PartPlan(reasoning=THINK, tools=TOOL_FORMATS["json"]),
        '<think>x</think>\n[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "parameters": {}}]',
        [("reasoning", None, "x"), ("tool_call", "f", '{"a": 1}'), ("tool_call", "g", "{}")],
    ),
    (PartPlan(tools=TOOL_FORMATS["json"]), "[1, 2]", [("content", None, "[1, 2]")]),
    (
        PartPlan(tools=MISTRAL),
        'Sure [TOOL_CALLS][{"name": "f", "arguments": {"a": [1]}}]',
        [("content", None, "Sure"), ("tool_call", "f", '{"a": [1]}')],
    ),
    (
        PartPlan(tools=MISTRAL),
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": 2}',
        [("tool_call", "f", '{"a": 1}'), ("tool_call", "g", '{"b": 2}')],
    ),
    (
        PartPlan(tools=TOOL_FORMATS["llama3_json"]),
        '<|python_tag|>{"name": "f", "parameters": {"a": "é"}}; {"name": "g", "parameters": {}}',
        [("tool_call", "f", '{"a": "é"}'), ("tool_call", "g", "{}")],
    ),
    (
        PartPlan(tools=TOOL_FORMATS["pythonic"]),
        "[f(a=1, b=['x', None]), m.g()]",
        [("tool_call", "f", '{"a": 1, "b": ["x", null]}'), ("tool_call", "m.g", "{}")],
    ),
    (
        PartPlan(tools=TOOL_FORMATS["functiongemma"]),
        '<start_function_call>call:f{city:<escape>Paris: "x"<escape>,n:2}<end_function_call>',
        [("tool_call", "f", '{"city": "Paris: \\"x\\"", "n": 2}')],
    ),
]


@pytest.mark.parametrize(("plan", "text", "expected"), WHOLE, ids=lambda value: str(value)[:30])
def test_a_whole_text_has_its_parts(plan: PartPlan, text: str, expected: Joined):
    assert parse(plan, text) == expected


@pytest.mark.parametrize(("plan", "text", "expected"), WHOLE, ids=lambda value: str(value)[:30])
def test_every_cut_in_three_gives_the_same_parts(plan: PartPlan, text: str, expected: Joined):
    places = range(len(text) + 1)
    for first, second in itertools.combinations(places[:: 1 + len(text) // 40], 2):
        assert parse(plan, text[:first], text[first:second], text[second:]) == expected
    assert parse(plan, *text) == expected


MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "\n", " "]
CALLS = ['{"name": "f", "arguments": {}}', "f(a=1)", "[", "]", "{", "}", ";", "<|python_tag|>", "<"]
words = st.lists(st.sampled_from([*MARKS, *CALLS, "word", "é"]), max_size=8).map("".join)


@given(st.sampled_from(PLANS), words, st.data())
def test_every_way_of_cutting_a_text_gives_the_parts_of_the_whole(
    plan: PartPlan, text: str, data: st.DataObject
):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert parse(plan, *pieces) == parse(plan, text) == parse(plan, *text)


@pytest.mark.parametrize("name", TOOL_FORMATS)
@given(text=st.one_of(words, st.text()))
def test_no_text_breaks_a_reader(name: str, text: str):
    for form in TOOL_FORMATS[name].forms:
        for call in form.read(text, {}) or ():
            assert isinstance(json.loads(call.arguments), dict)


def test_hostile_texts_are_no_calls():
    for text in ("[" * 100_000, "{" * 100_000, "(" * 5000, "f(" * 5000, '{"a":' * 50_000):
        for reader in READERS:
            assert reader(text, {}) is None


def test_a_template_shows_its_format():
    assert format_shown_by("… <tool_call>\n…") == "hermes"
    assert format_shown_by("[TOOL_CALLS]") == "mistral"
    assert format_shown_by("{{ 'Environment: ipython' }}") == "llama3_json"
    assert format_shown_by("{{ tools }}") == "json"


@pytest.mark.parametrize(
    "text",
    [
        '[{"name": "f", "arguments": {"a": "\\ud800"}}]',
        '[{"name": "\\ud800", "arguments": {}}]',
        '[{"name": "f", "arguments": {"a": NaN}}]',
        '[{"name": "f", "arguments": "{\\"a\\": Infinity}"}]',
    ],
)
def test_what_no_json_can_hold_is_no_call(text: str):
    assert read_objects(text, {}) is None
    assert read_pythonic("[f(a='\\ud800')]", {}) is None
