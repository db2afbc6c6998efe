"""Conversations as gpt-oss's chat template can render them: it takes one call of a message, the
first system text only, and the text or the reasoning beside a call. Invariant: no text and no call
is lost, and the form of a conversation begins with that of each of its earlier turns.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from cadenza.outputs import OutputPart
from cadenza.text.answers.harmony import ASSISTANT, END, HarmonyParser
from cadenza.text.answers.part_parser import REASONING_FORMATS, PartPlan
from cadenza.text.answers.tool_calls import HARMONY
from cadenza.text.templates.message_forms import Message, systems_in_turns

_REASONING = ("reasoning_content", "thinking", "reasoning")
_BETWEEN = "\n\n"
_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?"
    r"((?:\s?to=[^\s<]+)?<\|channel\|>[^<]{0,64}(?:<\|constrain\|>[^<]{0,64})?<\|message\|>)"
)
_PLAN = PartPlan(reasoning=REASONING_FORMATS["harmony"], tools=HARMONY)


def harmony_messages(given: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Each call is a message of its own, with its result after it; the text of a turn with calls
    follows its reasoning; a later system text, or a result without a call before it, stands in a
    user's turn."""
    placed = systems_in_turns([dict(message) for message in given], into_results=False)
    found: list[Message] = []
    place, has_called = 0, False
    while place < len(placed):
        message = _without_headers(placed[place])
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


def _without_headers(message: Message) -> Message:
    """An assistant's texts with headers, which an earlier server left there, as reasoning, text and
    calls."""
    if message.get("role") != "assistant":
        return message
    found = {**message}
    for key in (key for key in _REASONING if _has_header(message.get(key))):
        found[key] = _BETWEEN.join(part.text for part in _parts(message[key]))
    if not _has_header(message.get("content")):
        return found
    parts = _parts(message["content"])
    key = next((key for key in _REASONING if found.get(key)), _REASONING[0])
    thoughts = [part.text for part in parts if part.kind == "reasoning"]
    told = [part.text for part in parts if part.kind == "content"]
    calls = [
        {"type": "function", "function": {"name": part.name, "arguments": json.loads(part.text)}}
        for part in parts
        if part.kind == "tool_call"
    ]
    found["content"] = _BETWEEN.join(told)
    if thoughts:
        found[key] = _BETWEEN.join(filter(None, (found.get(key), *thoughts)))
    if calls:
        found["tool_calls"] = [*(found.get("tool_calls") or ()), *calls]
    return found


def _has_header(text: object) -> bool:
    return isinstance(text, str) and _HEADER.search(text) is not None


def _parts(text: str) -> Sequence[OutputPart]:
    parser = HarmonyParser(_PLAN)
    whole = _HEADER.sub(rf"{END}{ASSISTANT}\1", text) + END
    return [part for part in (*parser.push(whole), *parser.flush()) if part.text.strip()]


def _without_calls(message: Message) -> Message:
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": message.get("content") or ""}


def _told(result: Message) -> Message:
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
    """The message with its text after its reasoning, where it has both."""
    key = next((key for key in _REASONING if message.get(key)), None)
    text = message.get("content")
    if key is None or not isinstance(text, str) or not text.strip():
        return message
    return {**message, key: f"{message[key]}{_BETWEEN}{text}", "content": ""}


def _one_by_one(message: Message, calls: list[Any], results: list[Message]) -> Iterator[Message]:
    """A message for each call, then what belongs to it; results that name no call follow in their
    order."""
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
    given = cast(Mapping[str, Any], call).get("id") if isinstance(call, Mapping) else None
    named = (each for each in results if given and each.get("tool_call_id") == given)
    unnamed = (each for each in results if not each.get("tool_call_id"))
    return next(named, None) or next(unnamed, None)
