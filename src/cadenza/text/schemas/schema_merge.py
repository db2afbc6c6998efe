"""`SchemaMerger`: a JSON Schema as alternatives without references and combinations. Invariant:
together they allow what the schema allows, or less where its `oneOf` and `unevaluatedProperties`
are read as their branches say.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

Schema = dict[str, Any]
"""A schema that is an object; true is {}, and false raises UnsatisfiableError."""

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
CONSTRAINTS: frozenset[str] = frozenset(  # of one alternative; `COMBINATIONS` are resolved
    "type enum const minLength maxLength pattern format minimum maximum exclusiveMinimum "
    "exclusiveMaximum multipleOf items additionalItems prefixItems minItems maxItems uniqueItems "
    "properties additionalProperties patternProperties required minProperties maxProperties "
    "propertyNames".split()
)

COMBINATIONS = ("$ref", "allOf", "anyOf", "oneOf")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAY_BE_BOOLEAN = ("exclusiveMinimum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_VALUE_TYPES: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("pattern", "format"), str),
    **dict.fromkeys(("enum", "prefixItems"), list),
    **dict.fromkeys(("properties", "patternProperties"), dict),
    **dict.fromkeys(("additionalItems", "additionalProperties", "propertyNames"), (bool, dict)),
    "items": (bool, dict, list),
    "uniqueItems": bool,
}

MAX_ALTERNATIVES = 256
MAX_WORK = 100_000  # schemas looked at and members merged: a few tenths of a second
MAX_DEPTH = 32  # of references and combinations within each other; `disjoint` goes less deep


class UnsatisfiableError(Exception):
    """No value satisfies a schema; the argument says why, where that is known."""


class UnsupportedSchemaError(Exception):
    """The schema combines what is not resolved here."""


class SchemaMerger:
    """Resolves within one schema. `resolve`: the schema that a reference names; it raises
    UnsupportedSchemaError; `leave_out` gets the name of a keyword that is not followed;
    `ignores_siblings`: of a `$ref`, as in drafts before 2019-09."""

    def __init__(
        self,
        resolve: Callable[[str], object],
        leave_out: Callable[[str], None],
        *,
        ignores_siblings: bool = False,
    ) -> None:
        self._resolve = resolve
        self._leave_out = leave_out
        self._ignores_siblings = ignores_siblings
        self._work = 0

    def spend(self, work: int = 1) -> None:
        """Raises UnsupportedSchemaError where too much was done."""
        self._work += work
        if self._work > MAX_WORK:
            raise UnsupportedSchemaError

    def alternatives(self, schema: object, depth: int = 0) -> list[Schema]:
        """What a schema is any of: each has constraints only, or is one reference alone."""
        self.spend()
        if depth > MAX_DEPTH:
            raise UnsupportedSchemaError
        if schema is True:
            return [{}]
        if schema is False:
            return []
        if not isinstance(schema, dict):
            raise UnsupportedSchemaError
        given = cast(Schema, schema)
        if "$ref" in given and self._ignores_siblings:
            given = {"$ref": given["$ref"]}
        found = [_constraints(given)]
        for group in self._groups(given, depth):
            found = self._product(found, group, depth)
        rest = given.get("unevaluatedProperties", True)
        return found if rest is True else [*self._closed(found, rest, depth)]

    def _closed(self, found: list[Schema], rest: object, depth: int) -> Iterator[Schema]:
        for each in found:
            for one in self._of(each, depth):
                if "unevaluatedProperties" in one:
                    raise UnsupportedSchemaError
                yield {**one, "unevaluatedProperties": rest}

    def resolved(self, schema: object, depth: int = 0) -> list[Schema]:
        found: list[Schema] = []
        for each in self.alternatives(schema, depth):
            found += [each] if "$ref" not in each else self._dereferenced(each, depth)
        return found

    def _dereferenced(self, reference: Schema, depth: int) -> list[Schema]:
        return self.resolved(self._resolve(reference["$ref"]), depth + 1)

    def _groups(self, schema: Schema, depth: int) -> Iterator[list[Schema]]:
        if "$ref" in schema:
            if not isinstance(schema["$ref"], str):
                raise UnsupportedSchemaError
            yield [{"$ref": schema["$ref"]}]
        for each in _list(schema, "allOf"):
            yield self.alternatives(each, depth + 1)
        if "anyOf" in schema:
            yield [
                found
                for each in _list(schema, "anyOf")
                for found in self.alternatives(each, depth + 1)
            ]
        if "oneOf" in schema:
            branches = [self.alternatives(each, depth + 1) for each in _list(schema, "oneOf")]
            if not self._are_disjoint(branches, schema, depth):
                self._leave_out("oneOf")
            yield [found for each in branches for found in each]

    def _product(self, left: Sequence[Schema], right: Sequence[Schema], depth: int) -> list[Schema]:
        if left == [{}]:
            return list(right)
        if right == [{}]:
            return list(left)
        if len(left) * len(right) > MAX_ALTERNATIVES:
            raise UnsupportedSchemaError
        found: list[Schema] = []
        for first in left:
            for second in right:
                if not first or not second or first == second:
                    found.append(first or second)
                    continue
                for one in self._of(first, depth):
                    for other in self._of(second, depth):
                        found += self._merged(one, other)
        return found

    def _of(self, schema: Schema, depth: int) -> list[Schema]:
        return self._dereferenced(schema, depth) if "$ref" in schema else [schema]

    def _merged(self, first: Schema, second: Schema) -> list[Schema]:
        self.spend(_size(first) + _size(second))
        self.spend(len(first.get("enum", ())) * len(second.get("enum", ())))
        try:
            return [merged(first, second)]
        except UnsatisfiableError:
            return []

    def _are_disjoint(self, branches: list[list[Schema]], beside: Schema, depth: int) -> bool:
        outside = _constraints(beside)
        resolved = [
            [
                found
                for each in branch
                for one in self._of(each, depth)
                for found in self._merged(outside, one)
            ]
            for branch in branches
        ]
        return all(
            self.disjoint(one, other, depth)
            for index, first in enumerate(resolved)
            for second in resolved[index + 1 :]
            for one in first
            for other in second
        )

    def disjoint(self, first: Schema, second: Schema, depth: int) -> bool:
        """Whether no value satisfies two alternatives without references, as far as is seen."""
        if depth > MAX_DEPTH:
            return False
        types = types_of(first) & types_of(second)
        if "enum" in first and "enum" in second:
            self.spend(len(first["enum"]) * len(second["enum"]))
            return not _common(first["enum"], second["enum"])
        for one, other in ((first, second), (second, first)):
            if "enum" in one:
                return not any(is_of_type(each, types_of(other)) for each in one["enum"])
        if types != {"object"}:
            return not types
        return self._are_objects_disjoint(first, second, depth)

    def _are_objects_disjoint(self, first: Schema, second: Schema, depth: int) -> bool:
        for one, other in ((first, second), (second, first)):
            self.spend(_size(one) + _size(other))
            needed = {*other.get("required", ())}
            for name in one.get("required", ()):
                known = other.get("properties", {})
                is_closed = other.get("additionalProperties") is False
                if name not in known and is_closed and "patternProperties" not in other:
                    return True
                mine = one.get("properties", {}).get(name, True)
                if name not in known or name not in needed:
                    continue
                pairs = (
                    (a, b)
                    for a in self.resolved(mine, depth + 8)
                    for b in self.resolved(known[name], depth + 8)
                )
                if all(self.disjoint(a, b, depth + 8) for a, b in pairs):
                    return True
        return False


def types_of(schema: Schema) -> set[str]:
    """Those that a schema names, or all; integer stands beside number where both may be."""
    given = schema.get("type")
    if given is None:
        return set(TYPES)
    names = {given} if isinstance(given, str) else set(cast(list[str], given))
    if not names <= set(TYPES):
        raise UnsupportedSchemaError
    return names | {"integer"} if "number" in names else names


def type_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    for kind, name in ((str, "string"), (list, "array"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "number"


def is_of_type(value: object, types: set[str]) -> bool:
    return type_of(value) in types


def equal(first: object, second: object) -> bool:
    """As JSON: 1 is 1.0, and neither is true."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, list) and isinstance(second, list):
        one, other = cast(list[object], first), cast(list[object], second)
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(first, dict) and isinstance(second, dict):
        mine, theirs = cast(Schema, first), cast(Schema, second)
        return mine.keys() == theirs.keys() and all(
            equal(mine[name], theirs[name]) for name in mine
        )
    return first == second


