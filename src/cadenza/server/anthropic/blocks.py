"""The fields of /v1/messages: roles, content blocks and objects, as in Anthropic's Messages API.
Invariant: what was checked is in the messages that follow from it, but for labels; what is not
built is refused by its name."""

import re
from collections.abc import Iterable, Mapping, Sequence
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
from cadenza.server.fields.images import (
    IMAGE_BASE64,
    IMAGE_URL,
    Content,
    Part,
    content_of,
    content_parts,
    has_images,
)
from cadenza.server.fields.messages import MAX_MESSAGES
from cadenza.server.fields.structured import structured_of
from cadenza.server.fields.thinking import EFFORT, EFFORT_HELP
from cadenza.server.fields.tools import (
    MESSAGE_TOOL,
    OTHER_WORDS,
    checked_tools,
    message_tool,
    tool_schema,
)
from cadenza.server.fields.types import (
    NULL,
    Boolean,
    Integer,
    OneOf,
    Schema,
    String,
    anything,
    array_schema,
    checked_dict,
    checked_list,
    field_type,
    members_of,
    object_schema,
    refuse,
)
from cadenza.structured import StructuredOutput
from cadenza.text.answers.tool_format import Tool

BILLING_LABEL = "x-anthropic-billing-header:"
"""Begins a coding agent's first system block; it differs in each request and would prevent shared
prefixes."""

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

_HOSTED_BY_ANTHROPIC = re.compile(
    "^(web_search|web_fetch|code_execution|tool_search_tool_[a-z0-9]+)_[0-9]{8}$"
)
"""Those that only Anthropic's servers run."""

_ID = String(min_chars=1, max_chars=256)

MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")


class _Base64Source(DeclaredObject):
    is_open = True
    type = required(OneOf(("base64",)))
    media_type = required(OneOf(MEDIA_TYPES))
    data = required(IMAGE_BASE64)


class _UrlSource(DeclaredObject):
    is_open = True
    type = required(OneOf(("url",)))
    url = required(IMAGE_URL)


_SOURCES: Mapping[str, type[DeclaredObject]] = {"base64": _Base64Source, "url": _UrlSource}


@field_type(lambda: {"anyOf": [source.object_schema() for source in _SOURCES.values()]})
def image_source(name: str, value: object) -> str:
    """`source` of a block, checked into a URL."""
    kind = checked_dict(name, value).get("type")
    if kind == "file":
        raise not_built(name, "an uploaded file", advice="send base64 or a url")
    declared = _SOURCES.get(kind) if isinstance(kind, str) else None
    if declared is None:
        raise refuse(name, value, f"an object of one of the types {', '.join(_SOURCES)}")
    found = ObjectOf(declared).check(name, value).values
    if kind == "url":
        return found["url"]
    return f"data:{found['media_type']};base64,{found['data']}"


class ImageBlock(DeclaredObject):
    """A block of /v1/messages that has an image."""

    is_open = True
    type = required(OneOf(("image",)))
    source = required(image_source, "Its bytes as base64, or an https: URL of an allowed host.")
    more = labels("cache_control")


def image_of_block(name: str, where: str, block: object) -> ImageInput:
    """Raises ApiError (400)."""
    return ImageInput(url=ObjectOf(ImageBlock).check(name, block).values["source"], where=where)


class _Block(DeclaredObject):
    is_open = True


class _TextBlock(_Block):
    type = required(OneOf(("text",)))
    text = optional(PART_TEXT, default="")
    more = labels("cache_control citations")


TEXT_BLOCKS = TextParts(("text",), _TextBlock)
_SEEN_BLOCKS = SeenParts(TEXT_BLOCKS, "image", ImageBlock, image_of_block)


class _ToolResult(_Block):
    type = required(OneOf(("tool_result",)))
    tool_use_id = required(_ID)
    content = optional(_SEEN_BLOCKS, default=())
    is_error = optional(Boolean(), default=False)
    more = labels("cache_control toolset_name")


class _ToolUse(_Block):
    type = required(OneOf(("tool_use",)))
    id = required(_ID)
    name = required(String(min_chars=1, max_chars=128))
    input = optional(anything, "The arguments of the call: an object.")
    more = labels("cache_control caller toolset_name")


class _Thinking(_Block):
    type = required(OneOf(("thinking",)))
    thinking = optional(PART_TEXT, default="")
    more = labels("signature")


class _RedactedThinking(_Block):
    """Only the server that made it can read it, so it is left out."""

    type = required(OneOf(("redacted_thinking",)))
    more = labels("data")


class _ServerBlock(_Block):
    """A use or result of a tool that another server ran: it is sealed, so it is left out."""

    type = required(OneOf(SERVER_BLOCKS))


