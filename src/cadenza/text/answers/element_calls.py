"""Notations of elements with texts as they are, other values JSON (Qwen3-Coder's, GLM-4.5's);
Hermes' objects, in whose place Qwen3-Coder's answers have elements."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cadenza.structured import CallRule
from cadenza.text.answers.argument_schema import ArgumentSchema, json_text
from cadenza.text.answers.call_forms import MarkedCalls
from cadenza.text.answers.json_calls import NAME, object_lines, read_objects
from cadenza.text.answers.tool_format import (
    BLANKS,
    CallGrammar,
    Functions,
    Marks,
    Parts,
    Tool,
    ToolCall,
    ToolFormat,
    either,
    has_plain_texts,
    literal_in,
    properties_of,
    text_until,
    texts_until,
)
from cadenza.text.schemas.grammar import joined_grammar, parts_of

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"


class _Found(NamedTuple):
    arguments: str
    end: int


@dataclass(frozen=True, slots=True)
class _Elements:
    """Arguments that are written as plain text: their types are the schema's."""

    begin: re.Pattern[str]  # of an element, with its key; without one it is cut, or `last`
    end: re.Pattern[str]  # of a text
    last: str = ""  # what may follow the last element

    def read(self, text: str, position: int, schema: Mapping[str, Any]) -> _Found | None:
        properties: Mapping[str, Any] = schema.get("properties") or {}
        typed: dict[str, object] = {}
        while (begin := self.begin.search(text, position)) is not None and begin[1] is not None:
            key = begin[1] if begin[1] in properties else begin[1].strip()
            argument = ArgumentSchema.of(properties.get(key), schema)
            first = begin.end()
            ends = (end.start() for end in self.end.finditer(text, first))
            position = next((end for end in ends if not argument.is_open(text[first:end])), -1)
            if position < 0:
                return None
            written = text[first:position]
            if begin[0].endswith("\r\n"):
                written = written.removesuffix("\r")
            typed[key] = argument.read(written)
        if begin is not None and begin[0] != self.last:
            return None
        arguments = json_text(typed)
        end = len(text) if begin is None else begin.end()
        return None if arguments is None else _Found(arguments, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tags:
    """How a call with elements is written, in Lark's notation."""

    rules: Sequence[str]  # among them `text`: any text and the end of its element
    head: Callable[[str], str]  # a call's beginning, of a function's name
    opening: Callable[[str], str]  # the beginning of an element, of an argument's name
    end: str  # that of an element, as text
    behind: str = ""  # what may follow it
    tail: str = ""  # a call's end


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
            f"call: {either('call', len(calls.tools))}",
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


_GAP = r"[ \t\r\n]{0,16}"
_XML_ENDS = (  # where the text of an element ends, even where its own end is not written
    rf"\n?</parameter>{_GAP}(?:<parameter=|</function>|</tool_call>)"
    rf"|\n?</function>{_GAP}</tool_call>|\n{_GAP}<parameter="
)

_XML_FUNCTION = re.compile(r"<function=([^>\s]+)\s*>")

_XML = _Elements(
    re.compile(r"<parameter=(?:([^>\n]+)>(?:\r?\n)?)?|</function>"),
    re.compile(_XML_ENDS),
    "</function>",
)


def read_xml(text: str, functions: Functions) -> list[ToolCall] | None:
    """`<function=name>` elements with `<parameter=key>` elements; None where a text has no end."""
    whole = text.strip() + TOOL_CALL_END
    calls: list[ToolCall] = []
    head = _XML_FUNCTION.match(whole)
    while head is not None:
        found = _XML.read(whole, head.end(), functions.get(head[1], {}))
        if found is None:
            return None
        calls.append(ToolCall(head[1], found.arguments))
        head = _XML_FUNCTION.search(whole, found.end)
    return calls if calls and all(NAME.fullmatch(each.name) for each in calls) else None


def read_hermes(text: str, functions: Functions) -> list[ToolCall] | None:
    return read_objects(text, functions) or read_xml(text, functions)


def _hermes(calls: CallGrammar, marks: Marks) -> CallRule:
    end = literal_in(calls.format.end, marks)
    lines = [f"start: BLANKS? call BLANKS? {end}", BLANKS, *object_lines(calls.tools)]
    return CallRule(begin=re.escape(calls.format.begin), grammar=calls.whole(lines))


_HERMES_CALLS = MarkedCalls(begin=TOOL_CALL, end=TOOL_CALL_END, read=read_hermes)
HERMES = ToolFormat(
    begin=TOOL_CALL,
    end=TOOL_CALL_END,
    opening="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    closing="\n</tool_call>",
    forms=(_HERMES_CALLS,),
    write=_hermes,
)


def _xml(calls: CallGrammar, marks: Marks) -> CallRule:
    ends = _XML_ENDS.replace("/", r"\/")
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


QWEN3_CODER = ToolFormat(
    begin=TOOL_CALL,
    end=TOOL_CALL_END,
    is_json=False,
    escaped="<",
    forms=(
        _HERMES_CALLS,
        # Some answers leave the outer mark out.
        MarkedCalls(
            begin="<function=",
            end="</function>",
            trailing=TOOL_CALL_END,
            is_named=True,
            read=read_xml,
        ),
    ),
    write=_xml,
    keys=r"[^<>\s]([^<>\n]*[^<>\s])?",
    holds=has_plain_texts,
)

_GLM_NAME = re.compile(r"\s*([\w.-]+)\s*(?=<arg_key>|\Z)")

_GLM = _Elements(
    re.compile(r"<arg_key>(?:([^<]*)</arg_key>\s*<arg_value>)?"), re.compile("</arg_value>")
)


def read_glm(text: str, functions: Functions) -> list[ToolCall] | None:
    """A name, then `<arg_key>` and `<arg_value>` elements in turn; None where a text has no end."""
    head = _GLM_NAME.match(text)
    if head is None:
        return read_objects(text, functions)
    found = _GLM.read(text, head.end(), functions.get(head[1], {}))
    return None if found is None else [ToolCall(head[1], found.arguments)]


def _glm(calls: CallGrammar, marks: Marks) -> CallRule:
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


GLM45 = ToolFormat(
    begin=TOOL_CALL,
    end=TOOL_CALL_END,
    is_json=False,
    escaped="<",
    inner_marks=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    forms=(MarkedCalls(begin=TOOL_CALL, end=TOOL_CALL_END, read=read_glm),),
    write=_glm,
    keys=r"[^<\s]([^<]*[^<\s])?",
)
