"""Results of calls in the message that made them, as the first templates of Gemma 4 read them
(`tool_responses`, no turn for the role `tool`). Invariant: no result is lost, and the form of a
conversation begins with that of each of its earlier turns.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from cadenza.text.templates.message_forms import Message


def reads_responses_only(template: str) -> bool:
    """Whether a template's source reads results in the message with the calls, and nowhere else."""
    return "tool_responses" in template and "tool_call_id" not in template


def with_responses(given: Sequence[Mapping[str, Any]]) -> list[Message]:
    """A result after a message with calls is in that message, under its function's name; one after
    another message stays as it is."""
    found: list[Message] = []
    for message in given:
        last = found[-1] if found else {}
        if message.get("role") == "tool" and last.get("tool_calls"):
            responses = [*last.get("tool_responses", ()), _response(message, last["tool_calls"])]
            found[-1] = {**last, "tool_responses": responses}
        else:
            found.append(dict(message))
    return found


def _response(result: Mapping[str, Any], calls: object) -> dict[str, Any]:
    called, call_id = dict(_names(calls)), result.get("tool_call_id")
    name = called.get(call_id) if isinstance(call_id, str) else None
    name = name or result.get("name") or "unknown"
    content = result.get("content")
    return {"name": name, "response": "" if content is None else content}


def _names(calls: object) -> Iterator[tuple[str, object]]:
    for call in cast(Sequence[object], calls) if isinstance(calls, list) else ():
        if not isinstance(call, Mapping):
            continue
        members = cast(Mapping[str, Any], call)
        function = members.get("function")
        call_id: object = members.get("id")
        if isinstance(call_id, str) and call_id and isinstance(function, Mapping):
            yield call_id, cast(Mapping[str, Any], function).get("name")
