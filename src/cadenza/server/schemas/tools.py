"""The fields of a body about tools, checked into a `ToolUse`.

Owns the shapes of tools and choices as OpenAI's chat API has them. Knows no notation of calls.
Invariant: a tool that is chosen is one of the tools.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from cadenza.frontend.answers import ToolUse
from cadenza.request import show
from cadenza.server.errors import invalid_value, not_built
from cadenza.server.schemas.body import further_members
from cadenza.server.schemas.field_types import Schema, members_of, refuse
from cadenza.server.schemas.unknown_members import unknown_members
from cadenza.structured import MAX_STRUCTURED_BYTES
from cadenza.text.answer_grammar import Tool

MAX_NAME_CHARS = 128
MAX_DESCRIPTION_CHARS = 32 << 10

CHOICES = ("none", "auto", "required")
_OTHER_WORDS = {"any": "required"}
"""What other APIs call a choice."""

MEMBERS_OF_TOOL: Mapping[str, Schema] = {
    "name": {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS},
    "description": {"type": ["string", "null"]},
    "parameters": {"type": ["object", "null"]},
    "strict": {"type": ["boolean", "null"]},
}

_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
_CHOICE = "tool_choice"
_WANTED = 'a list of tools such as {"type": "function", "function": {"name": …}}'


@dataclass(frozen=True, slots=True)
class Tools:
    """A list of functions."""

    def check(self, name: str, value: object) -> tuple[Tool, ...]:
        return checked_tools(name, value, nested_function)

    def schema(self) -> Schema:
        function = tool_schema(MEMBERS_OF_TOOL, ("name",))
        members = {
            "type": {"enum": ["function"]},
            "function": function,
            **{label: {} for label in _LABELS_BESIDE_FUNCTION},
        }
        return tools_schema(tool_schema(members, ("type", "function")))


@dataclass(frozen=True, slots=True)
class FlatTools:
    """A list of functions whose members lie beside their type, as in Responses."""

    def check(self, name: str, value: object) -> tuple[Tool, ...]:
        return checked_tools(name, value, flat_function)

    def schema(self) -> Schema:
        members = {"type": {"enum": ["function"]}, **MEMBERS_OF_TOOL}
        return tools_schema(tool_schema(members, ("type", "name")))


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """none, auto, required, or a function; checked into `none`, `auto`, `required`, or its name
    behind a colon."""

    def check(self, name: str, value: object) -> str:
        return _checked_choice(name, value, _named_function)

    def schema(self) -> Schema:
        named: Schema = {"type": "object", "required": ["type"]}
        return {"anyOf": [{"type": "string", "enum": [*CHOICES, *_OTHER_WORDS]}, named]}


@dataclass(frozen=True, slots=True)
class FlatToolChoice:
    """The same, where a function's name lies beside its type, as in Responses."""

    def check(self, name: str, value: object) -> str:
        return _checked_choice(name, value, lambda members: members)

    def schema(self) -> Schema:
        named: Schema = {"type": "object", "required": ["type", "name"]}
        return {"anyOf": [{"type": "string", "enum": [*CHOICES, *_OTHER_WORDS]}, named]}


def _named_function(members: dict[str, Any]) -> dict[str, Any]:
    """The object with the tool's name, which some clients write beside the type."""
    kind = str(members.get("type"))
    return members_of(members[kind]) if kind in members else members


def _checked_choice(
    name: str, value: object, named_in: Callable[[dict[str, Any]], dict[str, Any]]
) -> str:
    if isinstance(value, str) and value in (*CHOICES, *_OTHER_WORDS):
        return _OTHER_WORDS.get(value, value)
    if isinstance(value, dict):
        members = cast(dict[str, Any], value)
        if members.get("type") == "allowed_tools":
            raise not_built(name, "a choice of allowed tools")
        chosen = named_in(members).get("name")
        if members.get("type") in ("function", "custom") and isinstance(chosen, str) and chosen:
            return f":{chosen}"
    wanted = "none, auto, required, or a function with its name"
    raise refuse(name, cast(object, value), wanted)


def tool_use(
    tools: tuple[Tool, ...] | None, choice: str | None, is_parallel: bool
) -> ToolUse | None:
    """None where no tool may be called. Raises ApiError (400)."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid_value(
                "tool_choice asks for a call, but there are no tools", "tool_choice"
            )
        return None
    match choice:
        case "none":
            return None
        case None | "auto":
            return ToolUse(tools=tools, is_parallel=is_parallel)
        case "required":
            return ToolUse(tools=tools, choice="required", is_parallel=is_parallel)
        case _:
            named = choice.removeprefix(":")
    if named not in {tool.name for tool in tools}:
        raise invalid_value(
            f"tool_choice names {show(named)}, which is none of tools", "tool_choice"
        )
    return ToolUse(tools=tools, choice="required", named=named, is_parallel=is_parallel)


def has_constrained_calls(use: ToolUse | None) -> bool:
    """Whether an answer's calls have grammars, from their beginnings on at least."""
    return use is not None


