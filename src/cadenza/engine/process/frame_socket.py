"""`FrameSocket`: messages over a socket that never blocks, as a front end uses it; `Outbox`: what
other threads leave for the thread that serves an engine process. A `put` while a selector waits
wakes it; callers hold the lock, but for `waking` and `woken`."""

import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager

from cadenza.engine.batch_engine import Command
from cadenza.engine.process.messages import FrameBuffer, FromEngine, decode_from_engine, encode
from cadenza.engine.step_watch import Watch

RECEIVE_BYTES = 1 << 18


class FrameSocket:
    """Closes `connection`. `has_hung_up`: the other side has closed."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._frames = FrameBuffer()
        self._unsent: deque[memoryview] = deque()
        self.num_unsent_bytes = 0
        self.has_hung_up = False
        connection.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        """As much as the socket takes now; `flush` sends the rest."""
        self._unsent.append(memoryview(frame))
        self.num_unsent_bytes += len(frame)
        self.flush()

    def flush(self) -> None:
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError:
                # `receive` sees that the other side has ended.
                self._unsent.clear()
                self.num_unsent_bytes = 0
                return
            self.num_unsent_bytes -= sent
            self._unsent[0] = self._unsent[0][sent:]
            if not self._unsent[0]:
                self._unsent.popleft()

    def receive(self) -> Iterator[FromEngine]:
        return map(decode_from_engine, self.payloads())

    def payloads(self) -> Iterator[bytes]:
        """Received frames without their lengths. Raises WireError."""
        try:
            received = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self.has_hung_up = True
            return
        yield from self._frames.feed(received)

    def close(self) -> None:
        self._socket.close()


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
