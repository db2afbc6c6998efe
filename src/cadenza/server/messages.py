"""A conversation as clients send it, checked and made plain for a chat template.

Owns roles, members and content parts. Knows no template. Invariant: what comes out holds a role and
a text in each message and nothing that the text-only engine would drop in silence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from cadenza.request import show
from cadenza.server.errors import invalid_value, not_built
from cadenza.server.kinds import (
    NULL,
    AnyJson,
    Kind,
    Schema,
    Text,
    Unbuilt,
    check_member,
    is_whole_unicode,
    or_null,
    refuse,
)

MAX_MESSAGES = 4096
MAX_NAME_CHARS = 128

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""What a template is told; `developer` is the newer name of `system`."""

_MEMBERS = ("role", "content", "name", "reasoning_content", "reasoning")
"""What a template may be told; `reasoning` is the newer name of `reasoning_content`."""

_LABEL = Text(max_chars=256)
_ANNOTATION = AnyJson(max_chars=16 << 10)

OTHER_MEMBERS: Mapping[str, Kind] = {
    "tools": Unbuilt("calling tools", ([],)),
    "tool_calls": Unbuilt("calling tools", ([],)),
    "tool_call_id": Unbuilt("calling tools"),
    "function_call": Unbuilt("calling functions"),
    "audio": Unbuilt("audio"),
    "refusal": Unbuilt("a refusal as a message", ("",)),
    "id": _LABEL,
    "annotations": _ANNOTATION,
    "cache_control": _ANNOTATION,
    "metadata": _ANNOTATION,
    "provider_specific_fields": _ANNOTATION,
}
"""What else clients send with a message: accepted as far as it changes nothing."""

OTHER_PART_MEMBERS: Mapping[str, Kind] = {
    "id": _LABEL,
    "annotations": _ANNOTATION,
    "cache_control": _ANNOTATION,
    "prompt_cache_breakpoint": _ANNOTATION,
}

_NOT_BUILT_ROLES = ("tool", "function")
_NOT_BUILT_PARTS = (
    "image_url",
    "image_embeds",
    "input_audio",
    "audio_url",
    "audio_embeds",
    "video_url",
    "file",
    "refusal",
    "thinking",
)


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
            "properties": {
                "type": {"type": "string", "enum": ["text"]},
                "text": text,
                **_schemas(OTHER_PART_MEMBERS),
            },
            "required": ["type", "text"],
            "additionalProperties": NULL,
        }
        message: Schema = {
            "type": "object",
            "properties": {
                "role": {"type": "string", "enum": list(ROLES)},
                "content": {"anyOf": [text, {"type": "array", "items": part}]},
                "name": or_null({**text, "maxLength": MAX_NAME_CHARS}),
                "reasoning_content": or_null(text),
                "reasoning": or_null(text),
                **_schemas(OTHER_MEMBERS),
            },
            "required": ["role", "content"],
            "additionalProperties": NULL,
        }
        return {"type": "array", "items": message, "minItems": 1, "maxItems": MAX_MESSAGES}


def _schemas(members: Mapping[str, Kind]) -> Schema:
    return {key: or_null(kind.schema()) for key, kind in members.items()}


def _message(name: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise invalid_value(f"{name} holds {show(value)}; a message is an object", name)
    message = _without_nulls(cast(dict[str, Any], value))
    role = _role(name, message.get("role"))
    for key, item in message.items():
        if key in OTHER_MEMBERS:
            check_member(name, key, OTHER_MEMBERS[key], item)
        elif key not in _MEMBERS:
            known = ", ".join(_MEMBERS)
            raise invalid_value(f"{name} has a member {show(key)}; a message has {known}", name)
    plain = {"role": role, "content": _content(name, message)}
    if "name" in message:
        plain["name"] = _text(name, "name", message["name"], MAX_NAME_CHARS)
    reasoning = _reasoning(name, message)
    return plain if reasoning is None else {**plain, "reasoning_content": reasoning}


def _without_nulls(members: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in members.items() if item is not None}


def _reasoning(name: str, message: dict[str, Any]) -> str | None:
    found = [
        _text(name, key, message[key])
        for key in ("reasoning_content", "reasoning")
        if key in message
    ]
    if len(set(found)) > 1:
        raise invalid_value(
            f"{name} has a message whose reasoning and reasoning_content differ; give one of them",
            name,
        )
    return found[0] if found else None


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
    members = _without_nulls(cast(dict[str, Any], part))
    kind = members.get("type")
    if kind in _NOT_BUILT_PARTS:
        raise not_built(name, f"the content part {kind}")
    if kind != "text" or set(members) - OTHER_PART_MEMBERS.keys() != {"type", "text"}:
        raise invalid_value(
            f'{name} has a content part {show(members)}; a part is {{"type": "text", "text": …}}',
            name,
        )
    for key in members.keys() & OTHER_PART_MEMBERS.keys():
        check_member(name, key, OTHER_PART_MEMBERS[key], members[key])
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
