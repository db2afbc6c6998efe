"""`OutputParser`: splits one sample's text into parts, such as content and reasoning. Invariant of
every parser: the parts, those of one kind joined, are a function of the whole text, whatever pieces
it came in; a part that was returned is final.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from cadenza.outputs import OutputPart


class OutputParser(Protocol):
    """The parser of one sample."""

    @property
    def is_reasoning(self) -> bool: ...

    def push(self, text: str) -> Sequence[OutputPart]:
        """The parts that are certain now and were not before; often none, within a marker."""
        ...

    def flush(self) -> Sequence[OutputPart]: ...


PlacedPart = tuple[int, OutputPart]
"""A part, and where in the answer the text begins that it was read from; a content's text is that
from there on."""


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


MakeParser = Callable[[], OutputParser]
"""Makes a fresh parser for each sample of a request."""
