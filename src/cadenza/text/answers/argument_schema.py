"""`ArgumentSchema`: what an argument may be, in notations that write texts as they are; JSON as
models write it. Invariant: what `spelling` writes, `read` reads as the same text."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

from cadenza.text.schemas.json_schema import resolve_reference
from cadenza.text.schemas.schema_merge import (
    TYPES,
    Schema,
    SchemaMerger,
    UnsatisfiableError,
    UnsupportedSchemaError,
    equal,
    is_of_type,
    satisfies_bounds,
    types_of,
)

OTHER_TYPES = tuple(name for name in TYPES if name != "string")
WORDS: Mapping[str, object] = {"true": True, "false": False, "null": None, "none": None}

# A text of JSON, with its end if it has one, or a bracket.
NESTING = re.compile(r'"(?:[^"\\]|\\.)*+(")?|[{}\[\]]', re.DOTALL)
JSON_TEXT = r'"(?:[^"\\]|\\.)*+(?:"|\Z)'
_BAD_ESCAPE = re.compile(r'\\(\\|["/bfnrt]|u[0-9a-fA-F]{4})?')
_SEPARATORS = re.compile(r"[\s;]*")
_TAG = re.compile(r"</|<\w+=")


class ArgumentSchema:
    """One argument: it allows what one of `alternatives`, without references and combinations,
    does; `is_resolved`: they are all that it asks for, otherwise only its types are known."""

    __slots__ = ("alternatives", "has_others", "is_resolved", "texts")

    def __init__(self, alternatives: Sequence[Schema], *, is_resolved: bool = True) -> None:
        self.alternatives = alternatives
        self.is_resolved = is_resolved
        listed = [v for each in alternatives for v in each.get("enum", ()) if _satisfies(v, each)]
        types = [types_of(each) for each in alternatives if "enum" not in each]
        texts = [*dict.fromkeys(each for each in listed if isinstance(each, str))]
        # Those that enums allow; None where any may stand.
        self.texts = None if any("string" in each for each in types) else texts
        is_listed = any(not isinstance(each, str) for each in listed)
        self.has_others = is_listed or any(each != {"string"} for each in types)

    @classmethod
    def of(cls, schema: object, root: Mapping[str, Any]) -> "ArgumentSchema":
        """Of a schema within one to which it may refer; anything else than a schema is true."""
        given = cast(object, schema if isinstance(schema, dict | bool) else True)
        merger = SchemaMerger(partial(_target, root), lambda _: None)
        try:
            found = merger.resolved(given)
        except (UnsupportedSchemaError, UnsatisfiableError):
            named = schema_members(given).get("type")
            names = [named] if isinstance(named, str) else cast(list[object], named or [])
            types = [name for name in TYPES if name in names]
            return cls([{"type": types} if types else {}], is_resolved=False)
        return cls(found or [{}])

    @property
    def has_plain_texts(self) -> bool:
        free = (each for each in self.alternatives if "enum" not in each)
        return all(not each.keys() - {"type"} for each in free if "string" in types_of(each))

    def allows(self, value: object) -> bool:
        """Whether a value is of a type, an enum and the bounds of one alternative; what is in a
        list or an object, and patterns, are not looked at."""
        return any(_satisfies(value, each) for each in self.alternatives)

    def read(self, text: str) -> object:
        """The value of a text: the text itself, unless it is JSON, or a word of Python, for
        something else that is allowed. Quotes and blanks around a text of an enum, and around a
        value without a type, are not part of it."""
        if self.texts is None and not self.has_others:
            return text
        value = json_value(text)
        is_untyped = any(not {"type", "enum"} & each.keys() for each in self.alternatives)
        if (is_untyped or not isinstance(value, str)) and self.allows(value):
            return value
        for each in (text, text.strip(), value):
            if self.allows(each):
                return each
        is_named = any(is_of_type(value, types_of(each)) for each in self.alternatives)
        return text if isinstance(value, str) or not is_named else value

    def is_open(self, text: str) -> bool:
        """Whether a text can only go on: it is JSON that ends within a text."""
        is_json = text.lstrip()[:1] in ("[", "{", '"')
        return is_json and self.texts is not None and is_within_text(text)

    def spelling(self, text: str) -> str | None:
        """How a text of an enum is written within elements: as it is, or as JSON, where it would be
        read as something else; None where neither is read."""
        quoted = json.dumps(text, ensure_ascii=False).replace("<", r"\u003c")
        ways = (quoted,) if _TAG.search(text) else (text, quoted)
        read = (each for each in ways if not self.is_open(each) and self.read(each) == text)
        return next(read, None)


def json_value(text: str) -> object:
    word = text.strip().lower()
    if word in WORDS:
        return WORDS[word]
    for written in (text, with_known_escapes(text)):
        try:
            value: object = json.loads(written, strict=False)
        except (ValueError, RecursionError):
            continue
        return text if json_text(value) is None else value
    return text


def json_text(value: object) -> str | None:
    """JSON that can be sent; None where there is none: of NaN, or of half a surrogate pair."""
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()
    except (ValueError, TypeError, RecursionError):
        return None
    return written


def with_known_escapes(text: str) -> str:
    """JSON in which the backslash of an escape that JSON does not know is a backslash."""
    return _BAD_ESCAPE.sub(lambda escape: escape[0] if escape[1] else r"\\", text)


def json_values(text: str) -> list[object] | None:
    decoder = json.JSONDecoder(strict=False)
    for written in (text, with_known_escapes(text)):
        found: list[object] = []
        position = 0
        try:
            while position < len(written):
                value, position = decoder.raw_decode(written, position)
                found += cast(list[object], value) if isinstance(value, list) else [value]
                position = _SEPARATORS.match(written, position).end()  # pyright: ignore[reportOptionalMemberAccess]
        except (ValueError, RecursionError):
            continue
        return found
    return None


def json_object_of(text: str) -> str | None:
    found = json_values(text.strip())
    if found is None or len(found) != 1 or not isinstance(found[0], dict):
        return None
    return json_text(cast(object, found[0]))


def closed(text: str, most: int) -> str | None:
    """JSON with its last brackets, where at most `most` are missing; None within a text."""
    missing: list[str] = []
    for match in NESTING.finditer(text):
        mark = match[0]
        if mark[0] == '"':
            if match[1] is None:
                return None
        elif mark in "{[":
            missing.append("}" if mark == "{" else "]")
        elif not missing or missing.pop() != mark:
            return None
    return None if not 0 < len(missing) <= most else text + "".join(missing[::-1])


def is_within_text(text: str) -> bool:
    texts = (match for match in NESTING.finditer(text) if match[0][0] == '"')
    return any(match[1] is None for match in texts)


def schema_members(schema: object) -> Mapping[str, Any]:
    """None of anything else than an object."""
    return cast(Mapping[str, Any], schema) if isinstance(schema, Mapping) else {}


def _target(root: Mapping[str, Any], name: str) -> object:
    found = resolve_reference(cast(Schema, root), name)
    if found is None:
        raise UnsupportedSchemaError
    return found


def _satisfies(value: object, alternative: Schema) -> bool:
    values: list[object] | None = alternative.get("enum")
    if values is not None:
        is_text = isinstance(value, str)  # for which this is quick
        if not (value in values if is_text else any(equal(value, each) for each in values)):
            return False
    return satisfies_bounds(value, alternative)
