"""Grammars of whole answers: tool calls in a family's notation, and what follows reasoning.

Invariant: an answer of a grammar made here is read by the parser of the same format.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from cadenza.text.answers.argument_schema import schema_members
from cadenza.text.answers.grammar_parts import joined_grammar, parts_of
from cadenza.text.answers.input_grammar import InputGrammar
from cadenza.text.answers.part_parser import ReasoningFormat
from cadenza.text.answers.tool_calls import ToolFormat

MAX_CALLS = 16
"""Of one constrained answer; without a bound a small model may call for ever."""

ANNOTATIONS = frozenset({"description", "title", "default", "examples", "$schema"})
"""Members of a schema that ask for nothing."""

_REFERENCE = re.compile(r'"\$ref": "#([^"]*)"')
_DEFINITIONS = ("$defs", "definitions")

_NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}

Marks = Mapping[str, int]
"""The marks of a format that are tokens by themselves, with their ids; others are plain text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function. `parameters`: JSON Schema, None for no arguments; `input`: the text of a custom
    tool."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    is_strict: bool = False
    input: InputGrammar | None = None

    @property
    def schema(self) -> str:
        return json.dumps(self.parameters or _NO_ARGUMENTS)


Arguments = Mapping[str, str]
"""What may be called: the grammars of the functions' arguments, by the functions' names."""


def calls_grammar(arguments: Arguments, format: ToolFormat, marks: Marks, *, max_calls: int) -> str:
    """At least one call and at most `max_calls`."""
    lark = f"start: calls\n{_calls(arguments, format, marks, max_calls)}"
    return joined_grammar(lark, _named(arguments))


def text_or_calls_grammar(arguments: Arguments, format: ToolFormat, marks: Marks) -> str:
    """Any text, in which whatever begins a call is one."""
    calls = _calls(arguments, format, marks, MAX_CALLS)
    if format.begin:
        start, text = "start: TEXT | TEXT calls", text_without("TEXT", format.begin)
    else:
        openers = "".join(map(re.escape, format.openers))
        start = "start: TEXT | calls"
        text = rf"TEXT: /[^\s{openers}](.|\n)*/"
    return joined_grammar(f"{start}\n{text}\n{calls}", _named(arguments))


def either_grammar(first: str, second: str) -> str:
    return joined_grammar(
        "start: @first | @second", [*parts_of("first", first), *parts_of("second", second)]
    )


def after_reasoning(
    grammar: str, reasoning: ReasoningFormat, marks: Marks, *, has_begun: bool
) -> str:
    """What a grammar allows, after reasoning: that which the prompt began, or any or none."""
    begin, end = (literal_in(each, marks) for each in (reasoning.begin, reasoning.end))
    thought = text_without("THOUGHT", reasoning.end)
    thinking = f"THOUGHT {end} BLANKS"
    start = f"{thinking} @inner" if has_begun else f"({begin} {thinking})? @inner"
    lark = f"start: {start}\n{thought}\nBLANKS: /\\s{{0,8}}/"
    return joined_grammar(lark, parts_of("inner", grammar))


def _calls(names: Collection[str], format: ToolFormat, marks: Marks, max_calls: int) -> str:
    lines = [f"call: {' | '.join(f'call_{i}' for i in range(len(names)))}"]
    for i, name in enumerate(names):
        head = f'{{"name": {json.dumps(name)}, "{format.arguments}": '
        lines.append(f'call_{i}: {json.dumps(head)} @args_{i} "}}"')
    opening, between, closing = (
        literal_in(each, marks) for each in (format.opening, format.between, format.closing)
    )
    more = f"({between} call){{0,{max_calls - 1}}}" if max_calls > 1 else ""
    return "\n".join([f"calls: {opening} call {more} {closing}", *lines])


def text_without(name: str, mark: str) -> str:
    pattern = re.escape(mark).replace("/", r"\/")
    return rf"{name}: /(.|\n)*/ & ~/(.|\n)*{pattern}(.|\n)*/"


def literal_in(text: str, marks: Marks) -> str:
    """A text in Lark's notation; marks in it that are tokens are named by id."""
    if not text:
        return ""
    pattern = "|".join(map(re.escape, marks)) or "(?!)"
    parts = re.split(f"({pattern})", text)
    return " ".join(
        f"<[{marks[part]}]>" if part in marks else json.dumps(part) for part in parts if part
    )


def _named(arguments: Arguments) -> list[dict[str, Any]]:
    named = (parts_of(f"args_{i}", grammar) for i, grammar in enumerate(arguments.values()))
    return [part for parts in named for part in parts]


def property_schema(root: Mapping[str, Any], value: object) -> str:
    """The schema of a property of `root`, with what it may refer to."""
    shared = {name: root[name] for name in _DEFINITIONS if name in root}
    alone = json.dumps({**shared, **schema_members(value)})
    known = tuple(f"/{name}/" for name in _DEFINITIONS)
    if all(name.startswith(known) for name in _REFERENCE.findall(alone)):
        return alone
    whole = json.dumps({**schema_members(value), "$defs": {"root": root}})
    return _REFERENCE.sub(r'"$ref": "#/$defs/root\1"', whole)