class _PlainText(DeclaredObject):
    type = required(OneOf(("text",)))
    media_type = label(anything)
    data = required(PART_TEXT)


class _Document(_Block):
    type = required(OneOf(("document",)))
    source = required(ObjectOf(_PlainText))
    title = optional(PART_TEXT)
    context = optional(PART_TEXT)
    more = labels("cache_control citations")


class _BlockMessage(_Block):
    role = required(OneOf(("user", "assistant", "system")))
    content = required(PART_TEXT)


Kinds = Mapping[str, type[DeclaredObject]]

USER_BLOCKS: Kinds = {
    "text": _TextBlock,
    "image": ImageBlock,
    "document": _Document,
    "tool_result": _ToolResult,
}
ASSISTANT_BLOCKS: Kinds = {
    "text": _TextBlock,
    "thinking": _Thinking,
    "redacted_thinking": _RedactedThinking,
    "tool_use": _ToolUse,
    **dict.fromkeys(SERVER_BLOCKS, _ServerBlock),
}
SYSTEM_BLOCKS: Kinds = {"text": _TextBlock}
ROLES = {"user": USER_BLOCKS, "assistant": ASSISTANT_BLOCKS, "system": SYSTEM_BLOCKS}


def _messages_schema() -> Schema:
    messages = [_message_schema(role, kinds) for role, kinds in ROLES.items()]
    return array_schema({"anyOf": messages}, 1, MAX_MESSAGES)


def _message_schema(role: str, kinds: Kinds) -> Schema:
    blocks = {"anyOf": [kind.object_schema() for kind in kinds.values()]}
    content = {"anyOf": [PART_TEXT.schema(), array_schema(blocks, high=MAX_MESSAGES)]}
    return object_schema({"role": {"enum": [role]}, "content": content})


@field_type(_messages_schema)
def block_messages(name: str, value: object) -> tuple[Message, ...]:
    """`messages`, checked into messages of a chat."""
    items = checked_list(name, value, "a list of messages", (1, MAX_MESSAGES))
    conversation = ConversationBuilder()
    for index, item in enumerate(items):
        _add_message(conversation, f"{name}[{index}]", item)
    return tuple(conversation.messages)


def _add_message(conversation: ConversationBuilder, name: str, value: object) -> None:
    """Adds what a message becomes: one of the chat's, and one for each result of a call."""
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
        _add_turn(conversation, blocks)
        return
    for kind, block in blocks:
        if kind == "tool_result":
            conversation.add_result(block["tool_use_id"], _result_of(block))
    parts = [_part_of(kind, block) for kind, block in blocks if kind != "tool_result"]
    if parts or not blocks:
        _add_parts(conversation, role, parts or [""])


def _result_of(block: Mapping[str, Any]) -> Content:
    """What a call gave; an error is said in front of it."""
    parts: Sequence[Part] = block.get("content", ())
    if not block.get("is_error"):
        return content_of(parts)
    if has_images(parts):
        return content_of(["Error:", *parts])
    return f"Error: {content_of(parts)}"


def _blocks(name: str, value: object, kinds: Kinds) -> list[tuple[str, Mapping[str, Any]]]:
    """Content as the values of checked blocks, each with its type; a text is one block of text."""
    if isinstance(value, str):
        return [("text", {"text": PART_TEXT.check(name, value)})]
    if not isinstance(value, list):
        raise refuse(name, value, "a text, or a list of content blocks")
    found: list[tuple[str, Mapping[str, Any]]] = []
    for index, block in enumerate(cast(list[object], value)[: MAX_MESSAGES + 1]):
        kind = members_of(block).get("type")
        if not isinstance(kind, str):
            raise refuse(name, block, f"blocks of the types {', '.join(kinds)}")
        if kind not in kinds:
            raise not_built(name, f"the content block {show(kind)} here")
        if kind == "image":
            image = image_of_block(name, f"{name}[{index}]", block)
            found.append((kind, {"image": image}))
        else:
            found.append((kind, ObjectOf(kinds[kind]).check(name, block).values))
    if len(found) > MAX_MESSAGES:
        raise invalid_value(f"{name} has over {MAX_MESSAGES} blocks", name)
    return found


def _part_of(kind: str, block: Mapping[str, Any]) -> Part:
    if kind == "image":
        return block["image"]
    if kind == "text":
        return block.get("text", "")
    texts = (block.get("title"), block.get("context"), block["source"].values["data"])
    return "\n".join(text for text in texts if text)


def _add_parts(conversation: ConversationBuilder, role: str, parts: list[Part]) -> None:
    """Consecutive messages of the user are joined."""
    messages = conversation.messages
    if messages and messages[-1]["role"] == role == "user":
        parts = [*content_parts(messages.pop()["content"]), *parts]
    conversation.add(role, content_of(parts))