def make_tool(
    field: str, *, name: object, description: object, parameters: object, strict: object
) -> Tool:
    """A checked tool. Raises ApiError (400) naming the field."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or set(name) - _NAME_CHARS:
        raise invalid_value(
            f"{field} has a function with the name {show(name)}; give 1 to {MAX_NAME_CHARS} "
            f"letters, digits, '_', '-' and '.'",
            field,
        )
    if description is not None and (
        not isinstance(description, str) or len(description) > MAX_DESCRIPTION_CHARS
    ):
        raise invalid_value(
            f"{field}: the description of {name} must be a text of at most "
            f"{MAX_DESCRIPTION_CHARS} characters",
            field,
        )
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid_value(f"{field}: the parameters of {name} must be a JSON Schema", field)
    if strict is not None and not isinstance(strict, bool):
        raise invalid_value(f"{field}: strict of {name} must be true or false", field)
    schema = cast(dict[str, Any] | None, parameters)
    if len(json.dumps(schema)) > MAX_STRUCTURED_BYTES:
        raise invalid_value(
            f"{field}: the parameters of {name} have over {MAX_STRUCTURED_BYTES} bytes", field
        )
    return Tool(name=name, description=description, parameters=schema, is_strict=bool(strict))


def checked_tools(
    name: str, value: object, read: Callable[[str, dict[str, Any]], Tool]
) -> tuple[Tool, ...]:
    """The tools of a list of objects, each of which `read` takes. Raises ApiError (400)."""
    if not isinstance(value, list):
        raise refuse(name, value, _WANTED)
    items = cast(list[object], value)
    tools: list[Tool] = []
    for item in items:
        if not isinstance(item, dict):
            raise refuse(name, item, _WANTED)
        tools.append(read(name, cast(dict[str, Any], item)))
    named: set[str] = set()
    for tool in tools:
        if tool.name in named:
            raise invalid_value(f"{name} has two tools with the name {tool.name}", name)
        named.add(tool.name)
    return tuple(tools)


def check_tool_type(name: str, members: Mapping[str, Any], *known: str) -> None:
    """Raises ApiError (400) naming a type of tool that is not known."""
    kind = members.get("type")
    if isinstance(kind, str) and kind not in known:
        advice = f"leave this tool out; those of the type {' or '.join(known)} are served"
        raise not_built(name, f"a tool of the type {show(kind)}", advice=advice)


def check_tool_members(name: str, members: Mapping[str, Any], *known: str) -> None:
    """Raises ApiError (400) naming a member of a tool that asks for what is not built, or one that
    is not known where the policy refuses it or its name is near a known one."""
    for member, (what, harmless) in _UNSUPPORTED_MEMBERS.items():
        if members.get(member) not in (None, harmless):
            raise not_built(name, f"{what} ({member})", (harmless,))
    unknown = unknown_members()
    for key, value in members.items():
        if value is None or key in known or key in _TOOL_LABELS or key in _UNSUPPORTED_MEMBERS:
            continue
        meant = unknown.suggestion(name, key, (*known, *_UNSUPPORTED_MEMBERS))
        if meant is not None or unknown.policy == "refuse":
            advice = "" if meant is None else f"; did you mean {meant}?"
            raise invalid_value(f"{name} has a tool with a member {show(key)}{advice}", name)
        unknown.ignore(f"{name}.{key}")


def tool_schema(members: Mapping[str, Schema], required: tuple[str, ...]) -> Schema:
    """The JSON Schema of an object that `check_tool_members` checks."""
    off = {name: {"enum": [harmless, None]} for name, (_, harmless) in _UNSUPPORTED_MEMBERS.items()}
    return {
        "type": "object",
        "properties": {**{label: {} for label in _TOOL_LABELS}, **off, **members},
        "required": list(required),
        "additionalProperties": further_members(),
    }


def tools_schema(tool: Schema) -> Schema:
    return {"type": "array", "items": tool}


_TOOL_LABELS = ("cache_control", "eager_input_streaming", "output_schema", "return")
"""`return` is what transformers writes of a Python function."""
_LABELS_BESIDE_FUNCTION = ("name", "strict")
_UNSUPPORTED_MEMBERS: Mapping[str, tuple[str, object]] = {
    "defer_loading": ("a tool that is loaded later", False),
    "allowed_callers": ("a tool that code calls", ["direct"]),
    "async": ("a tool whose result comes later", False),
}
"""What each asks for, and the value that does not."""


def nested_function(name: str, members: dict[str, Any]) -> Tool:
    """A function in a member of its own, as in chat. Raises ApiError (400)."""
    check_tool_type(name, members, "function")
    if not isinstance(members.get("function"), dict):
        raise refuse(name, members, _WANTED)
    known = ("type", "function", *_LABELS_BESIDE_FUNCTION)
    check_tool_members(name, members, *known)
    function = cast(dict[str, Any], members["function"])
    check_tool_members(name, function, *MEMBERS_OF_TOOL)
    return _function(name, function)


def flat_function(name: str, members: dict[str, Any]) -> Tool:
    """A function whose members lie beside its type. Raises ApiError (400)."""
    check_tool_type(name, members, "function")
    if members.get("type") != "function":
        raise refuse(name, members, 'tools such as {"type": "function", "name": …}')
    check_tool_members(name, members, "type", *MEMBERS_OF_TOOL)
    return _function(name, members)


def _function(name: str, members: Mapping[str, Any]) -> Tool:
    return make_tool(
        name,
        name=members.get("name"),
        description=members.get("description"),
        parameters=members.get("parameters"),
        strict=members.get("strict"),
    )
