"""`EngineChild`: the front end's handle on one engine process; `ChildProcess` starts and ends it
and owns its socket, lifeline and output. Only `close` blocks, for a stated time. Invariant: `close`
leaves no process, descriptor or thread."""

import logging
import os
import selectors
import subprocess
from collections.abc import Sequence
from typing import Protocol

from cadenza.engine.process.frame_socket import RECEIVE_BYTES, FrameSocket
from cadenza.engine.process.launch import COMMAND, Execute, Launched, execute, launch
from cadenza.engine.process.messages import LogLines
from cadenza.engine.process.supervision import ProcessUsage, usage_of

# Reads of the pipe after the exit. One empties it; more are needed while the process's own children
# still print.
_LAST_READS = 16


class EngineChild(Protocol):
    """The front end's handle on one engine process. `close` waits up to `within_s` for its exit,
    then ends it, and returns its exit status."""

    @property
    def pid(self) -> int: ...

    @property
    def frames(self) -> FrameSocket: ...

    def register(self, selector: selectors.BaseSelector) -> None: ...

    def unregister(self, selector: selectors.BaseSelector) -> None: ...

    def log_output(self) -> bool: ...

    def usage(self) -> ProcessUsage | None: ...

    def close(self, *, within_s: float) -> int: ...


class EngineUnreachableError(OSError):
    """A later attempt may find a way to start an engine."""


class ChildProcess:
    """The process `launched`, or a new one of `command`. Raises OSError where none can be started;
    then everything that was opened is closed."""

    def __init__(
        self,
        command: Sequence[str] = COMMAND,
        execute: Execute = execute,
        *,
        launched: Launched | None = None,
    ) -> None:
        self._log_lines = LogLines()
        self._watched_events = 0
        launched = launched or launch(command, execute)
        self._process, self.frames = launched.program, FrameSocket(launched.connection)
        self._lifeline, self._output = launched.lifeline, launched.output
        os.set_blocking(self._output, False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def register(self, selector: selectors.BaseSelector) -> None:
        """For messages ("messages"), output ("output"), and room to write; called again before each
        wait."""
        events = selectors.EVENT_READ | (
            selectors.EVENT_WRITE if self.frames.num_unsent_bytes else 0
        )
        if events == self._watched_events:
            return
        if self._watched_events:
            selector.modify(self.frames, events, "messages")
        else:
            selector.register(self.frames, events, "messages")
            selector.register(self._output, selectors.EVENT_READ, "output")
        self._watched_events = events

    def unregister(self, selector: selectors.BaseSelector) -> None:
        if self._watched_events:
            selector.unregister(self.frames)
            selector.unregister(self._output)
            self._watched_events = 0

    def usage(self) -> ProcessUsage | None:
        """None where that cannot be seen."""
        return usage_of(self.pid)

    def log_output(self) -> bool:
        """False if there was none. One read only: a process that prints without end must not occupy
        the front end."""
        try:
            received = os.read(self._output, RECEIVE_BYTES)
        except BlockingIOError:
            return False
        records = self._log_lines.feed(received) if received else self._log_lines.flush()
        for level, name, text in records:
            logging.getLogger(name).log(level, "%s", text, extra={"engine_pid": self.pid})
        return bool(received)

    def close(self, *, within_s: float) -> int:
        """Waits up to `within_s` for its exit, then kills it; returns its exit status."""
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        for _ in range(_LAST_READS):
            if not self.log_output():
                break
        self.frames.close()
        os.close(self._lifeline)
        os.close(self._output)
        return code
