"""What a long command is doing: a live line where stderr is a terminal, else a line now and then:
none in a few seconds, then at least one each `EVERY_S`. Invariant: lines of a result go to stdout
at once.
"""

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from rich.status import Status as RichStatus

EVERY_S = 5.0


class Status(Protocol):
    """Called with what is being done; `print` writes a line of the result to stdout."""

    def __call__(self, text: str, /) -> None: ...

    def print(self, line: str) -> None: ...


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class PlainStatus:
    """A line on stderr every `every_s` seconds, if something else is being done by then."""

    def __init__(
        self, first: str, every_s: float = EVERY_S, write: Callable[[str], object] = _to_stderr
    ) -> None:
        self._write = write
        self._text, self._written = first, ""
        self._every_s = every_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __call__(self, text: str, /) -> None:
        self._text = text

    def print(self, line: str) -> None:
        print(line, flush=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(self._every_s):
            text = self._text
            if text == self._written:
                continue
            self._written = text
            try:
                self._write(f"cadenza: {text}")
            except OSError:  # nobody reads stderr
                return


@contextmanager
def status_line(first: str) -> Generator[Status]:
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        with PlainStatus(first) as plain:
            yield plain
        return
    with console.status(first) as status:
        yield _LiveStatus(status)


@dataclass(frozen=True, slots=True)
class _LiveStatus:
    status: "RichStatus"

    def __call__(self, text: str, /) -> None:
        self.status.update(text)

    def print(self, line: str) -> None:
        self.status.stop()
        print(line, flush=True)
        self.status.start()


@contextmanager
def progress_bar(title: str) -> Generator[Callable[[int, int], None]]:
    """A bar on a terminal, elsewhere a line now and then; without an end until the first call with
    what is done and the whole."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        with PlainStatus(title) as plain:
            yield lambda done, total: plain(f"{title}: {done / total:.0%}" if total else title)
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
