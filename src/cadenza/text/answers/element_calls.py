"""Grammars of calls with an element for each argument (Qwen3-Coder, GLM-4.5), after a beginning.

Invariant: texts of elements are as they are, and their other values JSON.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cadenza.structured import CallRule
from cadenza.text.answers.answer_grammar import Marks, Tool, literal_in
from cadenza.text.answers.call_readers import XML_ENDS
from cadenza.text.answers.called_tools import (
    BLANKS,
    CallGrammar,
    Parts,
    are_keys,
    properties_of,
    text_until,
    texts_until,
)
from cadenza.text.answers.grammar_parts import joined_grammar, parts_of


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
