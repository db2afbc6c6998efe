"""Grammars of whole answers: tool calls in JSON, and what follows reasoning; `AnswerFrame` makes a
grammar of content, or of calls, one of an answer to a prompt. Invariant: an answer of a grammar
made here is split by the parser of the same frame, and read by that of the same format."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from cadenza.structured import CallRule
from cadenza.text.answers.part_parser import MakeParser, PartParser, PartPlan, ReasoningFormat
from cadenza.text.answers.tool_format import (
    Marks,
    ToolFormat,
    either,
    literal_in,
    text_without,
    up_to,
    whole_grammar,
)
from cadenza.text.schemas.grammar import joined_grammar, parts_of

MAX_CALLS = 16  # of one constrained answer; without a bound a small model may call for ever


Arguments = Mapping[str, str]  # their grammars, by the functions' names


def calls_grammar(arguments: Arguments, format: ToolFormat, marks: Marks, *, max_calls: int) -> str:
    lines = ["start: calls", *_calls(arguments, format, marks, max_calls)]
    return whole_grammar(arguments.values(), lines)


def text_or_calls_grammar(arguments: Arguments, format: ToolFormat, marks: Marks) -> str:
    """Any text, in which whatever begins a call is one."""
    calls = _calls(arguments, format, marks, MAX_CALLS)
    if format.begin:
        start, text = "start: TEXT | TEXT calls", text_without("TEXT", format.begin)
    else:
        openers = "".join(map(re.escape, format.openers))
        start = "start: TEXT | calls"
        text = rf"TEXT: /[^\s{openers}](.|\n)*/"
    return whole_grammar(arguments.values(), [start, text, *calls])


def either_grammar(first: str, second: str) -> str:
    return joined_grammar(
        "start: @first | @second", [*parts_of("first", first), *parts_of("second", second)]
    )


def after_reasoning(
    grammar: str, reasoning: ReasoningFormat, marks: Marks, *, has_begun: bool
) -> str:
    """What a grammar allows, after reasoning: that which the prompt began, or any or none."""
    begin, end = (literal_in(each, marks) for each in (reasoning.begin, reasoning.end))
    thought = text_without("THOUGHT", reasoning.end)
    thinking = f"THOUGHT {end} BLANKS"
    start = f"{thinking} @inner" if has_begun else f"({begin} {thinking})? @inner"
    lark = f"start: {start}\n{thought}\nBLANKS: /\\s{{0,8}}/"
    return joined_grammar(lark, parts_of("inner", grammar))


def _calls(names: Collection[str], format: ToolFormat, marks: Marks, max_calls: int) -> list[str]:
    lines = [f"call: {either('call', len(names))}"]
    for i, name in enumerate(names):
        head = f'{{"name": {json.dumps(name)}, "{format.arguments}": '
        lines.append(f'call_{i}: {json.dumps(head)} @args_{i} "}}"')
    opening, between, closing = (
        literal_in(each, marks) for each in (format.opening, format.between, format.closing)
    )
    more = up_to(max_calls - 1, f"{between} call")
    return [f"calls: {opening} call {more} {closing}", *lines]


class AnswerFrame(Protocol):
    """What stands around content and calls in one answer."""

    @property
    def marks(self) -> Sequence[str]:
        """Those that are tokens by themselves, beside those of calls."""
        ...

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """How reasoning that may come is marked; None: none may come, or it is not told apart."""
        ...

    @property
    def has_begun(self) -> bool: ...

    def with_content(self, grammar: str, marks: Marks) -> str:
        """An answer whose content is of a grammar, after the reasoning."""
        ...

    def called(self, grammar: str, marks: Marks) -> str: ...

    def behind_reasoning(self, grammar: str, marks: Marks) -> str: ...

    def placed(self, rule: CallRule) -> CallRule: ...

    def make_parser(self, plan: PartPlan) -> MakeParser | None:
        """None: all of the answer is content."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedFrame:
    """Reasoning between marks, then content and calls."""

    own: ReasoningFormat | None  # None: the model has none, or it is not told apart
    has_begun: bool  # the prompt has the mark that begins it
    is_over: bool  # the prompt has the mark that ends it

    @classmethod
    def of(cls, own: ReasoningFormat | None, prompt: str) -> "MarkedFrame":
        ended = prompt.rstrip()
        has_begun = own is not None and ended.endswith(own.begin)
        is_over = own is not None and ended.endswith(own.end)
        return cls(own=own, has_begun=has_begun, is_over=is_over)

    @property
    def marks(self) -> Sequence[str]:
        return () if self.own is None else (self.own.begin, self.own.end)

    @property
    def reasoning(self) -> ReasoningFormat | None:
        return None if self.is_over else self.own

    def with_content(self, grammar: str, marks: Marks) -> str:
        del marks
        return grammar

    def called(self, grammar: str, marks: Marks) -> str:
        del marks
        return grammar

    def behind_reasoning(self, grammar: str, marks: Marks) -> str:
        if self.reasoning is None:
            return grammar
        return after_reasoning(grammar, self.reasoning, marks, has_begun=self.has_begun)

    def placed(self, rule: CallRule) -> CallRule:
        reasoning = self.reasoning
        if reasoning is None:
            return rule
        around = (reasoning.begin, reasoning.end)
        return replace(rule, reasoning=around, has_begun=self.has_begun)

    def make_parser(self, plan: PartPlan) -> MakeParser | None:
        if self.own is None and plan.tools is None:
            return None
        whole = replace(plan, reasoning=self.own, begins_in_reasoning=self.has_begun)
        return partial(PartParser, whole)
