"""`call_rule`: what a call may be that a model begins by itself, in its family's own notation:
objects, elements (Qwen3-Coder, GLM-4.5: texts as they are, other values JSON), lists. Invariant:
the forms of the same format read what a rule allows as calls of its functions.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cadenza.structured import CallRule
from cadenza.text.answers.answer_grammar import ANNOTATIONS, Marks, Tool, literal_in
from cadenza.text.answers.argument_schema import ArgumentSchema
from cadenza.text.answers.call_readers import MISTRAL, XML_ENDS
from cadenza.text.answers.called_tools import (
    BEGIN_BLANKS,
    BLANKS,
    MAX_LISTED_CALLS,
    CallGrammar,
    Parts,
    are_keys,
    properties_of,
    text_until,
    texts_until,
    up_to,
    whole_grammar,
)
from cadenza.text.answers.grammar_parts import joined_grammar, parts_of
from cadenza.text.answers.harmony_grammar import message_rule
from cadenza.text.answers.listed_calls import (
    deepseek_calls,
    deepseek_list,
    function_gemma_calls,
    gemma4_calls,
    have_list_names,
    lfm2_calls,
    python_list,
    pythonic_calls,
)
from cadenza.text.answers.tool_calls import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GEMMA4,
    GENERIC,
    HARMONY,
    LFM2,
    TOOL_FORMATS,
    ToolFormat,
)


def have_xml_names(tools: Sequence[Tool]) -> bool:
    return are_keys(tools, r"[^<>\s]([^<>\n]*[^<>\s])?")


def xml_calls(calls: CallGrammar, marks: Marks) -> CallRule | None:
    if not have_xml_names(calls.tools):
        return None
    ends = XML_ENDS.replace("/", r"\/")
    tags = _Tags(
        rules=[
            rf'text[suffix="\n</parameter>\n"]: /(.|\n)*/ & ~/(.|\n)*({ends})(.|\n)*/',
            'element: "<parameter=" /[^>\\s]{1,64}/ ">\\n" text',
        ],
        head=lambda name: json.dumps(f"<function={name}>\n"),
        opening=lambda key: json.dumps(f"<parameter={key}>\n"),
        end="\n</parameter>\n",
        tail='"</function>"',
    )
    return _ElementGrammar(calls, marks, tags).rule()


def glm_calls(calls: CallGrammar, marks: Marks) -> CallRule | None:
    if not are_keys(calls.tools, r"[^<\s]([^<]*[^<\s])?"):
        return None
    end = "</arg_value>"
    first, last, begin = (
        literal_in(mark, marks) for mark in ("<arg_key>", "</arg_key>", "<arg_value>")
    )
    tags = _Tags(
        rules=[
            *text_until(end, marks, "BLANKS?"),
            f"element: {first} /[^<\\s]{{1,64}}/ {last} BLANKS? {begin} text",
        ],
        head=lambda name: f"{json.dumps(name)} BLANKS?",
        opening=lambda key: f"{first} {json.dumps(key)} {last} BLANKS? {begin}",
        end=end,
        behind="BLANKS?",
    )
    return _ElementGrammar(calls, marks, tags).rule()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tags:
    """How a call with elements is written, in Lark's notation. `rules`: those that the others refer
    to, with `text`: any text and the end of its element; `head`: a call's beginning, of a
    function's name; `opening`: the beginning of an element, of an argument's name; `end`: that of
    an element, as text; `behind`: what may follow it; `tail`: a call's end."""

    rules: Sequence[str]
    head: Callable[[str], str]
    opening: Callable[[str], str]
    end: str
    behind: str = ""
    tail: str = ""


