"""`OutputParser`: splits a sample's text into parts, such as content and reasoning.

Behind detokenising and stop strings, before an endpoint's answer: a parser sees the shown text of
one sample as it comes. Owns the protocol only; a request without a parser has its text whole, as
content, at no cost. Knows no tokens and no endpoint. Invariant of every parser: the parts, those of
one kind joined, are a function of the whole text, whatever pieces it came in; a part that was
returned is final.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from cadenza.outputs import OutputPart


class OutputParser(Protocol):
    """The parser of one sample."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within reasoning."""
        ...

    def push(self, text: str) -> Sequence[OutputPart]:
        """The parts that are certain now and were not before; often none, within a marker."""
        ...

    def flush(self) -> Sequence[OutputPart]:
        """The parts that were held back; the text has ended."""
        ...


MakeParser = Callable[[], OutputParser]
"""Makes a fresh parser for each sample of a request."""
