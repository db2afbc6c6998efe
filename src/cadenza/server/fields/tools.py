"""Tools, checked into a `ToolUse`: those of chats, which take any API's form, and what all APIs
make of theirs; custom and namespaced ones become functions for the chat template. Invariant: a
chosen tool is one of the tools; a call is returned under the client's name and in its form."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from cadenza.frontend.answers import ToolUse
from cadenza.request import show
from cadenza.server.errors import invalid_value, not_built
from cadenza.server.fields.body import further_members, unknown_members
from cadenza.server.fields.types import (
    CheckedBy,
    OneOf,
    Schema,
    array_schema,
    checked_dict,
    field_type,
    members_of,
    object_schema,
    refuse,
)
from cadenza.structured import MAX_STRUCTURED_BYTES
from cadenza.text.answers.input_grammar import InputGrammar
from cadenza.text.answers.tool_format import Tool

MAX_NAME_CHARS = 128
MAX_DESCRIPTION_CHARS = 32 << 10

_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")

_MEMBERS: Mapping[str, Schema] = {
    "name": {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS},
    "description": {"type": ["string", "null"]},
    "parameters": {"type": ["object", "null"]},
    "input_schema": {"type": ["object", "null"]},
    "strict": {"type": ["boolean", "null"]},
}
MESSAGE_TOOL: Mapping[str, Schema] = {
    "type": {"enum": ["custom", None]},
    "name": {"type": "string", "minLength": 1},
    "description": {"type": ["string", "null"]},
    "input_schema": {"type": "object"},
    "input_examples": {"type": ["array", "null"], "items": {"type": "object"}},
    "strict": {"type": ["boolean", "null"]},
}
_TOOL_LABELS = ("cache_control", "eager_input_streaming", "output_schema", "return")
"""transformers writes `return` for a Python function."""
_LABELS_BESIDE_FUNCTION = ("name", "strict")
_UNSUPPORTED_MEMBERS: Mapping[str, tuple[str, object]] = {
    "defer_loading": ("a tool that is loaded later", False),
    "allowed_callers": ("a tool that code calls", ["direct"]),
    "async": ("a tool whose result comes later", False),
}
"""The feature that each asks for, and the value that does not ask for it."""

_INPUT = "input"
_TEXT_INPUT: Mapping[str, Any] = {
    "type": "object",
    "properties": {_INPUT: {"type": "string"}},
    "required": [_INPUT],
    "additionalProperties": False,
}
_WANTED = 'a list of tools such as {"type": "function", "function": {"name": …}}'


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTool(Tool):
    """A tool as a function. `own_name`: the one that the client gave; `name` has the namespace
    before it. `given`: the object of a custom tool, or of the namespace, which a response
    repeats."""

    kind: Literal["function", "custom"] = "function"
    own_name: str
    namespace: str | None = None
    given: Mapping[str, Any] | None = None


def is_custom(tool: Tool) -> bool:
    return isinstance(tool, ResponseTool) and tool.kind == "custom"


def flat_name(namespace: str | None, name: str) -> str:
    """The name of a function in a namespace as a function of its own."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def text_of_input(arguments: str) -> str:
    try:
        found = members_of(json.loads(arguments)).get(_INPUT)
    except ValueError:
        return arguments
    return found if isinstance(found, str) else arguments


def arguments_of_input(text: str) -> str:
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def nested_schema() -> Schema:
    members: dict[str, Schema] = {
        "type": {"enum": ["function"]},
        "function": tool_schema(_MEMBERS, ("name",)),
        **{name: {} for name in _LABELS_BESIDE_FUNCTION},
    }
    return tool_schema(members, ("type", "function"))


def flat_schema() -> Schema:
    return tool_schema({"type": {"enum": ["function"]}, **_MEMBERS}, ("type", "name"))


def flat_custom_schema() -> Schema:
    members = {"type": {"enum": ["custom"]}, **_MEMBERS, "format": {"type": "object"}}
    del members["parameters"], members["input_schema"], members["strict"]
    return tool_schema(members, ("type", "name"))


def _chat_schema() -> Schema:
    members = {"type": {"enum": ["custom"]}, "custom": {"type": "object"}}
    nested = [nested_schema(), tool_schema(members, ("type", "custom"))]
    message = tool_schema(MESSAGE_TOOL, ("name", "input_schema"))
    return {"anyOf": [*nested, flat_schema(), flat_custom_schema(), message]}


