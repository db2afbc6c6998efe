"""The fields of /v1/messages that are objects: thinking, tools, the form of the answer, labels.

Owns their members. Knows no engine. Invariant: what is not built is refused by its name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from cadenza.server.errors import invalid_value, not_built
from cadenza.server.schemas.body import (
    DeclaredObject,
    ObjectOf,
    optional,
    unsupported,
)
from cadenza.server.schemas.field_types import (
    NULL,
    Boolean,
    Integer,
    OneOf,
    Schema,
    String,
    members_of,
    refuse,
)
from cadenza.server.schemas.reasoning import EFFORT, EFFORT_HELP
from cadenza.server.schemas.structured import structured_of
from cadenza.server.schemas.tools import (
    check_tool_members,
    check_tool_type,
    checked_tools,
    make_tool,
    tool_schema,
    tools_schema,
)
from cadenza.server.schemas.unknown_members import unknown_members
from cadenza.structured import StructuredOutput
from cadenza.text.answer_grammar import Tool

MAX_BUDGET = 1 << 31

_KEPT_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


class MessageMetadata(DeclaredObject):
    """The members of `metadata`."""

    user_id = optional(String(max_chars=512), "Who asks; it goes into the log's line.")


class ThinkingOptions(DeclaredObject):
    """The members of `thinking`."""

    type = optional(OneOf(("enabled", "adaptive", "disabled")), "Whether the model thinks.")
    budget_tokens = optional(Integer(1, MAX_BUDGET), "Most tokens of thinking.")
    display = optional(
        OneOf(("summarized", "omitted")),
        "omitted: blocks of thinking without their text; there are no summaries.",
    )


@dataclass(frozen=True, slots=True)
class JsonForm:
    """`output_config.format`: JSON of a schema."""

    def check(self, name: str, value: object) -> StructuredOutput:
        members = members_of(value)
        if members.get("type") != "json_schema" or members.keys() != {"type", "schema"}:
            raise refuse(name, value, '{"type": "json_schema", "schema": {…}}')
        return structured_of(name, json=members["schema"])

    def schema(self) -> Schema:
        return {
            "type": "object",
            "properties": {"type": {"enum": ["json_schema"]}, "schema": {}},
            "required": ["type", "schema"],
        }


class OutputConfig(DeclaredObject):
    """The members of `output_config`."""

    effort = optional(EFFORT, EFFORT_HELP)
    format = optional(JsonForm(), "The form of the answer's text.")
    task_budget = unsupported("a budget of a task")


@dataclass(frozen=True, slots=True)
class MessageTools:
    """Tools of the client; those that only Anthropic's servers run are left out."""

    def check(self, name: str, value: object) -> tuple[Tool, ...]:
        items: object = value
        if isinstance(value, list):
            items = [each for each in cast(list[object], value) if not _is_left_out(name, each)]
        return checked_tools(name, items, _tool)

    def schema(self) -> Schema:
        own = tool_schema(_TOOL_MEMBERS, ("name", "input_schema"))
        kinds: Schema = {"type": "string", "pattern": _HOSTED.pattern}
        hosted: Schema = {"type": "object", "properties": {"type": kinds}, "required": ["type"]}
        return tools_schema({"anyOf": [own, hosted]})


_HOSTED = re.compile("^(web_search|web_fetch|code_execution|tool_search_tool_[a-z0-9]+)_[0-9]{8}$")
"""Types of tools that only Anthropic's servers run: without them a model does what it can."""


def _is_left_out(name: str, tool: object) -> bool:
    kind = members_of(tool).get("type")
    if not isinstance(kind, str) or not _HOSTED.match(kind):
        return False
    unknown_members().ignore(f"{name}.{kind}")
    return True


_TOOL_MEMBERS: Mapping[str, Schema] = {
    "type": {"enum": ["custom", None]},
    "name": {"type": "string", "minLength": 1},
    "description": {"type": ["string", "null"]},
    "input_schema": {"type": "object"},
    "input_examples": {"type": ["array", "null"], "items": {"type": "object"}},
    "strict": {"type": ["boolean", "null"]},
}


def _tool(name: str, members: Mapping[str, Any]) -> Tool:
    check_tool_type(name, members, "custom")
    check_tool_members(name, members, *_TOOL_MEMBERS)
    if not isinstance(members.get("input_schema"), dict):
        raise invalid_value(f"{name} has a tool without input_schema; give a JSON Schema", name)
    return make_tool(
        name,
        name=members.get("name"),
        description=members.get("description"),
        parameters={**members["input_schema"], **_examples(name, members.get("input_examples"))},
        strict=members.get("strict"),
    )


def _examples(name: str, value: object) -> dict[str, Any]:
    """As the keyword of JSON Schema, which changes no form; templates show it with the schema."""
    if value in (None, []):
        return {}
    if not isinstance(value, list) or not all(
        isinstance(each, dict) for each in cast(list[object], value)
    ):
        raise invalid_value(f"{name} has input_examples that are no list of objects", name)
    return {"examples": value}


class _ChoiceMembers(DeclaredObject):
    type = optional(OneOf(("auto", "any", "tool", "none")))
    name = optional(String(min_chars=1, max_chars=128), "With the type tool.")
    disable_parallel_tool_use = optional(Boolean(), default=False)


@dataclass(frozen=True, slots=True)
class AskedChoice:
    """`choice` as `schemas.tools.tool_use` takes it."""

    choice: str
    is_parallel: bool


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


@dataclass(frozen=True, slots=True)
class MessageToolChoice:
    """Which tool is called."""

    def check(self, name: str, value: object) -> AskedChoice:
        members = ObjectOf(_ChoiceMembers).check(name, value)
        kind, tool = members.type, members.name
        if kind is None or (kind == "tool") != (tool is not None):
            raise refuse(name, value, '{"type": auto, any or none}, or {"type": tool, "name": …}')
        choice = f":{tool}" if kind == "tool" else _CHOICES[kind]
        return AskedChoice(choice, is_parallel=not members.disable_parallel_tool_use)

    def schema(self) -> Schema:
        return _ChoiceMembers.object_schema()


@dataclass(frozen=True, slots=True)
class NoThread:
    """`thread`: a conversation that the server holds; clients then send the whole of it instead,
    which the error's details ask them to."""

    def check(self, name: str, value: object) -> None:
        del value
        error = not_built(name, "a conversation that the server holds")
        error.details = {"error_code": "thread_unsupported_request", "unsupported": [name]}
        raise error

    def schema(self) -> Schema:
        return NULL


@dataclass(frozen=True, slots=True)
class ContextManagement:
    """`context_management`: only what changes nothing, since messages are taken as they are."""

    def check(self, name: str, value: object) -> object:
        if value in ({}, {"edits": []}, _KEPT_THINKING):
            return value
        raise not_built(name, "editing the context", ({"edits": []}, _KEPT_THINKING))

    def schema(self) -> Schema:
        return {"enum": [{}, {"edits": []}, _KEPT_THINKING]}
