"""Where calls stand in an answer: between marks (`MarkedCalls`), or bare (`BareCalls`).

Invariant: no later text changes what a `CallMatcher` decides; text is held back until then.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from cadenza.text.answers.argument_schema import closed
from cadenza.text.answers.tool_format import (
    CallMatcher,
    CallStart,
    Functions,
    ReadCalls,
    Taken,
    ToolCall,
)

MAX_UNDECIDED_CHARS = 4096  # of a bare call before its function is known
_FENCE = "```"
_FENCE_LINE = re.compile(r"`{3,}[ \t]*[\w-]*\s*")
_BEFORE_FENCE_END = " \t\r\n;,"


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedCalls:
    """Calls between marks."""

    begin: str
    end: str = ""  # empty where they reach to the end of the text
    trailing: str = ""  # what may follow the end, and is no content
    is_named: bool = False  # the marks are a part of what is read
    read: ReadCalls

    def find(self, text: str, functions: Functions, *, is_end: bool) -> CallStart | None:
        del functions
        position = text.find(self.begin)
        if position >= 0:
            return CallStart(position, is_certain=True)
        held = 0 if is_end else num_held(text, self.begin)
        return CallStart(len(text) - held, is_certain=False) if held else None

    def matcher(self, functions: Functions) -> CallMatcher:
        return _MarkedMatcher(self, functions)


class _MarkedMatcher:
    """A call ends at the first end mark up to which it can be read."""

    def __init__(self, form: MarkedCalls, functions: Functions) -> None:
        self._form = form
        self._functions = functions
        self._num_tried = len(form.begin)
        self._taken: Taken | None = None

    def take(self, text: str, *, is_end: bool) -> Taken | None:
        form = self._form
        while self._taken is None and form.end:
            position = text.find(form.end, self._num_tried)
            if position < 0:
                self._num_tried = max(len(form.begin), len(text) - len(form.end) + 1)
                break
            self._num_tried = position + 1
            calls = self._read(text, position, most=2)
            if calls is not None:
                self._taken = Taken(calls, position + len(form.end))
        if self._taken is not None:
            return self._with_trailing(self._taken, text, is_end=is_end)
        if not is_end:
            return None
        calls = self._read(text, len(text), most=1)
        if calls is not None:
            return Taken(calls, len(text))
        # Text may stand behind a call that has no end mark.
        position = max(text.rfind("]"), text.rfind("}")) + 1
        calls = None if form.end else self._read(text, position, most=0)
        return Taken((), len(text)) if calls is None else Taken(calls, position)

    def _read(self, text: str, position: int, *, most: int) -> tuple[ToolCall, ...] | None:
        """Of the calls up to a position `most` last brackets may be missing."""
        form = self._form
        written = text[:position] if form.is_named else text[len(form.begin) : position]
        calls = form.read(written, self._functions)
        if calls is None and most and (whole := closed(written, most)) is not None:
            calls = form.read(whole, self._functions)
        return None if calls is None else tuple(calls)

    def _with_trailing(self, taken: Taken, text: str, *, is_end: bool) -> Taken | None:
        trailing, rest = self._form.trailing, text[taken.end :].lstrip()
        if not trailing:
            return taken
        if rest.startswith(trailing):
            return taken._replace(end=len(text) - len(rest) + len(trailing))
        return None if trailing.startswith(rest) and not is_end else taken


# Whether a text begins with a call of a notation; None if more of it decides.
Begins = Callable[[str, Functions], bool | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BareCalls:
    """Calls that stand by themselves, with text or a code fence around them."""

    prefix: str = ""  # a mark that may stand in front
    first: re.Pattern[str]  # what a call, a fence or the mark begins with
    quotes: str = '"'  # what stands around texts, in which brackets mean nothing
    begins: Begins
    read: ReadCalls

    def find(self, text: str, functions: Functions, *, is_end: bool) -> CallStart | None:
        for match in self.first.finditer(text):
            is_call = self._begins(text[match.start() :], functions)
            if is_call or (is_call is None and not is_end):
                return CallStart(match.start(), is_certain=bool(is_call))
        if is_end:
            return None
        held = max(len(text) - len(text.rstrip("`")), num_held(text, self.prefix))
        return CallStart(len(text) - held, is_certain=False) if held else None

    def matcher(self, functions: Functions) -> CallMatcher:
        return _BareMatcher(self, functions)

    def _begins(self, text: str, functions: Functions) -> bool | None:
        front = self.front(text)
        rest = text[len(front) :]
        found = self.begins(rest, functions) if rest else None
        return False if found is None and len(text) > MAX_UNDECIDED_CHARS else found

    def front(self, text: str) -> str:
        match = _FENCE_LINE.match(text)
        if match is not None:
            return match[0]
        if self.prefix and text.startswith(self.prefix):
            return text[: len(text) - len(text[len(self.prefix) :].lstrip())]
        return ""


class _BareMatcher:
    """A call ends where its brackets do; a fence ends after the calls in it."""

    def __init__(self, form: BareCalls, functions: Functions) -> None:
        self._form = form
        self._functions = functions
        self._marks = re.compile(rf"[\[\](){{}}\\{form.quotes}]")
        self._calls: tuple[ToolCall, ...] = ()
        self._end = 0  # behind the newest call
        self._begin: int | None = None  # of the call that is being read
        self._place = 0  # up to which its brackets are known
        self._depth = 0
        self._quote = ""

    def take(self, text: str, *, is_end: bool) -> Taken | None:
        if not self._end and self._begin is None:
            self._begin = self._place = len(self._form.front(text))
        while True:
            if self._begin is not None:
                if not self._scan(text):
                    return self._unclosed(text, self._begin) if is_end else None
                calls = self._read(text[self._begin : self._place])
                if calls is None:
                    return self._found or Taken((), self._place)
                self._calls += calls
                self._end, self._begin = self._place, None
            if not text.startswith(_FENCE):
                return self._found
            rest = text[self._end :].lstrip(_BEFORE_FENCE_END)
            if rest.startswith(_FENCE):
                return Taken(self._calls, len(text) - len(rest) + len(_FENCE))
            if _FENCE.startswith(rest):
                return self._found if is_end else None
            if rest[0] not in "[{":
                return self._found
            self._begin = self._place = len(text) - len(rest)

    @property
    def _found(self) -> Taken | None:
        return Taken(self._calls, self._end) if self._calls else None

    def _scan(self, text: str) -> bool:
        position = self._place
        while (match := self._marks.search(text, position)) is not None:
            mark, position = match[0], match.end()
            if self._quote:
                if mark == "\\" and position == len(text):
                    self._place = match.start()  # what it escapes is not there yet
                    return False
                position += mark == "\\"
                self._quote = "" if mark == self._quote else self._quote
            elif mark in self._form.quotes:
                self._quote = mark
            elif mark in "([{":
                self._depth += 1
            elif mark != "\\":
                self._depth -= 1
                if self._depth <= 0:
                    self._place, self._depth = position, 0
                    return True
        self._place = len(text)
        return False

    def _unclosed(self, text: str, begin: int) -> Taken:
        whole = closed(text[begin:], 1)
        calls = None if whole is None else self._read(whole)
        if calls is None:
            return self._found or Taken((), len(text))
        return Taken((*self._calls, *calls), len(text))

    def _read(self, text: str) -> tuple[ToolCall, ...] | None:
        calls = self._form.read(text, self._functions)
        if calls is None or (self._functions and any(c.name not in self._functions for c in calls)):
            return None
        return tuple(calls)


def num_held(text: str, mark: str) -> int:
    """How many last characters of a text may be the beginning of a mark."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)
