"""`is_valid`: whether a text is JSON of a schema, all of whose keywords count but formats
(annotations, as in draft 2020-12). Patterns are the client's, so its time has no bound: it runs in
a process that can be killed. Invariant: what cannot be decided, such as a reference to elsewhere,
is not valid."""

import json
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, cast

from cadenza.errors import InvalidRequestError
from cadenza.text.schemas.json_schema import parse_schema, resolve_reference
from cadenza.text.schemas.schema_merge import (
    Schema,
    UnsupportedSchemaError,
    equal,
    is_of_type,
    types_of,
)


class _UndecidedError(Exception):
    """A schema has what is not understood here."""


@dataclass(slots=True, eq=False)
class _Seen:
    """What keywords have looked at."""

    names: set[str] = field(default_factory=set[str])
    places: set[int] = field(default_factory=set[int])

    def add(self, other: "_Seen") -> None:
        self.names |= other.names
        self.places |= other.places


def is_valid(text: str, schema: str) -> bool:
    try:
        value, root = json.loads(text), parse_schema(schema)
        return _Validator(root).evaluate(value, root) is not None
    except _NOT_DECIDED:
        return False


_NOT_DECIDED = (
    *(_UndecidedError, UnsupportedSchemaError, InvalidRequestError, ValueError, RecursionError),
    # what keywords raise whose values are not of the form that they must have
    *(TypeError, AttributeError, LookupError, ArithmeticError),
)


class _Validator:
    def __init__(self, root: Schema | bool) -> None:
        self._root = root

    def evaluate(self, value: object, schema: object) -> _Seen | None:
        """What was looked at; None if the value does not satisfy the schema."""
        if isinstance(schema, bool):
            return _Seen() if schema else None
        if not isinstance(schema, dict) or not _UNKNOWN.isdisjoint(cast(Schema, schema)):
            raise _UndecidedError
        given, seen = cast(Schema, schema), _Seen()
        checks: tuple[Callable[[Any, Schema, _Seen], bool], ...] = (
            self._has_form,
            self._has_parts,
            self._has_combinations,
            self._has_conditions,
            self._has_no_others,
        )
        return seen if all(check(value, given, seen) for check in checks) else None

    def _is(self, value: object, schema: object, seen: _Seen | None = None) -> bool:
        found = self.evaluate(value, schema)
        if found is not None and seen is not None:
            seen.add(found)
        return found is not None

    def _has_form(self, value: Any, schema: Schema, seen: _Seen) -> bool:
        del seen
        if "type" in schema and not is_of_type(value, types_of(schema)):
            return False
        if "const" in schema and not equal(value, schema["const"]):
            return False
        if "enum" in schema and not any(equal(value, each) for each in schema["enum"]):
            return False
        if isinstance(value, str):
            pattern = schema.get("pattern")
            is_found = pattern is None or _search(pattern, value)
            return is_found and _is_counted(len(value), schema, "Length")
        if isinstance(value, list):
            items = cast(list[object], value)
            is_repeated = schema.get("uniqueItems") is True and _repeats(items)
            return not is_repeated and _is_counted(len(items), schema, "Items")
        if isinstance(value, dict):
            members = cast(Schema, value)
            is_whole = all(name in members for name in schema.get("required", ()))
            return is_whole and _is_counted(len(members), schema, "Properties")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return not is_number or _is_within(value, schema)

    def _has_parts(self, value: Any, schema: Schema, seen: _Seen) -> bool:
        if isinstance(value, dict):
            return all(self._members(cast(Schema, value), schema, seen))
        if isinstance(value, list):
            return all(self._items(cast(list[object], value), schema, seen))
        return True

    def _members(self, value: Schema, schema: Schema, seen: _Seen) -> Iterator[bool]:
        known: Schema = schema.get("properties", {})
        patterns: Schema = schema.get("patternProperties", {})
        rest = schema.get("additionalProperties")
        for name, member in value.items():
            if "propertyNames" in schema:
                yield self._is(name, schema["propertyNames"])
            named = [known[name]] if name in known else []
            named += [inner for pattern, inner in patterns.items() if _search(pattern, name)]
            for inner in named or ([rest] if rest is not None else []):
                seen.names.add(name)
                yield self._is(member, inner)

    def _items(self, value: list[object], schema: Schema, seen: _Seen) -> Iterator[bool]:
        items, prefix = schema.get("items"), schema.get("prefixItems", [])
        if isinstance(items, list):  # as drafts before 2020-12 have it
            prefix, items = cast(list[object], items), schema.get("additionalItems")
        for index, item in enumerate(value):
            inner = prefix[index] if index < len(prefix) else items
            if inner is not None:
                seen.places.add(index)
                yield self._is(item, inner)
        if "contains" in schema:
            found = [i for i, item in enumerate(value) if self._is(item, schema["contains"])]
            seen.places |= {*found}
            most = schema.get("maxContains", len(value))
            yield schema.get("minContains", 1) <= len(found) <= most

    def _has_combinations(self, value: Any, schema: Schema, seen: _Seen) -> bool:
        if "$ref" in schema:
            target = resolve_reference(cast(Schema, self._root), schema["$ref"])
            if target is None:
                raise _UndecidedError
            if not self._is(value, target, seen):
                return False
        if not all(self._is(value, each, seen) for each in schema.get("allOf", ())):
            return False
        for name in ("anyOf", "oneOf"):
            if name in schema:
                count = sum(self._is(value, each, seen) for each in schema[name])
                if not count or (name == "oneOf" and count > 1):
                    return False
        return "not" not in schema or not self._is(value, schema["not"])

    def _has_conditions(self, value: Any, schema: Schema, seen: _Seen) -> bool:
        if "if" in schema:
            name = "then" if self._is(value, schema["if"], seen) else "else"
            if name in schema and not self._is(value, schema[name], seen):
                return False
        if not isinstance(value, dict):
            return True
        members = cast(Schema, value)
        needed = {**schema.get("dependentRequired", {}), **schema.get("dependencies", {})}
        lists = [
            cast(list[str], each)
            for name, each in needed.items()
            if name in members and isinstance(each, list)
        ]
        if not all(other in members for each in lists for other in each):
            return False
        schemas = {**needed, **schema.get("dependentSchemas", {})}
        return all(
            isinstance(each, list) or self._is(members, each, seen)
            for name, each in schemas.items()
            if name in members
        )

    def _has_no_others(self, value: Any, schema: Schema, seen: _Seen) -> bool:
        if isinstance(value, dict) and "unevaluatedProperties" in schema:
            members = cast(Schema, value)
            rest = [name for name in members if name not in seen.names]
            seen.names |= {*rest}
            inner = schema["unevaluatedProperties"]
            return all(self._is(members[name], inner) for name in rest)
        if isinstance(value, list) and "unevaluatedItems" in schema:
            items = cast(list[object], value)
            places = [index for index in range(len(items)) if index not in seen.places]
            seen.places |= {*places}
            inner = schema["unevaluatedItems"]
            return all(self._is(items[index], inner) for index in places)
        return True


