"""Grammars of answers in the harmony format, and `HarmonyFrame`.

Invariant: `HarmonyParser` splits what a grammar allows into the parts that it is of.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from cadenza.structured import CallRule
from cadenza.text.answers.answer_grammar import Arguments, Marks, Tool, literal_in, text_without
from cadenza.text.answers.grammar_parts import joined_grammar, parts_of
from cadenza.text.answers.harmony import (
    ASSISTANT,
    END,
    MESSAGE,
    HarmonyParser,
    header_of,
    tail_of,
)
from cadenza.text.answers.output_parser import MakeParser
from cadenza.text.answers.part_parser import REASONING_FORMATS, PartPlan, ReasoningFormat
from cadenza.text.answers.tool_calls import HARMONY_MARKS

MAX_THOUGHTS = 4
"""Messages of reasoning in front of a constrained one; without a bound a small model may think for
ever."""

_ANALYSIS = REASONING_FORMATS["harmony"].begin
_FINAL = "<|channel|>final<|message|>"
_COMMENTARY = "<|channel|>commentary"
_TO = " to=functions."


def message_calls(arguments: Arguments, marks: Marks) -> str:
    """One call: the model's answer ends after it."""
    return joined_grammar("\n".join(["start: call", *_calls(arguments, marks)]), _named(arguments))


def text_or_message_calls(arguments: Arguments, marks: Marks) -> str:
    """Any text, or a call, perhaps after a text about it."""
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
    return joined_grammar("\n".join(lines), _named(arguments))


def message_rule(tools: Sequence[Tool], arguments: Mapping[str, str], marks: Marks) -> CallRule:
    lines = [f"start: {_either('call', len(tools))}", *_kinds(marks)]
    header = literal_in(_COMMENTARY, marks)
    for i, tool in enumerate(tools):
        lines.append(f"call_{i}: {json.dumps(tool.name)} ({header})? kind @args_{i}")
    begin = "|".join(re.escape(each + _TO) for each in (_COMMENTARY, ASSISTANT))
    return CallRule(begin=begin, grammar=joined_grammar("\n".join(lines), _named(arguments)))


def _calls(arguments: Arguments, marks: Marks) -> list[str]:
    lines = [f"call: {_either('call', len(arguments))}", *_kinds(marks)]
    header = literal_in(_COMMENTARY, marks)
    for i, name in enumerate(arguments):
        to = json.dumps(_TO + name)
        lines.append(f"call_{i}: ({header} {to} | {to} {header}) kind @args_{i}")
    return lines


def _kinds(marks: Marks) -> list[str]:
    constrain, message = (literal_in(each, marks) for each in ("<|constrain|>", MESSAGE))
    return [f'kind: " "? ({constrain}? "json")? {message}']


def _either(name: str, count: int) -> str:
    return " | ".join(f"{name}_{i}" for i in range(count))


def _named(arguments: Mapping[str, str]) -> list[dict[str, object]]:
    named = (parts_of(f"args_{i}", grammar) for i, grammar in enumerate(arguments.values()))
    return [part for parts in named for part in parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyFrame:
    """An `AnswerFrame` of messages; `own` None: reasoning is not told apart; `begun`: what the
    prompt has of the answer's first message."""

    own: ReasoningFormat | None
    begun: str

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

    def told(self, grammar: str, marks: Marks) -> str:
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
