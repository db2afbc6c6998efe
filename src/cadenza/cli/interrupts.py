"""Signals that end a command: Ctrl-C between two steps, SIGTERM and SIGHUP at once.

Owns the process's handlers while it is entered. Invariants: Ctrl-C interrupts no step, but a second
one before the first was handled raises KeyboardInterrupt at once; a command that SIGTERM or SIGHUP
ends exits its contexts, which remove what it made.
"""

import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, Self

TERMINATED = 128 + signal.SIGTERM


class Interrupts:
    """`is_set` after Ctrl-C, until `raised` is entered."""

    __slots__ = ("_is_raised", "_previous", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._is_raised = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        self.is_set = False
        self._previous = signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    @contextmanager
    def raised(self) -> Generator[None, None, None]:
        """Within this block Ctrl-C raises KeyboardInterrupt at once, for reading input."""
        self.is_set, self._is_raised = False, True
        try:
            yield
        finally:
            self._is_raised = False

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        if self.is_set or self._is_raised:
            raise KeyboardInterrupt
        self.is_set = True


@contextmanager
def terminable() -> Generator[None]:
    """Within this block SIGTERM raises SystemExit with its exit code; so does SIGHUP, unless the
    command was started with SIGHUP ignored.
    """

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    taken = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        taken.append(signal.SIGHUP)
    previous = {number: signal.signal(number, leave) for number in taken}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
