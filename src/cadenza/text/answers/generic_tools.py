"""Tools and calls as texts of messages, for chat templates that have no place for them or pass over
them. Invariants: what `generic_messages` returns has no tools, calls or results, so that every
template can render it; a turn's form does not depend on later turns.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from cadenza.text.answers.tool_format import ToolFormat
from cadenza.text.tokens.provenance import MarkedText, OwnText, written_by_template

Message = Mapping[str, Any]

_SYSTEM_ROLES = ("system", "developer")
_CALL = '{"name": "tool name", "arguments": {"parameter": "value"}}'


class _Call(NamedTuple):
    name: str
    arguments: str


def has_calls(messages: Sequence[Message]) -> bool:
    return any(each.get("tool_calls") or each.get("role") == "tool" for each in messages)


def generic_messages(
    messages: Sequence[Message], tools: Sequence[Message] | None, format: ToolFormat
) -> list[Message]:
    """The system's text describes the tools, if there are any, and results are user turns. A call
    is shown with its result, not as the assistant's turn: small models repeat a turn that they have
    written."""
    shown = [*_shown(messages)]
    if not tools:
        return shown
    instruction = _instruction(tools, format)
    if shown and shown[0].get("role") in _SYSTEM_ROLES:
        own = _text(shown[0].get("content"))
        return [{**shown[0], "content": f"{own}\n\n{instruction}"}, *shown[1:]]
    return [{"role": "system", "content": instruction}, *shown]


def _instruction(tools: Sequence[Message], format: ToolFormat) -> str:
    call = _CALL.replace("arguments", format.arguments)
    before, behind = tools_described(tools)
    return f"{before}{format.opening}{call}{format.closing}{behind}"


def tools_described(tools: Sequence[Message]) -> tuple[str, str]:
    listed = json.dumps([each.get("function", each) for each in tools], ensure_ascii=False)
    before = (
        f"You are a helpful assistant. You can use these tools:\n{listed}\n"
        f"To use a tool, reply only with "
    )
    return before, (". When you have the results that you need, answer the user in plain words.")


def _shown(messages: Sequence[Message]) -> Iterator[Message]:
    called: dict[str, _Call] = {}
    for each in messages:
        if each.get("role") == "tool":
            call = called.get(str(each.get("tool_call_id"))) or _Call(str(each.get("name", "")), "")
            label = " ".join(("Result of", *filter(None, call))) if call.name else "Result"
            text = f"{label}: {_text(each.get('content'))}"
            others = _other_parts(each.get("content"))
            yield {"role": "user", "content": [*others, _part(text)] if others else text}
        elif each.get("tool_calls"):
            calls = cast(Sequence[dict[str, Any]], each["tool_calls"])
            called |= {str(call.get("id")): _call_of(call) for call in calls}
            rest = {key: value for key, value in each.items() if key != "tool_calls"}
            if _text(rest.get("content")):
                yield rest
        else:
            yield each


def _call_of(call: Mapping[str, Any]) -> _Call:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return _Call(str(function.get("name", "")), written)


def _part(text: str) -> Message:
    return {"type": "text", "text": text}


def _other_parts(content: object) -> list[object]:
    parts = cast(Sequence[object], content) if isinstance(content, list | tuple) else ()
    kinds = [cast(Message, part).get("type") if isinstance(part, Mapping) else "" for part in parts]
    return [part for part, kind in zip(parts, kinds, strict=True) if kind in ("image", "image_url")]


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = cast(Sequence[object], content) if isinstance(content, list | tuple) else ()
    texts = [cast(Message, part).get("text") for part in parts if isinstance(part, Mapping)]
    return "".join(text for text in texts if isinstance(text, str))


def with_listed_calls(messages: Sequence[Message], format: ToolFormat) -> list[Message]:
    """The calls of a turn after its text, as a list of Python's calls between marks."""
    return [_listed(message, format) for message in messages]


def with_description(
    messages: Sequence[Message], tools: Sequence[Message], format: ToolFormat
) -> list[Message]:
    """The system's text describes the tools, with a call as the format's example has it."""
    before, behind = tools_described(tools)
    described = MarkedText(before) + written_by_template(format.example) + behind
    if not messages or messages[0].get("role") not in ("system", "developer"):
        return [{"role": "system", "content": OwnText(described)}, *messages]
    first = messages[0]
    own = first.get("content")
    text = own if isinstance(own, str) else ""
    content = OwnText(MarkedText(f"{text}\n\n") + described if text else described)
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