class _ElementGrammar:
    def __init__(self, calls: CallGrammar, marks: Marks, tags: _Tags) -> None:
        self._calls = calls
        self._marks = marks
        self._tags = tags
        self._parts: Parts = []
        self._lines = [
            f"start: BLANKS? call BLANKS? {literal_in(calls.format.end, marks)}",
            BLANKS,
            *tags.rules,
            f"call: {' | '.join(f'call_{i}' for i in range(len(calls.tools)))}",
        ]

    def rule(self) -> CallRule:
        tags = self._tags
        for i, tool in enumerate(self._calls.tools):
            elements: list[str] = []
            required = (tool.parameters or {}).get("required", ())
            for j, (key, schema) in enumerate(properties_of(tool).items()):
                value = self._value(tool, schema, f"args_{i}_{j}")
                self._lines.append(f"value_{i}_{j}: {tags.opening(key)} {value}")
                elements.append(f"value_{i}_{j}" + ("" if key in required else "?"))
            if not elements and tool.parameters is not None:
                elements.append("element{0,16}")
            called = f"{tags.head(tool.name)} {' '.join(elements)} {tags.tail}"
            self._lines.append(f"call_{i}: {called}")
        grammar = joined_grammar("\n".join(self._lines), self._parts)
        return CallRule(begin=re.escape(self._calls.format.begin), grammar=grammar)

    def _value(self, tool: Tool, schema: object, name: str) -> str:
        argument = self._calls.argument(tool, schema)
        if argument is None:
            return self._json(name, self._calls.value(tool, schema))
        if argument.texts is None:
            return "text"
        texts = [each for each in map(argument.spelling, argument.texts) if each is not None]
        if not texts:
            return self._json(name, self._calls.value(tool, schema))
        line, one = texts_until(name, texts, self._tags.end, self._marks)
        self._lines.append(line)
        ways = [f"{one} {self._tags.behind}"]
        if argument.has_others:
            ways.append(self._json(name, self._calls.other_value(tool, schema)))
        return f"({' | '.join(ways)})"

    def _json(self, name: str, grammar: str) -> str:
        self._parts += parts_of(name, grammar)
        return f"@{name} {literal_in(self._tags.end, self._marks)} {self._tags.behind}"


ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

_PLAIN_OBJECT = ANNOTATIONS | {
    *("type", "properties", "required", "additionalProperties", "$defs", "definitions"),
}


def call_rule(calls: CallGrammar, marks: Marks) -> CallRule | None:
    """None where the format's calls cannot be constrained. Raises InvalidRequestError where a
    schema cannot be read."""
    write = next((write for each, write in _WRITERS if each is calls.format), None)
    rule = None if write is None else write(calls, marks)
    return None if rule is None else replace(rule, is_needed=bool(calls.inputs))


def holds_schemas(format: ToolFormat, tools: Sequence[Tool]) -> bool:
    """Whether required calls can be written in a format that is not JSON, so that they satisfy all
    that the schemas ask for: elements, whose texts are bounded by nothing."""
    if format in (DEEPSEEK_V3, DEEPSEEK_V31):
        return True
    if format is LFM2:
        return have_list_names(tools) and all(map(_is_listed, tools))
    if format is not GEMMA4 and not have_xml_names(tools):
        return False
    return format in (TOOL_FORMATS["qwen3_coder"], GEMMA4) and all(map(_is_held, tools))


def _is_listed(tool: Tool) -> bool:
    schema, properties = tool.parameters or {}, properties_of(tool)
    if schema.keys() - _PLAIN_OBJECT or set(schema.get("required", ())) - properties.keys():
        return False
    return "properties" in schema or "additionalProperties" not in schema


def _is_held(tool: Tool) -> bool:
    """Whether each text is any or one of an enum, and what may be any is nothing else."""
    if not _is_listed(tool):
        return False
    for value in properties_of(tool).values():
        argument = ArgumentSchema.of(value, tool.parameters or {})
        is_plain = argument.has_plain_texts and not argument.has_others
        if not argument.is_resolved or (argument.texts is None and not is_plain):
            return False
    return True


