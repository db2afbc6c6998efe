"""JSON: `read_json`, and the types of fields, each a check and a JSON Schema. Invariants: `check`
takes any JSON value, and returns one within the type's bounds; an error of a body that is no JSON
names the line, the column, and what was found there."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import msgspec

from cadenza.request import show
from cadenza.server.errors import ApiError, invalid_json, invalid_value, not_built

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Schema = dict[str, Any]

NULL: Schema = {"type": "null"}  # also the schema of undeclared members: null counts as absent
MAX_JSON_DEPTH = 64
MAX_LENIENT_BYTES = 1 << 16
"""Up to this size a body that is not strict JSON is decoded again by a decoder that allows NaN."""

MAX_SHOWN_CHARS = 16
_WANTED = {
    "Expecting value": "a value is needed",
    "Expecting property name enclosed in double quotes": "a name in double quotes is needed",
    "Expecting ',' delimiter": "a comma or a closing bracket is needed",
    "Expecting ':' delimiter": "a colon is needed",
    "Unterminated string starting at": "the text that begins there does not end",
    "Invalid control character at": "in texts control characters are written as escapes, \\n",
    "Invalid \\escape": "that is no escape of JSON",
    "Invalid \\uXXXX escape": "four hexadecimal digits are needed behind \\u",
    "Extra data": "the object has ended, and nothing may follow it",
    "Illegal trailing comma before end of object": "no comma may stand before the end",
    "Illegal trailing comma before end of array": "no comma may stand before the end",
}
"""Our words for the messages of Python's decoder."""

_NOT_JSON = "that is not JSON"
_KINDS = {"list": "a list", "str": "a text", "bool": "true or false", "NoneType": "null"}
MAX_TOKEN_ID = 1 << 31
SLICE = 1 << 16


class FieldType(Protocol[T_co]):
    """A set of values."""

    @property
    def check(self) -> Callable[[str, object], T_co]:
        """Takes a field's name and value; returns the server's value. Raises ApiError (400) naming
        the field."""
        ...

    @property
    def schema(self) -> Callable[[], Schema]: ...


@dataclass(frozen=True, slots=True)
class CheckedBy(Generic[T]):
    """A field type that is one function; see `field_type`."""

    check: Callable[[str, object], T]
    schema: Callable[[], Schema]


def field_type(
    schema: Schema | Callable[[], Schema],
) -> Callable[[Callable[[str, object], T]], CheckedBy[T]]:
    """Makes a field type of the function that checks its values. `schema`: of the values; a
    function of no arguments where it depends on the policy on unknown members."""
    described: Callable[[], Schema] = schema if callable(schema) else lambda: schema
    return lambda check: CheckedBy(check, described)


def refuse(name: str, value: object, wanted: str) -> ApiError:
    return invalid_value(f"{name} is {show(value)}; it must be {wanted}", name)


def checked_dict(name: str, value: object, wanted: str = "an object") -> dict[str, Any]:
    """Raises ApiError (400) for anything but an object."""
    if isinstance(value, dict):
        return cast(dict[str, Any], value)
    raise refuse(name, value, wanted)


def checked_list(
    name: str, value: object, wanted: str, bounds: tuple[int, int], entries: str = "entries"
) -> list[object]:
    """Raises ApiError (400) for anything but a list whose length is within the bounds."""
    if not isinstance(value, list):
        raise refuse(name, value, wanted)
    items = cast(list[object], value)
    if not bounds[0] <= len(items) <= bounds[1]:
        raise invalid_value(
            f"{name} has {len(items)} {entries}; from {bounds[0]} to {bounds[1]} are allowed", name
        )
    return items


def array_schema(item: Schema, low: int | None = None, high: int | None = None) -> Schema:
    """The schema of a list of `low` to `high` items; None: no bound."""
    bounds = {"minItems": low, "maxItems": high}
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    return {"type": "array", "items": item, **given}


def object_schema(
    members: Mapping[str, Schema], required: Iterable[str] | None = None, **rest: Any
) -> Schema:
    """The schema of an object; `required` are the members that it needs; None: all."""
    needed = list(members if required is None else required)
    return {"type": "object", "properties": {**members}, "required": needed, **rest}


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number from `low` to `high`."""

    low: float
    high: float

    def check(self, name: str, value: object) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # NaN is not within any bounds, and an integer of any size can be compared.
        if is_number and self.low <= cast(float, value) <= self.high:
            return cast(float, value)
        raise refuse(name, value, f"a number from {self.low:g} to {self.high:g}")

    def schema(self) -> Schema:
        return {"type": "number", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number from `low` to `high`."""

    low: int
    high: int

    def check(self, name: str, value: object) -> int:
        whole = as_whole(value)
        if whole is not None and self.low <= whole <= self.high:
            return whole
        raise refuse(name, value, f"a whole number from {self.low} to {self.high}")

    def schema(self) -> Schema:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


