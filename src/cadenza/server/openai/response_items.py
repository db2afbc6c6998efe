"""Fields of /v1/responses: input items, and objects of text and reasoning. Invariant: a checked
item can be returned by the API; of reasoning with summary and text, `messages_of` takes the
text."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from cadenza.media.image_input import ImageInput
from cadenza.request import show
from cadenza.server.calls.conversation import (
    PART_TEXT,
    ConversationBuilder,
    Message,
    SeenParts,
    TextParts,
)
from cadenza.server.errors import invalid_value, not_built
from cadenza.server.fields.body import (
    DeclaredObject,
    ObjectOf,
    label,
    labels,
    optional,
    required,
    unknown_members,
    unsupported,
)
from cadenza.server.fields.images import IMAGE_PARTS, Content, InputImage, content_of, image_of_part
from cadenza.server.fields.messages import MAX_MESSAGES
from cadenza.server.fields.structured import schema_format, structured_of
from cadenza.server.fields.thinking import BUDGET, EFFORT, EFFORT_HELP, VERBOSITY, VERBOSITY_HELP
from cadenza.server.fields.tools import (
    NAMESPACE,
    ResponseTool,
    arguments_of_input,
    checked_tools,
    choice_type,
    flat_custom_schema,
    flat_name,
    flat_schema,
    flat_tool,
    nested_schema,
)
from cadenza.server.fields.types import (
    Boolean,
    OneOf,
    Schema,
    String,
    anything,
    array_schema,
    checked_dict,
    field_type,
    members_of,
    object_schema,
    refuse,
)
from cadenza.structured import StructuredOutput

REFERENCE = "item_reference"
"""The type of an item that stands for one of a stored response, by its id."""

HOSTED_ITEMS = (
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
)
"""Calls of tools that another server ran: the model's own text tells of their results."""

HOSTED = ("local_shell", "web_search", "web_search_preview", "image_generation")
"""Tools that only OpenAI's servers run; they are left out."""

_ID = String(min_chars=1, max_chars=256)
_NAME = String(min_chars=1, max_chars=128)
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


class _Data(DeclaredObject):
    is_open = True


class _Part(_Data):
    type = required(OneOf(_TEXT_PARTS))
    text = optional(PART_TEXT)
    refusal = optional(PART_TEXT)
    more = labels("annotations logprobs prompt_cache_breakpoint")


def _image_part(name: str, where: str, part: dict[str, Any]) -> dict[str, Any]:
    """As the API has it: items are kept and returned."""
    image = image_of_part(name, where, part)
    return {"type": _IMAGE, "image_url": image.url, "detail": part.get("detail") or "auto"}


_IMAGE = "input_image"
_TEXTS = TextParts(_TEXT_PARTS, _Part)
_SEEN = SeenParts(_TEXTS, _IMAGE, InputImage, _image_part)


class _Message(_Data):
    type = optional(OneOf(("message",)))
    role = required(OneOf(("user", "assistant", "system", "developer")))
    content = optional(_SEEN, default=())
    id = optional(_ID)
    more = labels("status phase end_turn")


@field_type({})
def _argument_text(name: str, value: object) -> str:
    """A call's arguments: JSON as text, or the value that a client decoded it into."""
    return PART_TEXT.check(name, value if isinstance(value, str) else json.dumps(value))


class _FunctionCall(_Data):
    type = required(OneOf(("function_call",)))
    call_id = required(_ID)
    name = required(_NAME)
    arguments = optional(_argument_text, default="")
    id = optional(_ID)
    status = label(anything)
    caller = label(anything)
    namespace = optional(String(max_chars=128), "That of the function.")


class _CustomCall(_Data):
    type = required(OneOf(("custom_tool_call",)))
    call_id = required(_ID)
    name = required(_NAME)
    input = optional(PART_TEXT, default="")
    id = optional(_ID)
    status = label(anything)
    namespace = optional(String(max_chars=128))


class _CustomResult(_Data):
    type = required(OneOf(("custom_tool_call_output",)))
    call_id = required(_ID)
    output = optional(_SEEN, default=())
    id = optional(_ID)
    more = labels("status")


class _FunctionResult(_CustomResult):
    type = required(OneOf(("function_call_output",)))
    more = labels("caller")


class _Reasoning(_Data):
    type = required(OneOf(("reasoning",)))
    summary = optional(_TEXTS)
    content = optional(_TEXTS)
    encrypted_content = label(anything)
    id = optional(_ID)
    more = labels("status")


class _Reference(_Data):
    type = optional(OneOf((REFERENCE,)))
    id = required(_ID)


ITEMS: Mapping[str, type[DeclaredObject]] = {
    REFERENCE: _Reference,
    "message": _Message,
    "function_call": _FunctionCall,
    "function_call_output": _FunctionResult,
    "custom_tool_call": _CustomCall,
    "custom_tool_call_output": _CustomResult,
    "reasoning": _Reasoning,
}


