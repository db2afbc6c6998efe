"""A request's bytes become a JSON object, within bounds.

Owns the bounds on size and depth. Invariant: what comes back is a dict whose nesting is at most
`MAX_DEPTH`; numbers may still be NaN or of any size, so that the field they stand in can be named.
"""

import json
from typing import Any, cast

import msgspec

from cadenza.server.errors import invalid_json

MAX_DEPTH = 64
MAX_LENIENT_BYTES = 1 << 16
"""Up to this size a body that is no strict JSON gets a second reading that knows NaN."""

_OPENERS = (b"[", b"{")


def read_json(body: bytes) -> dict[str, Any]:
    """Raises ApiError (400)."""
    try:
        value = _decode(body)
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(value, dict):
        raise invalid_json("is no JSON object")
    if sum(map(body.count, _OPENERS)) > MAX_DEPTH:
        _check_depth(cast(object, value))
    return cast(dict[str, Any], value)


def _decode(body: bytes) -> object:
    try:
        return msgspec.json.decode(body)
    except (ValueError, UnicodeDecodeError):
        if len(body) > MAX_LENIENT_BYTES:
            raise invalid_json("is not valid JSON") from None
    try:
        return json.loads(body.decode("utf-8"))
    except ValueError:
        raise invalid_json("is not valid JSON") from None


def _check_depth(value: object) -> None:
    """Walks level by level; lists without lists in them cost one pass."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[object] = []
        for item in level:
            members = cast(list[object], list(item.values()) if isinstance(item, dict) else item)
            deeper += [member for member in members if isinstance(member, dict | list)]
        if not deeper:
            return
        level = deeper
    raise _too_deep()


def _too_deep() -> Exception:
    return invalid_json(f"is nested over {MAX_DEPTH} deep")
