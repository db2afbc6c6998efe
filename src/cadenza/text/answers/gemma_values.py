"""`GemmaValues`: values of arguments as Gemma 4 writes them, in Lark's notation. Texts stand
between marks, names of members as they are; what this notation cannot hold is JSON, which is read
alike. Invariant: the rule `text` is any text and the mark after it, and `COMMA` stands between
values."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from cadenza.text.answers.answer_grammar import Marks, literal_in, property_schema
from cadenza.text.answers.argument_schema import ArgumentSchema, schema_members
from cadenza.text.answers.called_tools import texts_until
from cadenza.text.answers.grammar_parts import parts_of
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
    """Of one function's arguments: `root`, their schema; `compile`, of JSON Schemas; `quote`, the
    mark around a text; `parts` and `lines` get the grammars and rules to which the values refer."""

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
