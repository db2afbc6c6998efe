"""`OutputParser`: splits a sample's text into parts, such as content and reasoning.

Behind detokenising and stop strings, before an endpoint's answer: a parser sees the shown text of
one sample as it comes. Owns the protocol only; a request without a parser has its text whole, as
content, at no cost. Knows no tokens and no endpoint. Invariant of every parser: the parts, those of
one kind joined, are a function of the whole text, whatever pieces it came in; a part that was
returned is final.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

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


PlacedPart = tuple[int, OutputPart]
"""A part, and where in the answer the text begins that it was read from; a content's text is that
from there on."""


@runtime_checkable
class PlacedParser(OutputParser, Protocol):
    """A parser that knows where in the text its parts are. Parts without a text end a stretch of
    content; `push` and `flush` leave them out."""

    @property
    def num_read(self) -> int:
        """Characters of the answer of which it is decided what they are."""
        ...

    def push_placed(self, text: str) -> Sequence[PlacedPart]: ...

    def flush_placed(self) -> Sequence[PlacedPart]: ...


MakeParser = Callable[[], OutputParser]
"""Makes a fresh parser for each sample of a request."""
