"""Messages of chats, checked and converted for a chat template. Invariant: a checked message holds
a role and text or images, and nothing that the engine would ignore silently."""

import json
from dataclasses import dataclass
from typing import Any, cast

from cadenza.request import show
from cadenza.server.errors import invalid_value, not_built
from cadenza.server.fields.body import (
    Body,
    DeclaredObject,
    Field,
    label,
    labels,
    optional,
    required,
    unsupported,
)
from cadenza.server.fields.images import (
    IMAGE_PARTS,
    Content,
    Part,
    content_of,
    image_of_part,
    is_image_part,
)
from cadenza.server.fields.types import (
    NULL,
    AnyJson,
    Boolean,
    OneOf,
    Schema,
    anything,
    array_schema,
    check_member,
    checked_dict,
    checked_list,
    field_type,
    is_whole_unicode,
    members_of,
    object_schema,
    refuse,
)

MAX_MESSAGES = 4096

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""As templates get them; `developer` is the newer name of `system`, `tool` that of `function`."""

_NOT_BUILT_PARTS = ("image_embeds", "input_audio", "audio_url", "audio_embeds", "video_url", "file")
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
"""The types of parts that are a text, in chats and in Responses, and the members that have it."""
_REASONING = ("thinking", "reasoning")
"""The types of parts that are reasoning, under a member of that name."""
_LEFT_OUT = ("redacted_thinking", "tool_use", "tool_call", *_REASONING)
"""Parts that are not content, or that only the server that made them can read."""


@field_type(OneOf(tuple(ROLES)).schema())
def _role(name: str, value: object) -> str:
    if isinstance(value, str) and value in ROLES:
        return ROLES[value]
    known = ", ".join(ROLES)
    raise invalid_value(
        f"{name} has a message with the role {show(value)}; there are {known}", name
    )


@dataclass(frozen=True, slots=True)
class _MemberText:
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
    more = labels("id annotations cache_control prompt_cache_breakpoint")


def _content_schema() -> Schema:
    return {"anyOf": [{"type": "string"}, array_schema(TextPart.object_schema())]}


def _seen_schema() -> Schema:
    declared = (TextPart, *IMAGE_PARTS.values())
    parts = array_schema({"anyOf": [part.object_schema() for part in declared]})
    return {"anyOf": [{"type": "string"}, parts]}


@field_type(_content_schema)
def _content(name: str, value: object) -> str:
    if isinstance(value, list):
        found = content_of(_parts(name, name, cast(list[object], value)))
        if not isinstance(found, str):
            raise not_built(name, "an image here")
        return found
    return _MemberText("content").check(name, value)


@field_type(_seen_schema)
def _message_content(name: str, value: object) -> Content:
    """What a message has. `name` ends in the message's place, for its images' own."""
    if isinstance(value, list):
        field = name.partition("[")[0]
        return content_of(_parts(field, f"{name}.content", cast(list[object], value)))
    return _MemberText("content").check(name.partition("[")[0], value)


def _parts(name: str, where: str, items: list[object]) -> list[Part]:
    found = [_part(name, f"{where}[{index}]", part) for index, part in enumerate(items)]
    return [part for part in found if part is not None]


def _prediction_schema() -> Schema:
    members = {"type": OneOf(("content",)).schema(), "content": _content_schema()}
    return object_schema(members, additionalProperties=False)


@field_type(_prediction_schema)
def predicted_content(name: str, value: object) -> str:
    given = members_of(value)
    if given.keys() != {"type", "content"} or given["type"] != "content":
        raise refuse(name, value, 'an object {"type": "content", "content": …}')
    return _content.check(name, given["content"])


_FUNCTION = object_schema({"name": {"type": "string"}, "arguments": {"type": "string"}})
_CALL: dict[str, Schema] = {
    "id": {"type": "string"},
    "type": {"enum": ["function"]},
    "function": _FUNCTION,
}


@field_type(array_schema(object_schema(_CALL, ("function",))))
def _tool_calls(name: str, value: object) -> list[dict[str, Any]]:
    """Calls of functions, whose arguments become objects, which templates know, where they can."""
    if not isinstance(value, list):
        raise invalid_value(f"{name} has tool_calls that are no list", name)
    items = cast(list[object], value)
    if len(items) > MAX_MESSAGES:
        raise invalid_value(f"{name} has {len(items)} tool_calls in a message", name)
    return [_tool_call(name, item) for item in items]


def _tool_call(name: str, item: object) -> dict[str, Any]:
    """As templates know it, and as a model once wrote it: a missing name is empty, arguments that
    are no JSON object stay text."""
    if not isinstance(item, dict):
        raise invalid_value(f"{name} has a tool call {show(item)}; a call is an object", name)
    call = cast(dict[str, Any], item)
    function = members_of(call.get("function")) or members_of(call.get("custom")) or call
    called = function.get("name")
    arguments = cast(object, function.get("arguments", function.get("input")))
    if "custom" in call and isinstance(arguments, str):
        arguments = {"input": arguments}
    described: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": called if isinstance(called, str) else "",
            "arguments": read_arguments(arguments),
        },
    }
    given = call.get("id")
    return {"id": given, **described} if isinstance(given, str) else described


def read_arguments(given: object) -> dict[str, Any] | str:
    """As an object; the given text if they are none; empty without any."""
    value = given
    if isinstance(given, str):
        try:
            value = cast(object, json.loads(given or "null"))
        except (ValueError, RecursionError):
            return given
    if value is None:
        return {}
    if isinstance(value, dict):
        return cast(dict[str, Any], value)
    return given if isinstance(given, str) else json.dumps(given)


class ChatMessage(DeclaredObject):
    """One message; members that have no effect are accepted."""

    is_open = True
    role = required(_role)
    content = optional(_message_content, "Needed but beside tool_calls.")
    name = optional(_MemberText("name", max_chars=128))
    reasoning_content = optional(_MemberText("reasoning_content"))
    reasoning = optional(_MemberText("reasoning"), "The newer name of `reasoning_content`.")
    tools = label(anything)
    tool_calls = optional(_tool_calls, "The calls that an assistant's message made.")
    tool_call_id = optional(_MemberText("tool_call_id", max_chars=256))
    function_call = optional(anything, "The older form of one of them.")
    audio = unsupported("audio")
    refusal = optional(_MemberText("refusal"), "The text of a message without content.")
    more = labels("id annotations cache_control metadata provider_specific_fields")


@field_type(lambda: array_schema(ChatMessage.object_schema(), 1, MAX_MESSAGES))
def chat_messages(name: str, value: object) -> tuple[dict[str, Any], ...]:
    items = checked_list(name, value, "a list of messages", (1, MAX_MESSAGES))
    return tuple([_message(name, index, item) for index, item in enumerate(items)])


MAX_VARIABLES = 64
_OWN_FIELDS = ("add_generation_prompt", "continue_final_message", "documents", "messages", "tools")

_VARIABLES = AnyJson(max_chars=64 << 10)


@field_type({"type": "object", "properties": dict.fromkeys(_OWN_FIELDS, NULL)})
def _template_variables(name: str, value: object) -> dict[str, object]:
    """`chat_template_kwargs`: those that the template does not read have no effect."""
    given = checked_dict(name, value, "an object of the chat template's variables")
    variables = _without_nulls(given)
    for key in _OWN_FIELDS:
        if key in variables:
            raise invalid_value(f"{name}.{key} is a field of the request; send it there", name)
    if len(variables) > MAX_VARIABLES:
        raise invalid_value(
            f"{name} has {len(variables)} variables; at most {MAX_VARIABLES} are allowed", name
        )
    _VARIABLES.check(name, variables)
    return variables


def template_variables() -> Field[dict[str, object]]:
    help = "Variables of the model's chat template, such as enable_thinking; others are ignored."
    return optional(_template_variables, help, default=dict[str, object]())


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
        return {"add_generation_prompt": is_begun, "continue_final_message": is_continued}


def _message(name: str, index: int, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid_value(f"{name} holds {show(value)}; a message is an object", name)
    message = _without_nulls(cast(dict[str, Any], value))
    fields = ChatMessage.fields
    role = fields["role"].type.check(name, message.get("role"))
    for key, item in message.items():
        if key not in fields:
            ChatMessage.take_unknown(name, key)
        elif key not in ChatMessage.effective_names:
            check_member(name, key, fields[key].type, item)
    content, parts = message.get("content"), _parts_of(message)
    calls = fields["tool_calls"].type.check(name, _given_calls(message, parts))
    if content is None and (calls or role in ("assistant", "tool")):
        content = message.get("refusal", "")
    checked = fields["content"].type.check(f"{name}[{index}]", content)
    plain: dict[str, Any] = {"role": role, "content": checked}
    if calls:
        plain["tool_calls"] = calls
    for key in ("name", "tool_call_id"):
        if key in message:
            plain[key] = fields[key].type.check(name, message[key])
    reasoning = _reasoning(message, parts)
    if reasoning is not None:
        plain["reasoning_content"] = fields["reasoning"].type.check(name, reasoning)
    return plain


def _parts_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    items = cast(list[object], content) if isinstance(content, list) else []
    return [members_of(item) for item in items]


def _given_calls(message: dict[str, Any], parts: list[dict[str, Any]]) -> object:
    """Under any of their names; content parts repeat `tool_calls` in some libraries, and stand
    alone in others."""
    if message.get("tool_calls"):
        return message["tool_calls"]
    if "function_call" in message:
        return [message["function_call"]]
    return [part for part in parts if part.get("type") in ("tool_use", "tool_call")]


def _reasoning(message: dict[str, Any], parts: list[dict[str, Any]]) -> str | None:
    """The reasoning, under the older one of its names if there are two, or of content parts."""
    given = [message.get("reasoning_content"), message.get("reasoning")]
    given += [part.get(kind) for part in parts if (kind := part.get("type")) in _REASONING]
    return next((text for text in given if isinstance(text, str)), None)


def _part(name: str, where: str, part: object) -> Part | None:
    """The text or the image of a part; None of one that is left out."""
    if isinstance(part, str):
        return _MemberText("content").check(name, part)
    if not isinstance(part, dict):
        raise invalid_value(f"{name} has a content part {show(part)}; a part is an object", name)
    members = _without_nulls(cast(dict[str, Any], part))
    if is_image_part(members):
        return members["image"]
    kind = members.get("type")
    if kind in IMAGE_PARTS:
        return image_of_part(name, where, members)
    if kind in _NOT_BUILT_PARTS:
        raise not_built(name, f"the content part {kind}")
    if kind in _LEFT_OUT:
        return None
    if kind not in _TEXT_PARTS:
        raise invalid_value(
            f'{name} has a content part {show(members)}; a part is {{"type": "text", "text": …}}',
            name,
        )
    for key in members.keys() - TextPart.fields.keys():
        TextPart.take_unknown(name, key)
    member = _TEXT_PARTS[kind]
    return _MemberText(member).check(name, members.get(member, ""))


def _without_nulls(members: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in members.items() if item is not None}