_UNKNOWN = frozenset({"$dynamicRef", "$recursiveRef"})


def _search(pattern: str, text: str) -> bool:
    try:
        return re.search(pattern, text, re.ASCII) is not None
    except (re.error, OverflowError):
        raise _UndecidedError from None


def _is_counted(count: int, schema: Schema, of: str) -> bool:
    least, most = schema.get(f"min{of}", 0), schema.get(f"max{of}")
    return least <= count and (most is None or count <= most)


def _repeats(items: list[object]) -> bool:
    return any(equal(one, other) for index, one in enumerate(items) for other in items[index + 1 :])


def _is_within(value: float, schema: Schema) -> bool:
    for name, is_met, is_met_openly in _BOUNDS:
        bound, opened = schema.get(name), schema.get(f"exclusive{name.capitalize()}")
        # Draft 4 says with a boolean that a bound is outside.
        if bound is not None and not (is_met_openly if opened is True else is_met)(value, bound):
            return False
        if not isinstance(opened, bool | None) and not is_met_openly(value, opened):
            return False
    factor = schema.get("multipleOf")
    return factor is None or (Fraction(repr(value)) / Fraction(repr(factor))).denominator == 1


# Each with what holds of a bound that is within, and of one that is outside.
_BOUNDS: tuple[tuple[str, Callable[[Any, Any], bool], Callable[[Any, Any], bool]], ...] = (
    ("minimum", operator.ge, operator.gt),
    ("maximum", operator.le, operator.lt),
)
