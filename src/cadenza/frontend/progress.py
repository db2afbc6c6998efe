"""Progress of many requests: `ProgressLine` on a terminal, or a caller's bar. Invariant: nothing is
written, and rich not imported, where stderr is no terminal; the line is gone at the end."""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from cadenza.errors import must_be

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

FIRST_S = 0.5  # before the line appears: what is done sooner needs none
EVERY_S = 0.1
BAR_WIDTH = 24


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
        rows = "1 row" if self.num_rows == 1 else f"{self.num_rows} rows"
        parts = [f"{self.num_done}/{self.num_requests} done", rows]
        if self.num_tokens and self.elapsed_s > 0:
            parts.append(f"{self.num_tokens / self.elapsed_s:.1f} tok/s")
        return ", ".join(parts)


class ProgressLine:
    """Redraws the line while a batch runs, as a context manager. `console`: writes to a terminal;
    None writes nothing. `clock`: seconds."""

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
        return self._clock() >= self._due_s

    def show(self, *, num_done: int, num_rows: int, num_tokens: int) -> None:
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
        self._draw(progress)
        self._due_s = self._clock() + EVERY_S

    def _draw(self, progress: BatchProgress) -> None:
        from rich.live import Live
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        if self._live is None:
            self._live = Live(
                console=self._console, auto_refresh=False, transient=True, redirect_stdout=False
            )
            self._live.start()
        line = Table.grid(padding=(0, 1))
        total, done = progress.num_requests, progress.num_done
        line.add_row(ProgressBar(total, done, width=BAR_WIDTH), progress.text)
        self._live.update(line, refresh=True)


class TqdmBar(Protocol):
    """What is used of a `tqdm`."""

    postfix: Any

    def update(self, n: int) -> object: ...

    def close(self) -> object: ...


MakeBar = Callable[..., TqdmBar]  # called with `total`, `desc`, `dynamic_ncols`, `postfix`


class MadeBar:
    """A bar that the caller made, as a context manager in place of a `ProgressLine`."""

    is_due = True

    def __init__(
        self, num_requests: int, make: MakeBar, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock, self._start_s = clock, clock()
        self._num_done = 0
        title, speed = "Processed prompts", "0.0 tok/s"
        self._bar = make(total=num_requests, desc=title, dynamic_ncols=True, postfix=speed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, *, num_done: int, num_rows: int, num_tokens: int) -> None:
        del num_rows
        if num_done == self._num_done:
            return
        elapsed_s = self._clock() - self._start_s
        self._bar.postfix = f"{num_tokens / elapsed_s:.1f} tok/s" if elapsed_s > 0 else ""
        self._bar.update(num_done - self._num_done)
        self._num_done = num_done


def batch_progress(num_requests: int, wanted: bool | MakeBar | None) -> ProgressLine | MadeBar:
    if wanted is None or isinstance(wanted, bool):
        return progress_line(num_requests, is_wanted=bool(wanted))
    if not callable(wanted):
        raise must_be("use_tqdm", wanted, "true, false, or what makes a bar, such as tqdm")
    return MadeBar(num_requests, wanted)


def progress_line(num_requests: int, *, is_wanted: bool = True) -> ProgressLine:
    if not is_wanted or sys.stderr is None or not sys.stderr.isatty():
        return ProgressLine(num_requests, None)
    from rich.console import Console

    return ProgressLine(num_requests, Console(stderr=True, highlight=False))
