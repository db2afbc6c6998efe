"""`FrameSocket`: messages over a socket that never blocks, as a front end uses it. No call waits;
`flush` is to be called when the socket takes more."""

import socket
from collections import deque
from collections.abc import Iterator

from cadenza.engine.process.messages import FrameBuffer, FromEngine, decode_from_engine

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
