"""JSON Schemas before they become grammars: their bounds, cycles of references, and formats.

Owns what the grammar library does not say or allows too much: how deep a schema is nested, a `$ref`
that leads back to itself, and texts of a format that validators refuse. Knows no grammar.
Invariant: what `exact_schema` returns allows no text that the given schema does not.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast
from urllib.parse import unquote

from cadenza.errors import InvalidRequestError

MAX_DEPTH = 64
"""Levels of objects and lists within each other; also the bound of request bodies."""

_LEAP_DAY = r"(([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
_DATE = rf"([0-9]{{4}}-(0[13-9]|1[0-2])-|[0-9]{{4}}-02-([01]|2[0-8])|{_LEAP_DAY})"
_TIME = "([^:]*:){2}[0-5]"

FORMAT_PATTERNS: Mapping[str, str] = {
    "date": f"^{_DATE}",
    "time": f"^{_TIME}",
    "date-time": rf"^{_DATE}[^:]*:[^:]*:[0-5]",
}
"""What texts of a format must match as well. The library's own expressions allow second 60 at any
minute, and 29 February in any year."""

_ONE_SCHEMA = (
    *("items", "additionalProperties", "additionalItems", "not", "if", "then", "else"),
    *("contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties"),
)
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

_Schema = dict[str, Any]


def exact_schema(text: str) -> str:
    """A schema, given as JSON, as the grammar library may have it. Raises InvalidRequestError."""
    try:
        parsed: object = json.loads(text)
    except (ValueError, RecursionError):
        raise _refused("is not valid JSON, or is nested too deep") from None
    if parsed is True:
        return "{}"
    if not isinstance(parsed, dict):
        raise _refused("is neither an object nor true")
    schema = cast(_Schema, parsed)
    if "x-guidance" in schema:
        raise _refused("has x-guidance, which is not a keyword here; leave it out")
    if _is_deeper_than(MAX_DEPTH, schema):
        raise _refused(f"is nested more than {MAX_DEPTH} levels deep, the most that is allowed")
    has_changed = False
    ending: set[str] = set()
    for each in _subschemas(schema):
        _check_references(schema, each, ending)
        has_changed |= _narrow_format(each)
    return json.dumps(schema, ensure_ascii=False) if has_changed else text


def _refused(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"the JSON schema {problem}", param="structured")


def _is_deeper_than(depth: int, value: object) -> bool:
    level: list[object] = [value]
    for _ in range(depth):
        level = [inner for each in level for inner in _members(each)]
        if not level:
            return False
    return any(isinstance(each, dict | list) for each in level)


def _members(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from cast(_Schema, value).values()
    elif isinstance(value, list):
        yield from cast(list[object], value)


def _subschemas(schema: _Schema) -> Iterator[_Schema]:
    """The schema, and all that it holds where a keyword takes one."""
    waiting: list[object] = [schema]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, dict):
            continue
        found = cast(_Schema, each)
        yield found
        waiting += [found.get(name) for name in _ONE_SCHEMA]
        for name in _SCHEMA_LISTS:
            if isinstance(found.get(name), list):
                waiting += found[name]
        for name in _SCHEMA_MAPS:
            if isinstance(found.get(name), dict):
                waiting += found[name].values()


def _check_references(root: _Schema, schema: _Schema, ending: set[str]) -> None:
    """Raises for a reference that leads back to itself with nothing between.

    Args:
        ending: the references that are known to end; those found here are added, so that each of
            a schema is resolved once.
    """
    names: dict[str, None] = {}
    while isinstance(name := schema.get("$ref"), str) and name not in ending:
        if name in names:
            followed = list(names)
            cycle = " -> ".join([*followed[followed.index(name) :], name])
            raise _refused(f"has a $ref that leads back to itself: {cycle[:300]}")
        names[name] = None
        found = _resolved(root, name)
        if not isinstance(found, dict):
            break
        schema = cast(_Schema, found)
    ending.update(names)


def _resolved(root: _Schema, name: str) -> object:
    """What a pointer within the schema names; None if there is nothing, or it is no pointer."""
    found = cast(object, root)
    if name != "#" and not name.startswith("#/"):
        return None
    for part in unquote(name).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = cast(_Schema, found).get(key)
        elif isinstance(found, list) and key.isascii() and key.isdecimal():
            place, items = int(key[:9]), cast(list[object], found)
            found = items[place] if place < len(items) else None
        else:
            return None
    return found


def _narrow_format(schema: _Schema) -> bool:
    """Adds the pattern of a schema's format; whether there is one."""
    name = schema.get("format")
    pattern = FORMAT_PATTERNS.get(name) if isinstance(name, str) else None
    if pattern is None:
        return False
    if "pattern" not in schema:
        schema["pattern"] = pattern
    elif isinstance(schema.setdefault("allOf", []), list):
        schema["allOf"].append({"pattern": pattern})
    return True
