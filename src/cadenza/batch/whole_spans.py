"""Spans: bidirectional image blocks, within which no step ends, but one may begin. A span longer
than a step is computed in **passes**, one a layer, so that all rows' KV is written before any row
attends. Steps share the passes' work items (**quanta**), blocks of rows; until the last, the span
counts as not begun."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from cadenza.batch.image_cost import ImageCost, ImageWork
from cadenza.request import Attachment


class WholeSpan(NamedTuple):
    """The tokens [start, stop) of a prompt."""

    start: int
    stop: int


def whole_spans_of(attachments: Iterable[Attachment]) -> tuple[WholeSpan, ...]:
    return tuple(WholeSpan(each.start, each.start + each.length) for each in attachments)


def cut_within(spans: Iterable[WholeSpan], stop: int) -> WholeSpan | None:
    """The span within which tokens up to `stop` end."""
    return next((span for span in spans if span.start < stop < span.stop), None)


def fitting_count(spans: Iterable[WholeSpan], start: int, count: int, most: int) -> int:
    """How many of `count` tokens end within no span: fewer, or the rest of the first span, if at
    most `most`; else 0."""
    cut = cut_within(spans, start + count)
    if cut is None:
        return count
    if cut.start > start:
        return cut.start - start
    rest = cut.stop - start
    return rest if rest <= most else 0


def least_budget(longest: int, num_rows: int) -> int:
    """The token budget with which `longest` tokens fit each step, whatever other rows decode."""
    return longest + num_rows - 1


class SpanRows(NamedTuple):
    """[first, end) in pass `pass_index`."""

    pass_index: int
    first: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanShape:
    """Spans of up to `max_rows` rows, in passes over blocks of rows."""

    num_passes: int
    max_rows: int
    block_rows: int

    def work(self, start: int, stop: int) -> ImageWork:
        """In tokens of a whole step and keys that these attend to."""
        num_rows = stop - start
        firsts = np.arange(0, num_rows, self.block_rows, dtype=np.float64)
        rows = np.minimum(self.block_rows, num_rows - firsts) / self.num_passes
        products = np.tile(rows, self.num_passes)
        return ImageWork(products=products, attention=stop * products)

    def rows(self, num_rows: int, start: int, stop: int) -> Iterator[SpanRows]:
        """Of work items [start, stop); those of one pass are joined."""
        num_blocks = -(-num_rows // self.block_rows)
        while start < stop:
            index, block = divmod(start, num_blocks)
            behind = min(stop, (index + 1) * num_blocks)
            end = min(num_rows, (behind - index * num_blocks) * self.block_rows)
            yield SpanRows(index, block * self.block_rows, end)
            start = behind


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRest:
    """Work items of `work` after `num_done` of a span of `num_rows` rows."""

    work: ImageWork
    cost: ImageCost
    num_rows: int
    num_done: int = 0

    @property
    def has_begun(self) -> bool:
        return self.num_done > 0

    @property
    def num_left(self) -> int:
        return len(self.work) - self.num_done

    def num_within(self, left_ms: float) -> int:
        """That take `left_ms`; may be 0."""
        return self.cost.num_within(self.work, self.num_done, len(self.work), left_ms)

    def num_worth(self, num_tokens: int) -> int:
        """That compute as much as so many tokens of a step; may be 0."""
        tokens = np.cumsum(self.work.products[self.num_done :])
        return int(np.searchsorted(tokens, num_tokens, side="right"))

    def predict_ms(self, count: int) -> float:
        return self.cost.predict_ms(self.work.load(self.num_done, self.num_done + count))

    def behind(self, count: int) -> "SpanRest":
        return replace(self, num_done=self.num_done + count)

    def at_cost(self, cost: ImageCost) -> "SpanRest":
        return replace(self, cost=cost)