def tool_schema(members: Mapping[str, Schema], required: tuple[str, ...]) -> Schema:
    off = {name: {"enum": [harmless, None]} for name, (_, harmless) in _UNSUPPORTED_MEMBERS.items()}
    known: dict[str, Schema] = {**{name: {} for name in _TOOL_LABELS}, **off, **members}
    return object_schema(known, required, additionalProperties=further_members())


def checked_tools(
    name: str, value: object, read: Callable[[str, dict[str, Any]], Tool]
) -> tuple[Tool, ...]:
    if not isinstance(value, list):
        raise refuse(name, value, _WANTED)
    items = cast(list[object], value)
    tools = tuple([read(name, checked_dict(name, item, _WANTED)) for item in items])
    named: set[str] = set()
    for tool in tools:
        if tool.name in named:
            raise invalid_value(f"{name} has two tools with the name {tool.name}", name)
        named.add(tool.name)
    return tools


@field_type(lambda: array_schema(nested_schema()))
def function_tools(name: str, value: object) -> tuple[Tool, ...]:
    return checked_tools(name, value, _nested_function)


@field_type(lambda: array_schema(_chat_schema()))
def chat_tools(name: str, value: object) -> tuple[Tool, ...]:
    return checked_tools(name, value, _nested_tool)


NAMESPACE = "namespace of the tool"
"""The key under which `flat_tool` finds it; the blanks keep it from being a client's member."""


def _nested_tool(name: str, members: dict[str, Any]) -> Tool:
    """A tool of a chat, or one in the form of responses or messages, as agents send them here."""
    kind = members.get("type")
    if isinstance(members.get("input_schema"), dict) and kind in (None, "custom"):
        return message_tool(name, members)
    if kind in ("function", "custom") and kind not in members and "name" in members:
        return flat_tool(name, members)
    if kind != "custom":
        return _nested_function(name, members)
    _check_members(name, members, "type", "custom")
    custom = members.get("custom")
    if not isinstance(custom, dict):
        raise refuse(name, members, 'tools such as {"type": "custom", "custom": {"name": …}}')
    return _custom(name, cast(dict[str, Any], custom))


def _nested_function(name: str, members: dict[str, Any]) -> Tool:
    _check_type(name, members, "function")
    if not isinstance(members.get("function"), dict):
        raise refuse(name, members, _WANTED)
    _check_members(name, members, "type", "function", *_LABELS_BESIDE_FUNCTION)
    function: dict[str, Any] = members["function"]
    if function.get("name") is None and members.get("name") is not None:
        function = {**function, "name": members["name"]}
    _check_members(name, function, *_MEMBERS)
    return Tool(**_facts(name, function, _parameters_of(name, function)))


def _parameters_of(name: str, function: Mapping[str, Any]) -> object:
    """Some clients write them under the name of the messages API. Raises ApiError (400)."""
    own, other = function.get("parameters"), function.get("input_schema")
    if own is not None and other is not None and own != other:
        raise invalid_value(f"{name}: parameters and input_schema differ; give one of them", name)
    return other if own is None else own


def flat_tool(name: str, members: dict[str, Any]) -> ResponseTool:
    """A function whose members are next to its type, or a custom tool."""
    own = {key: value for key, value in members.items() if key != NAMESPACE}
    space = cast(dict[str, Any] | None, members.get(NAMESPACE))
    if own.get("type") == "custom":
        return _custom(name, own)
    _check_type(name, own, "function")
    if isinstance(own.get("function"), dict):  # as in chat
        _check_members(name, own, "type", "function", *_LABELS_BESIDE_FUNCTION)
        beside = {key: own[key] for key in _LABELS_BESIDE_FUNCTION if key in own}
        own = {**beside, **cast(dict[str, Any], own["function"]), "type": "function"}
    if own.get("type") != "function":
        raise refuse(name, own, 'tools such as {"type": "function", "name": …}')
    _check_members(name, own, "type", *_MEMBERS)
    facts = _facts(name, own, _parameters_of(name, own))
    namespace = None if space is None else cast(str, space["name"])
    flat = _facts(name, {**own, "name": flat_name(namespace, facts["name"])}, facts["parameters"])
    return ResponseTool(**flat, own_name=facts["name"], namespace=namespace, given=space)


def message_tool(name: str, members: dict[str, Any]) -> Tool:
    _check_type(name, members, "custom")
    _check_members(name, members, *MESSAGE_TOOL)
    if not isinstance(members.get("input_schema"), dict):
        raise invalid_value(f"{name} has a tool without input_schema; give a JSON Schema", name)
    examples = _examples(name, members.get("input_examples"))
    return Tool(**_facts(name, members, {**members["input_schema"], **examples}))


