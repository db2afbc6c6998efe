"""`HarmonyParser` of gpt-oss's format: messages, each in a channel. One of the channel `analysis`
is reasoning, one for a function a call, any other content. Invariants: the parts are a function of
the whole text, whatever pieces it comes in; texts of messages keep their blanks.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cadenza.outputs import OutputPart
from cadenza.text.answers.argument_schema import is_within_text
from cadenza.text.answers.call_forms import num_held
from cadenza.text.answers.call_readers import Functions, closed, json_object_of
from cadenza.text.answers.output_parser import PlacedPart
from cadenza.text.answers.part_parser import PartPlan
from cadenza.text.answers.tool_calls import HARMONY_MARKS

START, CHANNEL, MESSAGE, _, END, CALL, RETURN = HARMONY_MARKS
ASSISTANT = f"{START}assistant"
"""What the prompt ends with, and each further message of an answer begins with."""
MAX_HEADER_CHARS = 1024

_ENDS = (END, CALL, RETURN)
_END = re.compile("|".join(map(re.escape, (*_ENDS, ASSISTANT))))
_MOST_HELD = max(map(len, (*_ENDS, ASSISTANT)))
_HEADERS = (START, CHANNEL, MESSAGE, "to=")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTIONS = "functions."
_READERS = ("assistant", "user", "all")
"""Recipients that are no tools."""


class Header(NamedTuple):
    """What a message is: a call has the name of its function."""

    kind: Literal["reasoning", "content", "tool_call"]
    name: str = ""


_CONTENT = Header("content")


def tail_of(prompt: str) -> str:
    """What a prompt has of the answer's first message, whose header, or text, it ends within."""
    _, start, tail = prompt.rpartition(ASSISTANT)
    return tail if start else ""


def header_of(text: str, functions: Functions, *, has_tools: bool) -> Header:
    """What the header of a message says, whichever order its parts are in. Calls are found in every
    channel, as models write them in `analysis`, too; what is for a tool that is no function is
    reasoning."""
    recipient = _RECIPIENT.search(text)
    channel = _CHANNEL.search(text)
    called = "" if recipient is None else recipient[1]
    name = called.removeprefix(_FUNCTIONS)
    if name and (name != called or name in functions):
        return Header("tool_call", name) if has_tools else _CONTENT
    is_thought = channel is not None and channel[1] == "analysis"
    return Header("reasoning") if is_thought or (called and called not in _READERS) else _CONTENT


@dataclass(slots=True, eq=False)
class _Message:
    """The message that the text is in; in so many first characters no end is searched."""

    header: Header
    num_searched: int = 0