def _items_schema() -> Schema:
    hosted = object_schema({"type": {"enum": [*HOSTED_ITEMS]}})
    kinds = [*(kind.object_schema() for kind in ITEMS.values()), hosted]
    return {"anyOf": [PART_TEXT.schema(), array_schema({"anyOf": kinds}, high=MAX_MESSAGES)]}


@field_type(_items_schema)
def input_items(name: str, value: object) -> tuple[dict[str, Any], ...]:
    """A text, which is a user's message, or a list of items; checked into items."""
    if isinstance(value, str):
        text = PART_TEXT.check(name, value)
        return (_message_item(name, {"role": "user", "content": (text,)}),)
    if not isinstance(value, list):
        raise refuse(name, value, "a text, or a list of items")
    items = cast(list[object], value)
    if len(items) > MAX_MESSAGES:
        raise invalid_value(
            f"{name} has {len(items)} items; at most {MAX_MESSAGES} are allowed", name
        )
    return tuple(
        [
            _item(f"{name}[{index}]", item)
            for index, item in enumerate(items)
            if not _is_left_out(name, item)
        ]
    )


def _is_left_out(name: str, item: object) -> bool:
    kind = members_of(item).get("type")
    if kind not in HOSTED_ITEMS:
        return False
    unknown_members().ignore(f"{name}.{kind}")
    return True


def _item(name: str, value: object) -> dict[str, Any]:
    given = checked_dict(name, value, "an item, which is an object")
    kind = given.get("type")
    if kind is None:
        kind = REFERENCE if given.keys() == {"id"} else "message"
    declared = ITEMS.get(kind) if isinstance(kind, str) else None
    if declared is None:
        if isinstance(kind, str):
            raise not_built(name, f"an item of the type {show(kind)}")
        raise refuse(f"{name}.type", kind, f"one of {', '.join(ITEMS)}")
    members = ObjectOf(declared).check(name, given).values
    match kind:
        case "message":
            if members["role"] != "assistant" and "content" not in members:
                raise invalid_value(f"{name}.content is missing; it is needed here", name)
            return _message_item(name, members)
        case "item_reference":
            return {"type": REFERENCE, "id": members["id"]}
        case "function_call_output" | "custom_tool_call_output":
            made: dict[str, Any] = {"output": _shown_output(members.get("output", ()))}
        case "function_call":
            made = {"arguments": members.get("arguments", "")}
        case "custom_tool_call":
            made = {"input": members.get("input", "")}
        case _:
            made = {
                member: [{"type": part, "text": text} for text in members.get(member, ())]
                for member, part in (("summary", "summary_text"), ("content", "reasoning_text"))
            }
    return {**members, **made, "status": "completed"}


def _message_item(name: str, members: Mapping[str, Any]) -> dict[str, Any]:
    is_answer = members["role"] == "assistant"
    rest: dict[str, Any] = {"annotations": []} if is_answer else {}
    kind = "output_text" if is_answer else "input_text"
    given = members.get("content", ())
    if is_answer and not all(isinstance(part, str) for part in given):
        raise not_built(name, "an image in an assistant's message")
    parts = _shown_parts(given, kind, rest)
    return {**members, "type": "message", "content": parts, "status": "completed"}


def _shown_parts(
    given: Sequence[str | dict[str, Any]], kind: str, rest: Mapping[str, Any]
) -> list[dict[str, Any]]:
    return [
        {"type": kind, "text": part, **rest} if isinstance(part, str) else part for part in given
    ]


