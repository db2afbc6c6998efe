"""Ctrl-C ends a command between two steps, SIGTERM and SIGHUP at once; its contexts remove what it
made. Within `Interrupts` Ctrl-C interrupts no step, but a second one before the first was handled
raises KeyboardInterrupt at once; elsewhere it always ends the command.
"""

import _thread
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, Self

TERMINATED = 128 + signal.SIGTERM
AGAIN_S = 0.01  # from a KeyboardInterrupt that was dropped to the next one


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
def dropped_interrupts_raised() -> Generator[None]:
    """Within this block, on the main thread, a KeyboardInterrupt that Python drops is raised again.
    It drops what is raised in finalisers and in callbacks of its garbage collector, of which JAX
    has one."""
    previous, main = sys.unraisablehook, threading.main_thread().ident
    is_over = threading.Event()

    def interrupt() -> None:
        if not is_over.wait(AGAIN_S) and main is not None:
            signal.pthread_kill(main, signal.SIGINT)

    def take(dropped: "sys.UnraisableHookArgs") -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            previous(dropped)
            return
        while True:
            try:
                # A thread whose start is not waited for, as `threading.Thread` would.
                _thread.start_new_thread(interrupt, ())
            except KeyboardInterrupt:  # here it would be dropped for good
                continue
            return

    sys.unraisablehook = take
    try:
        yield
    finally:
        is_over.set()
        sys.unraisablehook = previous


@contextmanager
def terminable() -> Generator[None]:
    """Within this block SIGTERM raises SystemExit with its exit code; so does SIGHUP, unless the
    command was started with SIGHUP ignored."""

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
