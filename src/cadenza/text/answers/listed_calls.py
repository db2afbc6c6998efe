"""Grammars of calls with arguments between commas (Python's, function-gemma's, Gemma 4's) and of
lists of names with JSON (DeepSeek's), after a call's beginning. Invariant: the forms of the same
format read what a grammar allows.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from cadenza.structured import CallRule
from cadenza.text.answers.answer_grammar import Marks, Tool, literal_in, property_schema
from cadenza.text.answers.argument_schema import ArgumentSchema, schema_members
from cadenza.text.answers.call_readers import ESCAPE, GEMMA_QUOTE, PYTHON_KEY
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
from cadenza.text.answers.tool_calls import DEEPSEEK_V3
from cadenza.text.schemas.schema_merge import Schema, types_of

MAX_DEPTH = 3
"""Of lists and objects within each other; what is deeper is JSON."""

MAX_ELEMENTS = 512
MAX_MEMBERS = 24
"""Of an object that is written member by member."""

MAX_RULES = 2048
"""Of a grammar; what would have more is JSON."""

_LIST = frozenset({"type", "items"})
_OBJECT = frozenset({"type", "properties", "required", "additionalProperties"})


def gemma_key(name: str) -> str:
    is_plain = re.fullmatch(r'[^\s"{}\[\],:<]+', name)
    return json.dumps(f"{name if is_plain else json.dumps(name)}:")


@dataclass(slots=True, eq=False, kw_only=True)
class GemmaValues:
    """Values of one function's arguments as Gemma 4 writes them, in Lark's notation. Texts stand
    between marks (`quote`), names of members as they are; what this notation cannot hold is JSON,
    which is read alike. `root`: the arguments' schema; `compile`: of JSON Schemas; `parts` and
    `lines` get the grammars and rules to which the values refer. The rule `text` is any text and
    the mark after it, and `COMMA` stands between values."""

    root: Mapping[str, Any]
    compile: Callable[[str], str]
    quote: str
    marks: Marks
    parts: list[dict[str, Any]]
    lines: list[str]
    _num_named: int = field(default=0)

    def of(self, schema: object, name: str, depth: int = 0) -> str:
        """The value of a schema; the names of the rules that it needs begin with `name`."""
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
    """A schema of an alternative, in which one keyword may have several values."""
    several = [
        {name: value} for name in ("pattern", "format") for value in alternative.get(name, ())
    ]
    rest = {name: each for name, each in alternative.items() if name not in ("pattern", "format")}
    return {**rest, "allOf": several} if several else rest


def pythonic_calls(calls: CallGrammar, marks: Marks) -> CallRule | None:
    """A list of calls, from the first one's name on. The names of arguments need not be Python's,
    but none has blanks or marks of the list."""
    if not have_list_names(calls.tools):
        return None
    names = "|".join(re.escape(tool.name) for tool in calls.tools)
    grammar = python_list(calls, marks, MAX_LISTED_CALLS)
    return CallRule(begin=rf"\[{BEGIN_BLANKS}(?:{names})\(", grammar=grammar, is_read=True)


def lfm2_calls(calls: CallGrammar, marks: Marks) -> CallRule | None:
    if not have_list_names(calls.tools):
        return None
    grammar = python_list(calls, marks, MAX_LISTED_CALLS)
    return CallRule(begin=re.escape(calls.format.begin), grammar=grammar)


def have_list_names(tools: Sequence[Tool]) -> bool:
    return are_keys(tools, PYTHON_KEY)


def python_list(calls: CallGrammar, marks: Marks, most: int) -> str:
    """At most `most` calls. Values are JSON, with Python's words as well, which the reader takes
    alike."""

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


def deepseek_calls(calls: CallGrammar, marks: Marks) -> CallRule:
    grammar = deepseek_list(calls, marks, MAX_LISTED_CALLS)
    return CallRule(begin=re.escape(calls.format.begin), grammar=grammar)


def deepseek_list(calls: CallGrammar, marks: Marks, most: int) -> str:
    """At most `most` calls, whose arguments are JSON."""
    begin, separator, end = (literal_in(each, marks) for each in calls.format.inner_marks)
    is_fenced = calls.format is DEEPSEEK_V3
    kind = f'"function" {separator}' if is_fenced else ""
    before, behind = ('"\\n```json\\n"', '"\\n```"') if is_fenced else (separator, "")
    between, last = (literal_in(each, marks) for each in (calls.format.between, calls.format.end))
    more = up_to(most - 1, f"{between} call")
    lines = [
        f"start: call {more} {last}",
        f"call: {' | '.join(f'call_{i}' for i in range(len(calls.tools)))}",
    ]
    for i, tool in enumerate(calls.tools):
        name = json.dumps(tool.name)
        lines.append(f"call_{i}: {begin} {kind} {name} {before} @args_{i} {behind} {end}")
    return whole_grammar(calls, lines)


def function_gemma_calls(calls: CallGrammar, marks: Marks) -> CallRule:
    """Arguments after their names; texts stand between marks, other values are JSON."""
    return _gemma_calls(calls, marks, ESCAPE, list)


def gemma4_calls(calls: CallGrammar, marks: Marks) -> CallRule:
    """As function-gemma's, but that arguments are sorted by their names, as the chat template has
    those of the functions."""
    return _gemma_calls(calls, marks, GEMMA_QUOTE, partial(sorted, key=str.lower))


def _gemma_calls(calls: CallGrammar, marks: Marks, quote: str, order: "_Order") -> CallRule:
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


_Order = Callable[[Iterable[str]], Iterable[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arguments:
    """How a call is written: `head`, with a field for the function's name, and `end` around its
    arguments; `key`: an argument's name and what follows it, in Lark's notation; `any_key`: of any
    name; `value`: of a tool, an argument's schema, and a name for the grammars that it refers to,
    which it adds to the others; `order`: of the arguments."""

    head: str
    end: str
    key: Callable[[str], str]
    any_key: str
    value: Callable[[Tool, object, str, Parts], str]
    order: _Order = list


def _with_arguments(calls: CallGrammar, lines: list[str], notation: _Arguments) -> str:
    lines += [
        BLANKS,
        "COMMA: /,[ \\t]?/",
        f"call: {' | '.join(f'call_{i}' for i in range(len(calls.tools)))}",
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
