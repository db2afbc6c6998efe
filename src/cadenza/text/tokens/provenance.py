"""`MarkedText`: strings that track which characters a chat template wrote. Invariant: a character
is marked only if it comes from the template's source; operations without propagation return a plain
`str`, which counts as user text.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, SupportsIndex, cast

Spans = tuple[tuple[int, int], ...]
"""Ranges [start, stop) of characters, ascending, with gaps between them."""

MAX_PIECES = 10_000  # splits into more pieces than this lose the marks
_CONVERSION = re.compile(r"%(?:\((?P<key>[^)]*)\))?[#0\- +]*\d*(?:\.\d+)?(?P<kind>[a-zA-Z%])")


class MarkedText(str):
    """A string with the spans of it that the template wrote (`own_spans`), equal to the plain
    string."""

    __slots__ = ("own_spans",)

    own_spans: Spans

    def __new__(cls, text: str = "", own_spans: Spans = ()) -> "MarkedText":
        marked = super().__new__(cls, text)
        marked.own_spans = own_spans
        return marked

    def __str__(self) -> str:
        return self

    @property
    def is_uniform(self) -> bool:
        return self.own_spans in ((), ((0, len(self)),))

    def is_own(self, start: int, stop: int) -> bool:
        index = bisect_right(self.own_spans, start, key=_first) - 1
        return index >= 0 and stop <= self.own_spans[index][1]

    def cut(self, start: int, stop: int) -> "MarkedText":
        """The substring [start, stop) with its marks, for 0 <= start <= stop <= length."""
        begin = bisect_right(self.own_spans, start, key=_last)
        spans = self.own_spans[begin : bisect_left(self.own_spans, stop, key=_first)]
        clipped = ((max(a, start) - start, min(b, stop) - start) for a, b in spans)
        return MarkedText(str.__getitem__(self, slice(start, stop)), _tidy(clipped))

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            return self.cut(start, max(start, stop)) if step == 1 else super().__getitem__(key)
        return super().__getitem__(key)

    def __add__(self, other: str) -> "MarkedText":
        return join_marked((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> "MarkedText":
        return join_marked((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> "MarkedText":
        if self.is_uniform:
            return self._like(str.__mul__(self, times))
        return join_marked([self] * times.__index__())

    def __rmul__(self, times: SupportsIndex) -> "MarkedText":
        return self * times

    def __mod__(self, values: object) -> str:
        return _format_percent(self, values)

    def strip(self, chars: str | None = None, /) -> "MarkedText":
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> "MarkedText":
        return self.cut(len(self) - len(super().lstrip(chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> "MarkedText":
        return self.cut(0, len(super().rstrip(chars)))

    def removeprefix(self, prefix: str, /) -> "MarkedText":
        return self.cut(len(self) - len(super().removeprefix(prefix)), len(self))

    def removesuffix(self, suffix: str, /) -> "MarkedText":
        return self.cut(0, len(super().removesuffix(suffix)))

    def lower(self) -> str:
        return self._mapped(super().lower())

    def upper(self) -> str:
        return self._mapped(super().upper())

    def title(self) -> str:
        return self._mapped(super().title())

    def capitalize(self) -> str:
        return self._mapped(super().capitalize())

    def join(self, parts: Iterable[str], /) -> str:
        joined: list[str] = []
        for part in parts:
            joined += [self, part] if joined else [part]
        return join_marked(joined)

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not old:
            return super().replace(old, new, count)
        is_alike = not new or (spans_of(new) != ()) == (self.own_spans != ())
        if self.is_uniform and MarkedText(new, spans_of(new)).is_uniform and is_alike:
            return self._like(super().replace(old, new, count))
        if self.count(old) > MAX_PIECES:
            return super().replace(old, new, count)
        return MarkedText(new, spans_of(new)).join(self.split(old, count))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._located(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._located(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        lines = self._located(super().splitlines(keepends=True), "")
        without_ends = map(len, super().splitlines())
        sizes = map(len, lines) if keepends else without_ends
        return [line[:size] for line, size in zip(lines, sizes, strict=True)]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        first, middle, last = self._located([*super().partition(sep)], "")
        return first, middle, last

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        first, middle, last = self._located([*super().rpartition(sep)], "")
        return first, middle, last

    def _mapped(self, text: str) -> str:
        return MarkedText(text, self.own_spans) if len(text) == len(self) else text

    def _like(self, text: str) -> "MarkedText":
        return written_by_template(text) if self.own_spans else MarkedText(text)

    def _located(self, pieces: list[str], between: str | None) -> list[str]:
        """Substrings of a split with their marks; `between`: the separator, None for white
        space."""
        if not self.own_spans or len(pieces) > MAX_PIECES:
            return pieces
        located: list[str] = []
        position = 0
        for piece in pieces:
            if between is None:
                position = self.find(piece, position)
            located.append(self.cut(position, position + len(piece)))
            position += len(piece) + len(between or "")
        return located


@dataclass(frozen=True, slots=True)
class OwnText:
    """A message's text with marks that are written here, in place of a chat template."""

    text: MarkedText