def _shown_output(given: Sequence[str | dict[str, Any]]) -> str | list[dict[str, Any]]:
    texts = [part for part in given if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(given) else _shown_parts(given, "input_text", {})


def messages_of(items: Sequence[Mapping[str, Any]], num_stored: int = 0) -> list[Message]:
    """Chat messages of items: reasoning, text and calls of one turn are one assistant's message.
    `num_stored`: of the items, which are in no field of the body."""
    conversation = ConversationBuilder()
    for index, item in enumerate(items):
        where = f"input[{index - num_stored}]" if index >= num_stored else "previous_response_id"
        match item["type"]:
            case "function_call" | "custom_tool_call":
                name = flat_name(item.get("namespace"), item["name"])
                arguments = item.get("arguments")
                if arguments is None:
                    arguments = arguments_of_input(item["input"])
                turn = conversation.last_turn()
                conversation.add_call(turn, item["call_id"], name, arguments)
            case "function_call_output" | "custom_tool_call_output":
                content = _content_of(item["output"], f"{where}.output")
                conversation.add_result(item["call_id"], content)
            case "reasoning":
                text = _joined(item.get("content") or item["summary"])
                if text:
                    conversation.new_turn()["reasoning_content"] = text
            case _ if item["role"] == "assistant":
                turn = conversation.last_turn()
                if turn["content"]:
                    turn = conversation.new_turn()
                turn["content"] = _joined(item["content"])
            case _:
                content = _content_of(item["content"], f"{where}.content")
                conversation.add(item["role"], content)
    return conversation.messages


def _content_of(given: str | Sequence[Mapping[str, Any]], where: str) -> Content:
    if isinstance(given, str):
        return given
    parts: list[str | ImageInput] = [
        image_of_part("input", f"{where}[{index}]", part)
        if part["type"] in IMAGE_PARTS
        else part["text"]
        for index, part in enumerate(given)
    ]
    return content_of(parts)


def _joined(parts: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts)


INCLUDABLE = (
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""These change nothing: reasoning is plain text here, and no response has the other items."""


@field_type(array_schema(OneOf(INCLUDABLE).schema()))
def includes(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise refuse(name, value, "a list of texts")
    for item in cast(list[object], value):
        if item not in INCLUDABLE:
            raise not_built(name, f"including {show(item)}")
    return tuple(cast(list[str], value))


@dataclass(frozen=True, slots=True)
class AskedForm:
    """A checked format: what it asks for, and the object that did."""

    form: StructuredOutput | None
    given: dict[str, Any]


TEXT_FORM = AskedForm(None, {"type": "text"})
_FORMATS = 'an object such as {"type": "json_schema", "name": …, "schema": {…}}'
_FORMAT_SCHEMA = object_schema(
    {
        "type": OneOf(("text", "json_object", "json_schema")).schema(),
        "name": {"type": ["string", "null"], "maxLength": 64},
        "schema": {"type": ["object", "boolean", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
    ("type",),
)


@field_type(_FORMAT_SCHEMA)
def text_format(name: str, value: object) -> AskedForm:
    """`text.format`: as `response_format`, but that a schema's members are next to the type."""
    given = checked_dict(name, value, _FORMATS)
    members = {key: item for key, item in given.items() if item is not None}
    kind = members.pop("type", None)
    if kind == "text" and not members:
        return TEXT_FORM
    if kind == "json_object" and not members:
        return AskedForm(structured_of(name, json_object=True), given)
    if isinstance(kind, str) and kind not in ("text", "json_object", "json_schema"):
        raise not_built(name, f"the type {show(kind)}")
    if kind != "json_schema":
        raise refuse(name, given, _FORMATS)
    return AskedForm(schema_format(name, members), given)


class TextOptions(DeclaredObject):
    """The members of `text`."""

    format = optional(text_format, "The answer's form: text, or JSON.")
    verbosity = optional(VERBOSITY, VERBOSITY_HELP)


_SUMMARY = "a summary of reasoning; the reasoning itself is returned"


class ReasoningOptions(DeclaredObject):
    """The members of `reasoning`."""

    effort = optional(EFFORT, EFFORT_HELP)
    summary = unsupported(_SUMMARY, "auto")
    generate_summary = unsupported(_SUMMARY, "auto")
    context = label(OneOf(("auto",)))
    enabled = optional(Boolean(), "Whether the model reasons, as OpenRouter says it.")
    max_tokens = optional(BUDGET, "Most tokens of reasoning, as OpenRouter says it.")
    exclude = unsupported("leaving reasoning out", False)


class ResponseStreamOptions(DeclaredObject):
    """The members of `stream_options`."""

    include_obfuscation = unsupported("obfuscated events", False)


def _response_schema() -> Schema:
    space: dict[str, Schema] = {
        "type": {"enum": ["namespace"]},
        "name": {"type": "string"},
        "tools": array_schema(flat_schema()),
    }
    hosted: Schema = {"type": "object", "properties": {"type": {"enum": [*HOSTED]}}}
    own = [flat_schema(), flat_custom_schema(), nested_schema()]
    return {"anyOf": [*own, object_schema(space), hosted]}


@field_type(lambda: array_schema(_response_schema()))
def response_tools(name: str, value: object) -> tuple[ResponseTool, ...]:
    items: object = value
    if isinstance(value, list):
        items = [*_flattened(name, cast(list[object], value))]
    return cast(tuple[ResponseTool, ...], checked_tools(name, items, flat_tool))


def _flattened(name: str, value: list[object]) -> Iterator[object]:
    for item in value:
        members = members_of(item)
        kind = members.get("type")
        if kind in HOSTED:
            unknown_members().ignore(f"{name}.{kind}")
        elif kind == "namespace":
            inner = members.get("tools")
            if not isinstance(members.get("name"), str) or not isinstance(inner, list):
                raise refuse(name, item, 'a namespace with a name and "tools": […]')
            for each in cast(list[object], inner):
                yield {**members_of(each), NAMESPACE: members}
        else:
            yield item


response_tool_choice = choice_type(("type", "name"), lambda members: members)
