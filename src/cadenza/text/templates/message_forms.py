"""Further forms of a conversation: for chat templates that refuse the given one or read results
only in the message with the calls, and without what agents change from call to call
(`stable_messages`). Invariant: no text or result is lost or moved over another turn, and the form
of a conversation begins with that of each of its earlier turns, so that a prefix cache finds
them."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

Message = dict[str, Any]
_BETWEEN = "\n\n"


class Form(NamedTuple):
    """A conversation in another form, and in words what was changed."""

    change: str
    messages: list[Message]


def other_forms(given: Sequence[Mapping[str, Any]]) -> Iterator[Form]:
    """Those with the least changes first; none that is the given one."""
    tried: list[list[Message]] = [[dict(message) for message in given]]
    for form in _forms(tried[0]):
        if form.messages not in tried:
            tried.append(form.messages)
            yield form


def _forms(given: list[Message]) -> Iterator[Form]:
    objects = [_with_objects(message) for message in given]
    yield Form("arguments of calls that are no JSON object as objects", objects)
    yield Form("arguments of calls as JSON texts", [_with_texts(message) for message in given])
    for base in (given, objects):
        placed = systems_in_turns(base, into_results=False)
        yield Form("later system messages in user turns", placed)
        joined = _joined(placed)
        yield Form("neighbouring turns of one role joined", joined)
        yield Form("a user turn first", _user_first(joined))
        in_results = _user_first(_joined(systems_in_turns(base, into_results=True)))
        yield Form("later system messages in results of calls", in_results)
        for whole in (joined, in_results):
            yield Form("the system text in the first user turn", _without_system(whole))


def _with_objects(message: Message) -> Message:

    def changed(arguments: object) -> object:
        return {"_raw": arguments} if isinstance(arguments, str) else arguments

    return _with_arguments(message, changed)


def _with_texts(message: Message) -> Message:

    def changed(arguments: object) -> object:
        is_object = isinstance(arguments, dict)
        return json.dumps(arguments, ensure_ascii=False) if is_object else arguments

    return _with_arguments(message, changed)


def _with_arguments(message: Message, change: Callable[[object], object]) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    changed = [_changed_call(call, change) for call in cast(list[Any], calls)]
    return {**message, "tool_calls": changed}


def _changed_call(call: Any, change: Callable[[object], object]) -> Any:
    found = cast(dict[str, Any], call) if isinstance(call, dict) else {}
    function: object = found.get("function")
    if not isinstance(function, dict) or "arguments" not in function:
        return cast(Any, call)
    members = cast(dict[str, Any], function)
    return {**found, "function": {**members, "arguments": change(members["arguments"])}}


def systems_in_turns(given: list[Message], *, into_results: bool) -> list[Message]:
    """Leading system messages are one; a later one stands in its place in the user's turn before or
    after it, else in the result of a call before it, or in a user's turn of its own."""
    found: list[Message] = []
    pending: list[Message] = []
    for message in given:
        if message.get("role") in ("system", "developer"):
            system = {**message, "role": "system"}
            before = found[-1].get("role") if found else "system"
            if before == "system" and not pending:
                _join(found, system)
            elif before == "user" or (before == "tool" and into_results):
                _join(found, {**system, "role": before})
            else:
                _join(pending, {**system, "role": "user"})
            continue
        found += pending
        if pending and message.get("role") == "user":
            _join(found, message)
        else:
            found.append(message)
        pending = []
    return [*found, *pending]


def _joined(given: list[Message]) -> list[Message]:
    found: list[Message] = []
    for message in given:
        if message.get("role") == "tool":
            found.append(message)
        else:
            _join(found, message)
    return found


def _join(found: list[Message], message: Message) -> None:
    if found and found[-1].get("role") == message.get("role"):
        found[-1] = _merged(found[-1], message)
    else:
        found.append(message)


def _merged(first: Message, second: Message) -> Message:
    merged = {**second, **first, "content": _both(first.get("content"), second.get("content"))}
    calls = [*(first.get("tool_calls") or ()), *(second.get("tool_calls") or ())]
    thoughts = [each.get("reasoning_content") for each in (first, second)]
    if calls:
        merged["tool_calls"] = calls
    if any(thoughts):
        merged["reasoning_content"] = _BETWEEN.join(filter(None, thoughts))
    return merged


def _both(first: Any, second: Any) -> Any:
    if not first or not second:
        return first or second or ""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{_BETWEEN}{second}"
    return [*_parts(first), *_parts(second)]


def _parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return cast(list[Any], content)
    return [{"type": "text", "text": content}]


def _user_first(given: list[Message]) -> list[Message]:
    index = 1 if given and given[0].get("role") == "system" else 0
    if len(given) > index and given[index].get("role") == "user":
        return given
    return [*given[:index], {"role": "user", "content": ""}, *given[index:]]


