"""Input items of /v1/responses, checked, and converted into messages of a chat.

Owns the kinds of items and their members. Knows no store. Invariant: an item that was checked is an
object that the API can return; of reasoning that has both a summary and a text, `messages_of`
takes the text.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from cadenza.request import show
from cadenza.server.errors import invalid_value, not_built
from cadenza.server.schemas.body import DeclaredObject, label, optional, required
from cadenza.server.schemas.field_types import (
    Anything,
    OneOf,
    Schema,
    String,
    members_of,
    refuse,
)
from cadenza.server.schemas.messages import MAX_MESSAGES
from cadenza.server.schemas.response_tools import arguments_of_input, flat_name
from cadenza.server.schemas.text_parts import PART_TEXT, TextParts, checked_object
from cadenza.server.schemas.unknown_members import unknown_members

REFERENCE = "item_reference"
"""The type of an item that stands for one of a stored response, by its id."""

HOSTED_ITEMS = (
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
)
"""What tools did that another server ran: the model reads what it wrote of it itself."""

_ID = String(min_chars=1, max_chars=256)
_LABEL = Anything()
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


class _Data(DeclaredObject):
    is_open = True


class _Part(_Data):
    type = required(OneOf(_TEXT_PARTS))
    text = optional(PART_TEXT)
    refusal = optional(PART_TEXT)
    annotations = label(_LABEL)
    logprobs = label(_LABEL)
    prompt_cache_breakpoint = label(_LABEL)


_TEXTS = TextParts(_TEXT_PARTS, _Part)


class _Message(_Data):
    type = optional(OneOf(("message",)))
    role = required(OneOf(("user", "assistant", "system", "developer")))
    content = optional(_TEXTS, default=())
    id = optional(_ID)
    status = label(_LABEL)
    phase = label(_LABEL)
    end_turn = label(_LABEL)


@dataclass(frozen=True, slots=True)
class _ArgumentText:
    """A call's arguments: JSON as text, or what a client made of it."""

    def check(self, name: str, value: object) -> str:
        return PART_TEXT.check(name, value if isinstance(value, str) else json.dumps(value))

    def schema(self) -> Schema:
        return {}


class _FunctionCall(_Data):
    type = required(OneOf(("function_call",)))
    call_id = required(_ID)
    name = required(String(min_chars=1, max_chars=128))
    arguments = optional(_ArgumentText(), default="")
    id = optional(_ID)
    status = label(_LABEL)
    caller = label(_LABEL)
    namespace = optional(String(max_chars=128), "That of the function.")


class _CustomCall(_Data):
    type = required(OneOf(("custom_tool_call",)))
    call_id = required(_ID)
    name = required(String(min_chars=1, max_chars=128))
    input = optional(PART_TEXT, default="")
    id = optional(_ID)
    status = label(_LABEL)
    namespace = optional(String(max_chars=128))


class _CustomResult(_Data):
    type = required(OneOf(("custom_tool_call_output",)))
    call_id = required(_ID)
    output = optional(_TEXTS, default=())
    id = optional(_ID)
    status = label(_LABEL)


class _FunctionResult(_Data):
    type = required(OneOf(("function_call_output",)))
    call_id = required(_ID)
    output = optional(_TEXTS, default=())
    id = optional(_ID)
    status = label(_LABEL)
    caller = label(_LABEL)


class _Reasoning(_Data):
    type = required(OneOf(("reasoning",)))
    summary = optional(_TEXTS)
    content = optional(_TEXTS)
    encrypted_content = label(_LABEL)
    id = optional(_ID)
    status = label(_LABEL)


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


@dataclass(frozen=True, slots=True)
class InputItems:
    """A text, which is a user's message, or a list of items; checked into items."""

    def check(self, name: str, value: object) -> tuple[dict[str, Any], ...]:
        if isinstance(value, str):
            text = PART_TEXT.check(name, value)
            return (_message_item({"role": "user", "content": (text,)}),)
        if not isinstance(value, list):
            raise refuse(name, value, "a text, or a list of items")
        items = cast(list[object], value)
        if len(items) > MAX_MESSAGES:
            raise invalid_value(
                f"{name} has {len(items)} items; at most {MAX_MESSAGES} are allowed", name
            )
        read = [
            _item(f"{name}[{place}]", item)
            for place, item in enumerate(items)
            if not _is_left_out(name, item)
        ]
        return tuple(read)

    def schema(self) -> Schema:
        kind: Schema = {"enum": [*HOSTED_ITEMS]}
        hosted: Schema = {"type": "object", "properties": {"type": kind}, "required": ["type"]}
        kinds = [*(kind.object_schema() for kind in ITEMS.values()), hosted]
        items = {"type": "array", "items": {"anyOf": kinds}, "maxItems": MAX_MESSAGES}
        return {"anyOf": [PART_TEXT.schema(), items]}


