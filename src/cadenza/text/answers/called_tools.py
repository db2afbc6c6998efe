"""`CallGrammar`: the tools of one request, with what the grammars of their calls are made of.

Invariant: a rule refers to its grammars by names, under which its parts are given.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cadenza.text.answers.answer_grammar import (
    Marks,
    Tool,
    literal_in,
    property_schema,
    text_without,
)
from cadenza.text.answers.argument_schema import OTHER_TYPES, ArgumentSchema
from cadenza.text.answers.grammar_parts import joined_grammar, parts_of
from cadenza.text.answers.input_grammar import arguments_of_written
from cadenza.text.answers.tool_calls import ToolFormat

MAX_LISTED_CALLS = 16
"""Of one list; without a bound a small model may call for ever."""

BLANKS = r"BLANKS: /[ \t]|\n[ \t]{0,16}/"
BEGIN_BLANKS = r"\s{0,16}"

Parts = list[dict[str, Any]]
"""Named grammars to which others refer."""

CompileSchema = Callable[[str], str]
"""Makes the grammar of a JSON Schema, which is given as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGrammar:
    """Makes the rules of one request's calls. `tools`: the functions, whose schemas can be
    followed; `compile`: of their arguments; `inputs`: the grammars of the JSON texts that custom
    tools take."""

    tools: Sequence[Tool]
    format: ToolFormat
    compile: CompileSchema
    inputs: Mapping[str, str]

    def arguments(self, tool: Tool) -> str:
        text = self.inputs.get(tool.name)
        return self.compile(tool.schema) if text is None else arguments_of_written(text)

    def value(self, tool: Tool, schema: object) -> str:
        text = self.inputs.get(tool.name)
        return (
            self.compile(property_schema(tool.parameters or {}, schema)) if text is None else text
        )

    def other_value(self, tool: Tool, schema: object) -> str:
        """As `value`, of what is no text."""
        return self.value(tool, {"allOf": [schema], "type": OTHER_TYPES})

    def argument(self, tool: Tool, schema: object) -> ArgumentSchema | None:
        """What an argument may be; None where it is the JSON text of a custom tool."""
        is_input = tool.name in self.inputs
        return None if is_input else ArgumentSchema.of(schema, tool.parameters or {})


def properties_of(tool: Tool) -> Mapping[str, Any]:
    return (tool.parameters or {}).get("properties") or {}


def are_keys(tools: Sequence[Tool], pattern: str) -> bool:
    """Whether the name of each argument is one that a notation can write."""
    names = (name for tool in tools for name in properties_of(tool))
    return all(re.fullmatch(pattern, name) for name in names)


def text_until(mark: str, marks: Marks, behind: str = "") -> list[str]:
    if mark not in marks:
        return [
            f"text_and_mark[suffix={json.dumps(mark)}]: /(.|\\n)*/",
            f"text: text_and_mark {behind}",
        ]
    return [text_without("TEXT", mark), f"text: TEXT {literal_in(mark, marks)} {behind}"]


def texts_until(name: str, texts: Sequence[str], mark: str, marks: Marks) -> tuple[str, str]:
    """A terminal of one of some texts, and what has it with the mark after it. One has all of them:
    few rules may be open at once, and with the mark, one text may begin with another."""
    listed = " | ".join(map(json.dumps, texts))
    if mark in marks:
        return f"{name.upper()}: {listed}", f"{name.upper()} {literal_in(mark, marks)}"
    return f"{name.upper()}: ({listed}) {json.dumps(mark)}", name.upper()


def whole_grammar(calls: CallGrammar, lines: Sequence[str]) -> str:
    parts = [
        part
        for i, tool in enumerate(calls.tools)
        for part in parts_of(f"args_{i}", calls.arguments(tool))
    ]
    return joined_grammar("\n".join(lines), parts)


def up_to(most: int, text: str) -> str:
    """So many times at most, in Lark's notation, which has no word for none."""
    return f"({text}){{0,{most}}}" if most else ""
