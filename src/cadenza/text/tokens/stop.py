"""Stop strings in streamed text: `StopMatcher`. Invariant: however the text is split, the
concatenated output is the complete text cut at its earliest stop string; output is final.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """The matched stop string; `end` is the number of pushed characters up to its end."""

    stop: str
    end: int


class StopMatcher:
    """Finds the earliest of `stops` (not empty): the one that begins first, the shortest of equal
    beginnings. A complete one is held while a longer one that begins earlier may still be
    completed. `is_included`: the output keeps it."""

    __slots__ = ("_first", "_held", "_is_included", "_num_released", "_stops", "match")

    match: StopMatch | None

    def __init__(self, stops: Iterable[str], *, is_included: bool = False) -> None:
        self._stops = tuple(sorted(set(stops), key=len))
        firsts = "".join(re.escape(first) for first in sorted({stop[0] for stop in self._stops}))
        self._first = re.compile(f"[{firsts}]" if firsts else "(?!)")
        self._is_included = is_included
        self._held = ""
        self._num_released = 0
        self.match = None

    @property
    def least_end(self) -> int | None:
        """A lower bound of `match.end`, in characters; None if no stop string is complete yet."""
        if self.match is not None:
            return self.match.end
        ends = [at + len(stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        return self._num_released + min(ends) if ends else None

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_given(self) -> int:
        if self.match is None:
            return self._num_released
        return self.match.end - (0 if self._is_included else len(self.match.stop))

    def push(self, text: str) -> str:
        """The text that this part makes final; "" after a match."""
        if self.match is not None:
            return ""
        self._held += text
        start = 0
        while (begin := self._first.search(self._held, start)) is not None:
            start = begin.start()
            for stop in self._stops:
                if self._held.startswith(stop, start):
                    return self._end_with(stop, start)
            if self._may_begin_at(start):
                return self._release(start)
            start += 1
        return self._release(len(self._held))

    def flush(self) -> str:
        if self.match is not None:
            return ""
        starts = [(self._held.find(stop), len(stop), stop) for stop in self._stops]
        complete = [found for found in starts if found[0] >= 0]
        if not complete:
            return self._release(len(self._held))
        start, _, stop = min(complete)
        return self._end_with(stop, start)

    def _may_begin_at(self, start: int) -> bool:
        rest = len(self._held) - start
        return any(
            len(stop) > rest and self._held.endswith(stop[:rest]) for stop in reversed(self._stops)
        )

    def _end_with(self, stop: str, start: int) -> str:
        self.match = StopMatch(stop=stop, end=self._num_released + start + len(stop))
        text = self._held[: start + len(stop) if self._is_included else start]
        self._held = ""
        return text

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self._num_released += count
        return text
