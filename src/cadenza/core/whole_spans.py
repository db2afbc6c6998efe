"""Spans of tokens that attend to each other both ways: a step computes their ends whole.

Keys behind a token of such a span decide its result, so that no step may end within one. A step
may begin within one: what is before then exists as it was computed with the whole span. Pure
functions; the spans of a sequence ascend and do not overlap.
"""

from collections.abc import Iterable
from typing import NamedTuple

from cadenza.request import Attachment


class WholeSpan(NamedTuple):
    """The tokens [start, stop) of a prompt."""

    start: int
    stop: int


def whole_spans_of(attachments: Iterable[Attachment]) -> tuple[WholeSpan, ...]:
    return tuple(WholeSpan(each.start, each.start + each.length) for each in attachments)


def cut_within(spans: Iterable[WholeSpan], stop: int) -> WholeSpan | None:
    """The span within which tokens up to `stop` end, if there is one."""
    return next((span for span in spans if span.start < stop < span.stop), None)


def fitting_count(spans: Iterable[WholeSpan], start: int, count: int, most: int) -> int:
    """How many of `count` tokens from `start` on a step computes, so that it ends within no span:
    fewer, or the rest of the span that it begins with, if that is at most `most`; otherwise 0."""
    cut = cut_within(spans, start + count)
    if cut is None:
        return count
    if cut.start > start:
        return cut.start - start
    rest = cut.stop - start
    return rest if rest <= most else 0


def least_budget(longest: int, num_rows: int) -> int:
    """The token budget with which a span of `longest` tokens fits each step, whatever the other
    rows decode."""
    return longest + num_rows - 1
