"""Calls with an element for each argument: Qwen3-Coder's, and GLM-4.5's.

Owns their grammars behind a call's beginning. Knows no tokens beside marks. Invariant: texts of
elements are as they are, and their other values JSON.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cadenza.structured import CallRule
from cadenza.text.answers.answer_grammar import Marks, literal_in, texts_and_end
from cadenza.text.answers.call_readers import kinds_of_schema, resolved
from cadenza.text.answers.called_tools import BLANKS, CallGrammar, text_until
from cadenza.text.answers.grammar_parts import joined_grammar, parts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tags:
    """How a call with elements is written, in Lark's notation.

    Args:
        rules: those that the others refer to, with `text`: any text and the end of its element.
        head: a call's beginning, of a function's name.
        opening: the beginning of an element, of an argument's name.
        closing: the end of an element.
        tail: a call's end.
    """

    rules: Sequence[str]
    head: Callable[[str], str]
    opening: Callable[[str], str]
    closing: str
    tail: str = ""


def xml_calls(calls: CallGrammar, marks: Marks) -> CallRule:
    tags = _Tags(
        rules=[
            'text[suffix="\\n</parameter>\\n"]: /(.|\\n)*/',
            'element: "<parameter=" /[^>\\s]{1,64}/ ">\\n" text',
        ],
        head=lambda name: json.dumps(f"<function={name}>\n"),
        opening=lambda key: json.dumps(f"<parameter={key}>\n"),
        closing='"\\n</parameter>\\n"',
        tail='"</function>"',
    )
    return _elements(calls, marks, tags)


def glm_calls(calls: CallGrammar, marks: Marks) -> CallRule:
    def opening(key: str) -> str:
        return f"{name(key)} BLANKS? {literal_in('<arg_value>', marks)}"

    def name(key: str) -> str:
        return literal_in(f"<arg_key>{key}</arg_key>", marks)

    end = "</arg_value>"
    first, last = (literal_in(mark, marks) for mark in ("<arg_key>", "</arg_key>"))
    tags = _Tags(
        rules=[
            *text_until(end, marks, "BLANKS?"),
            f"element: {first} /[^<\\s]{{1,64}}/ {last} BLANKS? "
            f"{literal_in('<arg_value>', marks)} text",
        ],
        head=lambda called: f"{json.dumps(called)} BLANKS?",
        opening=opening,
        closing=f"{literal_in(end, marks)} BLANKS?",
    )
    return _elements(calls, marks, tags)


def _elements(calls: CallGrammar, marks: Marks, tags: _Tags) -> CallRule:
    """Elements, whose texts are as they are, and whose other values are JSON."""
    parts: list[dict[str, Any]] = []
    lines = [
        f"start: BLANKS? call BLANKS? {literal_in(calls.format.end, marks)}",
        BLANKS,
        *tags.rules,
        f"call: {' | '.join(f'call_{i}' for i in range(len(calls.tools)))}",
    ]
    for i, tool in enumerate(calls.tools):
        elements: list[str] = []
        schema = tool.parameters or {}
        properties: Mapping[str, Any] = schema.get("properties") or {}
        for j, (key, value) in enumerate(properties.items()):
            kinds = kinds_of_schema(resolved(value, schema))
            if tool.name not in calls.inputs and (not kinds or "string" in kinds):
                written = texts_and_end(resolved(value, schema), "text", tags.closing)
            else:
                written = f"@args_{i}_{j} {tags.closing}"
                parts += parts_of(f"args_{i}_{j}", calls.value(tool, value))
            lines.append(f"value_{i}_{j}: {tags.opening(key)} {written}")
            is_needed = key in schema.get("required", ())
            elements.append(f"value_{i}_{j}" + ("" if is_needed else "?"))
        if not properties and tool.parameters is not None:
            elements.append("element{0,16}")
        lines.append(f"call_{i}: {tags.head(tool.name)} {' '.join(elements)} {tags.tail}")
    grammar = joined_grammar("\n".join(lines), parts)
    return CallRule(begin=re.escape(calls.format.begin), grammar=grammar)
