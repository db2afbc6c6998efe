"""gpt-oss's format: messages, each in a channel. `HarmonyParser` reads them: one of the channel
`analysis` is reasoning, one for a function a call, any other content; grammars write them;
`harmony_messages` makes the conversations that its template can render. Invariants: the parser
splits what a grammar allows into what it is of; no text and no call of a conversation is lost."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast

from cadenza.outputs import OutputPart
from cadenza.structured import CallRule
from cadenza.text.answers.answer_grammar import Arguments
from cadenza.text.answers.argument_schema import closed, is_within_text, json_object_of
from cadenza.text.answers.call_forms import num_held
from cadenza.text.answers.part_parser import (
    REASONING_FORMATS,
    MakeParser,
    PartPlan,
    PlacedPart,
    ReasoningFormat,
)
from cadenza.text.answers.tool_format import (
    CallGrammar,
    Functions,
    Marks,
    ToolFormat,
    either,
    literal_in,
    text_without,
    whole_grammar,
)
from cadenza.text.schemas.grammar import joined_grammar, parts_of
from cadenza.text.templates.message_forms import Message, systems_in_turns

HARMONY_MARKS = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
    *("<|end|>", "<|call|>", "<|return|>"),
)
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
_READERS = ("assistant", "user", "all")  # recipients that are no tools


class Header(NamedTuple):
    """What a message is: a call has the name of its function."""

    kind: Literal["reasoning", "content", "tool_call"]
    name: str = ""


_CONTENT = Header("content")


def tail_of(prompt: str) -> str:
    _, start, tail = prompt.rpartition(ASSISTANT)
    return tail if start else ""


def header_of(text: str, functions: Functions, *, has_tools: bool) -> Header:
    """Whichever order its parts are in. Calls are found in every channel, as models write them in
    `analysis`, too; what is for a tool that is no function is reasoning."""
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
    """A `PlacedParser` of one sample. `plan` without `reasoning`: the text of `analysis` is
    content; `begun`: what the prompt has of the answer's first message."""

    def __init__(self, plan: PartPlan, begun: str = "") -> None:
        self._plan = plan
        head, mark, _ = begun.partition(MESSAGE)
        self._head = "" if mark else begun.strip()  # of the next message, what the prompt has
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
                num_read, part = self._take(message, self._text, is_end=is_end)
            if part is not None:
                placed.append((self._num_read, part))
            if not num_read and self._message is message:
                break
            self._num_read += num_read
            self._text = self._text[num_read:]
        return placed

    def _begin(self, text: str, *, is_end: bool) -> tuple[int, OutputPart | None]:
        """A header, a stray end, or nothing: what is neither begins a message of content. A part
        without a text stands between messages, so that no text is found across them."""
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

    def _take(self, message: _Message, text: str, *, is_end: bool) -> tuple[int, OutputPart | None]:
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


def _behind(found: re.Match[str]) -> int:  # a mark that begins another message is not read
    return found.start() if found[0] == ASSISTANT else found.end()


def _as_call(name: str, body: str) -> OutputPart | None:
    """A call, whose last bracket may be missing; None where its arguments cannot be read."""
    written = json_object_of(body) if body.strip() else "{}"
    if written is None and (whole := closed(body.strip(), 1)) is not None:
        written = json_object_of(whole)
    return None if written is None else OutputPart("tool_call", written, name)


def _shown(placed: Sequence[PlacedPart]) -> list[OutputPart]:
    return [part for _, part in placed if part.text or part.name is not None]


MAX_THOUGHTS = 4  # in front of a constrained message; a small model may think for ever
_ANALYSIS = REASONING_FORMATS["harmony"].begin
_FINAL = "<|channel|>final<|message|>"
_COMMENTARY = "<|channel|>commentary"
_TO = " to=functions."


# The model's answer ends after one call.
def message_calls(arguments: Arguments, marks: Marks) -> str:
    return whole_grammar(arguments.values(), ["start: call", *_calls(arguments, marks)])


def text_or_message_calls(arguments: Arguments, marks: Marks) -> str:
    final, preamble, between = (
        literal_in(each, marks) for each in (_FINAL, f"{_COMMENTARY}{MESSAGE}", f"{END}{ASSISTANT}")
    )
    lines = [
        "start: told? (final | call)",
        text_without("TEXT", END),
        f"told: {preamble} TEXT {between}",
        f"final: {final} TEXT",
        *_calls(arguments, marks),
    ]
    return whole_grammar(arguments.values(), lines)


def _message_rule(calls: CallGrammar, marks: Marks) -> CallRule:
    tools = calls.tools
    lines = [f"start: {either('call', len(tools))}", *_kinds(marks)]
    header = literal_in(_COMMENTARY, marks)
    for i, tool in enumerate(tools):
        lines.append(f"call_{i}: {json.dumps(tool.name)} ({header})? kind @args_{i}")
    begin = "|".join(re.escape(each + _TO) for each in (_COMMENTARY, ASSISTANT))
    return CallRule(begin=begin, grammar=calls.whole(lines))


def _calls(arguments: Arguments, marks: Marks) -> list[str]:
    lines = [f"call: {either('call', len(arguments))}", *_kinds(marks)]
    header = literal_in(_COMMENTARY, marks)
    for i, name in enumerate(arguments):
        to = json.dumps(_TO + name)
        lines.append(f"call_{i}: ({header} {to} | {to} {header}) kind @args_{i}")
    return lines


