"""Notations of arguments between commas: Python's lists of calls (LFM2's, too), function-gemma's
and Gemma 4's."""

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from cadenza.structured import CallRule
from cadenza.text.answers.argument_schema import (
    JSON_TEXT,
    WORDS,
    ArgumentSchema,
    json_object_of,
    json_text,
    schema_members,
)
from cadenza.text.answers.call_forms import BareCalls, MarkedCalls
from cadenza.text.answers.json_calls import PYTHON_TAG, read_objects
from cadenza.text.answers.tool_format import (
    BEGIN_BLANKS,
    BLANKS,
    MAX_LISTED_CALLS,
    CallGrammar,
    Functions,
    Marks,
    Parts,
    Tool,
    ToolCall,
    ToolFormat,
    either,
    has_plain_texts,
    is_plain_object,
    literal_in,
    properties_of,
    property_schema,
    text_until,
    texts_until,
    up_to,
)
from cadenza.text.schemas.grammar import joined_grammar, parts_of
from cadenza.text.schemas.schema_merge import Schema, types_of

_Order = Callable[[Iterable[str]], Iterable[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arguments:
    """How a call is written, in Lark's notation."""

    head: str  # with a field for the function's name
    end: str
    key: Callable[[str], str]  # an argument's name and what follows it
    any_key: str
    # Of an argument's schema and a name for the grammars that it refers to, which it adds.
    value: Callable[[Tool, object, str, Parts], str]
    order: _Order = list  # of the arguments


def _with_arguments(calls: CallGrammar, lines: list[str], notation: _Arguments) -> str:
    lines += [
        BLANKS,
        "COMMA: /,[ \\t]?/",
        f"call: {either('call', len(calls.tools))}",
    ]
    parts: Parts = []
    for i, tool in enumerate(calls.tools):
        schema, properties = tool.parameters or {}, properties_of(tool)
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
        free = '""'
        if is_open:
            member = f"{notation.any_key} {notation.value(tool, {}, f'any_{i}', parts)}"
            free = f"({member} (COMMA {member}){{0,15}})?"
        lines.append(f"first_{i}_{len(properties)}: {free}")
        lines.append(f'tail_{i}_{len(properties)}: ""')
        head = json.dumps(notation.head.format(tool.name))
        lines.append(f"call_{i}: {head} first_{i}_0 {json.dumps(notation.end)}")
    return joined_grammar("\n".join(lines), parts)


_PYTHON_MARK = re.compile(  # a text, a quote that begins none, a bracket or a comma
    r"'{3}.*?'{3}|\"{3}.*?\"{3}|'(?:[^'\\]|\\.)*+'|\"(?:[^\"\\]|\\.)*+\"|['\"\[\](){},]", re.DOTALL
)

_PYTHON_CALL = re.compile(r"\s*([\w.-]+)\s*\((.*)\)\s*", re.DOTALL)
_PYTHON_ESCAPE = re.compile(r"""(\b[rR](?:'[^']*'|"[^"]*")|\\[\n\\'"abfnrtvxNuU0-7])|\\""")
_PYTHON_KEY = r"""[^\s=()\[\]{},'"*][^\s=()\[\]{},'"]*"""
_PYTHON_ARGUMENT = re.compile(rf"\s*({_PYTHON_KEY})\s*=(?!=)(.*)", re.DOTALL)
_PYTHON_HEAD = re.compile(r"\[\s*([\w.-]+)\(")
_PYTHON_PART = re.compile(r"\[\s*[\w.-]*")


def begins_python(text: str, functions: Functions) -> bool | None:
    """A list of calls, whose first name is known."""
    head = _PYTHON_HEAD.match(text)
    if head is None:
        return None if _PYTHON_PART.fullmatch(text) else False
    return not functions or head[1] in functions


def read_pythonic(text: str, functions: Functions) -> list[ToolCall] | None:
    """A Python list of calls with literal keyword arguments, whose names need not be Python's."""
    del functions
    body = text.strip()
    entries = _at_commas(body[1:-1] if body[:1] == "[" and body[-1:] == "]" else body)
    calls = [_python_call(each) for each in entries or ()]
    return [each for each in calls if each is not None] if calls and None not in calls else None


def _at_commas(text: str) -> list[str] | None:
    """None where a bracket or a quote is open."""
    pieces: list[str] = []
    begin = depth = 0
    for match in _PYTHON_MARK.finditer(text):
        mark = match[0]
        if mark in ("'", '"'):
            return None
        depth += (mark in "([{") - (mark in ")]}")
        if depth < 0:
            return None
        if mark == "," and not depth:
            pieces.append(text[begin : match.start()])
            begin = match.end()
    last = text[begin:]
    return None if depth else [*pieces, *([last] if last.strip() else [])]


def _python_call(text: str) -> ToolCall | None:
    call = _PYTHON_CALL.fullmatch(text)
    given = None if call is None else _at_commas(call[2])
    if call is None or given is None:
        return None
    arguments: dict[str, object] = {}
    try:
        for each in given:
            arguments |= _python_argument(each)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    written = json_text(arguments)
    return None if written is None else ToolCall(call[1], written)


def _python_argument(text: str) -> Mapping[str, object]:
    """One argument, or those of an object behind two stars."""
    found = _PYTHON_ARGUMENT.fullmatch(text)
    if found is not None:
        return {found[1]: _python_value(found[2])}
    stars, given = text.lstrip()[:2], _python_value(text.lstrip()[2:])
    if stars != "**" or not isinstance(given, dict):
        raise ValueError(text)
    return cast(dict[str, object], given)


def _python_value(text: str) -> object:
    try:
        return cast(object, json.loads(text, strict=False))
    except ValueError:
        literal = _PYTHON_ESCAPE.sub(lambda each: each[1] or r"\\", text.strip())
        return _literal(ast.parse(literal, mode="eval").body)


def _literal(node: ast.expr) -> object:
    if isinstance(node, ast.Name) and node.id.lower() in WORDS:
        return WORDS[node.id.lower()]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        keys = [ast.literal_eval(each) for each in node.keys if each is not None]
        return dict(zip(keys, map(_literal, node.values), strict=True))
    return ast.literal_eval(node)


def _python_list(calls: CallGrammar, marks: Marks, most: int) -> str:
    # Values are JSON, with Python's words as well, which the reader takes alike.

    def value(tool: Tool, schema: object, name: str, parts: Parts) -> str:
        parts += parts_of(name, calls.value(tool, schema))
        argument = calls.argument(tool, schema)
        words = (each for each in (True, False, None) if argument and argument.allows(each))
        return f"({' | '.join([f'@{name}', *(json.dumps(repr(each)) for each in words)])})"

    end = literal_in(calls.format.end, marks)
    more = up_to(most - 1, 'BLANKS? "," BLANKS? call')
    lines = [
        f'start: "[" BLANKS? call {more} BLANKS? "]" {end}',
        "KEY: /[A-Za-z_][A-Za-z0-9_.-]{0,63}/",
    ]
    notation = _Arguments(
        head="{}(", end=")", key=lambda key: json.dumps(f"{key}="), any_key='KEY "="', value=value
    )
    return _with_arguments(calls, lines, notation)


def _pythonic(calls: CallGrammar, marks: Marks) -> CallRule:
    names = "|".join(re.escape(tool.name) for tool in calls.tools)
    grammar = _python_list(calls, marks, MAX_LISTED_CALLS)
    return CallRule(begin=rf"\[{BEGIN_BLANKS}(?:{names})\(", grammar=grammar, is_read=True)


PYTHONIC = ToolFormat(
    openers="[",
    is_json=False,
    forms=(
        BareCalls(
            prefix=PYTHON_TAG,
            first=re.compile(r"`{3,}|\[|<\|python_tag\|>"),
            quotes="\"'",
            begins=begins_python,
            read=read_pythonic,
        ),
    ),
    write=_pythonic,
    keys=_PYTHON_KEY,
)


def read_lfm2(text: str, functions: Functions) -> list[ToolCall] | None:
    return read_pythonic(text, functions) or read_objects(text, functions)


LFM2 = ToolFormat(
    begin="<|tool_call_start|>",
    end="<|tool_call_end|>",
    is_json=False,
    forms=(MarkedCalls(begin="<|tool_call_start|>", end="<|tool_call_end|>", read=read_lfm2),),
    listed=_python_list,
    keys=_PYTHON_KEY,
    holds=is_plain_object,
)

GEMMA_QUOTE = '<|"|>'
ESCAPE = "<escape>"
_GEMMA_CALL = re.compile(r"call:([\w.-]+)\{(.*)\}", re.DOTALL)


def _gemma_parts(quote: str) -> re.Pattern[str]:
    """What is written otherwise than in JSON, and the texts of JSON, in which nothing is."""
    mark = re.escape(quote)
    name = rf'(?:(?!{mark})[^\s"{{}}\[\],:])+'
    return re.compile(
        rf"{mark}(?P<text>.*?){mark}|{JSON_TEXT}"
        rf"|(?P<before>[{{,]\s*)(?P<name>{name})\s*:|\b(?P<word>None|True|False)\b",
        re.DOTALL,
    )


_GEMMA_PARTS = {quote: _gemma_parts(quote) for quote in (GEMMA_QUOTE, ESCAPE)}


def _read_gemma(text: str, quote: str) -> list[ToolCall] | None:
    call = _GEMMA_CALL.fullmatch(text.strip())
    if call is None:
        return None
    arguments = json_object_of(_GEMMA_PARTS[quote].sub(_as_json, "{" + call[2] + "}"))
    return None if arguments is None else [ToolCall(call[1], arguments)]


def _as_json(found: re.Match[str]) -> str:
    text, before, name, word = found["text"], found["before"], found["name"], found["word"]
    if text is not None:
        return json.dumps(text)
    if name is not None:
        return f"{before}{json.dumps(name)}:"
    return found[0] if word is None else json.dumps(WORDS[word.lower()])


def read_function_gemma(text: str, functions: Functions) -> list[ToolCall] | None:
    del functions
    return _read_gemma(text, ESCAPE)


def read_gemma4(text: str, functions: Functions) -> list[ToolCall] | None:
    del functions
    return _read_gemma(text, GEMMA_QUOTE)


MAX_DEPTH = 3  # of lists and objects within each other; what is deeper is JSON
MAX_ELEMENTS = 512
MAX_MEMBERS = 24  # of an object that is written member by member
MAX_RULES = 2048  # of a grammar; what would have more is JSON
_LIST = frozenset({"type", "items"})
_OBJECT = frozenset({"type", "properties", "required", "additionalProperties"})


def gemma_key(name: str) -> str:
    is_plain = re.fullmatch(r'[^\s"{}\[\],:<]+', name)
    return json.dumps(f"{name if is_plain else json.dumps(name)}:")


@dataclass(slots=True, eq=False, kw_only=True)
class GemmaValues:
    """Values of one function's arguments as Gemma 4 writes them, in Lark's notation: texts between
    marks (`quote`), names of members as they are; what this notation cannot hold is JSON, which is
    read alike. `parts` and `lines` get the grammars and rules to which the values refer; the rule
    `text` is any text and the mark after it."""

    root: Mapping[str, Any]
    compile: Callable[[str], str]
    quote: str
    marks: Marks
    parts: list[dict[str, Any]]
    lines: list[str]
    _num_named: int = field(default=0)

    def of(self, schema: object, name: str, depth: int = 0) -> str:
        """The names of the rules that a value needs begin with `name`."""
        argument = ArgumentSchema.of(schema, self.root)
        if not argument.is_resolved:
            return self._json(schema, name)
        bodies = (self._bodies(each, name, depth) for each in argument.alternatives)
        return f"({' | '.join(dict.fromkeys(body for found in bodies for body in found))})"

    def _bodies(self, schema: Schema, name: str, depth: int) -> Iterator[str]:
        if "enum" in schema:
            yield from self._enum(schema, name)
            return
        rest = types_of(schema)
        if "string" in rest and (not depth or not schema.keys() - {"type"}):
            rest.discard("string")
            yield f"{self._mark} text"
        is_nested = depth < MAX_DEPTH and len(self.lines) < MAX_RULES
        if is_nested and "array" in rest and "items" in schema and not schema.keys() - _LIST:
            rest.discard("array")
            item = self._rule(name, self.of(schema["items"], name, depth + 1))
            yield f'"[" ({item} (COMMA {item}){{0,{MAX_ELEMENTS - 1}}})? "]"'
        if is_nested and "object" in rest and self._is_listed(schema):
            rest.discard("object")
            yield f'"{{" {self._listed(schema, name, depth)} "}}"'
        if rest:
            yield self._json({**_restated(schema), "type": sorted(rest)}, name)

    def _enum(self, schema: Schema, name: str) -> Iterator[str]:
        """One of the values, with texts between marks; as JSON where they have the mark."""
        allowed = filter(ArgumentSchema([schema]).allows, schema["enum"])
        marked: list[object] = []
        for value in allowed:
            if json.dumps(self.quote)[1:-1] in json.dumps(value):
                yield self._json({"const": value}, name)
            else:
                marked.append(value)
        texts = [each for each in marked if isinstance(each, str)]
        if texts:
            line, one = texts_until(self._new_name(name), texts, self.quote, self.marks)
            self.lines.append(line)
            yield f"{self._mark} {one}"
        yield from (self._literal(each) for each in marked if not isinstance(each, str))

    def _literal(self, value: object) -> str:
        if isinstance(value, str):
            return f"{self._mark} {json.dumps(value)} {self._mark}"
        if isinstance(value, list):
            items = map(self._literal, cast(list[object], value))
            return f'"[" {" COMMA ".join(items)} "]"'
        if isinstance(value, dict):
            members = cast(dict[str, object], value)
            pairs = (
                f"{gemma_key(key)} {self._literal(members[key])}"
                for key in sorted(members, key=str.lower)
            )
            return f'"{{" {" COMMA ".join(pairs)} "}}"'
        return json.dumps(json.dumps(value))

    @property
    def _mark(self) -> str:
        return literal_in(self.quote, self.marks)

    def _json(self, schema: object, name: str) -> str:
        named = self._new_name(name)
        self.parts += parts_of(named, self.compile(property_schema(self.root, schema)))
        return f"@{named}"

    def _rule(self, name: str, text: str) -> str:
        named = self._new_name(name)
        self.lines.append(f"{named}: {text}")
        return named

    def _new_name(self, name: str) -> str:
        self._num_named += 1
        return f"{name}_{self._num_named}"

    def _is_listed(self, members: Mapping[str, Any]) -> bool:
        properties = schema_members(members.get("properties"))
        is_small = 0 < len(properties) <= MAX_MEMBERS
        is_plain = not members.keys() - _OBJECT and not members.get("additionalProperties")
        return is_small and is_plain and set(members.get("required", ())) <= properties.keys()

    def _listed(self, members: Mapping[str, Any], name: str, depth: int) -> str:
        properties, required = members["properties"], members.get("required", ())
        first = later = self._rule(name, '""')
        for key in sorted(properties, key=str.lower, reverse=True):
            pair = self._rule(name, f"{gemma_key(key)} {self.of(properties[key], name, depth + 1)}")
            is_needed = key in required
            first = self._rule(name, f"{pair} {later}" + ("" if is_needed else f" | {first}"))
            later = self._rule(name, f"COMMA {pair} {later}" + ("" if is_needed else f" | {later}"))
        return first


def _restated(alternative: Schema) -> Schema:
    several = [
        {name: value} for name in ("pattern", "format") for value in alternative.get(name, ())
    ]
    rest = {name: each for name, each in alternative.items() if name not in ("pattern", "format")}
    return {**rest, "allOf": several} if several else rest


def _gemma(calls: CallGrammar, marks: Marks, quote: str, order: "_Order") -> CallRule:
    def value(tool: Tool, schema: object, name: str, parts: Parts) -> str:
        if tool.name in calls.inputs:
            parts += parts_of(name, calls.value(tool, schema))
            return f"@{name}"
        values = GemmaValues(
            root=tool.parameters or {},
            compile=calls.compile,
            quote=quote,
            marks=marks,
            parts=parts,
            lines=lines,
        )
        return values.of(schema, name)

    lines = [
        f"start: BLANKS? call BLANKS? {literal_in(calls.format.end, marks)}",
        "KEY: /[A-Za-z_][A-Za-z0-9_.-]{0,63}/",
        *text_until(quote, marks),
    ]
    notation = _Arguments(
        head="call:{}{{", end="}", key=gemma_key, any_key='KEY ":"', value=value, order=order
    )
    grammar = _with_arguments(calls, lines, notation)
    return CallRule(begin=re.escape(calls.format.begin), grammar=grammar)


FUNCTION_GEMMA = ToolFormat(
    begin="<start_function_call>",
    end="<end_function_call>",
    is_json=False,
    escaped="<",
    inner_marks=(ESCAPE,),
    forms=(
        MarkedCalls(
            begin="<start_function_call>", end="<end_function_call>", read=read_function_gemma
        ),
    ),
    write=partial(_gemma, quote=ESCAPE, order=list),
)

GEMMA4 = ToolFormat(
    begin="<|tool_call>",
    end="<tool_call|>",
    between="",
    is_json=False,
    escaped="<",
    inner_marks=(GEMMA_QUOTE,),
    forms=(MarkedCalls(begin="<|tool_call>", end="<tool_call|>", read=read_gemma4),),
    # Arguments are sorted by their names, as the chat template has those of the functions.
    write=partial(_gemma, quote=GEMMA_QUOTE, order=partial(sorted, key=str.lower)),
    holds=has_plain_texts,
)