def merged(first: Schema, second: Schema) -> Schema:
    if "unevaluatedProperties" in first or "unevaluatedProperties" in second:
        raise UnsupportedSchemaError
    found = {**first, **second}
    for name in first.keys() & second.keys():
        found[name] = _MERGES.get(name, _equal_only)(first[name], second[name])
    found |= _merged_types(first, second)
    _merge_properties(found, first, second)
    if ("prefixItems" in first) != ("prefixItems" in second) and "items" in found:
        raise UnsupportedSchemaError
    return found


def _constraints(schema: Schema) -> Schema:
    found = {name: value for name, value in schema.items() if name in CONSTRAINTS}
    for name, value in found.items():
        if not _is_well_formed(name, value):
            raise UnsupportedSchemaError
    if "const" in found:
        const = found.pop("const")
        found["enum"] = _common([const], found.get("enum", [const]))
    if "enum" in found and not isinstance(found["enum"], list):
        raise UnsupportedSchemaError
    for name in ("pattern", "format"):
        if name in found:
            found[name] = [found[name]]
    if isinstance(found.get("items"), list):
        found["prefixItems"] = found.pop("items")
        if "additionalItems" in found:
            found["items"] = found["additionalItems"]
    found.pop("additionalItems", None)
    return found


def _is_well_formed(name: str, value: object) -> bool:
    if name in _NUMBERS:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number or (isinstance(value, bool) and name in _MAY_BE_BOOLEAN)
    if name in _COUNTS:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if name == "type":
        names = cast(list[object], value) if isinstance(value, list) else [value]
        return bool(names) and all(each in TYPES for each in names)
    if name == "required":
        return _is_list_of(str, value)
    return name not in _VALUE_TYPES or isinstance(value, _VALUE_TYPES[name])


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, kind) for each in cast(list[object], value)
    )


