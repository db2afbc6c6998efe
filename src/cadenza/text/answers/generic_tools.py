"""Tools as messages, for a chat template that has no room for them. Invariant: what
`generic_messages` returns has no tools, calls or results, so that every template can render it, and
what is in front of a turn does not depend on later turns.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from cadenza.text.answers.tool_calls import ToolFormat

Message = Mapping[str, object]

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
    """A conversation in which the system's text describes the tools, if there are any, and results
    are user turns. A call is shown with its result, not as the assistant's turn: small models
    repeat a turn that they have written, and answer with the same call again."""
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
            told = " ".join(("Result of", *filter(None, call))) if call.name else "Result"
            text = f"{told}: {_text(each.get('content'))}"
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
