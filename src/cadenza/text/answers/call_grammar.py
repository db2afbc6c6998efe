"""`CallGrammar`: what a call may be that a model begins by itself, in its family's own notation.

Owns the grammars of one call behind its beginning, for the families whose notation can be
constrained. Knows no tokens beside marks, and no endpoint. Invariant: what a rule allows is read by
the forms of the same format as calls of its functions.
"""

import json
import keyword
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cadenza.structured import CallRule
from cadenza.text.answers.answer_grammar import (
    ANNOTATIONS,
    PLAIN_TEXT,
    Marks,
    Tool,
    literal_in,
    property_schema,
    text_without,
    texts_and_end,
)
from cadenza.text.answers.call_readers import (
    GEMMA_QUOTE,
    MISTRAL,
    kinds_of_schema,
    resolved,
    schema_members,
)
from cadenza.text.answers.gemma_values import GemmaValues, gemma_key
from cadenza.text.answers.grammar_parts import joined_grammar, parts_of
from cadenza.text.answers.harmony_grammar import call_rule
from cadenza.text.answers.input_grammar import arguments_of_written
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

MAX_LISTED_CALLS = 16
"""Of one list; without a bound a small model may call for ever."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

_PLAIN_OBJECT = ANNOTATIONS | {
    *("type", "properties", "required", "additionalProperties", "$defs", "definitions"),
}

_BLANKS = r"BLANKS: /[ \t]|\n[ \t]{0,16}/"
_BEGIN_BLANKS = r"\s{0,16}"

Parts = list[dict[str, Any]]
"""Named grammars to which others refer."""

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

    def value(self, tool: Tool, schema: object) -> str:
        """The grammar of an argument as JSON."""
        text = self.inputs.get(tool.name)
        return (
            self.compile(property_schema(tool.parameters or {}, schema)) if text is None else text
        )

    def rule(self, marks: Marks) -> CallRule | None:
        """None where the format's calls cannot be constrained. Raises InvalidRequestError where a
        schema cannot be read."""
        write = next((write for each, write in _WRITERS if each is self.format), None)
        if write is None:
            return None
        rule = write(self, marks)
        return None if rule is None else replace(rule, is_needed=bool(self.inputs))


def holds_schemas(format: ToolFormat, tools: Sequence[Tool]) -> bool:
    """Whether required calls can be written in a format that is not JSON, so that they satisfy all
    that the schemas ask for: elements, whose texts are bounded by nothing."""
    if format in (DEEPSEEK_V3, DEEPSEEK_V31):
        return True
    if format is LFM2:
        return _have_python_names(tools) and all(map(_is_listed, tools))
    return format in (TOOL_FORMATS["qwen3_coder"], GEMMA4) and all(map(_is_held, tools))


def _is_listed(tool: Tool) -> bool:
    """Whether arguments by their names, whose values are JSON, hold a function's schema."""
    schema, properties = tool.parameters or {}, _properties(tool)
    if schema.keys() - _PLAIN_OBJECT or set(schema.get("required", ())) - properties.keys():
        return False
    return "properties" in schema or "additionalProperties" not in schema


def _is_held(tool: Tool) -> bool:
    if not _is_listed(tool):
        return False
    schema = tool.parameters or {}
    for value in _properties(tool).values():
        found = schema_members(resolved(value, schema))
        kinds = kinds_of_schema(found)
        is_text = kinds == {"string"} and not found.keys() - PLAIN_TEXT
        options = found.get("enum", ())
        if is_text and not all(isinstance(each, str) for each in options):
            return False
        if not is_text and (not kinds or "string" in kinds):
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
        write = _python_list if calls.format is LFM2 else _deepseek_list
        lines = write(calls, marks, max_calls)
        return joined_grammar(f"start: {begin} @all", parts_of("all", lines))
    write = _gemma4 if calls.format is GEMMA4 else _xml
    one = write(calls, marks).grammar
    between = literal_in(calls.format.between, marks)
    lark = f"start: call ({between} call){{0,{max_calls - 1}}}\ncall: {begin} @one"
    return joined_grammar(lark, parts_of("one", one))


def _hermes(calls: CallGrammar, marks: Marks) -> CallRule:
    end = literal_in(calls.format.end, marks)
    lines = [f"start: BLANKS? call BLANKS? {end}", _BLANKS, *_objects(calls.tools)]
    return CallRule(begin=re.escape(calls.format.begin), grammar=_whole(calls, lines))


def _harmony(calls: CallGrammar, marks: Marks) -> CallRule:
    arguments = {tool.name: calls.arguments(tool) for tool in calls.tools}
    return call_rule(calls.tools, arguments, marks)


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


def _xml(calls: CallGrammar, marks: Marks) -> CallRule:
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


