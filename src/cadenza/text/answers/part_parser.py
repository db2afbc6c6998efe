"""`PartParser`: splits an answer into reasoning, content and tool calls as it comes. Each step of
`_advance` is a pure function of a state and the unread text. Invariant of every `OutputParser`: the
parts, those of one kind joined, are a function of the whole text, whatever pieces it came in; a
part that was returned is final."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol, runtime_checkable

from cadenza.outputs import OutputPart, PartKind
from cadenza.text.answers.call_forms import num_held
from cadenza.text.answers.tool_format import (
    CallForm,
    CallMatcher,
    CallStart,
    Functions,
    ToolCall,
    ToolFormat,
)


class OutputParser(Protocol):
    """The parser of one sample."""

    @property
    def is_reasoning(self) -> bool: ...

    def push(self, text: str) -> Sequence[OutputPart]:
        """The parts that are certain now and were not before; often none, within a marker."""
        ...

    def flush(self) -> Sequence[OutputPart]: ...


PlacedPart = tuple[int, OutputPart]  # with where in the answer its text begins


@runtime_checkable
class PlacedParser(OutputParser, Protocol):
    """Also says where in the text its parts are. Parts without a text, which `push` and `flush`
    leave out, end a stretch of content."""

    @property
    def num_read(self) -> int:
        """Characters of the answer of which it is decided what they are."""
        ...

    def push_placed(self, text: str) -> Sequence[PlacedPart]: ...

    def flush_placed(self) -> Sequence[PlacedPart]: ...


MakeParser = Callable[[], OutputParser]  # makes a fresh parser for each sample of a request

MAX_HELD_CHARS = 1 << 16  # of what may be a call within reasoning


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around reasoning."""

    begin: str
    end: str
    shown_by: str = ""  # what a chat template has that shows it; empty: its end
    opening: tuple[str, ...] = ()  # the tokens of its beginning, marks first and last; empty: one
    recurs: bool = False  # an answer may have several stretches of it

    def is_shown_by(self, template: str) -> bool:
        return (self.shown_by or self.end) in template


REASONING_FORMATS = {  # by the names that `--reasoning-parser` takes
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "harmony": ReasoningFormat(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        shown_by="<|channel|>",
        opening=("<|channel|>", "analysis", "<|message|>"),
        recurs=True,
    ),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>", opening=("<|channel>",)),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
}

