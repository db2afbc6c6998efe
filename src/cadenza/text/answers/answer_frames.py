"""`AnswerFrame`: makes a grammar of content, or of calls, one of a whole answer to a prompt.

Invariant: an answer of a grammar that a frame makes is split by the frame's own parser.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from cadenza.structured import CallRule
from cadenza.text.answers.answer_grammar import Marks, after_reasoning
from cadenza.text.answers.output_parser import MakeParser
from cadenza.text.answers.part_parser import PartParser, PartPlan, ReasoningFormat


class AnswerFrame(Protocol):
    """What stands around content and calls in one answer."""

    @property
    def marks(self) -> Sequence[str]:
        """The texts that are tokens by themselves in models of this kind, beside those of calls."""
        ...

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """How reasoning that may come is marked; None: none may come, or it is not told apart."""
        ...

    @property
    def has_begun(self) -> bool: ...

    def told(self, grammar: str, marks: Marks) -> str:
        """An answer whose content is of a grammar, after the reasoning."""
        ...

    def called(self, grammar: str, marks: Marks) -> str: ...

    def behind_reasoning(self, grammar: str, marks: Marks) -> str: ...

    def placed(self, rule: CallRule) -> CallRule: ...

    def make_parser(self, plan: PartPlan) -> MakeParser | None:
        """Of the parsers of its samples; None: all of them is content."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedFrame:
    """Reasoning between marks, then content and calls (`AnswerFrame`).

    Args:
        own: how the model marks its reasoning; None: it has none, or it is not told apart.
        has_begun: the prompt has the mark that begins it.
        is_over: the prompt has the mark that ends it.
    """

    own: ReasoningFormat | None
    has_begun: bool
    is_over: bool

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

    def told(self, grammar: str, marks: Marks) -> str:
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