def _glm(calls: CallGrammar, marks: Marks) -> CallRule:
    def opening(key: str) -> str:
        return f"{name(key)} BLANKS? {literal_in('<arg_value>', marks)}"

    def name(key: str) -> str:
        return literal_in(f"<arg_key>{key}</arg_key>", marks)

    end = "</arg_value>"
    first, last = (literal_in(mark, marks) for mark in ("<arg_key>", "</arg_key>"))
    tags = _Tags(
        rules=[
            *_text_until(end, marks, "BLANKS?"),
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
        _BLANKS,
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


def _pythonic(calls: CallGrammar, marks: Marks) -> CallRule | None:
    """A list of calls, from the first one's name on. Python must take the names of arguments."""
    if not _have_python_names(calls.tools):
        return None
    names = "|".join(re.escape(tool.name) for tool in calls.tools)
    grammar = _python_list(calls, marks, MAX_LISTED_CALLS)
    return CallRule(begin=rf"\[{_BEGIN_BLANKS}(?:{names})\(", grammar=grammar, is_read=True)


def _lfm2(calls: CallGrammar, marks: Marks) -> CallRule | None:
    """Such a list between marks."""
    if not _have_python_names(calls.tools):
        return None
    grammar = _python_list(calls, marks, MAX_LISTED_CALLS)
    return CallRule(begin=re.escape(calls.format.begin), grammar=grammar)


def _have_python_names(tools: Sequence[Tool]) -> bool:
    keys = [key for tool in tools for key in _properties(tool)]
    parts = [part for tool in tools for part in tool.name.split(".")]
    return all(map(_is_python_name, (*keys, *parts)))


def _python_list(calls: CallGrammar, marks: Marks, most: int) -> str:
    """At most so many calls. Values are JSON, with Python's words beside it, which the reader takes
    alike."""

    def value(tool: Tool, schema: object, name: str, parts: Parts) -> str:
        parts += parts_of(name, calls.value(tool, schema))
        found = resolved(schema, tool.parameters or {})
        kinds = kinds_of_schema(found)
        is_any = not {"enum", "const"} & schema_members(found).keys()
        words = ['"True"', '"False"'] if "boolean" in kinds and is_any else []
        words += ['"None"'] if "null" in kinds and is_any else []
        return f"({' | '.join([f'@{name}', *words])})"

    reserved = "|".join(keyword.kwlist)
    end = literal_in(calls.format.end, marks)
    more = _up_to(most - 1, 'BLANKS? "," BLANKS? call')
    lines = [
        f'start: "[" BLANKS? call {more} BLANKS? "]" {end}',
        f"KEY: /[A-Za-z_][A-Za-z0-9_]{{0,63}}/ & ~/{reserved}/",
    ]
    notation = _Arguments(
        head="{}(", end=")", key=lambda key: json.dumps(f"{key}="), any_key='KEY "="', value=value
    )
    return _with_arguments(calls, lines, notation)


def _up_to(most: int, text: str) -> str:
    return f"({text}){{0,{most}}}" if most else ""


def _deepseek(calls: CallGrammar, marks: Marks) -> CallRule:
    grammar = _deepseek_list(calls, marks, MAX_LISTED_CALLS)
    return CallRule(begin=re.escape(calls.format.begin), grammar=grammar)


def _deepseek_list(calls: CallGrammar, marks: Marks, most: int) -> str:
    """At most so many calls, whose arguments are JSON."""
    begin, separator, end = (literal_in(each, marks) for each in calls.format.inner_marks)
    is_fenced = calls.format is DEEPSEEK_V3
    kind = f'"function" {separator}' if is_fenced else ""
    before, behind = ('"\\n```json\\n"', '"\\n```"') if is_fenced else (separator, "")
    between, last = (literal_in(each, marks) for each in (calls.format.between, calls.format.end))
    more = _up_to(most - 1, f"{between} call")
    lines = [
        f"start: call {more} {last}",
        f"call: {' | '.join(f'call_{i}' for i in range(len(calls.tools)))}",
    ]
    for i, tool in enumerate(calls.tools):
        name = json.dumps(tool.name)
        lines.append(f"call_{i}: {begin} {kind} {name} {before} @args_{i} {behind} {end}")
    return _whole(calls, lines)


def _function_gemma(calls: CallGrammar, marks: Marks) -> CallRule:
    """Arguments behind their names; texts stand between marks, other values are JSON."""
    mark = literal_in("<escape>", marks)

    def value(tool: Tool, schema: object, name: str, parts: Parts) -> str:
        parts += parts_of(name, calls.value(tool, schema))
        found = resolved(schema, tool.parameters or {})
        if tool.name in calls.inputs or kinds_of_schema(found) != {"string"}:
            return f"@{name}"
        return f"{mark} {texts_and_end(found, 'text', mark)}"

    def key(name: str) -> str:
        is_plain = re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)
        return json.dumps(f"{name if is_plain else json.dumps(name)}:")

    lines = [
        f"start: BLANKS? call BLANKS? {literal_in(calls.format.end, marks)}",
        "KEY: /[A-Za-z_][A-Za-z0-9_]{0,63}/",
        *_text_until("<escape>", marks),
    ]
    notation = _Arguments(head="call:{}{{", end="}", key=key, any_key='KEY ":"', value=value)
    grammar = _with_arguments(calls, lines, notation)
    return CallRule(begin=re.escape(calls.format.begin), grammar=grammar)


def _gemma4(calls: CallGrammar, marks: Marks) -> CallRule:
    """As function-gemma's, but that texts within lists and objects stand between marks, too, and
    that arguments are sorted by their names, as the chat template has those of the functions."""

    def value(tool: Tool, schema: object, name: str, parts: Parts) -> str:
        if tool.name in calls.inputs:
            parts += parts_of(name, calls.value(tool, schema))
            return f"@{name}"
        root = tool.parameters or {}
        values = GemmaValues(
            root=root, compile=calls.compile, marks=marks, parts=parts, lines=lines
        )
        return values.of(schema, name)

    lines = [
        f"start: BLANKS? call BLANKS? {literal_in(calls.format.end, marks)}",
        "KEY: /[A-Za-z_][A-Za-z0-9_.-]{0,63}/",
        *_text_until(GEMMA_QUOTE, marks),
    ]
    notation = _Arguments(
        head="call:{}{{",
        end="}",
        key=gemma_key,
        any_key='KEY ":"',
        value=value,
        order=partial(sorted, key=str.lower),
    )
    grammar = _with_arguments(calls, lines, notation)
    return CallRule(begin=re.escape(calls.format.begin), grammar=grammar)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arguments:
    """How a call with arguments between commas is written.

    Args:
        head: what is in front of them, with a place for the function's name.
        end: what is behind them.
        key: an argument's name and what is behind it, in Lark's notation.
        any_key: of any name.
        value: of a tool, an argument's schema, and a name for the grammars that it refers to, which
            it adds to the others.
        order: of the arguments.
    """

    head: str
    end: str
    key: Callable[[str], str]
    any_key: str
    value: Callable[[Tool, object, str, Parts], str]
    order: Callable[[Iterable[str]], Iterable[str]] = list


def _with_arguments(calls: CallGrammar, lines: list[str], notation: _Arguments) -> str:
    lines += [
        _BLANKS,
        "COMMA: /,[ \\t]?/",
        f"call: {' | '.join(f'call_{i}' for i in range(len(calls.tools)))}",
    ]
    parts: Parts = []
    for i, tool in enumerate(calls.tools):
        schema, properties = tool.parameters or {}, _properties(tool)
        for j, key in enumerate(notation.order(properties)):
            value = notation.value(tool, properties[key], f"args_{i}_{j}", parts)
            lines.append(f"pair_{i}_{j}: {notation.key(key)} {value}")
            # A comma stands between the arguments that are there.
            rest, is_needed = f"tail_{i}_{j + 1}", key in schema.get("required", ())
            lines.append(
                f"first_{i}_{j}: pair_{i}_{j} {rest}"
                + ("" if is_needed else f" | first_{i}_{j + 1}")
            )
            lines.append(
                f"tail_{i}_{j}: COMMA pair_{i}_{j} {rest}" + ("" if is_needed else f" | {rest}")
            )
        is_open = tool.parameters is not None and "properties" not in schema
        free = (
            f"({notation.any_key} @any (COMMA {notation.any_key} @any){{0,15}})?"
            if is_open
            else '""'
        )
        lines.append(f"first_{i}_{len(properties)}: {free}")
        lines.append(f'tail_{i}_{len(properties)}: ""')
        if is_open:
            parts += parts_of("any", calls.compile("{}"))
        head = json.dumps(notation.head.format(tool.name))
        lines.append(f"call_{i}: {head} first_{i}_0 {json.dumps(notation.end)}")
    return joined_grammar("\n".join(lines), parts)


def _properties(tool: Tool) -> Mapping[str, Any]:
    return (tool.parameters or {}).get("properties") or {}


def _is_python_name(name: str) -> bool:
    return name.isidentifier() and name.isascii() and not keyword.iskeyword(name)


def _text_until(mark: str, marks: Marks, behind: str = "") -> list[str]:
    """The rule `text`: any text up to a mark, and the mark."""
    if mark not in marks:
        return [
            f"text_and_mark[suffix={json.dumps(mark)}]: /(.|\\n)*/",
            f"text: text_and_mark {behind}",
        ]
    return [text_without("TEXT", mark), f"text: TEXT {literal_in(mark, marks)} {behind}"]


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


_WRITERS: Sequence[tuple[ToolFormat, Callable[[CallGrammar, Marks], CallRule | None]]] = (
    (TOOL_FORMATS["hermes"], _hermes),
    (TOOL_FORMATS["qwen3_coder"], _xml),
    (TOOL_FORMATS["glm45"], _glm),
    (TOOL_FORMATS["pythonic"], _pythonic),
    (TOOL_FORMATS["functiongemma"], _function_gemma),
    (TOOL_FORMATS["mistral"], _mistral),
    (HARMONY, _harmony),
    (GEMMA4, _gemma4),
    (LFM2, _lfm2),
    (DEEPSEEK_V3, _deepseek),
    (DEEPSEEK_V31, _deepseek),
    (TOOL_FORMATS["llama3_json"], _bare),
    (TOOL_FORMATS["json"], _bare),
    (GENERIC, _bare),
)
