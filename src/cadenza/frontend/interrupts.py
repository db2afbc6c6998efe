"""Ctrl-C while steps run: it is kept until the step has ended, where nothing can drop it.

Python drops what a signal's handler raises inside a callback of its garbage collector, and JAX has
one. Invariant: the caller's handler is called once for each Ctrl-C, on the main thread.
"""

import inspect
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

Handler = Callable[[int, FrameType | None], object]


class KeptInterrupts:
    """Within this context the first Ctrl-C is kept for `deliver`; a second one, before that, goes
    to the caller's handler at once.

    Does nothing on other threads, and where Ctrl-C is ignored or ends the process.
    """

    __slots__ = ("_handler", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._handler: Handler | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handler: Any = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._keep)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if kind is None:
                self.deliver()

    def deliver(self) -> None:
        """Calls the caller's handler if Ctrl-C came; raises what it raises."""
        if self.is_set and self._handler is not None:
            self.is_set = False
            self._handler(signal.SIGINT, inspect.currentframe())

    def _keep(self, number: int, frame: FrameType | None) -> None:
        if self.is_set and self._handler is not None:
            self._handler(number, frame)
        self.is_set = True