def _list(schema: Schema, name: str) -> list[Any]:
    found = schema.get(name, [])
    if not isinstance(found, list):
        raise UnsupportedSchemaError
    return cast(list[Any], found)


def _common(first: list[Any], second: list[Any]) -> list[Any]:
    return [one for one in first if any(equal(one, other) for other in second)]


def _size(schema: Schema) -> int:
    members = ("properties", "patternProperties", "required", "pattern")
    return len(schema) + sum(len(schema.get(name, ())) for name in members)


def _merged_types(first: Schema, second: Schema) -> Schema:
    if "type" not in first or "type" not in second:
        return {}
    types = types_of(first) & types_of(second)
    if not types:
        raise UnsatisfiableError
    return {"type": sorted(types)}


def _merge_properties(found: Schema, first: Schema, second: Schema) -> None:
    """What one of two says about all other properties holds for those that the other names."""
    for one, other in ((first, second), (second, first)):
        rest = one.get("additionalProperties", True)
        if "patternProperties" in one and other.get("properties"):
            raise UnsupportedSchemaError
        if rest is True:
            continue
        if "patternProperties" in other:
            raise UnsupportedSchemaError
        known = one.get("properties", {})
        new = [name for name in other.get("properties", {}) if name not in known]
        inner = found.get("properties", {})
        narrowed = {name: {"allOf": [inner[name], rest]} for name in new}
        found |= {"properties": {**inner, **narrowed}} if new else {}


def _equal_only(first: Any, second: Any) -> Any:
    if first != second:
        raise UnsupportedSchemaError
    return first


def _both(first: Any, second: Any) -> Any:
    return first if first == second else {"allOf": [first, second]}


def _merged_maps(first: Schema, second: Schema) -> Schema:
    found = {**first, **second}
    for name in first.keys() & second.keys():
        found[name] = _both(first[name], second[name])
    return found


def _either(first: list[Any], second: list[Any]) -> list[Any]:
    return [*dict.fromkeys([*first, *second])]


_MERGES: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("minLength", "minItems", "minProperties", "minimum"), max),
    **dict.fromkeys(("maxLength", "maxItems", "maxProperties", "maximum"), min),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _equal_only),
    "type": lambda one, _: one,
    "enum": _common,
    "pattern": _either,
    "format": _either,
    "required": _either,
    "properties": _merged_maps,
    "patternProperties": _merged_maps,
    "uniqueItems": lambda one, other: one or other,
    **dict.fromkeys(("items", "additionalProperties", "propertyNames"), _both),
}


MAX_UNIQUE = 64  # values of the items of a list without repetition: bits of a rule's parameter

_BOUNDS: Mapping[str, Callable[[Any, Any], bool]] = {
    "minLength": operator.ge,
    "maxLength": operator.le,
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}


def are_simple(beside: Schema) -> bool:
    """Whether what stands beside an enum is types and bounds, none of them as draft 4 has it."""
    has_booleans = any(isinstance(each, bool) for each in beside.values())
    return _BOUNDS.keys() >= beside.keys() - {"type"} and not has_booleans


def satisfies_bounds(value: object, schema: Schema) -> bool:
    """Whether a value is of the types and within the bounds; nothing else is looked at."""
    if not is_of_type(value, types_of(schema)):
        return False
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    for name, is_met in _BOUNDS.items():
        measured: object = value if is_number else None
        if name.endswith("Length"):
            measured = len(value) if isinstance(value, str) else None
        bound = schema.get(name)
        if measured is None or isinstance(bound, bool | None):
            continue
        if not is_met(measured, bound):
            return False
    return True


def few_values(schema: Schema) -> list[object] | None:
    if "enum" in schema:
        return [each for each in schema["enum"] if is_of_type(each, types_of(schema))]
    types = types_of(schema)
    if types <= {"null", "boolean"}:
        return [
            *([None] if "null" in types else []),
            *([False, True] if "boolean" in types else []),
        ]
    low, high = schema.get("minimum"), schema.get("maximum")
    bounds = {"exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    if types != {"integer"} or low is None or high is None or bounds & schema.keys():
        return None
    first, last = -int(-low // 1), int(high // 1)
    return list(range(first, last + 1)) if last - first < MAX_UNIQUE else None
