"""`CallGrammar`: what a call may be that a model begins by itself, in its family's own notation.

Owns the grammars of one call behind its beginning, for the families whose notation can be
constrained. Knows no tokens beside marks, and no endpoint. Invariant: what a rule allows is read by
the forms of the same format as calls of its functions.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from cadenza.structured import CallRule
from cadenza.text.answer_grammar import Marks, Tool, literal_in
from cadenza.text.call_readers import MISTRAL, kinds_of_schema, resolved
from cadenza.text.grammar_parts import joined_grammar, parts_of
from cadenza.text.input_grammar import arguments_of_written
from cadenza.text.tool_calls import GENERIC, TOOL_FORMATS, ToolFormat

MAX_LISTED_CALLS = 16
"""Of one list; without a bound a small model may call for ever."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

_BLANKS = r"BLANKS: /[ \t]|\n[ \t]{0,16}/"
_BEGIN_BLANKS = r"\s{0,16}"

CompileSchema = Callable[[str], str]
"""Makes the grammar of a JSON Schema, which is given as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGrammar:
    """Makes the rules of one request's calls.

    Args:
        tools: the functions, whose schemas can be followed.
        compile: of their arguments.
        inputs: the grammars of the JSON texts that custom tools take, by the tools' names.
    """

    tools: Sequence[Tool]
    format: ToolFormat
    compile: CompileSchema
    inputs: Mapping[str, str]

    def arguments(self, tool: Tool) -> str:
        """The grammar of a call's arguments as JSON."""
        text = self.inputs.get(tool.name)
        return self.compile(tool.schema) if text is None else arguments_of_written(text)

    def rule(self, marks: Marks) -> CallRule | None:
        """None where the format's calls cannot be constrained. Raises InvalidRequestError where a
        schema cannot be read."""
        write = next((write for each, write in _WRITERS if each is self.format), None)
        if write is None:
            return None
        return replace(write(self, marks), is_needed=bool(self.inputs))


def _hermes(calls: CallGrammar, marks: Marks) -> CallRule:
    end = literal_in(calls.format.end, marks)
    lines = [f"start: BLANKS? call BLANKS? {end}", _BLANKS, *_objects(calls.tools)]
    return CallRule(begin=re.escape(calls.format.begin), grammar=_whole(calls, lines))


def _bare(calls: CallGrammar, marks: Marks) -> CallRule:
    """An object is a call from its name on, which is that of a function."""
    del marks
    names = "|".join(re.escape(tool.name) for tool in calls.tools)
    begin = rf'\{{{_BEGIN_BLANKS}"name"{_BEGIN_BLANKS}:{_BEGIN_BLANKS}"(?:{names})"'
    lines = ["start: call", _BLANKS, *_objects(calls.tools)]
    return CallRule(begin=begin, grammar=_whole(calls, lines), is_read=True)


def _mistral(calls: CallGrammar, marks: Marks) -> CallRule:
    """A list of objects, or a name with its arguments, as older and newer models write."""
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
        _BLANKS,
        *flat,
        *_objects(calls.tools),
    ]
    return CallRule(begin=re.escape(MISTRAL), grammar=_whole(calls, lines))


def _xml(calls: CallGrammar, marks: Marks) -> CallRule:
    """Elements, whose texts are as they are, and whose other values are JSON."""
    parts: list[dict[str, Any]] = []
    lines = [
        f"start: BLANKS? call BLANKS? {literal_in(calls.format.end, marks)}",
        _BLANKS,
        'text[suffix="\\n</parameter>\\n"]: /(.|\\n)*/',
        'element: "<parameter=" /[^>\\s]{1,64}/ ">\\n" text',
        f"call: {' | '.join(f'call_{i}' for i in range(len(calls.tools)))}",
    ]
    for i, tool in enumerate(calls.tools):
        elements: list[str] = []
        schema = tool.parameters or {}
        properties: Mapping[str, Any] = schema.get("properties") or {}
        for j, (key, value) in enumerate(properties.items()):
            kinds = kinds_of_schema(resolved(value, schema))
            if tool.name in calls.inputs:
                written = f'@args_{i}_{j} "\\n</parameter>\\n"'
                parts += parts_of(f"args_{i}_{j}", calls.inputs[tool.name])
            elif not kinds or "string" in kinds:
                written = _texts(resolved(value, schema))
            else:
                written = f'@args_{i}_{j} "\\n</parameter>\\n"'
                parts += parts_of(f"args_{i}_{j}", calls.compile(_property(schema, value)))
            opening = json.dumps(f"<parameter={key}>\n")
            lines.append(f"value_{i}_{j}: {opening} {written}")
            is_needed = key in schema.get("required", ())
            elements.append(f"value_{i}_{j}" + ("" if is_needed else "?"))
        if not properties and tool.parameters is not None:
            elements.append("element{0,16}")
        head = json.dumps(f"<function={tool.name}>\n")
        lines.append(f'call_{i}: {head} {" ".join(elements)} "</function>"')
    grammar = joined_grammar("\n".join(lines), parts)
    return CallRule(begin=re.escape(calls.format.begin), grammar=grammar)


def _texts(schema: object) -> str:
    """A text and the end of its element; of an enum, one of its texts."""
    options = _members(schema).get("enum")
    texts = cast(list[object], options) if isinstance(options, list) else []
    if texts and all(isinstance(each, str) for each in texts):
        return f'({" | ".join(map(json.dumps, texts))}) "\\n</parameter>\\n"'
    return "text"


def _property(schema: Mapping[str, Any], value: object) -> str:
    """The schema of a property, with the definitions that it may refer to."""
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return json.dumps({**shared, **_members(value)})


def _members(schema: object) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], schema) if isinstance(schema, Mapping) else {}


def _objects(tools: Sequence[Tool]) -> list[str]:
    """The rule `call`: an object with a name, then its arguments."""
    lines = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    lines.append(r'key: "\"arguments\"" | "\"parameters\""')
    for i, tool in enumerate(tools):
        name = json.dumps(json.dumps(tool.name))
        members = ['"{"', r'"\"name\""', '":"', name, '","', "key", '":"', f"@args_{i}", '"}"']
        lines.append(f"call_{i}: {' BLANKS? '.join(members)}")
    return lines


def _whole(calls: CallGrammar, lines: Sequence[str]) -> str:
    parts = [
        part
        for i, tool in enumerate(calls.tools)
        for part in parts_of(f"args_{i}", calls.arguments(tool))
    ]
    return joined_grammar("\n".join(lines), parts)


_WRITERS: Sequence[tuple[ToolFormat, Callable[[CallGrammar, Marks], CallRule]]] = (
    (TOOL_FORMATS["hermes"], _hermes),
    (TOOL_FORMATS["qwen3_coder"], _xml),
    (TOOL_FORMATS["mistral"], _mistral),
    (TOOL_FORMATS["llama3_json"], _bare),
    (TOOL_FORMATS["json"], _bare),
    (GENERIC, _bare),
)
