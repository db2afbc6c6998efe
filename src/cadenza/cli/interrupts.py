"""Signals that end a command: Ctrl-C as a question between two steps, SIGTERM and SIGHUP as a way
out.

Owns the process's handlers of them while it is entered. Invariants: no step is cut in its middle,
and a second Ctrl-C before the first was answered raises KeyboardInterrupt at once; a command that
SIGTERM or SIGHUP ends leaves its contexts, and with them what it has made.
"""

import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, Self

TERMINATED = 128 + signal.SIGTERM


class Interrupts:
    """`is_set` tells whether Ctrl-C was pressed since it was entered, or last raised."""

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
        """Within this block Ctrl-C raises KeyboardInterrupt, as is right where a user types."""
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
    """Within this block SIGTERM leaves it, as Ctrl-C does, and ends the command with its code; so
    does SIGHUP, where the command was not started to ignore it.
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
