"""The fields of /v1/messages that are objects: thinking, tools, the form of the answer, labels.

Owns their members. Knows no engine. Invariant: what is not built is refused by its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cadenza.server.errors import invalid_value, not_built
from cadenza.server.schemas.body import DeclaredObject, ObjectOf, optional, unsupported
from cadenza.server.schemas.field_types import (
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
from cadenza.server.schemas.tools import MAX_TOOLS, check_tool_type, checked_tools, make_tool
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
    """Tools of the client."""

    def check(self, name: str, value: object) -> tuple[Tool, ...]:
        return checked_tools(name, value, _tool)

    def schema(self) -> Schema:
        tool: Schema = {
            "type": "object",
            "properties": {
                "type": {"enum": ["custom", None]},
                "name": {"type": "string", "minLength": 1},
                "description": {"type": ["string", "null"]},
                "input_schema": {"type": "object"},
                "strict": {"type": ["boolean", "null"]},
            },
            "required": ["name", "input_schema"],
        }
        return {"type": "array", "items": tool, "maxItems": MAX_TOOLS}


_TOOL_LABELS = ("cache_control", "eager_input_streaming", "defer_loading", "input_examples")
_TOOL_MEMBERS = ("type", "name", "description", "input_schema", "strict", *_TOOL_LABELS)


def _tool(name: str, members: Mapping[str, Any]) -> Tool:
    check_tool_type(name, members, "custom")
    if members.get("defer_loading"):
        raise not_built(name, "a tool that is loaded later (defer_loading)", (False,))
    if members.get("allowed_callers") not in (None, ["direct"]):
        raise not_built(name, "a tool that code calls (allowed_callers)", (["direct"],))
    odd = [key for key in members if key not in (*_TOOL_MEMBERS, "allowed_callers")]
    if odd:
        raise invalid_value(f"{name} has a tool with a member {odd[0][:64]!r}", name)
    if not isinstance(members.get("input_schema"), dict):
        raise invalid_value(f"{name} has a tool without input_schema; give a JSON Schema", name)
    return make_tool(
        name,
        name=members.get("name"),
        description=members.get("description"),
        parameters=members["input_schema"],
        strict=members.get("strict"),
    )


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
class ContextManagement:
    """`context_management`: only what changes nothing, since messages are taken as they are."""

    def check(self, name: str, value: object) -> object:
        if value in ({}, {"edits": []}, _KEPT_THINKING):
            return value
        raise not_built(name, "editing the context", ({"edits": []}, _KEPT_THINKING))

    def schema(self) -> Schema:
        return {"enum": [{}, {"edits": []}, _KEPT_THINKING]}
