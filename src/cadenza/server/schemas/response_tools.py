"""Tools that are no functions: custom ones, which take a text, and those in namespaces.

Owns how each becomes a function that a chat template knows, and what it was. Knows no notation of
calls. Invariant: a call of a tool is returned under the name and in the form that the client gave.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from cadenza.request import show
from cadenza.server.errors import invalid_value
from cadenza.server.schemas.field_types import Schema, members_of, refuse
from cadenza.server.schemas.tools import (
    MEMBERS_OF_TOOL,
    FlatTools,
    Tools,
    check_tool_members,
    checked_tools,
    flat_function,
    make_tool,
    nested_function,
    tool_schema,
    tools_schema,
)
from cadenza.server.schemas.unknown_members import unknown_members
from cadenza.structured import MAX_STRUCTURED_BYTES
from cadenza.text.answer_grammar import Tool
from cadenza.text.input_grammar import InputGrammar

HOSTED = ("local_shell", "web_search", "web_search_preview", "image_generation")
"""Tools that only OpenAI's servers run: without them a model does what it can."""

_INPUT = "input"
_TEXT_INPUT: Mapping[str, Any] = {
    "type": "object",
    "properties": {_INPUT: {"type": "string"}},
    "required": [_INPUT],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTool(Tool):
    """A tool as a function.

    Args:
        own_name: the one that the client gave; `name` has the namespace before it.
        given: the object of a custom tool, or of the namespace, which a response repeats.
    """

    kind: Literal["function", "custom"] = "function"
    own_name: str
    namespace: str | None = None
    given: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """The type of the field `tools`."""

    def check(self, name: str, value: object) -> tuple[ResponseTool, ...]:
        items: object = value
        if isinstance(value, list):
            items = [*_flattened(name, cast(list[object], value))]
        return cast(tuple[ResponseTool, ...], checked_tools(name, items, _read))

    def schema(self) -> Schema:
        members = {"type": {"enum": ["custom"]}, **MEMBERS_OF_TOOL, "format": {"type": "object"}}
        del members["parameters"], members["strict"]
        custom = tool_schema(members, ("type", "name"))
        hosted: Schema = {"type": "object", "properties": {"type": {"enum": [*HOSTED]}}}
        space: Schema = {
            "type": "object",
            "properties": {
                "type": {"enum": ["namespace"]},
                "name": {"type": "string"},
                "tools": FlatTools().schema(),
            },
            "required": ["type", "name", "tools"],
        }
        kinds = [FlatTools().schema()["items"], custom, space, hosted]
        return tools_schema({"anyOf": kinds})


@dataclass(frozen=True, slots=True)
class ChatTools:
    """`tools` of a chat: functions, and custom tools."""

    def check(self, name: str, value: object) -> tuple[Tool, ...]:
        return checked_tools(name, value, _read_nested)

    def schema(self) -> Schema:
        members = {"type": {"enum": ["custom"]}, "custom": {"type": "object"}}
        custom = tool_schema(members, ("type", "custom"))
        return tools_schema({"anyOf": [Tools().schema()["items"], custom]})


def _read_nested(name: str, members: dict[str, Any]) -> Tool:
    if members.get("type") != "custom":
        return nested_function(name, members)
    check_tool_members(name, members, "type", "custom")
    custom = members.get("custom")
    if not isinstance(custom, dict):
        raise refuse(name, members, 'tools such as {"type": "custom", "custom": {"name": …}}')
    return _custom(name, cast(dict[str, Any], custom))


def is_custom(tool: Tool) -> bool:
    return isinstance(tool, ResponseTool) and tool.kind == "custom"


def flat_name(namespace: str | None, name: str) -> str:
    """The name of a function in a namespace as a function of its own."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def text_of_input(arguments: str) -> str:
    """The text that a custom tool is called with."""
    try:
        found = members_of(json.loads(arguments)).get(_INPUT)
    except ValueError:
        return arguments
    return found if isinstance(found, str) else arguments


def arguments_of_input(text: str) -> str:
    """The arguments of a call with a text."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def _flattened(name: str, value: list[object]) -> Iterator[object]:
    """The tools, those of a namespace in its place, without those that are run elsewhere."""
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
                yield {**members_of(each), _SPACE: members}
        else:
            yield item


_SPACE = "namespace of the tool"
"""The key under which `_read` finds it; the spaces keep it from being a member of a client's."""


def _read(name: str, members: dict[str, Any]) -> ResponseTool:
    own = {key: value for key, value in members.items() if key != _SPACE}
    space = cast(dict[str, Any] | None, members.get(_SPACE))
    if own.get("type") == "custom":
        return _custom(name, own)
    tool = flat_function(name, own)
    namespace = None if space is None else cast(str, space["name"])
    checked = make_tool(
        name,
        name=flat_name(namespace, tool.name),
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.is_strict,
    )
    return ResponseTool(
        name=checked.name,
        description=tool.description,
        parameters=tool.parameters,
        is_strict=tool.is_strict,
        own_name=tool.name,
        namespace=namespace,
        given=space,
    )


def _custom(name: str, members: dict[str, Any]) -> ResponseTool:
    check_tool_members(name, members, "type", "name", "description", "format")
    form = members.get("format") or {"type": "text"}
    kind = members_of(form).get("type")
    if kind not in ("text", "grammar"):
        raise invalid_value(f"{name} has a custom tool with the format {show(form)}", name)
    grammar = None if kind == "text" else _grammar(name, members_of(form))
    tool = make_tool(
        name,
        name=members.get("name"),
        description=members.get("description"),
        parameters=_TEXT_INPUT if grammar is None else _described(grammar),
        strict=None,
    )
    return ResponseTool(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        input=grammar,
        kind="custom",
        own_name=tool.name,
        given=members,
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
    """The schema of a text, which tells the model of its grammar."""
    what = "a grammar in Lark's notation" if grammar.syntax == "lark" else "an expression"
    told = f"A text that matches {what}:\n{grammar.definition}"
    return {**_TEXT_INPUT, "properties": {_INPUT: {"type": "string", "description": told}}}
