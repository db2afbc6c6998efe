"""Values of arguments as Gemma 4 writes them, in Lark's notation: `GemmaValues`.

Texts stand between marks, names of members as they are; what asks for more than this notation can
hold is JSON, which the reader takes alike. Knows no call. Invariant: the rule `text` of the grammar
is any text and the mark behind it, and `COMMA` stands between values.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cadenza.text.answers.answer_grammar import (
    ANNOTATIONS,
    PLAIN_TEXT,
    Marks,
    literal_in,
    property_schema,
    texts_and_end,
)
from cadenza.text.answers.call_readers import (
    GEMMA_QUOTE,
    kinds_of_schema,
    resolved,
    schema_members,
)
from cadenza.text.answers.grammar_parts import parts_of

MAX_DEPTH = 3
"""Of lists and objects within each other; what is deeper is JSON."""

MAX_ELEMENTS = 512
MAX_MEMBERS = 24
"""Of an object that is written member by member."""

_LIST = ANNOTATIONS | {"type", "items"}
_OBJECT = ANNOTATIONS | {"type", "properties", "required", "additionalProperties"}


def gemma_key(name: str) -> str:
    """An argument's name and the colon behind it."""
    is_plain = re.fullmatch(r"[\w.-]+", name, re.ASCII)
    return json.dumps(f"{name if is_plain else json.dumps(name)}:")


@dataclass(slots=True, eq=False, kw_only=True)
class GemmaValues:
    """Of one function's arguments.

    Args:
        root: the schema of all of them.
        compile: makes the grammar of a JSON Schema.
        parts, lines: get the grammars and the rules to which the values refer.
    """

    root: Mapping[str, Any]
    compile: Callable[[str], str]
    marks: Marks
    parts: list[dict[str, Any]]
    lines: list[str]
    _num_named: int = field(default=0)

    def of(self, schema: object, name: str, depth: int = 0) -> str:
        """The value of a schema; the names of the rules that it needs begin with `name`."""
        members = schema_members(resolved(schema, self.root))
        kinds, others = kinds_of_schema(members), members.keys()
        if kinds == {"string"} and (not depth or not others - PLAIN_TEXT):
            mark = literal_in(GEMMA_QUOTE, self.marks)
            return f"{mark} {texts_and_end(members, 'text', mark)}"
        if depth < MAX_DEPTH and kinds == {"array"} and not others - _LIST and "items" in members:
            item = self._rule(name, self.of(members["items"], name, depth + 1))
            return f'"[" ({item} (COMMA {item}){{0,{MAX_ELEMENTS - 1}}})? "]"'
        if depth < MAX_DEPTH and kinds == {"object"} and self._is_listed(members):
            return f'"{{" {self._listed(members, name, depth)} "}}"'
        named = self._new_name(name)
        self.parts += parts_of(named, self.compile(self._alone(schema)))
        return f"@{named}"

    def _rule(self, name: str, text: str) -> str:
        named = self._new_name(name)
        self.lines.append(f"{named}: {text}")
        return named

    def _new_name(self, name: str) -> str:
        self._num_named += 1
        return f"{name}_{self._num_named}"

    def _is_listed(self, members: Mapping[str, Any]) -> bool:
        """Whether an object has no other members than those that its schema names."""
        properties = schema_members(members.get("properties"))
        is_small = 0 < len(properties) <= MAX_MEMBERS
        is_plain = not members.keys() - _OBJECT and not members.get("additionalProperties")
        return is_small and is_plain and set(members.get("required", ())) <= properties.keys()

    def _listed(self, members: Mapping[str, Any], name: str, depth: int) -> str:
        """Members in the order of their names, with commas between those that are there."""
        properties, required = members["properties"], members.get("required", ())
        first = later = self._rule(name, '""')
        for key in sorted(properties, key=str.lower, reverse=True):
            pair = self._rule(name, f"{gemma_key(key)} {self.of(properties[key], name, depth + 1)}")
            is_needed = key in required
            first = self._rule(name, f"{pair} {later}" + ("" if is_needed else f" | {first}"))
            later = self._rule(name, f"COMMA {pair} {later}" + ("" if is_needed else f" | {later}"))
        return first

    def _alone(self, schema: object) -> str:
        """A schema as text, with the definitions that it may refer to."""
        return property_schema(self.root, resolved(schema, self.root))
