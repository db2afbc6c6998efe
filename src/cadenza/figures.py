"""`Figure`: a count or a measure of an engine, declared once beside what it is read from. Its name
and help are those of `/metrics`, docs and `top`; an engine sends its figures by name."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, Self, TypeVar

Source = TypeVar("Source")


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A histogram. `counts[i]` is the number of values in (bounds[i - 1], bounds[i]], the last one
    that of values above all bounds; `total` is the sum of all values."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> Self:
        return cls(bounds=bounds, counts=(0,) * (len(bounds) + 1), total=0.0)

    @property
    def count(self) -> int:
        return sum(self.counts)


class Tally:
    """Accumulates a `Distribution`."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    @property
    def total(self) -> float:
        """The sum of all values."""
        return self._total

    def add(self, value: float, count: int = 1) -> None:
        """Adds `count` occurrences of `value`."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._total += value * count

    def snapshot(self) -> Distribution:
        return Distribution(bounds=self._bounds, counts=tuple(self._counts), total=self._total)


FigureType = Literal["counter", "gauge", "histogram"]
Reading = int | float | Mapping[str, int | float] | Distribution
"""A number, numbers by the values of a figure's labels (joined by commas), or a histogram."""


@dataclass(frozen=True, slots=True)
class Figure(Generic[Source]):
    """What is counted or measured of a `Source`.

    Args:
        name: in `/metrics`, without its prefix and a counter's `_total`.
        read: None where the engine does not have the figure.
        labels: by which `read` gives numbers.
        type: a counter never decreases; a histogram is read as a `Distribution`.
        is_added: several engines have the sum of theirs; else what the first one has, as settings.
        has_vllm_name: it is exported under vLLM's prefix, too.
    """

    name: str
    help: str
    read: Callable[[Source], Reading | None]
    labels: tuple[str, ...] = ()
    type: FigureType = "counter"
    is_added: bool = True
    has_vllm_name: bool = False
