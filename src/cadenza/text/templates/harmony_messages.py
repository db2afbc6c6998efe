"""Conversations in the form that gpt-oss's chat template has room for.

That template renders one call of a message, only the first system text, and either the text or the
reasoning beside a call; it passes over the others, or refuses them. Owns what is changed so that
all of a conversation is rendered. Knows no template. Invariant: no text and no call is lost, and
the form of a conversation begins with that of each of its earlier turns.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from cadenza.text.templates.message_forms import Message, systems_in_turns

_REASONING = ("reasoning_content", "thinking", "reasoning")
_BETWEEN = "\n\n"


def harmony_messages(given: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Each call is a message of its own, with its result behind it; the text of a turn with calls
    follows its reasoning; a later system text stands in its place in a user's turn, and so does a
    result without a call before it."""
    placed = systems_in_turns([dict(message) for message in given], into_results=False)
    found: list[Message] = []
    place, has_called = 0, False
    while place < len(placed):
        message = placed[place]
        place += 1
        calls, role = message.get("tool_calls"), message.get("role")
        if role != "assistant" or not isinstance(calls, list) or not calls:
            has_called = has_called and role != "assistant"
            is_orphan = role == "tool" and not has_called
            found.append(_told(message) if is_orphan else _without_calls(message))
            continue
        has_called = True
        results: list[Message] = []
        while place < len(placed) and placed[place].get("role") == "tool":
            results.append(placed[place])
            place += 1
        found += _one_by_one(_with_thought(message), cast(list[Any], calls), results)
    return found


def _without_calls(message: Message) -> Message:
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": message.get("content") or ""}


def _told(result: Message) -> Message:
    """A result as the user tells it."""
    name, text = result.get("name"), result.get("content") or ""
    told = f"Result of {name}: " if isinstance(name, str) and name else "Result: "
    return {"role": "user", "content": told + text if isinstance(text, str) else text}


def harmony_tools(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Each function has a description, which the template reads."""
    return [_described(tool) for tool in tools]


def _described(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    return {**tool, "function": {"description": "", **cast(Mapping[str, Any], function)}}


def _with_thought(message: Message) -> Message:
    """The message with its text behind its reasoning, where it has both."""
    key = next((key for key in _REASONING if message.get(key)), None)
    text = message.get("content")
    if key is None or not isinstance(text, str) or not text.strip():
        return message
    return {**message, key: f"{message[key]}{_BETWEEN}{text}", "content": ""}


def _one_by_one(message: Message, calls: list[Any], results: list[Message]) -> Iterator[Message]:
    """A message for each call, and what belongs to it behind it; results that name no call follow
    in their order."""
    left = [*results]
    own = {key: value for key, value in message.items() if key not in ("content", *_REASONING)}
    for place, call in enumerate(calls):
        yield {**(own if place else message), "tool_calls": [call]}
        result = _result_of(call, left)
        if result is not None:
            left.remove(result)
            yield result
    yield from left


def _result_of(call: Any, results: list[Message]) -> Message | None:
    """By its id; else the first one without an id."""
    given = cast(Mapping[str, Any], call).get("id") if isinstance(call, Mapping) else None
    named = (each for each in results if given and each.get("tool_call_id") == given)
    unnamed = (each for each in results if not each.get("tool_call_id"))
    return next(named, None) or next(unnamed, None)