def written_by_template(text: str) -> MarkedText:
    return MarkedText(text, ((0, len(text)),) if text else ())


def spans_of(text: str) -> Spans:
    return text.own_spans if isinstance(text, MarkedText) else ()


def join_marked(parts: Iterable[str], *, is_plain_own: bool = False) -> MarkedText:
    """The concatenated parts with their marks; `is_plain_own`: plain strings are the template's."""
    parts = list(parts)
    spans: list[tuple[int, int]] = []
    position = 0
    for part in parts:
        if isinstance(part, MarkedText):
            spans += [(start + position, stop + position) for start, stop in part.own_spans]
        elif is_plain_own:
            spans.append((position, position + len(part)))
        position += len(part)
    return MarkedText("".join(parts), _tidy(spans))


def format_braces(
    formatter: Formatter, pattern: MarkedText, values: Sequence[Any], named: Mapping[str, Any]
) -> MarkedText:
    is_own = pattern.is_own(0, len(pattern))
    parts: list[str] = []
    number = 0
    for literal, field, given_width, conversion in formatter.parse(str.__str__(pattern)):
        parts.append(written_by_template(literal) if is_own else literal)
        if field is None:
            continue
        is_numbered = not field or field[0] in ".["
        name = f"{number}{field}" if is_numbered else field
        number += is_numbered
        value, _ = formatter.get_field(name, values, named)
        value = formatter.convert_field(value, cast(Any, conversion))
        width = formatter.vformat(given_width or "", values, named)
        is_text = isinstance(value, str) and not width
        parts.append(value if is_text else formatter.format_field(value, width))
    return join_marked(parts)


def _format_percent(pattern: MarkedText, values: object) -> str:
    text = str.__mod__(pattern, values)
    pending = list(cast(tuple[object, ...], values)) if isinstance(values, tuple) else [values]
    parts: list[str] = []
    position = 0
    for match in _CONVERSION.finditer(str.__str__(pattern)):
        parts.append(pattern.cut(position, match.start()))
        position = match.end()
        if match["kind"] == "%":
            parts.append(pattern.cut(position - 1, position))
        elif match["key"] is not None:
            parts.append(match[0] % values)
        else:
            value = pending.pop(0)
            is_text = isinstance(value, str) and match[0] == "%s"
            parts.append(cast(str, value) if is_text else match[0] % (value,))
    marked = join_marked([*parts, pattern.cut(position, len(pattern))])
    return marked if marked == text else text


def _first(span: tuple[int, int]) -> int:
    return span[0]


def _last(span: tuple[int, int]) -> int:
    return span[1]


def _tidy(spans: Iterable[tuple[int, int]]) -> Spans:
    tidy: list[tuple[int, int]] = []
    for start, stop in spans:
        if start >= stop:
            continue
        if tidy and tidy[-1][1] == start:
            tidy[-1] = (tidy[-1][0], stop)
        else:
            tidy.append((start, stop))
    return tuple(tidy)