def _add_turn(
    conversation: ConversationBuilder, blocks: list[tuple[str, Mapping[str, Any]]]
) -> None:
    texts = [block.get("text", "") for kind, block in blocks if kind == "text"]
    thoughts = [block.get("thinking", "") for kind, block in blocks if kind == "thinking"]
    turn = conversation.new_turn()
    turn["content"] = "\n".join(texts)
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    for kind, block in blocks:
        if kind == "tool_use":
            conversation.add_call(turn, block["id"], block["name"], block.get("input"))


def system_text(texts: Iterable[str]) -> str:
    """The blocks as one system text, without the billing label."""
    return "\n".join(text for text in texts if not text.startswith(BILLING_LABEL))


class MessageMetadata(DeclaredObject):
    """The members of `metadata`."""

    user_id = optional(String(max_chars=512), "Who asks; it goes into the log's line.")


class ThinkingOptions(DeclaredObject):
    """The members of `thinking`."""

    type = optional(OneOf(("enabled", "adaptive", "disabled")), "Whether the model thinks.")
    budget_tokens = optional(Integer(1, 1 << 31), "Most tokens of thinking.")
    display = optional(
        OneOf(("summarized", "omitted")),
        "omitted: blocks of thinking without their text; there are no summaries.",
    )


@field_type(object_schema({"type": {"enum": ["json_schema"]}, "schema": {}}))
def json_form(name: str, value: object) -> StructuredOutput:
    """`output_config.format`: JSON of a schema."""
    members = members_of(value)
    if members.get("type") != "json_schema" or members.keys() != {"type", "schema"}:
        raise refuse(name, value, '{"type": "json_schema", "schema": {…}}')
    return structured_of(name, json=members["schema"])


class OutputConfig(DeclaredObject):
    """The members of `output_config`."""

    effort = optional(EFFORT, EFFORT_HELP)
    format = optional(json_form, "The form of the answer's text.")
    task_budget = unsupported("a budget of a task")


@field_type(NULL)
def no_thread(name: str, value: object) -> None:
    """`thread`: a server-held conversation; the error's details ask clients to send all of it."""
    del value
    error = not_built(name, "a conversation that the server holds")
    error.details = {"error_code": "thread_unsupported_request", "unsupported": [name]}
    raise error


_KEPT_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
_NO_EDITS: tuple[object, ...] = ({}, {"edits": []}, _KEPT_THINKING)


@field_type({"enum": [*_NO_EDITS]})
def no_context_edits(name: str, value: object) -> object:
    """`context_management`: only what changes nothing, since messages are taken as they are."""
    if value in _NO_EDITS:
        return value
    raise not_built(name, "editing the context", _NO_EDITS[1:])


def _tools_schema() -> Schema:
    own = tool_schema(MESSAGE_TOOL, ("name", "input_schema"))
    kinds: Schema = {"type": "string", "pattern": _HOSTED_BY_ANTHROPIC.pattern}
    return {"anyOf": [own, object_schema({"type": kinds})]}


@field_type(lambda: array_schema(_tools_schema()))
def message_tools(name: str, value: object) -> tuple[Tool, ...]:
    """Those of the client, without those that only Anthropic's servers run."""
    items: object = value
    if isinstance(value, list):
        items = [each for each in cast(list[object], value) if not _is_run_by_anthropic(name, each)]
    return checked_tools(name, items, message_tool)


def _is_run_by_anthropic(name: str, tool: object) -> bool:
    kind = members_of(tool).get("type")
    if not isinstance(kind, str) or not _HOSTED_BY_ANTHROPIC.match(kind):
        return False
    unknown_members().ignore(f"{name}.{kind}")
    return True


class _ChoiceMembers(DeclaredObject):
    type = optional(OneOf(("auto", "any", "tool", "none")))
    name = optional(String(min_chars=1, max_chars=128), "With the type tool.")
    disable_parallel_tool_use = optional(Boolean(), default=False)


@dataclass(frozen=True, slots=True)
class AskedChoice:
    """`choice` as `tool_use` takes it."""

    choice: str
    is_parallel: bool


@field_type(_ChoiceMembers.object_schema)
def message_tool_choice(name: str, value: object) -> AskedChoice:
    members = ObjectOf(_ChoiceMembers).check(name, value)
    kind, tool = members.type, members.name
    if kind is None or (kind == "tool") != (tool is not None):
        raise refuse(name, value, '{"type": auto, any or none}, or {"type": tool, "name": …}')
    choice = f":{tool}" if kind == "tool" else OTHER_WORDS.get(kind, kind)
    return AskedChoice(choice, is_parallel=not members.disable_parallel_tool_use)
