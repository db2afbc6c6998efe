"""`ChildProcess`: the front end's handle on one engine process.

Owns its three descriptors (socket, lifeline, output), starts it, and ends it. Nothing here blocks
but `close`, and that for a stated time. Invariant: after `close` no process, descriptor or thread
of it is left.
"""

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Protocol

from cadenza.engine.process.log_lines import LogLines
from cadenza.engine.process.messages import FrameBuffer, FromEngine, decode_from_engine

COMMAND = (sys.executable, "-P", "-X", "faulthandler", "-m", "cadenza.loading.engine_program")
_RECEIVE_BYTES = 1 << 18
_LAST_READS = 16
"""A pipe is read whole in one; the end comes later where what the process started still prints."""


class Program(Protocol):
    """The part of `subprocess.Popen` that is needed."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...

    def send_signal(self, sig: int) -> None: ...


def execute(arguments: Sequence[str], fds: Sequence[int], output: int) -> Program:
    """Starts a process that inherits `fds` and prints to `output`. Raises OSError."""
    return subprocess.Popen(  # noqa: S603 - this interpreter, our own module
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=fds,
        start_new_session=True,
    )


Execute = Callable[[Sequence[str], Sequence[int], int], Program]


class ChildProcess:
    """Starts `command` with the numbers of its descriptors and this process's id behind it.

    Raises OSError where that cannot be done; then nothing of it is left.
    """

    def __init__(self, command: Sequence[str] = COMMAND, execute: Execute = execute) -> None:
        self._frames = FrameBuffer()
        self._log_lines = LogLines()
        self._outbox: deque[memoryview] = deque()
        self.num_unsent_bytes = 0
        self.has_hung_up = False
        with ExitStack() as theirs, ExitStack() as ours:
            self._socket, their_socket = socket.socketpair()
            theirs.callback(their_socket.close)
            ours.callback(self._socket.close)
            lifeline, self._lifeline = os.pipe()
            theirs.callback(os.close, lifeline)
            ours.callback(os.close, self._lifeline)
            self._output, their_output = os.pipe()
            theirs.callback(os.close, their_output)
            ours.callback(os.close, self._output)
            fds = (their_socket.fileno(), lifeline)
            arguments = [*command, *map(str, fds), str(os.getpid())]
            self._process = execute(arguments, fds, their_output)
            ours.pop_all()
        self._socket.setblocking(False)
        os.set_blocking(self._output, False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def register(self, selector: selectors.BaseSelector) -> None:
        """Wakes `selector` when there is something to read, or room to write what is left."""
        writes = selectors.EVENT_WRITE if self._outbox else 0
        for fd, events in (
            (self._socket.fileno(), selectors.EVENT_READ | writes),
            (self._output, selectors.EVENT_READ),
        ):
            if fd in selector.get_map():
                selector.modify(fd, events)
            else:
                selector.register(fd, events)

    def unregister(self, selector: selectors.BaseSelector) -> None:
        for fd in (self._socket.fileno(), self._output):
            if fd in selector.get_map():
                selector.unregister(fd)

    def send(self, frame: bytes) -> None:
        """Sends now what the socket takes, and the rest from `flush`."""
        self._outbox.append(memoryview(frame))
        self.num_unsent_bytes += len(frame)
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes of what is left."""
        while self._outbox:
            try:
                sent = self._socket.send(self._outbox[0])
            except BlockingIOError:
                return
            except OSError:
                # Its end is seen by `receive`.
                self._outbox.clear()
                self.num_unsent_bytes = 0
                return
            self.num_unsent_bytes -= sent
            self._outbox[0] = self._outbox[0][sent:]
            if not self._outbox[0]:
                self._outbox.popleft()

    def receive(self) -> Iterator[FromEngine]:
        """The messages that have arrived. Sets `has_hung_up` at the end. Raises WireError."""
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
        """Passes on some of what the process has printed or logged; whether there was any.

        A process that prints without end must not keep its front end from anything else.
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
        """For tests and the last resort."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def close(self, *, within_s: float) -> int:
        """Waits so long for it to exit by itself, then kills it; its exit status, reaped.

        A status below zero is the negative number of the signal that killed it.
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