def as_whole(value: object) -> int | None:
    """The number, if it is whole; as in JSON Schema, 2740.0 is an integer."""
    if type(value) is int:
        return value
    return int(value) if isinstance(value, float) and value.is_integer() else None


@dataclass(frozen=True, slots=True)
class Boolean:
    """True or false."""

    def check(self, name: str, value: object) -> bool:
        if isinstance(value, bool):
            return value
        raise refuse(name, value, "true or false")

    def schema(self) -> Schema:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True, kw_only=True)
class String:
    """A string of whole Unicode characters; an identifier is one that goes into headers."""

    max_chars: int
    min_chars: int = 0
    is_identifier: bool = False

    def check(self, name: str, value: object) -> str:
        if not isinstance(value, str) or not self.min_chars <= len(value) <= self.max_chars:
            shown = f"{len(value)} characters" if isinstance(value, str) else show(value)
            wanted = f"a text of {self.min_chars} to {self.max_chars} characters"
            raise invalid_value(f"{name} is {shown}; it must be {wanted}", name)
        if self.is_identifier and not _IDENTIFIER.issuperset(value):
            raise refuse(name, value, "made of ASCII letters, digits, '-', '_', '.' and ':'")
        if not is_whole_unicode(value):
            raise refuse(name, value, "whole Unicode characters; it has half a surrogate pair")
        return value

    def schema(self) -> Schema:
        bounds = {"minLength": self.min_chars, "maxLength": self.max_chars}
        pattern = {"pattern": "^[A-Za-z0-9_.:-]*$"} if self.is_identifier else {}
        return {"type": "string", **bounds, **pattern}


def is_whole_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_IDENTIFIER = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.:-")


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few strings."""

    values: tuple[str, ...]

    def check(self, name: str, value: object) -> str:
        if isinstance(value, str) and value in self.values:
            return value
        raise refuse(name, value, f"one of {', '.join(self.values)}")

    def schema(self) -> Schema:
        return {"type": "string", "enum": list(self.values)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOf(Generic[T]):
    """A list whose items are all of one type."""

    item: FieldType[T]
    max_items: int
    min_items: int = 0

    def check(self, name: str, value: object) -> tuple[T, ...]:
        items = checked_list(name, value, "a list", (self.min_items, self.max_items))
        return tuple(self.item.check(name, item) for item in items)

    def schema(self) -> Schema:
        return array_schema(self.item.schema(), self.min_items, self.max_items)


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Token ids of any vocabulary; the engine checks them against its own."""

    max_items: int
    min_items: int = 0

    def check(self, name: str, value: object) -> tuple[int, ...]:
        bounds = (self.min_items, self.max_items)
        items = checked_list(name, value, "a list of token ids", bounds)
        ids: list[int] = []
        for start in range(0, len(items), SLICE):  # between slices other threads can run
            ids += self._check_some(name, items[start : start + SLICE])
        return tuple(ids)

    @staticmethod
    def _check_some(name: str, found: list[object]) -> list[int]:
        items = cast(list[int], found)
        if set(map(type, found)) != {int}:
            items = [whole for item in found if (whole := as_whole(item)) is not None]
        if len(items) != len(found):
            odd = next(item for item in found if as_whole(item) is None)
            raise invalid_value(f"{name} holds {show(odd)}; token ids are whole numbers", name)
        if not 0 <= min(items) <= max(items) < MAX_TOKEN_ID:
            odd = next(item for item in items if not 0 <= item < MAX_TOKEN_ID)
            raise invalid_value(
                f"{name} holds the token id {show(odd)}; ids go from 0 to {MAX_TOKEN_ID - 1}", name
            )
        return items

    def schema(self) -> Schema:
        ids = Integer(0, MAX_TOKEN_ID - 1).schema()
        return array_schema(ids, self.min_items, self.max_items)


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A feature that is not built: only values that do not use it, `harmless`, are accepted."""

    what: str
    harmless: tuple[object, ...] = ()

    def check(self, name: str, value: object) -> Any:
        if any(_is_same_json(value, each) for each in self.harmless):
            return value
        raise not_built(name, self.what, self.harmless)

    def schema(self) -> Schema:
        return {"enum": [*self.harmless, None]}


def _is_same_json(left: object, right: object) -> bool:
    """In JSON, unlike in Python, true is not 1."""
    return isinstance(left, bool) == isinstance(right, bool) and left == right


@dataclass(frozen=True, slots=True, kw_only=True)
class StringMap:
    """An object from texts to texts."""

    max_items: int
    max_key_chars: int
    max_value_chars: int

    def check(self, name: str, value: object) -> dict[str, str]:
        entries = checked_dict(name, value, "an object from texts to texts")
        if len(entries) > self.max_items:
            raise invalid_value(
                f"{name} has {len(entries)} entries; at most {self.max_items} are allowed", name
            )
        for key, text in entries.items():
            if len(key) > self.max_key_chars:
                raise invalid_value(
                    f"{name} has the key {show(key)} of {len(key)} characters; at most "
                    f"{self.max_key_chars} are allowed",
                    name,
                )
            if not isinstance(text, str) or len(text) > self.max_value_chars:
                raise invalid_value(
                    f"{name} has {show(text)} under {show(key)}; it must be a text of at most "
                    f"{self.max_value_chars} characters",
                    name,
                )
        return entries

    def schema(self) -> Schema:
        return {
            "type": "object",
            "maxProperties": self.max_items,
            "propertyNames": {"maxLength": self.max_key_chars},
            "additionalProperties": {"type": "string", "maxLength": self.max_value_chars},
        }


@dataclass(frozen=True, slots=True)
class AnyJson:
    """Any value of at most `max_chars` characters of JSON; JSON Schema cannot express the bound."""

    max_chars: int

    def check(self, name: str, value: object) -> object:
        num_chars = len(json.dumps(value))
        if num_chars > self.max_chars:
            raise invalid_value(
                f"{name} has {num_chars} characters of JSON; at most {self.max_chars} are allowed",
                name,
            )
        return value

    def schema(self) -> Schema:
        return {}


@field_type({})
def anything(name: str, value: object) -> object:
    """Any value: a label in a conversation, which clients send back as they got it."""
    del name
    return value


def members_of(value: object) -> dict[str, Any]:
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def or_null(schema: Schema) -> Schema:
    if not schema or None in schema.get("enum", ()):
        return schema
    return {"anyOf": [schema, {"type": "null"}]}


def check_member(name: str, key: str, type: FieldType[T], value: object) -> T:
    """Checks a member; the error's message names it, and its `param` is the field that has it."""
    try:
        return type.check(f"{name}.{key}", value)
    except ApiError as error:
        raise ApiError(error.status, error.code, error.message, param=name) from None


