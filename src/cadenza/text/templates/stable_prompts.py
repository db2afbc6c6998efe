"""System prompts without the lines that agents change from call to call (`--stable-prompts`).
Invariant: it depends on the messages alone; leading system messages change in nothing else, and
what is moved stands at the end of the newest user or tool message, or, without one, is not moved.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

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
    """The conversation with a system prompt that stays; the same one if nothing is to change."""
    found = [dict(message) for message in messages]
    place = next(
        (at for at in reversed(range(len(found))) if found[at].get("role") in ("user", "tool")),
        None,
    )
    moved: list[str] = []
    patterns = REMOVED if place is None else (*REMOVED, *MOVED)
    for message in found:
        if message.get("role") not in ("system", "developer"):
            break
        message["content"] = _without(message.get("content"), patterns, moved)
    if moved and place is not None:
        found[place]["content"] = _with(found[place].get("content"), "\n".join(moved))
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
