"""`ChildProcess`: the front end's handle on one engine process.

Owns its three descriptors (socket, lifeline, output), starts it and ends it. Only `close` blocks,
for a stated time. Invariant: `close` leaves no process, descriptor or thread.
"""

import logging
import os
import selectors
import signal
import subprocess
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

from cadenza.engine.process.launch import COMMAND, Execute, Launched, execute, launch
from cadenza.engine.process.messages import (
    FrameBuffer,
    FromEngine,
    LogLines,
    decode_from_engine,
)

_RECEIVE_BYTES = 1 << 18
_LAST_READS = 16
"""Reads of the pipe after the exit. One empties it; more are needed while the process's own
children still print."""


class ChildProcess:
    """The process `launched`, or a new one of `command`.

    Raises OSError where none can be started; then everything that was opened is closed.
    """

    def __init__(
        self,
        command: Sequence[str] = COMMAND,
        execute: Execute = execute,
        *,
        launched: Launched | None = None,
    ) -> None:
        self._frames = FrameBuffer()
        self._log_lines = LogLines()
        self._outbox: deque[memoryview] = deque()
        self.num_unsent_bytes = 0
        self.has_hung_up = False
        self._watched_events = 0
        launched = launched or launch(command, execute)
        self._process, self._socket = launched.program, launched.connection
        self._lifeline, self._output = launched.lifeline, launched.output
        self._socket.setblocking(False)
        os.set_blocking(self._output, False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def register(self, selector: selectors.BaseSelector) -> None:
        """Makes `selector` wait for messages, for output, and for room to write what is unsent.

        The data of the keys are "messages" and "output". To be called again before each wait.
        """
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
        if events == self._watched_events:
            return
        if self._watched_events:
            selector.modify(self._socket, events, "messages")
        else:
            selector.register(self._socket, events, "messages")
            selector.register(self._output, selectors.EVENT_READ, "output")
        self._watched_events = events

    def unregister(self, selector: selectors.BaseSelector) -> None:
        if self._watched_events:
            selector.unregister(self._socket)
            selector.unregister(self._output)
            self._watched_events = 0

    def send(self, frame: bytes) -> None:
        """Sends as much as the socket takes now; `flush` sends the rest."""
        self._outbox.append(memoryview(frame))
        self.num_unsent_bytes += len(frame)
        self.flush()

    def flush(self) -> None:
        """Sends as much of the rest as the socket takes."""
        while self._outbox:
            try:
                sent = self._socket.send(self._outbox[0])
            except BlockingIOError:
                return
            except OSError:
                # `receive` sees that the process has exited.
                self._outbox.clear()
                self.num_unsent_bytes = 0
                return
            self.num_unsent_bytes -= sent
            self._outbox[0] = self._outbox[0][sent:]
            if not self._outbox[0]:
                self._outbox.popleft()

    def receive(self) -> Iterator[FromEngine]:
        """The messages that have arrived. Sets `has_hung_up` at end of file. Raises WireError."""
        try:
            received = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self.has_hung_up = True
            return
        yield from map(decode_from_engine, self._frames.feed(received))

    def log_output(self) -> bool:
        """Logs some of what the process has printed or logged; whether there was any.

        One read only: a process that prints without end must not occupy the front end.
        """
        try:
            received = os.read(self._output, _RECEIVE_BYTES)
        except BlockingIOError:
            return False
        records = self._log_lines.feed(received) if received else self._log_lines.flush()
        for level, name, text in records:
            logging.getLogger(name).log(level, "%s", text, extra={"engine_pid": self.pid})
        return bool(received)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, if the process still runs."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def close(self, *, within_s: float) -> int:
        """Waits up to `within_s` for it to exit, then kills it; returns its exit status.

        A status below zero is the negative number of the signal that ended it.
        """
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        for _ in range(_LAST_READS):
            if not self.log_output():
                break
        self._socket.close()
        os.close(self._lifeline)
        os.close(self._output)
        return code