def required_calls(calls: CallGrammar, marks: Marks, *, max_calls: int) -> str:
    """The grammar of an answer of calls in the format's own notation, of which `holds_schemas`."""
    tools = [
        replace(tool, parameters=None)
        if "properties" in schema and not schema["properties"]
        else tool
        for tool in calls.tools
        for schema in (tool.parameters or {},)
    ]
    calls = replace(calls, tools=tools)
    begin = literal_in(calls.format.begin, marks)
    if calls.format in (DEEPSEEK_V3, DEEPSEEK_V31, LFM2):
        write = python_list if calls.format is LFM2 else deepseek_list
        lines = write(calls, marks, max_calls)
        return joined_grammar(f"start: {begin} @all", parts_of("all", lines))
    rule = (gemma4_calls if calls.format is GEMMA4 else xml_calls)(calls, marks)
    assert rule is not None
    one = rule.grammar
    more = up_to(max_calls - 1, f"{literal_in(calls.format.between, marks)} call")
    lark = f"start: call {more}\ncall: {begin} @one"
    return joined_grammar(lark, parts_of("one", one))


def _hermes(calls: CallGrammar, marks: Marks) -> CallRule:
    end = literal_in(calls.format.end, marks)
    lines = [f"start: BLANKS? call BLANKS? {end}", BLANKS, *_objects(calls.tools)]
    return CallRule(begin=re.escape(calls.format.begin), grammar=whole_grammar(calls, lines))


def _harmony(calls: CallGrammar, marks: Marks) -> CallRule:
    arguments = {tool.name: calls.arguments(tool) for tool in calls.tools}
    return message_rule(calls.tools, arguments, marks)


def _bare(calls: CallGrammar, marks: Marks) -> CallRule:
    del marks
    names = "|".join(re.escape(tool.name) for tool in calls.tools)
    begin = rf'\{{{BEGIN_BLANKS}"name"{BEGIN_BLANKS}:{BEGIN_BLANKS}"(?:{names})"'
    lines = ["start: call", BLANKS, *_objects(calls.tools)]
    return CallRule(begin=begin, grammar=whole_grammar(calls, lines), is_read=True)


def _mistral(calls: CallGrammar, marks: Marks) -> CallRule:
    arguments, call_id = (literal_in(mark, marks) for mark in ("[ARGS]", "[CALL_ID]"))
    flat = [
        f"flat_{i}: {json.dumps(tool.name)} ({call_id} ID)? ({arguments})? @args_{i}"
        for i, tool in enumerate(calls.tools)
    ]
    lines = [
        "start: BLANKS? (listed | flat)",
        'listed: "[" BLANKS? call more BLANKS? "]"',
        f'more: (BLANKS? "," BLANKS? call){{0,{MAX_LISTED_CALLS - 1}}}',
        f"flat: {' | '.join(f'flat_{i}' for i in range(len(flat)))}",
        "ID: /[a-zA-Z0-9]{1,32}/",
        BLANKS,
        *flat,
        *_objects(calls.tools),
    ]
    return CallRule(begin=re.escape(MISTRAL), grammar=whole_grammar(calls, lines))


def _objects(tools: Sequence[Tool]) -> list[str]:
    lines = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    lines.append(r'key: "\"arguments\"" | "\"parameters\""')
    for i, tool in enumerate(tools):
        name = json.dumps(json.dumps(tool.name))
        members = ['"{"', r'"\"name\""', '":"', name, '","', "key", '":"', f"@args_{i}", '"}"']
        lines.append(f"call_{i}: {' BLANKS? '.join(members)}")
    return lines


_WRITERS: Sequence[tuple[ToolFormat, Callable[[CallGrammar, Marks], CallRule | None]]] = (
    (TOOL_FORMATS["hermes"], _hermes),
    (TOOL_FORMATS["qwen3_coder"], xml_calls),
    (TOOL_FORMATS["glm45"], glm_calls),
    (TOOL_FORMATS["pythonic"], pythonic_calls),
    (TOOL_FORMATS["functiongemma"], function_gemma_calls),
    (TOOL_FORMATS["mistral"], _mistral),
    (HARMONY, _harmony),
    (GEMMA4, gemma4_calls),
    (LFM2, lfm2_calls),
    (DEEPSEEK_V3, deepseek_calls),
    (DEEPSEEK_V31, deepseek_calls),
    (TOOL_FORMATS["llama3_json"], _bare),
    (TOOL_FORMATS["json"], _bare),
    (GENERIC, _bare),
)
