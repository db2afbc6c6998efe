"""`Outbox`: what other threads leave for the thread that serves an engine process; `Wakeup`. A
`put` while a selector waits wakes it. Callers hold the lock, but for `waking` and `woken`."""

import os
import selectors
import threading
from collections.abc import Generator
from contextlib import contextmanager

from cadenza.engine.batch_engine import Command
from cadenza.engine.process.messages import encode
from cadenza.engine.step_watch import Watch


class Wakeup:
    """Of a selector, from any thread."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)

    def set(self) -> None:
        try:
            os.write(self._writer, b"\0")
        except BlockingIOError:
            return

    def clear(self) -> None:
        try:
            os.read(self.reader, 1 << 16)
        except BlockingIOError:
            return

    def close(self) -> None:
        os.close(self.reader)
        os.close(self._writer)


class Outbox:
    """Frames in their order; `lock` is its owner's."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._frames = bytearray()
        self._wakeup: Wakeup | None = None

    def __len__(self) -> int:
        return len(self._frames)

    def put(self, *commands: Command | Watch) -> None:
        for command in commands:
            self._frames += encode(command)
        if commands:
            self.wake()

    def take(self) -> bytes:
        """Empties it."""
        frames, self._frames = self._frames, bytearray()
        return bytes(frames)

    def clear(self) -> None:
        self._frames.clear()

    def wake(self) -> None:
        if self._wakeup is not None:
            self._wakeup.set()

    def woken(self) -> None:
        if self._wakeup is not None:
            self._wakeup.clear()

    @contextmanager
    def waking(self, selector: selectors.BaseSelector) -> Generator[None]:
        """`selector` is woken with the data "wakeup"."""
        wakeup = Wakeup()
        selector.register(wakeup.reader, selectors.EVENT_READ, "wakeup")
        with self._lock:
            self._wakeup = wakeup
        try:
            yield
        finally:
            with self._lock:
                self._wakeup = None
            selector.unregister(wakeup.reader)
            wakeup.close()
