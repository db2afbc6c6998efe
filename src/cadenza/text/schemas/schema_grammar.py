"""`SchemaGrammar`: a JSON Schema becomes a grammar in Lark's notation; owns the bounds of lengths
and depths where the schema has none. Invariant: each text of the grammar is JSON that satisfies
what of the schema was not left out."""

import json
import math
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from typing import cast

from cadenza.structured import JsonStyle
from cadenza.text.schemas.json_rules import (
    MAX_COUNT,
    EmptyRangeError,
    Extra,
    JsonRules,
    UnboundedDigitsError,
    number_terminal,
)
from cadenza.text.schemas.schema_merge import (
    COMBINATIONS,
    CONSTRAINTS,
    MAX_UNIQUE,
    TYPES,
    Schema,
    SchemaMerger,
    UnsatisfiableError,
    UnsupportedSchemaError,
    are_simple,
    equal,
    few_values,
    satisfies_bounds,
    type_of,
    types_of,
)

_MAX_FRAMES = 650  # of Python's 1,000 for schemas within each other, references followed
_NUMBER_IN_BRACES = re.compile(r"(?<=[{,])\d{1,9}(?=[,}])")


class SchemaGrammar:
    """Compiles one schema. `resolve`: the schema that a reference names; it raises
    UnsupportedSchemaError; `leave_out` gets the name of a keyword that is not followed."""

    def __init__(
        self,
        style: JsonStyle,
        resolve: Callable[[str], object],
        leave_out: Callable[[str], None],
        *,
        ignores_siblings: bool = False,
    ) -> None:
        self._style = style
        self._resolve = resolve
        self._leave_out = leave_out
        self._ignores_siblings = ignores_siblings
        self._given: dict[str, object] = {}  # what is named here
        self._merger = SchemaMerger(resolve, leave_out, ignores_siblings=ignores_siblings)
        self._rules = JsonRules(style)
        # References by their names and levels; those that are being compiled, with whether they
        # are within themselves.
        self._references: dict[tuple[str, int], str] = {}
        self._impossible: set[tuple[str, int]] = set()
        self._open: dict[tuple[str, int], bool] = {}
        self._most_levels: int | None = None
        self._level = self._num_frames = 0
        # References within themselves, as far as they were compiled without levels.
        self.recursive: dict[str, object] = {}
        self._free: dict[int, str] = {}

    def compile(self, schema: object) -> str:
        """Raises UnsatisfiableError or UnsupportedSchemaError."""
        return self._rules.text_from(self._value(schema))

    def compile_levels(self, schema: object, recursive: Schema, most_levels: int) -> str:
        """As `compile`, with at most `most_levels` of each reference of `recursive` within itself:
        each level has rules of its own, and on the last one what refers to itself once more is left
        out as if it were false. The last is compiled first, so that levels are not nested in each
        other here."""
        self._most_levels = most_levels
        self._given |= recursive
        for self._level in reversed(range(1, most_levels)):
            for name in recursive:
                with suppress(UnsatisfiableError):
                    self._reference(name)
        self._level = 0
        self._open["#", 0] = False
        return self._rules.text_from(self._value(schema))

    def _value(self, schema: object) -> str:
        self._merger.spend()
        if self._is_narrowed(schema):
            # By its text, since what it merges to may have it again.
            name = json.dumps(schema)
            self._merger.spend(len(name) >> 8)
            self._given[name] = {"allOf": [schema]}
            with self._nested(2):
                return self._reference(name)
        found = self._merger.alternatives(schema)
        bodies: dict[str, None] = {}
        problem = UnsatisfiableError()
        for each in found:
            try:
                with self._nested(3 if "$ref" in each else 5):
                    bodies |= dict.fromkeys(self._bodies(each))
            except UnsatisfiableError as error:
                problem = error
        if not bodies:
            raise problem
        if len(bodies) == 1:
            (body,) = bodies
            if body in self._rules.bodies:
                return body
        return self._rules.rule(" | ".join(bodies))

    @contextmanager
    def _nested(self, num_frames: int) -> Generator[None]:
        self._num_frames += num_frames
        try:
            if self._num_frames > _MAX_FRAMES:
                raise UnsupportedSchemaError
            yield
        finally:
            self._num_frames -= num_frames

    def _bodies(self, each: Schema) -> Iterable[str]:
        if not each:
            return [self._any()]
        if "$ref" in each:
            return [self._reference(each["$ref"])]
        if "enum" in each:
            return self._enum(each)
        return self._typed(each)

    def _typed(self, schema: Schema) -> list[str]:
        make: dict[str, Callable[[Schema], str]] = {
            "null": lambda _: self._rules.terminal('"null"'),
            "boolean": lambda _: self._rules.terminal("/true|false/"),
            "integer": lambda each: self._number(each, is_integer=True),
            "number": lambda each: self._number(each, is_integer=False),
            "string": self._string,
            "array": self._array,
            "object": self._object,
        }
        types, found, problem = types_of(schema), list[str](), UnsatisfiableError()
        for name in TYPES:
            if name not in types or (name == "integer" and "number" in types):
                continue
            try:
                found.append(make[name](schema))
            except UnsatisfiableError as error:
                problem = error
        if not found:
            raise problem
        return found

    def _is_narrowed(self, schema: object) -> bool:
        if self._ignores_siblings or not isinstance(schema, dict) or "$ref" not in schema:
            return False
        beside = cast(Schema, schema).keys() - {"$ref"}
        return not beside.isdisjoint({*CONSTRAINTS, *COMBINATIONS})

    def _reference(self, name: str) -> str:
        key = name, self._level
        if key in self._open and self._most_levels is not None:
            return self._next_level(name, self._most_levels)
        if key in self._impossible:
            raise UnsatisfiableError
        if key in self._references:
            if key in self._open:
                self._open[key] = True
                self.recursive[name] = self._target(name)
            return self._references[key]
        self._references[key] = rule = self._rules.new_rule()
        self._open[key] = False
        try:
            self._rules.bodies[rule] = self._value(self._target(name))
        except UnsatisfiableError:
            self._impossible.add(key)
            if self._open[key]:  # rules that are kept may have it
                raise UnsupportedSchemaError from None
            raise
        finally:
            del self._open[key]
        return rule

    def _target(self, name: str) -> object:
        return self._given[name] if name in self._given else self._resolve(name)

    def _next_level(self, name: str, most_levels: int) -> str:
        if self._level + 1 == most_levels:
            raise UnsatisfiableError
        self._level += 1
        try:
            return self._reference(name)
        finally:
            self._level -= 1

    def _enum(self, schema: Schema) -> list[str]:
        beside = {name: value for name, value in schema.items() if name != "enum"}
        given = cast(list[object], schema["enum"])
        if given and not are_simple(beside):
            raise UnsupportedSchemaError
        values = [each for each in given if satisfies_bounds(each, beside)]
        scalars = [each for each in values if type_of(each) not in ("array", "object")]
        others = [each for each in values if type_of(each) in ("array", "object")]
        found = [self._rules.literal(each) for each in others]
        if scalars:
            found.append(self._rules.one_of(scalars))
        if not found:
            raise UnsatisfiableError
        return found

    def _number(self, schema: Schema, *, is_integer: bool) -> str:
        if "multipleOf" in schema:
            return self._library_number(schema, is_integer=is_integer)
        try:
            return self._rules.terminal(number_terminal(schema, is_integer=is_integer))
        except EmptyRangeError:
            raise UnsatisfiableError from None
        except UnboundedDigitsError:
            raise UnsupportedSchemaError from None

    def _library_number(self, schema: Schema, *, is_integer: bool) -> str:
        names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
        given = {name: schema[name] for name in names if name in schema}
        if "exclusiveMinimum" not in given:
            given.setdefault("minimum", -(10**18))
        if "exclusiveMaximum" not in given:
            given.setdefault("maximum", 10**18)
        return self._library({"type": "integer" if is_integer else "number", **given})

    def _library(self, schema: Schema) -> str:
        options = {"whitespace_flexible": False}
        return self._rules.rule(f"%json {json.dumps({**schema, 'x-guidance': options})}")

    def _string(self, schema: Schema) -> str:
        patterns, formats = schema.get("pattern", ()), schema.get("format", ())
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if most is None and self._style.max_string is not None:
            longest = _longest_count(patterns)
            most = None if longest > self._style.max_string else max(self._style.max_string, least)
        if most is not None and least > most:
            raise _contradiction("minLength", least, "maxLength", most)
        if not patterns and not formats:
            return self._rules.text(least, most)
        given: Schema = {"type": "string"}
        given |= {"minLength": least} if least else {}
        given |= {"maxLength": most} if most is not None and most < MAX_COUNT else {}
        conditions = [{"pattern": each} for each in patterns]
        conditions += [{"format": each} for each in formats]
        if len(conditions) == 1:
            return self._library({**given, **conditions[0]})
        return self._library({**given, "allOf": conditions})

    def _any(self, depth: int = 0) -> str:
        most = self._style.max_depth
        if most is None:
            depth = 0
        if depth not in self._free:
            self._free[depth] = rule = self._rules.new_rule()
            scalars = [name for name in TYPES if name not in ("array", "object")]
            bodies = self._typed({"type": scalars})
            if most is None or depth < most:
                inner = self._any(depth + 1)
                most_items = self._most_items(0)
                bodies.append(self._rules.repeated(inner, 0, most_items))
                member = f"{self._rules.other_name(())} {inner}"
                bodies.append(self._rules.object_of([], Extra(member, 0, most_items)))
            else:
                bodies += ["NONE", "EMPTY"]
            self._rules.bodies[rule] = " | ".join(bodies)
        return self._free[depth]

    def _most_items(self, least: int) -> int | None:
        most = self._style.max_items
        return None if most is None else max(most, least)

    def _array(self, schema: Schema) -> str:
        prefix = cast(list[object], schema.get("prefixItems", []))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most is None:
            most = self._most_items(max(least, len(prefix)))
        if schema.get("uniqueItems") and (most is None or most > 1):
            found = self._unique(schema, least, most) if not prefix else None
            if found is not None:
                return found
            self._leave_out("uniqueItems")
        items: list[str] = []
        rest: str | None = None
        try:
            for each in prefix[:most]:
                items.append(self._value(each))
            rest = self._value(schema.get("items", True))
        except UnsatisfiableError:
            most = len(items) if most is None else min(len(items), most)
        if most is not None and least > most:
            raise _contradiction("minItems", least, "items that may be", most)
        if not items:
            return "NONE" if rest is None else self._rules.repeated(rest, least, most)
        return self._rules.tuple_of(items, rest, least, most)

    def _unique(self, schema: Schema, least: int, most: int | None) -> str | None:
        values = self._values(schema.get("items", True))
        if values is None or len(values) > MAX_UNIQUE:
            return None
        most = len(values) if most is None else min(most, len(values))
        if least > most:
            raise UnsatisfiableError
        return self._rules.distinct(values, least, most)

    def _values(self, schema: object) -> list[object] | None:
        found: list[object] = []
        for each in self._merger.resolved(schema):
            values = few_values(each)
            if values is None:
                return None
            found += [one for one in values if not any(equal(one, other) for other in found)]
            if len(found) > MAX_UNIQUE:
                return None
        return found

    def _object(self, schema: Schema) -> str:
        schema = self._named_members(schema)
        given = cast(Schema, schema.get("properties", {}))
        required = dict.fromkeys(cast(list[str], schema.get("required", [])))
        said = schema.get("additionalProperties", schema.get("unevaluatedProperties"))
        members: list[tuple[str, bool]] = []
        for name in dict.fromkeys([*given, *required]):
            is_required = name in required
            try:
                value = self._value(given.get(name, True if said is None else said))
            except UnsatisfiableError:
                if is_required:
                    raise
                continue
            members.append((f"{self._rules.name(name)} {value}", is_required))
        rest = "properties" not in schema if said is None else said
        extra = self._extra(schema, rest, [*given, *required])
        return self._counted(schema, members, extra)

    def _counted(
        self, schema: Schema, members: Sequence[tuple[str, bool]], extra: str | None
    ) -> str:
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        count, num_required = len(members), sum(is_required for _, is_required in members)
        few = max(least - num_required, 0)
        if most is not None and most < max(num_required, least):
            raise UnsatisfiableError
        if extra is None and least > count:
            raise UnsatisfiableError
        if count > num_required:
            if few > (1 if num_required == 0 else 0):
                self._leave_out("minProperties")
            if most is not None and (extra is not None or count > most):
                self._leave_out("maxProperties")
            many = self._most_items(0)
            found = None if extra is None else Extra(extra, 0, many)
            return self._rules.object_of(members, found, is_filled=least > 0)
        if extra is None:
            return self._rules.object_of(members, None)
        many = self._most_items(few) if most is None else most - num_required
        return self._rules.object_of(members, Extra(extra, few, many))

    def _named_members(self, schema: Schema) -> Schema:
        """Names that `propertyNames` lists become properties; others it may only narrow."""
        names = schema.get("propertyNames")
        if names is None:
            return schema
        rest = {name: value for name, value in schema.items() if name != "propertyNames"}
        allowed = self._merger.resolved(names)
        if any(not each or each == {"type": "string"} for each in allowed):
            return rest
        if all("enum" in each for each in allowed):
            known, others = rest.get("properties", {}), rest.get("additionalProperties", True)
            if "patternProperties" in rest:
                raise UnsupportedSchemaError
            listed = [name for each in allowed for name in each["enum"] if isinstance(name, str)]
            found = {name: known.get(name, others) for name in listed}
            return {**rest, "properties": found, "additionalProperties": False}
        is_narrowed = rest.get("properties") or rest.get("required") or "patternProperties" in rest
        if len(allowed) > 1 or is_narrowed or "string" not in types_of(allowed[0]):
            self._leave_out("propertyNames")
            return rest
        return {**rest, "propertyNames": allowed[0]}

    def _extra(self, schema: Schema, rest: object, taken: Sequence[str]) -> str | None:
        patterns = cast(Schema, schema.get("patternProperties", {}))
        if patterns:
            is_open = schema.get("additionalProperties", False) is not False
            if taken or len(patterns) > 1 or "propertyNames" in schema or is_open:
                raise UnsupportedSchemaError
            ((pattern, rest),) = patterns.items()
            key = self._key_of({"pattern": [pattern]})
        elif "propertyNames" in schema:
            key = self._key_of(schema["propertyNames"])
        else:
            key = self._rules.other_name(taken)
        try:
            return f"{key} {self._value(rest)}"
        except UnsatisfiableError:
            return None

    def _key_of(self, schema: Schema) -> str:
        return f"{self._string({**schema, 'type': 'string'})} COLON"


def _contradiction(name: str, least: int, other: str, most: int) -> UnsatisfiableError:
    return UnsatisfiableError(f"{name} ({least}) is greater than {other} ({most})")


def _longest_count(patterns: Iterable[str]) -> int:
    """Of the repetitions of patterns, where all of them are within each other."""
    counts = [int(each) for text in patterns for each in _NUMBER_IN_BRACES.findall(text)]
    return math.prod(each for each in counts if each)
