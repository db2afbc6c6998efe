"""A conversation as clients send it, checked and made plain for a chat template.

Owns roles, members and content parts. Knows no template. Invariant: what comes out holds a role and
a text in each message and nothing that the text-only engine would drop in silence.
"""

from dataclasses import dataclass
from typing import Any, cast

from cadenza.request import show
from cadenza.server.errors import invalid_value, not_built
from cadenza.server.kinds import Schema, is_whole_unicode, refuse

MAX_MESSAGES = 4096
MAX_NAME_CHARS = 128

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""What a template is told; `developer` is the newer name of `system`."""

_MEMBERS = ("role", "content", "name", "reasoning_content", "refusal")
_NOT_BUILT_MEMBERS = ("tool_calls", "tool_call_id", "function_call", "audio")
_NOT_BUILT_ROLES = ("tool", "function")


@dataclass(frozen=True, slots=True)
class Messages:
    """The kind of the field `messages`."""

    def check(self, name: str, value: object) -> tuple[dict[str, str], ...]:
        if not isinstance(value, list):
            raise refuse(name, value, "a list of messages")
        items = cast(list[object], value)
        if not 1 <= len(items) <= MAX_MESSAGES:
            raise invalid_value(
                f"{name} has {len(items)} entries; from 1 to {MAX_MESSAGES} are allowed", name
            )
        return tuple(_message(name, item) for item in items)

    def schema(self) -> Schema:
        text = {"type": "string"}
        part: Schema = {
            "type": "object",
            "properties": {"type": {"type": "string", "enum": ["text"]}, "text": text},
            "required": ["type", "text"],
            "additionalProperties": False,
        }
        optional: Schema = {"anyOf": [text, {"type": "null"}]}
        message: Schema = {
            "type": "object",
            "properties": {
                "role": {"type": "string", "enum": list(ROLES)},
                "content": {"anyOf": [text, {"type": "array", "items": part}]},
                "name": {"anyOf": [{**text, "maxLength": MAX_NAME_CHARS}, {"type": "null"}]},
                "reasoning_content": optional,
                "refusal": {"type": "null"},
            },
            "required": ["role", "content"],
            "additionalProperties": False,
        }
        return {"type": "array", "items": message, "minItems": 1, "maxItems": MAX_MESSAGES}


def _message(name: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise invalid_value(f"{name} holds {show(value)}; a message is an object", name)
    message = {key: item for key, item in cast(dict[str, Any], value).items() if item is not None}
    for key in message:
        if key in _NOT_BUILT_MEMBERS:
            raise not_built(name, f"the member {key}")
        if key not in _MEMBERS:
            known = ", ".join(_MEMBERS)
            raise invalid_value(f"{name} has a member {show(key)}; a message has {known}", name)
    if message.get("refusal"):
        raise not_built(name, "the member refusal")
    plain = {"role": _role(name, message.get("role")), "content": _content(name, message)}
    if "name" in message:
        plain["name"] = _text(name, "name", message["name"], MAX_NAME_CHARS)
    if "reasoning_content" in message:
        plain["reasoning_content"] = _text(name, "reasoning_content", message["reasoning_content"])
    return plain


def _role(name: str, role: object) -> str:
    if role in _NOT_BUILT_ROLES:
        raise not_built(name, f"the role {role}")
    if isinstance(role, str) and role in ROLES:
        return ROLES[role]
    known = ", ".join(ROLES)
    raise invalid_value(f"{name} has a message with the role {show(role)}; there are {known}", name)


def _content(name: str, message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(_part(name, part) for part in cast(list[object], content))
    return _text(name, "content", content)


def _part(name: str, part: object) -> str:
    if not isinstance(part, dict):
        raise invalid_value(f"{name} has a content part {show(part)}; a part is an object", name)
    members = cast(dict[str, Any], part)
    kind = members.get("type")
    if kind in ("image_url", "input_audio", "file", "video_url", "refusal"):
        raise not_built(name, f"the content part {kind}")
    if kind != "text" or set(members) != {"type", "text"}:
        raise invalid_value(
            f'{name} has a content part {show(members)}; a part is {{"type": "text", "text": …}}',
            name,
        )
    return _text(name, "text", members["text"])


def _text(name: str, member: str, value: object, max_chars: int | None = None) -> str:
    if not isinstance(value, str):
        raise invalid_value(f"{name} has a message with {member} {show(value)}; give a text", name)
    if max_chars is not None and len(value) > max_chars:
        raise invalid_value(f"{name} has a {member} of over {max_chars} characters", name)
    if not is_whole_unicode(value):
        raise invalid_value(
            f"{name} has a {member} with half a surrogate pair; send whole characters", name
        )
    return value
