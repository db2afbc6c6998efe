"""A body's JSON: decoded, or refused where it is wrong or too deep. Invariant: an error names the
line, the column, and what was found there."""

import json
import re
from typing import Any, cast

import msgspec

from cadenza.server.errors import ApiError, invalid_json

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
            raise _wrong_at(*_place_of(body, str(error)), _NOT_JSON) from None
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


def _place_of(body: bytes, message: str) -> tuple[str, int]:
    """The body's text, and the place in it at which msgspec stopped."""
    found = re.search(r"\(byte (\d+)\)", message)
    end = len(body) if found is None else int(found[1])
    return body.decode(errors="replace"), len(body[:end].decode(errors="replace"))


def _wrong_at(text: str, place: int, wanted: str) -> ApiError:
    if not text.strip():
        return invalid_json("is empty")
    found = text[place : place + MAX_SHOWN_CHARS]
    return _wrong(text, place, repr(found) if found else "the end of the body", wanted)


def _wrong(text: str, place: int, found: str, wanted: str) -> ApiError:
    line = text.count("\n", 0, place) + 1
    column = place - text.rfind("\n", 0, place)
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
