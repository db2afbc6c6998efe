"""Conversations as clients send them, checked and converted for a chat template.

Owns roles, members and content parts. Knows no template. Invariant: a checked message holds a role
and a text, and nothing that the text-only engine would ignore silently.
"""

import json
from dataclasses import dataclass
from typing import Any, cast

from cadenza.request import show
from cadenza.server.errors import invalid_value, not_built
from cadenza.server.schemas.body import (
    Body,
    DeclaredObject,
    Field,
    label,
    optional,
    required,
    unsupported,
)
from cadenza.server.schemas.field_types import (
    NULL,
    AnyJson,
    Boolean,
    OneOf,
    Schema,
    String,
    check_member,
    is_whole_unicode,
    members_of,
    refuse,
)

MAX_MESSAGES = 4096

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""The roles that a template gets; `developer` is the newer name of `system`."""

_LABEL = String(max_chars=256)
_ANNOTATION = AnyJson(max_chars=16 << 10)

_NOT_BUILT_ROLES = ("function",)
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
class _Role:
    """A role, as templates name it."""

    def check(self, name: str, value: object) -> str:
        if value in _NOT_BUILT_ROLES:
            raise not_built(name, f"the role {value}")
        if isinstance(value, str) and value in ROLES:
            return ROLES[value]
        known = ", ".join(ROLES)
        raise invalid_value(
            f"{name} has a message with the role {show(value)}; there are {known}", name
        )

    def schema(self) -> Schema:
        return OneOf(tuple(ROLES)).schema()


@dataclass(frozen=True, slots=True)
class _MemberText:
    """A text that a template gets."""

    member: str
    max_chars: int | None = None

    def check(self, name: str, value: object) -> str:
        if not isinstance(value, str):
            raise invalid_value(
                f"{name} has a message with {self.member} {show(value)}; give a text", name
            )
        if self.max_chars is not None and len(value) > self.max_chars:
            raise invalid_value(
                f"{name} has a {self.member} of over {self.max_chars} characters", name
            )
        if not is_whole_unicode(value):
            raise invalid_value(
                f"{name} has a {self.member} with half a surrogate pair; send whole characters",
                name,
            )
        return value

    def schema(self) -> Schema:
        longest = {} if self.max_chars is None else {"maxLength": self.max_chars}
        return {"type": "string", **longest}


class TextPart(DeclaredObject):
    """A content part of a message."""

    is_open = True
    type = required(OneOf(("text",)))
    text = required(_MemberText("text"))
    id = label(_LABEL)
    annotations = label(_ANNOTATION)
    cache_control = label(_ANNOTATION)
    prompt_cache_breakpoint = label(_ANNOTATION)


@dataclass(frozen=True, slots=True)
class _Content:
    """A text, or text parts, which become lines of one text."""

    def check(self, name: str, value: object) -> str:
        if isinstance(value, list):
            return "\n".join(_part(name, part) for part in cast(list[object], value))
        return _MemberText("content").check(name, value)

    def schema(self) -> Schema:
        parts = {"type": "array", "items": TextPart.object_schema()}
        return {"anyOf": [{"type": "string"}, parts]}


@dataclass(frozen=True, slots=True)
class PredictedContent:
    """`prediction`: the text that much of the answer is expected to repeat."""

    def check(self, name: str, value: object) -> str:
        given = cast(dict[str, object], value) if isinstance(value, dict) else {}
        if given.keys() != {"type", "content"} or given["type"] != "content":
            wanted = 'an object {"type": "content", "content": …}'
            raise refuse(name, cast(object, value), wanted)
        return _Content().check(name, given["content"])

    def schema(self) -> Schema:
        kind = OneOf(("content",)).schema()
        return {
            "type": "object",
            "properties": {"type": kind, "content": _Content().schema()},
            "required": ["type", "content"],
            "additionalProperties": False,
        }


@dataclass(frozen=True, slots=True)
class _ToolCalls:
    """Calls of functions, whose arguments become objects, which templates know."""

    def check(self, name: str, value: object) -> list[dict[str, Any]]:
        if not isinstance(value, list):
            raise invalid_value(f"{name} has tool_calls that are no list", name)
        items = cast(list[object], value)
        if len(items) > MAX_MESSAGES:
            raise invalid_value(f"{name} has {len(items)} tool_calls in a message", name)
        return [_tool_call(name, item) for item in items]

    def schema(self) -> Schema:
        text: Schema = {"type": "string"}
        function: Schema = {
            "type": "object",
            "properties": {"name": text, "arguments": text},
            "required": ["name", "arguments"],
        }
        call: Schema = {
            "type": "object",
            "properties": {"id": text, "type": {"enum": ["function"]}, "function": function},
            "required": ["function"],
        }
        return {"type": "array", "items": call}


def _tool_call(name: str, item: object) -> dict[str, Any]:
    call = members_of(item)
    function = members_of(call.get("function"))
    called, arguments = function.get("name"), cast(object, function.get("arguments"))
    if isinstance(arguments, str):
        try:
            arguments = cast(object, json.loads(arguments or "{}"))
        except (ValueError, RecursionError):
            arguments = None
    is_object = isinstance(cast(object, arguments), dict)
    if not isinstance(called, str) or not called or not is_object:
        raise invalid_value(
            f"{name} has a tool call {show(item)}; it needs a function with a name, and arguments "
            f"that are a JSON object, as text",
            name,
        )
    described: dict[str, Any] = {
        "type": "function",
        "function": {"name": called, "arguments": arguments},
    }
    given = call.get("id")
    return {"id": given, **described} if isinstance(given, str) else described


class ChatMessage(DeclaredObject):
    """One message; members that have no effect are accepted."""

    is_open = True
    role = required(_Role())
    content = optional(_Content(), "Needed but beside tool_calls.")
    name = optional(_MemberText("name", max_chars=128))
    reasoning_content = optional(_MemberText("reasoning_content"))
    reasoning = optional(_MemberText("reasoning"))
    """The newer name of `reasoning_content`."""
    tools = unsupported("calling tools", [])
    tool_calls = optional(_ToolCalls(), "The calls that an assistant's message made.")
    tool_call_id = optional(_MemberText("tool_call_id", max_chars=256))
    function_call = unsupported("calling functions")
    audio = unsupported("audio")
    refusal = unsupported("a refusal as a message", "")
    id = label(_LABEL)
    annotations = label(_ANNOTATION)
    cache_control = label(_ANNOTATION)
    metadata = label(_ANNOTATION)
    provider_specific_fields = label(_ANNOTATION)


@dataclass(frozen=True, slots=True)
class Messages:
    """The type of the field `messages`."""

    def check(self, name: str, value: object) -> tuple[dict[str, Any], ...]:
        if not isinstance(value, list):
            raise refuse(name, value, "a list of messages")
        items = cast(list[object], value)
        if not 1 <= len(items) <= MAX_MESSAGES:
            raise invalid_value(
                f"{name} has {len(items)} entries; from 1 to {MAX_MESSAGES} are allowed", name
            )
        return tuple([_message(name, item) for item in items])

    def schema(self) -> Schema:
        return {
            "type": "array",
            "items": ChatMessage.object_schema(),
            "minItems": 1,
            "maxItems": MAX_MESSAGES,
        }


MAX_VARIABLES = 64
_OWN_FIELDS = ("add_generation_prompt", "continue_final_message", "documents", "messages", "tools")


@dataclass(frozen=True, slots=True)
class TemplateVariables:
    """`chat_template_kwargs`: further variables of the chat template.

    Which of them the template reads is not known here: the others have no effect.
    """

    def check(self, name: str, value: object) -> dict[str, object]:
        if not isinstance(value, dict):
            raise refuse(name, value, "an object of the chat template's variables")
        given = cast(dict[str, object], value)
        variables = {key: item for key, item in given.items() if item is not None}
        for key in _OWN_FIELDS:
            if key in variables:
                raise invalid_value(f"{name}.{key} is a field of the request; send it there", name)
        if len(variables) > MAX_VARIABLES:
            raise invalid_value(
                f"{name} has {len(variables)} variables; at most {MAX_VARIABLES} are allowed", name
            )
        return cast(dict[str, object], _VARIABLES.check(name, variables))

    def schema(self) -> Schema:
        return {"type": "object", "properties": dict.fromkeys(_OWN_FIELDS, NULL)}


_VARIABLES = AnyJson(max_chars=64 << 10)


def template_variables() -> Field[dict[str, object]]:
    """The field that has them."""
    help = "Variables of the model's chat template, such as enable_thinking; others are ignored."
    return optional(TemplateVariables(), help, default=dict[str, object]())


class ConversationBody(Body):
    """How a conversation is rendered."""

    chat_template_kwargs = template_variables()
    add_generation_prompt = optional(
        Boolean(),
        "End the prompt where the assistant begins (default true, but for a continued message).",
    )
    continue_final_message = optional(
        Boolean(),
        "End the prompt within the last message, which the answer continues.",
        default=False,
    )

    def template_kwargs(self) -> dict[str, bool]:
        """How a chat template ends the prompt. Raises ApiError (400)."""
        is_continued, is_begun = self.continue_final_message, self.add_generation_prompt
        if is_begun is None:
            is_begun = not is_continued
        if is_continued and is_begun:
            raise invalid_value(
                "continue_final_message and add_generation_prompt are both true; the prompt ends "
                "either within the last message or after the beginning of a new one: set one of "
                "them",
                "continue_final_message",
            )
        return {
            "add_generation_prompt": is_begun,
            "continue_final_message": is_continued,
        }


def _message(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid_value(f"{name} holds {show(value)}; a message is an object", name)
    message = _without_nulls(cast(dict[str, Any], value))
    fields = ChatMessage.fields
    role = fields["role"].type.check(name, message.get("role"))
    told = ChatMessage.effective_names
    for key, item in message.items():
        if key not in fields:
            ChatMessage.take_unknown(name, key)
        elif key not in told:
            check_member(name, key, ChatMessage.fields[key].type, item)
    calls = fields["tool_calls"].type.check(name, message.get("tool_calls", []))
    content = message.get("content", "" if calls else None)
    plain: dict[str, Any] = {"role": role, "content": fields["content"].type.check(name, content)}
    if calls:
        plain["tool_calls"] = calls
    for key in ("name", "reasoning_content", "reasoning", "tool_call_id"):
        if key in message:
            plain[key] = ChatMessage.fields[key].type.check(name, message[key])
    return _with_one_reasoning(name, plain) if "reasoning" in plain else plain


def _with_one_reasoning(name: str, message: dict[str, Any]) -> dict[str, Any]:
    """`reasoning` under its older name, which templates know."""
    reasoning = message.pop("reasoning")
    if message.setdefault("reasoning_content", reasoning) != reasoning:
        raise invalid_value(
            f"{name} has a message whose reasoning and reasoning_content differ; give one of them",
            name,
        )
    return message


def _part(name: str, part: object) -> str:
    if not isinstance(part, dict):
        raise invalid_value(f"{name} has a content part {show(part)}; a part is an object", name)
    members = _without_nulls(cast(dict[str, Any], part))
    kind = members.get("type")
    if kind in _NOT_BUILT_PARTS:
        raise not_built(name, f"the content part {kind}")
    told = set(TextPart.effective_names)
    if kind != "text" or told - members.keys():
        raise invalid_value(
            f'{name} has a content part {show(members)}; a part is {{"type": "text", "text": …}}',
            name,
        )
    for key in members.keys() - told:
        if key in TextPart.fields:
            check_member(name, key, TextPart.fields[key].type, members[key])
        else:
            TextPart.take_unknown(name, key)
    return TextPart.text.type.check(name, members["text"])


def _without_nulls(members: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in members.items() if item is not None}