REASONING_ALIASES = {
    "deepseek_r1": "think",
    "qwen3": "think",
    "gpt_oss": "harmony",
    "openai_gptoss": "harmony",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """What an answer may consist of."""

    reasoning: ReasoningFormat | None = None
    begins_in_reasoning: bool = False  # the prompt has the mark that begins it
    tools: ToolFormat | None = None
    functions: Functions = field(default_factory=dict[str, Mapping[str, Any]])


class _State(Enum):
    START = auto()
    REASONING_BEGUN = auto()
    REASONING = auto()
    REASONED_CALL = auto()  # what may be a call is within reasoning
    REASONED = auto()
    CONTENT = auto()
    CALL = auto()
    CALLED = auto()


class _Step(NamedTuple):
    """A decision: what follows, what is certain, and the unread text."""

    state: _State
    parts: tuple[OutputPart, ...]
    rest: str
    matcher: CallMatcher | None = None  # of a call which may begin there


class PartParser:
    """A `PlacedParser` of one sample."""

    def __init__(self, plan: PartPlan) -> None:
        self._plan = plan
        self._text: str = ""
        self._state = _State.CONTENT
        self._matcher: CallMatcher | None = None
        self._num_read = 0
        if plan.reasoning is not None:
            begun = plan.begins_in_reasoning
            self._state = _State.REASONING_BEGUN if begun else _State.START

    @property
    def is_reasoning(self) -> bool:
        states = (_State.REASONING_BEGUN, _State.REASONING, _State.REASONED_CALL)
        return self._state in states

    @property
    def num_read(self) -> int:
        return self._num_read

    def push(self, text: str) -> Sequence[OutputPart]:
        return [part for _, part in self.push_placed(text)]

    def flush(self) -> Sequence[OutputPart]:
        return [part for _, part in self.flush_placed()]

    def push_placed(self, text: str) -> Sequence[PlacedPart]:
        self._text += text
        return self._read(is_end=False)

    def flush_placed(self) -> Sequence[PlacedPart]:
        return self._read(is_end=True)

    def _read(self, *, is_end: bool) -> list[PlacedPart]:
        parts: list[PlacedPart] = []
        while self._text:
            step = self._advance(self._text, is_end=is_end)
            if step is None:
                break
            parts += [(self._num_read, part) for part in step.parts]
            self._num_read += len(self._text) - len(step.rest)
            self._state, self._text, self._matcher = step.state, step.rest, step.matcher
        return [placed for placed in parts if placed[1].text or placed[1].name is not None]

    def _advance(self, text: str, *, is_end: bool) -> _Step | None:
        plan, matcher = self._plan, self._matcher
        match self._state:
            case _State.START:
                return _start(plan, text, is_end=is_end)
            case _State.REASONING_BEGUN:
                return _skip_blanks(_State.REASONING, text, is_end=is_end)
            case _State.REASONING:
                return _reason(plan, text, is_end=is_end)
            case _State.REASONED_CALL:
                assert matcher is not None
                return _reason_call(plan, matcher, text, is_end=is_end)
            case _State.REASONED:
                return _skip_blanks(_State.CONTENT, text, is_end=is_end)
            case _State.CONTENT:
                return _content(plan, text, is_end=is_end)
            case _State.CALL:
                assert matcher is not None
                return _call(matcher, text, is_end=is_end)
            case _State.CALLED:
                skipped = None if plan.tools is None else plan.tools.skipped
                return _skip_blanks(_State.CONTENT, text, skipped, is_end=is_end)


def _start(plan: PartPlan, text: str, *, is_end: bool) -> _Step | None:
    assert plan.reasoning is not None
    begin, stripped = plan.reasoning.begin, text.lstrip()
    if stripped.startswith(begin):
        return _Step(_State.REASONING_BEGUN, (), stripped[len(begin) :])
    if begin.startswith(stripped) and not is_end:
        return None
    return _Step(_State.CONTENT, (), text)


def _skip_blanks(
    state: _State, text: str, blanks: str | None = None, *, is_end: bool
) -> _Step | None:
    stripped = text.lstrip(blanks)
    return _Step(state, (), stripped) if stripped or is_end else None


def _reason(plan: PartPlan, text: str, *, is_end: bool) -> _Step | None:
    assert plan.reasoning is not None
    position = text.find(plan.reasoning.end)
    found = _next_call(
        plan, text if position < 0 else text[:position], is_end=is_end or position >= 0
    )
    if found is not None:
        return _before_call(_State.REASONED_CALL, plan, text, found)
    if position >= 0:
        thought = OutputPart("reasoning", text[:position].rstrip())
        return _Step(_State.REASONED, (thought,), text[position + len(plan.reasoning.end) :])
    if is_end:
        return _Step(_State.REASONING, (OutputPart("reasoning", text.rstrip()),), "")
    held = num_held(text, plan.reasoning.end)
    return _certain(_State.REASONING, "reasoning", text, len(text) - held)


def _reason_call(plan: PartPlan, matcher: CallMatcher, text: str, *, is_end: bool) -> _Step | None:
    """Calls that end an answer which has nothing behind its reasoning; others are reasoning."""
    assert plan.reasoning is not None
    end = plan.reasoning.end
    begin = len(text) - len(text.lstrip())
    calls: list[ToolCall] = []
    rest = text[begin:]
    while True:
        position = rest.find(end)
        held = 0 if is_end or position >= 0 else num_held(rest, end)
        body = rest[: len(rest) - held] if position < 0 else rest[:position]
        taken = matcher.take(body, is_end=is_end or position >= 0)
        if taken is None and len(text) <= MAX_HELD_CHARS:
            return None
        if taken is None or not taken.calls or _has_unknown(plan, taken.calls):
            return _no_call(text, begin)
        calls += taken.calls
        rest = rest[taken.end :].lstrip()
        found = _next_call(plan, rest, is_end=is_end)
        if found is None or found[1].position or not found[1].is_certain:
            break
        matcher = found[0].matcher(plan.functions)
    behind = rest[len(end) :].lstrip() if rest.startswith(end) else rest
    if not behind:
        return _Step(_State.CALLED, _as_parts(calls), "") if is_end else None
    may_follow = end.startswith(rest) or (found is not None and not found[1].position)
    return _no_call(text, begin) if is_end or not may_follow else None


def _no_call(text: str, begin: int) -> _Step:
    """The first character of what was no call is reasoning; another call may begin after it."""
    part = OutputPart("reasoning", text[: begin + 1])
    return _Step(_State.REASONING, (part,), text[begin + 1 :])


def _has_unknown(plan: PartPlan, calls: Sequence[ToolCall]) -> bool:
    return bool(plan.functions) and any(call.name not in plan.functions for call in calls)


def _content(plan: PartPlan, text: str, *, is_end: bool) -> _Step | None:
    found = _next_call(plan, text, is_end=is_end)
    if found is not None:
        return _before_call(_State.CALL, plan, text, found)
    if is_end or plan.tools is None:
        return _Step(_State.CONTENT, (OutputPart("content", text),), "")
    return _certain(_State.CONTENT, "content", text, len(text))


def _call(matcher: CallMatcher, text: str, *, is_end: bool) -> _Step | None:
    begin = len(text) - len(text.lstrip())
    taken = matcher.take(text[begin:], is_end=is_end)
    if taken is None:
        return None
    rest = text[begin + taken.end :]
    if taken.calls:
        return _Step(_State.CALLED, _as_parts(taken.calls), rest)
    return _Step(_State.CONTENT, (OutputPart("content", text[: begin + taken.end]),), rest)


def _as_parts(calls: Sequence[ToolCall]) -> tuple[OutputPart, ...]:
    return tuple(OutputPart("tool_call", arguments, name) for name, arguments in calls)


def _next_call(plan: PartPlan, text: str, *, is_end: bool) -> tuple[CallForm, CallStart] | None:
    forms = () if plan.tools is None else plan.tools.forms
    found = [(form, form.find(text, plan.functions, is_end=is_end)) for form in forms]
    begun = [(form, beginning) for form, beginning in found if beginning is not None]
    return min(begun, key=lambda each: (each[1].position, not each[1].is_certain), default=None)


def _before_call(
    state: _State, plan: PartPlan, text: str, found: tuple[CallForm, CallStart]
) -> _Step | None:
    form, (position, is_certain) = found
    is_thought = state is _State.REASONED_CALL
    kind: PartKind = "reasoning" if is_thought else "content"
    if is_certain:
        sure = text[:position].rstrip()
        parts = (OutputPart(kind, sure),)
        return _Step(state, parts, text[len(sure) :], form.matcher(plan.functions))
    if is_thought and plan.reasoning is not None:
        position = min(position, len(text) - num_held(text, plan.reasoning.end))
    return _certain(_State.REASONING if is_thought else _State.CONTENT, kind, text, position)


def _certain(state: _State, kind: PartKind, text: str, end: int) -> _Step | None:
    sure = text[:end].rstrip()
    return _Step(state, (OutputPart(kind, sure),), text[len(sure) :]) if sure else None
