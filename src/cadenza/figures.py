"""`Figure`: a count or a measure of an engine, declared once beside what it is read from. Its name
and help are those of `/metrics`, docs and `top`; an engine sends its figures by name."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, Self, TypeVar

Source = TypeVar("Source")


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A histogram. `counts[i]`: values in (bounds[i - 1], bounds[i]], the last one those above all
    bounds; `total`: their sum."""

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
        return self._total

    def add(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._total += value * count

    def snapshot(self) -> Distribution:
        return Distribution(bounds=self._bounds, counts=tuple(self._counts), total=self._total)


FigureType = Literal["counter", "gauge", "histogram"]
# A number, numbers by the values of a figure's labels (joined by commas), or a histogram.
Reading = int | float | Mapping[str, int | float] | Distribution


@dataclass(frozen=True, slots=True)
class Figure(Generic[Source]):
    """What is counted or measured of a `Source`."""

    name: str  # in `/metrics`, without its prefix and a counter's `_total`
    help: str
    read: Callable[[Source], Reading | None]  # None where the engine does not have the figure
    labels: tuple[str, ...] = ()  # by which `read` gives numbers
    # A counter never decreases; a histogram is read as a `Distribution`.
    type: FigureType = "counter"
    # Several engines have the sum of theirs; else what the first one has, as settings.
    is_added: bool = True
    has_vllm_name: bool = False  # it is exported under vLLM's prefix, too