def _kinds(marks: Marks) -> list[str]:
    constrain, message = (literal_in(each, marks) for each in ("<|constrain|>", MESSAGE))
    return [f'kind: " "? ({constrain}? "json")? {message}']


HARMONY = ToolFormat(forms=(), write=_message_rule, inner_marks=HARMONY_MARKS)
"""Its calls are messages, and no texts within one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyFrame:
    """An `AnswerFrame` of messages."""

    own: ReasoningFormat | None  # None: reasoning is not told apart
    begun: str  # what the prompt has of the answer's first message

    @classmethod
    def of(cls, own: ReasoningFormat | None, prompt: str) -> "HarmonyFrame":
        return cls(own=own, begun=tail_of(prompt))

    @property
    def marks(self) -> Sequence[str]:
        return HARMONY_MARKS

    @property
    def reasoning(self) -> ReasoningFormat | None:
        return self.own

    @property
    def has_begun(self) -> bool:
        return self._within == "reasoning"

    @property
    def _within(self) -> str | None:
        head, mark, _ = self.begun.partition(MESSAGE)
        return header_of(head, {}, has_tools=False).kind if mark else None

    def with_content(self, grammar: str, marks: Marks) -> str:
        if self._within == "content":
            return grammar
        begun = "" if self.has_begun else self.begun.strip()
        lark = f"start: {literal_in(_FINAL.removeprefix(begun), marks)} @told"
        return joined_grammar(lark, parts_of("told", grammar))

    def called(self, grammar: str, marks: Marks) -> str:
        if self._within != "content":
            return grammar
        lark = f"start: {literal_in(f'{END}{ASSISTANT}', marks)} @called"
        return joined_grammar(lark, parts_of("called", grammar))

    def behind_reasoning(self, grammar: str, marks: Marks) -> str:
        if self.begun.strip() and not self.has_begun:
            return grammar
        begin, end = literal_in(_ANALYSIS, marks), literal_in(f"{END}{ASSISTANT}", marks)
        first = "thought " if self.has_begun else ""
        lines = [
            f"start: {first}message{{0,{MAX_THOUGHTS}}} @inner",
            f"thought: THOUGHT {end}",
            f"message: {begin} thought",
            text_without("THOUGHT", END),
        ]
        return joined_grammar("\n".join(lines), parts_of("inner", grammar))

    def placed(self, rule: CallRule) -> CallRule:
        return replace(rule, prompt_end=f"{ASSISTANT}{self.begun}"[-256:])

    def make_parser(self, plan: PartPlan) -> MakeParser | None:
        return partial(HarmonyParser, replace(plan, reasoning=self.own), self.begun)


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
    index, has_called = 0, False
    while index < len(placed):
        message = _without_headers(placed[index])
        index += 1
        calls, role = message.get("tool_calls"), message.get("role")
        if role != "assistant" or not isinstance(calls, list) or not calls:
            has_called = has_called and role != "assistant"
            is_orphan = role == "tool" and not has_called
            found.append(_as_user(message) if is_orphan else _without_calls(message))
            continue
        has_called = True
        results: list[Message] = []
        while index < len(placed) and placed[index].get("role") == "tool":
            results.append(placed[index])
            index += 1
        found += _one_by_one(_with_thought(message), cast(list[Any], calls), results)
    return found


def _without_headers(message: Message) -> Message:
    """Texts with headers, which an earlier server left there, as reasoning, text and calls."""
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
    contents = [part.text for part in parts if part.kind == "content"]
    calls = [
        {"type": "function", "function": {"name": part.name, "arguments": json.loads(part.text)}}
        for part in parts
        if part.kind == "tool_call"
    ]
    found["content"] = _BETWEEN.join(contents)
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


def _as_user(result: Message) -> Message:
    name, text = result.get("name"), result.get("content") or ""
    label = f"Result of {name}: " if isinstance(name, str) and name else "Result: "
    return {"role": "user", "content": label + text if isinstance(text, str) else text}


def harmony_tools(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [_described(tool) for tool in tools]  # the template reads each one's description


def _described(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    return {**tool, "function": {"description": "", **cast(Mapping[str, Any], function)}}


def _with_thought(message: Message) -> Message:
    key = next((key for key in _REASONING if message.get(key)), None)
    text = message.get("content")
    if key is None or not isinstance(text, str) or not text.strip():
        return message
    return {**message, key: f"{message[key]}{_BETWEEN}{text}", "content": ""}


def _one_by_one(message: Message, calls: list[Any], results: list[Message]) -> Iterator[Message]:
    left = [*results]
    own = {key: value for key, value in message.items() if key not in ("content", *_REASONING)}
    for index, call in enumerate(calls):
        yield {**(own if index else message), "tool_calls": [call]}
        result = _result_of(call, left)
        if result is not None:
            left.remove(result)
            yield result
    yield from left  # those that name no call, in their order


def _result_of(call: Any, results: list[Message]) -> Message | None:
    given = cast(Mapping[str, Any], call).get("id") if isinstance(call, Mapping) else None
    named = (each for each in results if given and each.get("tool_call_id") == given)
    unnamed = (each for each in results if not each.get("tool_call_id"))
    return next(named, None) or next(unnamed, None)
