"""Messages of /v1/messages: roles and content blocks, checked and converted into those of a chat.

Owns the kinds of blocks and their members (Anthropic's Messages API). Knows no template. Invariant:
what was checked is in the messages that follow from it, but for labels.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from cadenza.request import show
from cadenza.server.errors import invalid_value, not_built
from cadenza.server.schemas.body import DeclaredObject, ObjectOf, label, optional, required
from cadenza.server.schemas.field_types import (
    Anything,
    Boolean,
    OneOf,
    Schema,
    String,
    members_of,
    refuse,
)
from cadenza.server.schemas.messages import MAX_MESSAGES
from cadenza.server.schemas.text_parts import PART_TEXT, TextParts, checked_object

BILLING_LABEL = "x-anthropic-billing-header:"
"""What a coding agent's first system block begins with; it is a label that differs in each request,
so that it would keep every prefix from being shared."""

_SERVER_TOOLS = (
    "web_search web_fetch code_execution bash_code_execution text_editor_code_execution "
    "tool_search mcp"
).split()
SERVER_BLOCKS = (
    "server_tool_use",
    "mcp_tool_use",
    *(f"{tool}_tool_result" for tool in _SERVER_TOOLS),
)
"""The blocks of tools that a server runs, as the history of another server may have them."""

_ID = String(min_chars=1, max_chars=256)
_LABEL = Anything()

Message = dict[str, Any]


class _Block(DeclaredObject):
    is_open = True


class _TextBlock(_Block):
    type = required(OneOf(("text",)))
    text = optional(PART_TEXT, default="")
    cache_control = label(_LABEL)
    citations = label(_LABEL)


TEXT_BLOCKS = TextParts(("text",), _TextBlock)


class _ToolResult(_Block):
    type = required(OneOf(("tool_result",)))
    tool_use_id = required(_ID)
    content = optional(TEXT_BLOCKS, default=())
    is_error = optional(Boolean(), default=False)
    cache_control = label(_LABEL)
    toolset_name = label(_LABEL)


class _ToolUse(_Block):
    type = required(OneOf(("tool_use",)))
    id = required(_ID)
    name = required(String(min_chars=1, max_chars=128))
    input = optional(Anything(), "The arguments of the call: an object.")
    cache_control = label(_LABEL)
    caller = label(_LABEL)
    toolset_name = label(_LABEL)


class _Thinking(_Block):
    type = required(OneOf(("thinking",)))
    thinking = optional(PART_TEXT, default="")
    signature = label(_LABEL)


class _RedactedThinking(_Block):
    """Nobody but the server that made it can read it, so that it is left out."""

    type = required(OneOf(("redacted_thinking",)))
    data = label(_LABEL)


class _ServerBlock(_Block):
    """What a tool did that another server ran: its results are sealed, and it is left out."""

    type = required(OneOf(SERVER_BLOCKS))


class _PlainText(DeclaredObject):
    type = required(OneOf(("text",)))
    media_type = label(_LABEL)
    data = required(PART_TEXT)


class _Document(_Block):
    """One whose text is in the request."""

    type = required(OneOf(("document",)))
    source = required(ObjectOf(_PlainText))
    title = optional(PART_TEXT)
    context = optional(PART_TEXT)
    cache_control = label(_LABEL)
    citations = label(_LABEL)

    def text(self) -> str:
        texts = (self.title, self.context, self.source.values["data"])
        return "\n".join(text for text in texts if text)


class _BlockMessage(_Block):
    role = required(OneOf(("user", "assistant", "system")))
    content = required(PART_TEXT)


USER_BLOCKS: Mapping[str, type[DeclaredObject]] = {
    "text": _TextBlock,
    "document": _Document,
    "tool_result": _ToolResult,
}
ASSISTANT_BLOCKS: Mapping[str, type[DeclaredObject]] = {
    "text": _TextBlock,
    "thinking": _Thinking,
    "redacted_thinking": _RedactedThinking,
    "tool_use": _ToolUse,
    **dict.fromkeys(SERVER_BLOCKS, _ServerBlock),
}
SYSTEM_BLOCKS: Mapping[str, type[DeclaredObject]] = {"text": _TextBlock}
ROLES = {"user": USER_BLOCKS, "assistant": ASSISTANT_BLOCKS, "system": SYSTEM_BLOCKS}


@dataclass(frozen=True, slots=True)
class BlockMessages:
    """The type of the field `messages`; checked into messages of a chat."""

    def check(self, name: str, value: object) -> tuple[Message, ...]:
        if not isinstance(value, list):
            raise refuse(name, value, "a list of messages")
        items = cast(list[object], value)
        if not 1 <= len(items) <= MAX_MESSAGES:
            raise invalid_value(
                f"{name} has {len(items)} entries; from 1 to {MAX_MESSAGES} are allowed", name
            )
        found: list[Message] = []
        called: dict[str, str] = {}
        for place, item in enumerate(items):
            _add_message(found, called, f"{name}[{place}]", item)
        return tuple(found)

    def schema(self) -> Schema:
        messages = [_message_schema(role, [*kinds.values()]) for role, kinds in ROLES.items()]
        return {
            "type": "array",
            "items": {"anyOf": messages},
            "minItems": 1,
            "maxItems": MAX_MESSAGES,
        }


def _message_schema(role: str, kinds: list[type[DeclaredObject]]) -> Schema:
    content: Schema = {"anyOf": [PART_TEXT.schema(), _list_schema(kinds)]}
    return {
        "type": "object",
        "properties": {"role": {"enum": [role]}, "content": content},
        "required": ["role", "content"],
    }


def _list_schema(kinds: Iterable[type[DeclaredObject]]) -> Schema:
    schemas = [kind.object_schema() for kind in kinds]
    return {"type": "array", "items": {"anyOf": schemas}, "maxItems": MAX_MESSAGES}


def _blocks(
    name: str, value: object, kinds: Mapping[str, type[DeclaredObject]]
) -> list[tuple[str, DeclaredObject]]:
    """Content as checked blocks, each with its type; a text is one block of text."""
    if isinstance(value, str):
        return [("text", _TextBlock({"text": PART_TEXT.check(name, value)}))]
    if not isinstance(value, list):
        raise refuse(name, value, "a text, or a list of content blocks")
    found: list[tuple[str, DeclaredObject]] = []
    for block in cast(list[object], value)[: MAX_MESSAGES + 1]:
        kind = members_of(block).get("type")
        if isinstance(kind, str) and kind not in kinds:
            raise not_built(name, f"the content block {show(kind)} here")
        declared = kinds.get(kind) if isinstance(kind, str) else None
        if declared is None:
            raise refuse(name, block, f"blocks of the types {', '.join(kinds)}")
        found.append((cast(str, kind), checked_object(name, block, declared)))
    if len(found) > MAX_MESSAGES:
        raise invalid_value(f"{name} has over {MAX_MESSAGES} blocks", name)
    return found


def _add_message(found: list[Message], called: dict[str, str], name: str, value: object) -> None:
    """Adds what a message becomes: one of the chat's, and one for each result of a call.

    Args:
        called: the functions by the ids of their calls so far.
    """
    members = members_of(value)
    role = members.get("role")
    if not isinstance(role, str) or role not in ROLES:
        known = ", ".join(ROLES)
        raise refuse(name, value, f'{{"role": …, "content": …}}; the roles are {known}')
    for key, item in members.items():
        if item is not None and key not in _BlockMessage.fields:
            _BlockMessage.take_unknown(name, key)
    content = members.get("content")
    blocks = _blocks(f"{name}.content", [] if content is None else content, ROLES[role])
    if role == "assistant":
        _add_turn(found, called, blocks)
        return
    texts = [
        block.text() if isinstance(block, _Document) else block.values.get("text", "")
        for kind, block in blocks
        if kind in ("text", "document")
    ]
    for kind, block in blocks:
        if kind == "tool_result":
            found.append(_result(block.values, called))
    if texts or not blocks:
        _add_text(found, role, "\n".join(texts))


def _add_text(found: list[Message], role: str, text: str) -> None:
    """Messages of one role that follow each other are one."""
    if found and found[-1]["role"] == role == "user":
        text = f"{found.pop()['content']}\n{text}"
    found.append({"role": role, "content": text})


def _add_turn(
    found: list[Message], called: dict[str, str], blocks: list[tuple[str, DeclaredObject]]
) -> None:
    of: dict[str, list[Mapping[str, Any]]] = {kind: [] for kind in ASSISTANT_BLOCKS}
    for kind, block in blocks:
        of[kind].append(block.values)
    turn: Message = {
        "role": "assistant",
        "content": "\n".join(block.get("text", "") for block in of["text"]),
    }
    if of["thinking"]:
        turn["reasoning_content"] = "\n".join(block.get("thinking", "") for block in of["thinking"])
    for block in of["tool_use"]:
        called[block["id"]] = block["name"]
        function = {"name": block["name"], "arguments": block.get("input")}
        call = {"id": block["id"], "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
    found.append(turn)


def _result(block: Mapping[str, Any], called: Mapping[str, str]) -> Message:
    """The result of a call, which a client may have left out of the conversation."""
    call_id = block["tool_use_id"]
    text = "\n".join(block.get("content", ()))
    content = f"Error: {text}" if block.get("is_error") else text
    named = {"name": called[call_id]} if call_id in called else {}
    return {"role": "tool", "tool_call_id": call_id, **named, "content": content}


def system_text(texts: Iterable[str]) -> str:
    """A system text of the blocks, without a label that is none of the text."""
    return "\n".join(text for text in texts if not text.startswith(BILLING_LABEL))