def _is_left_out(name: str, item: object) -> bool:
    kind = members_of(item).get("type")
    if kind not in HOSTED_ITEMS:
        return False
    unknown_members().ignore(f"{name}.{kind}")
    return True


def _item(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refuse(name, value, "an item, which is an object")
    given = cast(dict[str, object], value)
    kind = given.get("type")
    if kind is None:
        kind = REFERENCE if given.keys() == {"id"} else "message"
    declared = ITEMS.get(kind) if isinstance(kind, str) else None
    if declared is None:
        if isinstance(kind, str):
            raise not_built(name, f"an item of the type {show(kind)}")
        raise refuse(f"{name}.type", kind, f"one of {', '.join(ITEMS)}")
    members = checked_object(name, cast(object, value), declared).values
    match kind:
        case "message":
            if members["role"] != "assistant" and "content" not in members:
                raise invalid_value(f"{name}.content is missing; it is needed here", name)
            return _message_item(members)
        case "function_call_output" | "custom_tool_call_output":
            return {
                **members,
                "output": "\n".join(members.get("output", ())),
                "status": "completed",
            }
        case "function_call":
            arguments = members.get("arguments", "")
            return {**members, "arguments": arguments, "status": "completed"}
        case "custom_tool_call":
            return {**members, "input": members.get("input", ""), "status": "completed"}
        case "reasoning":
            return _reasoning_item(members)
        case "item_reference":
            return {"type": REFERENCE, "id": members["id"]}
        case _:
            return {**members, "status": "completed"}


def _message_item(members: Mapping[str, Any]) -> dict[str, Any]:
    is_answer = members["role"] == "assistant"
    rest: dict[str, Any] = {"annotations": []} if is_answer else {}
    kind = "output_text" if is_answer else "input_text"
    parts = [{"type": kind, "text": text, **rest} for text in members.get("content", ())]
    return {**members, "type": "message", "content": parts, "status": "completed"}


def _reasoning_item(members: Mapping[str, Any]) -> dict[str, Any]:
    summary = [{"type": "summary_text", "text": text} for text in members.get("summary", ())]
    content = [{"type": "reasoning_text", "text": text} for text in members.get("content", ())]
    return {**members, "summary": summary, "content": content, "status": "completed"}


def messages_of(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages of items: reasoning, text and calls of one turn are one assistant's message."""
    found: list[dict[str, Any]] = []
    called: dict[str, str] = {}
    for item in items:
        is_turn = bool(found) and found[-1]["role"] == "assistant"
        turn = found[-1] if is_turn else None
        match item["type"]:
            case "function_call" | "custom_tool_call":
                name = flat_name(item.get("namespace"), item["name"])
                called[item["call_id"]] = name
                arguments = item.get("arguments")
                if arguments is None:
                    arguments = arguments_of_input(item["input"])
                function = {"name": name, "arguments": arguments}
                call = {"id": item["call_id"], "type": "function", "function": function}
                _turn(found, turn).setdefault("tool_calls", []).append(call)
            case "function_call_output" | "custom_tool_call_output":
                found.append(_result(item, called))
            case "reasoning":
                text = _joined(item.get("content") or item["summary"])
                if text:
                    _turn(found, None)["reasoning_content"] = text
            case _ if item["role"] == "assistant":
                is_free = turn is not None and not turn["content"]
                _turn(found, turn if is_free else None)["content"] = _joined(item["content"])
            case _:
                found.append({"role": item["role"], "content": _joined(item["content"])})
    return found


def _turn(found: list[dict[str, Any]], turn: dict[str, Any] | None) -> dict[str, Any]:
    """The assistant's message that an item belongs to."""
    if turn is None:
        turn = {"role": "assistant", "content": ""}
        found.append(turn)
    return turn


def _result(item: Mapping[str, Any], called: Mapping[str, str]) -> dict[str, Any]:
    """The result of a call, which a client may have left out of the conversation."""
    call_id = item["call_id"]
    named = {"name": called[call_id]} if call_id in called else {}
    return {"role": "tool", "tool_call_id": call_id, **named, "content": item["output"]}


def _joined(parts: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts)


def with_system(system: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages behind a system text; leading system messages become one, which is what many
    chat templates have room for."""
    texts = [] if not system else [system]
    place = 0
    while place < len(messages) and messages[place]["role"] in ("system", "developer"):
        texts.append(messages[place]["content"])
        place += 1
    leading = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    return [*leading, *messages[place:]]
