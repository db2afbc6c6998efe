"""Stop strings in a text that comes in parts: `StopMatcher`.

Owns what may be given out before it is certain that no stop string begins in it. Knows nothing of
tokens or requests. Invariant: for every way the text can be split, the parts put together are the
whole text cut at its earliest stop string; a part that was given out is final.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """`stop` ended the text; its last character is the `end`-th of all that was pushed."""

    stop: str
    end: int


class StopMatcher:
    """Looks for the earliest of `stops`: the one that begins first, and of those that begin at the
    same place the shortest.

    A stop string that is whole while an earlier, longer one may still come true has to wait for it.

    Args:
        stops: none of them empty.
        is_included: the stop string itself belongs to the text.
    """

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
        """No match can end before this character; None while the text may go on for ever."""
        if self.match is not None:
            return self.match.end
        ends = [at + len(stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        return self._num_released + min(ends) if ends else None

    def push(self, text: str) -> str:
        """The text that is certain now and was not before; "" once there was a match."""
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
        """What was kept back, cut at a stop string that is whole; the text has ended."""
        if self.match is not None:
            return ""
        starts = [(self._held.find(stop), len(stop), stop) for stop in self._stops]
        whole = [found for found in starts if found[0] >= 0]
        if not whole:
            return self._release(len(self._held))
        start, _, stop = min(whole)
        return self._end_with(stop, start)

    def _may_begin_at(self, start: int) -> bool:
        """Whether all that is kept back from `start` on is the beginning of a stop string."""
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