def _examples(name: str, value: object) -> dict[str, Any]:
    """As the JSON Schema keyword, which constrains nothing; templates show it with the schema."""
    if value in (None, []):
        return {}
    if not isinstance(value, list) or not all(
        isinstance(each, dict) for each in cast(list[object], value)
    ):
        raise invalid_value(f"{name} has input_examples that are no list of objects", name)
    return {"examples": value}


def _custom(name: str, members: dict[str, Any]) -> ResponseTool:
    _check_members(name, members, "type", "name", "description", "format")
    form = members.get("format") or {"type": "text"}
    kind = members_of(form).get("type")
    if kind not in ("text", "grammar"):
        raise invalid_value(f"{name} has a custom tool with the format {show(form)}", name)
    grammar = None if kind == "text" else _grammar(name, members_of(form))
    parameters = _TEXT_INPUT if grammar is None else _described(grammar)
    facts = _facts(name, {**members, "strict": None}, parameters)
    return ResponseTool(
        **facts, own_name=facts["name"], kind="custom", input=grammar, given=members
    )


def _grammar(name: str, form: dict[str, Any]) -> InputGrammar:
    """Of a format; chat has its members within one more object. Raises ApiError (400)."""
    given = members_of(form.get("grammar")) or form
    syntax, definition = given.get("syntax"), given.get("definition")
    if syntax not in ("lark", "regex"):
        raise invalid_value(
            f"{name} has a custom tool with a grammar of the syntax {show(syntax)}; give lark or "
            f"regex",
            name,
        )
    if not isinstance(definition, str) or not definition.strip():
        raise invalid_value(
            f"{name} has a custom tool with a grammar without a definition; give it as a text", name
        )
    if len(definition.encode(errors="replace")) > MAX_STRUCTURED_BYTES:
        raise invalid_value(
            f"{name}: the definition of a grammar has over {MAX_STRUCTURED_BYTES} bytes", name
        )
    return InputGrammar(syntax=syntax, definition=definition)


def _described(grammar: InputGrammar) -> Mapping[str, Any]:
    what = "a grammar in Lark's notation" if grammar.syntax == "lark" else "an expression"
    told = f"A text that matches {what}:\n{grammar.definition}"
    return {**_TEXT_INPUT, "properties": {_INPUT: {"type": "string", "description": told}}}


def _facts(field: str, members: Mapping[str, Any], parameters: object) -> dict[str, Any]:
    name, description, strict = (members.get(key) for key in ("name", "description", "strict"))
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
    return {
        "name": name,
        "description": description,
        "parameters": schema,
        "is_strict": bool(strict),
    }


def _check_type(name: str, members: Mapping[str, Any], known: str) -> None:
    kind = members.get("type")
    if isinstance(kind, str) and kind != known:
        advice = f"leave this tool out; those of the type {known} are served"
        raise not_built(name, f"a tool of the type {show(kind)}", advice=advice)


def _check_members(name: str, members: Mapping[str, Any], *known: str) -> None:
    """Raises ApiError (400) naming a member that is not built, or unknown and refused by the
    policy, or near a known name."""
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


CHOICES = ("none", "auto", "required")
OTHER_WORDS = {"any": "required"}  # other APIs' words


def choice_type(
    required: tuple[str, ...], named_in: Callable[[dict[str, Any]], dict[str, Any]]
) -> CheckedBy[str]:
    """none, auto, required, or an object with the `required` members; checked into these words or
    the tool's name after a colon."""
    named: Schema = {"type": "object", "required": [*required]}

    @field_type({"anyOf": [OneOf((*CHOICES, *OTHER_WORDS)).schema(), named]})
    def choice(name: str, value: object) -> str:
        if isinstance(value, str) and value in (*CHOICES, *OTHER_WORDS):
            return OTHER_WORDS.get(value, value)
        members = members_of(value)
        if members.get("type") == "allowed_tools":
            raise not_built(name, "a choice of allowed tools")
        chosen = named_in(members).get("name")
        if members.get("type") in ("function", "custom") and isinstance(chosen, str) and chosen:
            return f":{chosen}"
        raise refuse(name, value, "none, auto, required, or a function with its name")

    return choice


def _named_function(members: dict[str, Any]) -> dict[str, Any]:
    """The object with the tool's name, which some clients write next to the type."""
    kind = str(members.get("type"))
    return members_of(members[kind]) if kind in members else members


chat_tool_choice = choice_type(("type",), _named_function)


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