def _without_system(given: list[Message]) -> list[Message]:
    if not given or given[0].get("role") != "system":
        return _user_first(given)
    system, (first, *rest) = given[0], _user_first(given[1:])
    return [_merged({**system, "role": "user"}, first), *rest]


def reads_responses_only(template: str) -> bool:
    """Whether a template reads results in the message with the calls, and nowhere else."""
    return "tool_responses" in template and "tool_call_id" not in template


def with_responses(given: Sequence[Mapping[str, Any]]) -> list[Message]:
    """A result after a message with calls is in that message (`tool_responses`, for the first
    templates of Gemma 4), under its function's name; one after another message stays as it is."""
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


_LINE = r"(?im)^[^\S\n]*(?:[-*][^\S\n]+)?(?:\*\*)?"
_IS = r"(?:[^\S\n]*\([^)\n]*\))?(?:\*\*)?(?:[^\S\n]+is\b|[^\S\n]*[:=])"
_REST = r"[^\n]*(?:\n|\Z)"
_PARAGRAPH = r"[^\n]*(?:\n[^\n]*\S[^\n]*)*(?:\n|\Z)"

REMOVED = (
    # Billing and attribution headers, which are not about the task.
    re.compile(_LINE + r"x-[\w-]{0,40}(?:billing|attribution)[\w-]{0,40}(?:\*\*)?:" + _REST),
)
MOVED = (
    # Dates and times: "Today's date: 2026-01-02", "Current time is 10:31".
    re.compile(
        _LINE
        + r"(?:(?:the[^\S\n]+)?current[^\S\n]+(?:date|time)|today(?:['\u2019]s[^\S\n]+date)?"
        + r"|(?:the[^\S\n]+)?(?:date|time)|timestamp|now)(?:[^\S\n]+(?:and|&)[^\S\n]+time)?"
        + _IS
        + r"[^\n]*(?:\d{4}|\d[:./-]\d)"
        + _REST
    ),
    # Counters: "Token usage: 12/200", "Turn 3 of 10", "Session id: ...".
    re.compile(
        _LINE
        + r"(?:tokens?[^\S\n]+(?:usage|used|left|remaining|budget)|session[^\S\n]+id"
        + r"|(?:context|turns?|requests?|messages?)[^\S\n]+(?:count|used|left|remaining|id))"
        + _IS
        + _REST
    ),
    re.compile(_LINE + r"turn[^\S\n]+\d+[^\S\n]*(?:of\b|/)[^\S\n]*\d+" + _REST),
    # The state of the working folder: paragraphs of git, and single lines of it.
    re.compile(
        _LINE
        + r"(?:git[^\S\n_-]*status|working[^\S\n]+(?:tree|directory)[^\S\n]+status)\b"
        + _PARAGRAPH
    ),
    re.compile(_LINE + r"(?:status|recent[^\S\n]+commits)(?:\*\*)?:[^\S\n]*\n" + _PARAGRAPH),
    re.compile(_LINE + r"current[^\S\n]+branch(?:\*\*)?:" + _REST),
)


def stable_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with a system prompt that stays the same from call to call."""
    found = [dict(message) for message in messages]
    index = next(
        (at for at in reversed(range(len(found))) if found[at].get("role") in ("user", "tool")),
        None,
    )
    moved: list[str] = []
    patterns = REMOVED if index is None else (*REMOVED, *MOVED)
    for message in found:
        if message.get("role") not in ("system", "developer"):
            break
        message["content"] = _without(message.get("content"), patterns, moved)
    if moved and index is not None:
        found[index]["content"] = _with(found[index].get("content"), "\n".join(moved))
    return found


def _without(content: Any, patterns: Sequence[re.Pattern[str]], moved: list[str]) -> Any:
    if isinstance(content, list):
        return [_part_without(part, patterns, moved) for part in cast(list[Any], content)]
    if not isinstance(content, str):
        return content
    for pattern in patterns:
        if pattern in MOVED:
            moved += [match.group().strip() for match in pattern.finditer(content)]
        content = pattern.sub("", content)
    return content


def _part_without(part: Any, patterns: Sequence[re.Pattern[str]], moved: list[str]) -> Any:
    if not isinstance(part, dict) or "text" not in part:
        return cast(Any, part)
    members = cast(dict[str, Any], part)
    return {**members, "text": _without(members["text"], patterns, moved)}


def _with(content: Any, text: str) -> Any:
    if isinstance(content, list):
        return [*cast(list[Any], content), {"type": "text", "text": f"\n\n{text}"}]
    return f"{content}\n\n{text}" if isinstance(content, str) and content else text
