"""`ContentStops`: stop strings in the content of an answer that is split into parts. Invariants: no
stop string is found in or across reasoning and calls; however the text is split, what is shown and
its parts are those of the whole text, cut at the first stop string in its content."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cadenza.outputs import OutputPart
from cadenza.text.answers.part_parser import PlacedParser
from cadenza.text.tokens.stop import StopMatch, StopMatcher


class ShownText(NamedTuple):
    """What has become certain."""

    text: str
    parts: list[OutputPart]


class ContentStops:
    """Of one sample, with a fresh parser; `make_matcher`: of one stretch of content."""

    __slots__ = (
        "_base",
        "_first",
        "_held",
        "_make_matcher",
        "_matcher",
        "_num_pushed",
        "_num_shown",
        "_parser",
        "_stops",
        "match",
    )

    match: StopMatch | None  # its `end` counts all characters of the answer

    def __init__(
        self,
        parser: PlacedParser,
        stops: Sequence[str],
        make_matcher: Callable[[], StopMatcher],
    ) -> None:
        self._parser = parser
        self._stops = stops
        self._make_matcher = make_matcher
        self._matcher: StopMatcher | None = None  # of the stretch of content that goes on
        self._base = 0  # where its first searched character is
        self._first = 0  # what is in front of this character is not searched
        self._held = ""  # pushed and not shown
        self._num_pushed = 0
        self._num_shown = 0
        self.match = None

    @property
    def is_reasoning(self) -> bool:
        return self._parser.is_reasoning

    @property
    def least_end(self) -> int | None:
        """A lower bound of `match.end`; None if no stop string is complete yet."""
        if self.match is not None:
            return self.match.end
        found = [(self._held.find(stop), len(stop)) for stop in self._stops]
        ends = [self._num_shown + position + size for position, size in found if position >= 0]
        return min(ends, default=None)

    def push(self, text: str, *, is_searched: bool = True) -> ShownText:
        """Takes more text; that of `min_tokens` is not searched."""
        if self.match is not None:
            return ShownText("", [])
        self._held += text
        self._num_pushed += len(text)
        if not is_searched:
            self._first = self._num_pushed
        return self._show(self._parser.push_placed(text))

    def flush(self) -> ShownText:
        if self.match is not None:
            return ShownText("", [])
        shown = self._show(self._parser.flush_placed())
        if self.match is not None:
            return shown
        parts = [*shown.parts, *self._end_stretch()]
        return ShownText(shown.text + self._release(self._end_of_shown(self._num_pushed)), parts)

    def _show(self, placed: Sequence[tuple[int, OutputPart]]) -> ShownText:
        parts: list[OutputPart] = []
        for position, part in placed:
            parts += self._search(position, part) if part.kind == "content" else self._end_stretch()
            if self.match is not None:
                break
            if part.kind != "content":
                parts.append(part)
        num_held = 0 if self._matcher is None else self._matcher.num_held
        end = self._end_of_shown(self._parser.num_read - num_held)
        return ShownText(self._release(end), [part for part in parts if _is_something(part)])

    def _search(self, position: int, part: OutputPart) -> list[OutputPart]:
        num_free = max(0, min(len(part.text), self._first - position))
        free, text = part.text[:num_free], part.text[num_free:]
        if text and self._matcher is None:
            self._matcher, self._base = self._make_matcher(), position + num_free
        if text and self._matcher is not None:
            text = self._matcher.push(text)
            self._take_match(self._matcher)
        return [OutputPart("content", free + text)]

    def _end_stretch(self) -> list[OutputPart]:
        if self._matcher is None:
            return []
        part = OutputPart("content", self._matcher.flush())
        self._take_match(self._matcher)
        if self.match is None:
            self._matcher = None
        return [part]

    def _take_match(self, matcher: StopMatcher) -> None:
        if matcher.match is not None:
            self.match = StopMatch(stop=matcher.match.stop, end=self._base + matcher.match.end)

    def _end_of_shown(self, otherwise: int) -> int:
        if self.match is None or self._matcher is None:
            return otherwise
        return self._base + self._matcher.num_given

    def _release(self, end: int) -> str:
        count = max(0, end - self._num_shown)
        text, self._held = self._held[:count], self._held[count:]
        self._num_shown += len(text)
        return text


def _is_something(part: OutputPart) -> bool:
    return bool(part.text) or part.name is not None
