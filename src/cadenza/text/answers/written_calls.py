"""Calls and descriptions of tools as texts of messages, for chat templates that pass over them.

Invariant: a turn's form does not depend on later turns.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from cadenza.text.answers.generic_tools import tools_described
from cadenza.text.answers.tool_calls import ToolFormat
from cadenza.text.tokens.provenance import MarkedText, OwnText, written_by_template

Message = Mapping[str, Any]


def with_listed_calls(messages: Sequence[Message], format: ToolFormat) -> list[Message]:
    """The calls of a turn after its text, as a list of Python's calls between the marks."""
    return [_listed(message, format) for message in messages]


def with_description(
    messages: Sequence[Message], tools: Sequence[Message], format: ToolFormat
) -> list[Message]:
    """The system's text describes the tools, with a call as the format's example has it."""
    before, behind = tools_described(tools)
    told = MarkedText(before) + written_by_template(format.example) + behind
    if not messages or messages[0].get("role") not in ("system", "developer"):
        return [{"role": "system", "content": OwnText(told)}, *messages]
    first = messages[0]
    own = first.get("content")
    text = own if isinstance(own, str) else ""
    content = OwnText(MarkedText(f"{text}\n\n") + told if text else told)
    return [{**first, "content": content}, *messages[1:]]


def _listed(message: Message, format: ToolFormat) -> Message:
    calls, text = message.get("tool_calls"), message.get("content")
    if not isinstance(calls, list) or not calls or not isinstance(text, str | None):
        return message
    listed = ", ".join(_calls(cast(list[Any], calls)))
    begin, end = written_by_template(format.begin), written_by_template(format.end)
    content = OwnText(MarkedText(text or "") + begin + f"[{listed}]" + end)
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": content}


def _calls(calls: list[Any]) -> Iterator[str]:
    for call in calls:
        if not isinstance(call, Mapping):
            continue
        members = cast(Mapping[str, Any], call)
        given = members.get("function")
        function = cast(Mapping[str, Any], given) if isinstance(given, Mapping) else members
        arguments: object = function.get("arguments")
        if isinstance(arguments, Mapping):
            given = cast(Mapping[str, Any], arguments)
            written = ", ".join(f"{key}={_python(value)}" for key, value in given.items())
        else:
            written = arguments if isinstance(arguments, str) else ""
        yield f"{function.get('name', '')}({written})"


def _python(value: object) -> str:
    match value:
        case bool() | None:
            return repr(value)
        case dict():
            members = cast(dict[str, object], value).items()
            return (
                "{" + ", ".join(f"{_python(key)}: {_python(each)}" for key, each in members) + "}"
            )
        case list():
            return "[" + ", ".join(map(_python, cast(list[object], value))) + "]"
        case _:
            return json.dumps(value, ensure_ascii=False)