def read_json(body: bytes) -> dict[str, Any]:
    """Nested at most `MAX_JSON_DEPTH`; numbers may be NaN or of any size, so that errors name their
    field. Raises ApiError (400)."""
    try:
        value = _decode(body)
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(value, dict):
        kind = _KINDS.get(type(value).__name__, "a number")
        raise invalid_json(f"is {kind}, and no JSON object")
    if body.count(b"[") + body.count(b"{") > MAX_JSON_DEPTH:
        _check_depth(cast(object, value))
    return cast(dict[str, Any], value)


def _decode(body: bytes) -> object:
    try:
        return msgspec.json.decode(body)
    except (ValueError, UnicodeDecodeError) as error:
        if len(body) > MAX_LENIENT_BYTES:
            raise _wrong_at(*_offset_of(body, str(error)), _NOT_JSON) from None
    try:
        return json.loads(_text(body))
    except json.JSONDecodeError as error:
        wanted = _WANTED.get(error.msg.removesuffix(": "), _NOT_JSON)
        raise _wrong_at(error.doc, error.pos, wanted) from None
    except ValueError:  # a number of more digits than Python reads
        raise invalid_json("has a number of too many digits") from None


def _text(body: bytes) -> str:
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        before = body[: error.start].decode()
        shown = f"the byte 0x{body[error.start]:02x}, which is no UTF-8"
        raise _wrong(before, len(before), shown, "the body is read as UTF-8") from None
    return text.removeprefix("\ufeff")


def _offset_of(body: bytes, message: str) -> tuple[str, int]:
    """The body's text, and the place in it at which msgspec stopped."""
    found = re.search(r"\(byte (\d+)\)", message)
    end = len(body) if found is None else int(found[1])
    return body.decode(errors="replace"), len(body[:end].decode(errors="replace"))


def _wrong_at(text: str, offset: int, wanted: str) -> ApiError:
    if not text.strip():
        return invalid_json("is empty")
    found = text[offset : offset + MAX_SHOWN_CHARS]
    return _wrong(text, offset, repr(found) if found else "the end of the body", wanted)


def _wrong(text: str, offset: int, found: str, wanted: str) -> ApiError:
    line = text.count("\n", 0, offset) + 1
    column = offset - text.rfind("\n", 0, offset)
    return invalid_json(
        f"is not valid JSON: line {line}, column {column} has {found}; {wanted}", at_place=True
    )


def _check_depth(value: object) -> None:
    """Walks level by level; a list without lists in it costs one pass."""
    level: list[object] = [value]
    for _ in range(MAX_JSON_DEPTH):
        deeper: list[object] = []
        for item in level:
            members = cast(list[object], list(item.values()) if isinstance(item, dict) else item)
            deeper += [member for member in members if isinstance(member, dict | list)]
        if not deeper:
            return
        level = deeper
    raise _too_deep()


def _too_deep() -> ApiError:
    return invalid_json(f"is nested over {MAX_JSON_DEPTH} deep")