class HarmonyParser:
    """A `PlacedParser` of one sample. `plan`: without `reasoning`, the text of `analysis` is
    content; `begun`: what the prompt has of the answer's first message (`tail_of`)."""

    def __init__(self, plan: PartPlan, begun: str = "") -> None:
        self._plan = plan
        head, mark, _ = begun.partition(MESSAGE)
        self._head = "" if mark else begun.strip()
        """Of the next message, what the prompt has."""
        self._message = _Message(self._read_header(head)) if mark else None
        self._text: str = ""
        self._num_read = 0

    @property
    def is_reasoning(self) -> bool:
        return self._message is not None and self._message.header.kind == "reasoning"

    @property
    def num_read(self) -> int:
        return self._num_read

    def push(self, text: str) -> Sequence[OutputPart]:
        return _shown(self.push_placed(text))

    def flush(self) -> Sequence[OutputPart]:
        return _shown(self.flush_placed())

    def push_placed(self, text: str) -> Sequence[PlacedPart]:
        self._text += text
        return self._read(is_end=False)

    def flush_placed(self) -> Sequence[PlacedPart]:
        return self._read(is_end=True)

    def _read(self, *, is_end: bool) -> list[PlacedPart]:
        placed: list[PlacedPart] = []
        while self._text:
            message = self._message
            if message is None:
                num_read, part = self._begin(self._text, is_end=is_end)
            elif message.header.kind == "tool_call":
                num_read, part = self._call(message, self._text, is_end=is_end)
            else:
                num_read, part = self._tell(message, self._text, is_end=is_end)
            if part is not None:
                placed.append((self._num_read, part))
            if not num_read and self._message is message:
                break
            self._num_read += num_read
            self._text = self._text[num_read:]
        return placed

    def _begin(self, text: str, *, is_end: bool) -> tuple[int, OutputPart | None]:
        """Reads a header, a stray end, or nothing: what is neither begins a message of content. A
        part without a text stands between messages, so that no text is found across them."""
        between = OutputPart("reasoning", "")
        head, mark, _ = text[:MAX_HEADER_CHARS].partition(MESSAGE)
        begun = (self._head + head + mark).lstrip()
        if begun.startswith(_ENDS):
            return text.index(">") + 1, None
        skipped = len(ASSISTANT) if begun.startswith(ASSISTANT) else 0
        is_header = begun.startswith(_HEADERS) and _END.search(begun, skipped) is None
        if mark and is_header:
            self._message, self._head = _Message(self._read_header(self._head + head)), ""
            return len(head) + len(mark), between
        if not mark and len(text) < MAX_HEADER_CHARS:
            may_begin = is_header or any(each.startswith(begun) for each in (*_HEADERS, *_ENDS))
            if may_begin and not is_end:
                return 0, None
            if may_begin and (not begun or "<|" in begun):  # a header that was cut
                return len(text), None
        self._message, self._head = _Message(_CONTENT, num_searched=1), ""
        return 0, between

    def _tell(self, message: _Message, text: str, *, is_end: bool) -> tuple[int, OutputPart | None]:
        kind = "reasoning" if message.header.kind == "reasoning" else "content"
        found = _END.search(text, message.num_searched)
        if found is None:
            held = 0 if is_end else max(num_held(text, mark) for mark in (*_ENDS, ASSISTANT))
            end = len(text) - held
            if not end:
                return 0, None
            message.num_searched = 0
            return end, OutputPart(kind, text[:end])
        self._message = None
        return _behind(found), OutputPart(kind, text[: found.start()])

    def _call(self, message: _Message, text: str, *, is_end: bool) -> tuple[int, OutputPart | None]:
        name = message.header.name
        while (found := _END.search(text, message.num_searched)) is not None:
            if not is_within_text(text[: found.start()]):
                break
            message.num_searched = found.end()
        if found is None and not is_end:
            message.num_searched = max(message.num_searched, len(text) - _MOST_HELD)
            return 0, None
        part = _as_call(name, text if found is None else text[: found.start()])
        if part is None and (found := _END.search(text)) is not None:
            part = _as_call(name, text[: found.start()])
        self._message = None
        body = text if found is None else text[: found.start()]
        return len(text) if found is None else _behind(found), part or OutputPart("content", body)

    def _read_header(self, text: str) -> Header:
        plan = self._plan
        header = header_of(text, plan.functions, has_tools=plan.tools is not None)
        is_hidden = header.kind == "reasoning" and plan.reasoning is None
        return _CONTENT if is_hidden else header


def _behind(found: re.Match[str]) -> int:
    """The position after a mark that ends a message; one that begins another is not read."""
    return found.start() if found[0] == ASSISTANT else found.end()


def _as_call(name: str, body: str) -> OutputPart | None:
    """A call, whose last bracket may be missing; None where its arguments cannot be read."""
    written = json_object_of(body) if body.strip() else "{}"
    if written is None and (whole := closed(body.strip(), 1)) is not None:
        written = json_object_of(whole)
    return None if written is None else OutputPart("tool_call", written, name)


def _shown(placed: Sequence[PlacedPart]) -> list[OutputPart]:
    return [part for _, part in placed if part.text or part.name is not None]
