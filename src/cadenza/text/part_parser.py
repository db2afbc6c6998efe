"""`PartParser`: splits an answer into reasoning, content and tool calls as it comes.

Owns the states of an answer. Each step of `_advance` is a pure function of a state and of the text
that is not read yet: it either decides something that no later text can change, or asks for more.
So the parts are a function of the whole text, whatever pieces it comes in. Blanks at the borders of
parts are dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from cadenza.outputs import OutputPart, PartKind
from cadenza.text.tool_calls import ToolCall, ToolFormat


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around reasoning."""

    begin: str
    end: str


REASONING_FORMATS = {
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
}
"""By the names that `--reasoning-parser` takes."""

REASONING_ALIASES = {"deepseek_r1": "think", "qwen3": "think"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """What an answer may consist of.

    Args:
        reasoning: None: it has no reasoning.
        begins_in_reasoning: the prompt has the mark that begins reasoning.
        tools: None: it has no calls.
    """

    reasoning: ReasoningFormat | None = None
    begins_in_reasoning: bool = False
    tools: ToolFormat | None = None


class _State(Enum):
    START = auto()
    REASONING_BEGUN = auto()
    REASONING = auto()
    REASONED = auto()
    ANSWER_BEGUN = auto()
    CONTENT = auto()
    CALL = auto()
    CALLED = auto()


class _Step(NamedTuple):
    """A decision: what follows, what is certain, and the text that is not read yet."""

    state: _State
    parts: tuple[OutputPart, ...]
    rest: str


class PartParser:
    """The parser of one sample (`text.output_parser.OutputParser`)."""

    def __init__(self, plan: PartPlan) -> None:
        self._plan = plan
        self._text: str = ""
        self._state = _State.ANSWER_BEGUN
        if plan.reasoning is not None:
            begun = plan.begins_in_reasoning
            self._state = _State.REASONING_BEGUN if begun else _State.START

    @property
    def is_reasoning(self) -> bool:
        return self._state in (_State.REASONING_BEGUN, _State.REASONING)

    def push(self, text: str) -> Sequence[OutputPart]:
        self._text += text
        return self._read(is_end=False)

    def flush(self) -> Sequence[OutputPart]:
        return self._read(is_end=True)

    def _read(self, *, is_end: bool) -> list[OutputPart]:
        parts: list[OutputPart] = []
        while self._text:
            step = _advance(self._plan, self._state, self._text, is_end=is_end)
            if step is None:
                break
            parts += step.parts
            self._state, self._text = step.state, step.rest
        return [part for part in parts if part.text or part.name is not None]


def _advance(plan: PartPlan, state: _State, text: str, *, is_end: bool) -> _Step | None:
    """The next decision; None where it takes more text. `text` is not empty."""
    match state:
        case _State.START:
            return _start(plan, text, is_end=is_end)
        case _State.REASONING_BEGUN:
            return _skip_blanks(_State.REASONING, text, is_end=is_end)
        case _State.REASONING:
            return _reason(plan, text, is_end=is_end)
        case _State.REASONED:
            return _skip_blanks(_State.ANSWER_BEGUN, text, is_end=is_end)
        case _State.ANSWER_BEGUN:
            return _begin_answer(plan, text, is_end=is_end)
        case _State.CONTENT:
            return _tell(plan, text, is_end=is_end)
        case _State.CALL:
            return _call(plan, text, is_end=is_end)
        case _State.CALLED:
            return _skip_blanks(_State.CONTENT, text, is_end=is_end)


def _start(plan: PartPlan, text: str, *, is_end: bool) -> _Step | None:
    assert plan.reasoning is not None
    begin, stripped = plan.reasoning.begin, text.lstrip()
    if stripped.startswith(begin):
        return _Step(_State.REASONING_BEGUN, (), stripped[len(begin) :])
    if begin.startswith(stripped) and not is_end:
        return None
    return _Step(_State.ANSWER_BEGUN, (), text)


def _skip_blanks(state: _State, text: str, *, is_end: bool) -> _Step | None:
    stripped = text.lstrip()
    return _Step(state, (), stripped) if stripped or is_end else None


def _reason(plan: PartPlan, text: str, *, is_end: bool) -> _Step | None:
    assert plan.reasoning is not None
    before, end, behind = text.partition(plan.reasoning.end)
    if end:
        return _Step(_State.REASONED, (OutputPart("reasoning", before.rstrip()),), behind)
    if is_end:
        return _Step(_State.REASONING, (OutputPart("reasoning", text.rstrip()),), "")
    return _certain(_State.REASONING, "reasoning", text, plan.reasoning.end)


def _begin_answer(plan: PartPlan, text: str, *, is_end: bool) -> _Step | None:
    openers = "" if plan.tools is None else plan.tools.openers
    stripped = text.lstrip()
    if not openers:
        return _Step(_State.CONTENT, (), text)
    if not stripped and not is_end:
        return None
    return _Step(_State.CALL if stripped[:1] in tuple(openers) else _State.CONTENT, (), text)


def _tell(plan: PartPlan, text: str, *, is_end: bool) -> _Step | None:
    begin = "" if plan.tools is None else plan.tools.begin
    place = text.find(begin) if begin else -1
    if place >= 0:
        part = OutputPart("content", text[:place].rstrip())
        return _Step(_State.CALL, (part,), text[place:])
    if is_end or not begin:
        return _Step(_State.CONTENT, (OutputPart("content", text),), "")
    return _certain(_State.CONTENT, "content", text, begin)


def _call(plan: PartPlan, text: str, *, is_end: bool) -> _Step | None:
    """A call ends at the first end mark up to which it can be read."""
    tools = plan.tools
    assert tools is not None
    place = text.find(tools.end, len(tools.begin)) if tools.end else -1
    while place >= 0:
        calls = tools.read(text[len(tools.begin) : place])
        if calls is not None:
            rest = text[place + len(tools.end) :]
            return _Step(_State.CALLED, _as_parts(calls), rest)
        place = text.find(tools.end, place + 1)
    if not is_end:
        return None
    calls = tools.read(text[len(tools.begin) :])
    parts = (OutputPart("content", text),) if calls is None else _as_parts(calls)
    return _Step(_State.CONTENT, parts, "")


def _as_parts(calls: list[ToolCall]) -> tuple[OutputPart, ...]:
    return tuple(OutputPart("tool_call", arguments, name) for name, arguments in calls)


def _certain(state: _State, kind: PartKind, text: str, mark: str) -> _Step | None:
    """The text before what may be the beginning of `mark`, and before blanks in front of it."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    held = next((size for size in sizes if text.endswith(mark[:size])), 0)
    sure = text[: len(text) - held].rstrip()
    if not sure:
        return None
    return _Step(state, (OutputPart(kind, sure),), text[len(sure) :])
