"""The progress of many requests, as one line on a terminal: `ProgressLine`.

Owns the line's text and when it is drawn. Knows no engine. Invariant: nothing is written where
stderr is no terminal, and rich is not even imported; on a terminal the line is gone at the end.
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

FIRST_S = 0.5
"""Seconds before the line appears: what is done sooner needs none."""
EVERY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProgress:
    """How far a batch is; `num_rows` of its sequences run, `num_tokens` were generated."""

    num_done: int
    num_requests: int
    num_rows: int
    num_tokens: int
    elapsed_s: float

    @property
    def text(self) -> str:
        """Say 12/64 done, 16 rows, 345.6 tok/s."""
        rows = "1 row" if self.num_rows == 1 else f"{self.num_rows} rows"
        parts = [f"{self.num_done}/{self.num_requests} done", rows]
        if self.num_tokens and self.elapsed_s > 0:
            parts.append(f"{self.num_tokens / self.elapsed_s:.1f} tok/s")
        return ", ".join(parts)


class ProgressLine:
    """Redraws the line while a batch runs, as a context manager.

    Args:
        console: writes to a terminal; None writes nothing.
        clock: seconds.
    """

    def __init__(
        self,
        num_requests: int,
        console: "Console | None",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._num_requests = num_requests
        self._console = console
        self._clock = clock
        self._start_s = clock()
        self._due_s = math.inf if console is None else self._start_s + FIRST_S
        self._live: Live | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @property
    def has_terminal(self) -> bool:
        return self._console is not None

    @property
    def is_due(self) -> bool:
        """Whether `show` would draw; never without a terminal."""
        return self._clock() >= self._due_s

    def show(self, *, num_done: int, num_rows: int, num_tokens: int) -> None:
        """Draws the line if it is due."""
        now_s = self._clock()
        if now_s < self._due_s:
            return
        progress = BatchProgress(
            num_done=num_done,
            num_requests=self._num_requests,
            num_rows=num_rows,
            num_tokens=num_tokens,
            elapsed_s=now_s - self._start_s,
        )
        self._draw(progress.text)
        self._due_s = self._clock() + EVERY_S

    def _draw(self, text: str) -> None:
        if self._live is None:
            from rich.live import Live

            self._live = Live(
                console=self._console, auto_refresh=False, transient=True, redirect_stdout=False
            )
            self._live.start()
        self._live.update(text, refresh=True)


def progress_line(num_requests: int, *, is_wanted: bool = True) -> ProgressLine:
    """On stderr if that is a terminal and the line `is_wanted`."""
    if not is_wanted or sys.stderr is None or not sys.stderr.isatty():
        return ProgressLine(num_requests, None)
    from rich.console import Console

    return ProgressLine(num_requests, Console(stderr=True, highlight=False))
