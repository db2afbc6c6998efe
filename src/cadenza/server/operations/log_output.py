"""The log: lines as text or JSON in a bounded queue, written by a thread. Invariants: a client's
text cannot begin a line; logging and printing never wait for stderr's reader; a line is written
whole and in order, or counted as dropped, and the count is written once writing works."""

import atexit
import io
import json
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, TextIO

LAST_LINES_S = 1.0  # how long the process waits at exit for its last lines to be written

LogFormat = Literal["text", "json"]

MAX_QUEUED_BYTES = 1 << 20
MAX_PART_CHARS = 1 << 16
_POLL_MS = 1000


class LogQueue:
    """Writes lines to `descriptor`, on a thread that lasts until `close`. `describe_dropped`: makes
    the line with the number of dropped lines. `max_bytes`: of the queued lines; those being written
    may be as many again."""

    def __init__(
        self,
        descriptor: int,
        describe_dropped: Callable[[int], str],
        max_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        self._descriptor = descriptor
        self._describe_dropped = describe_dropped
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._texts: deque[bytes] = deque()
        self._num_bytes = 0
        self._num_overflowed = 0
        self._num_untold = 0
        self._num_dropped = 0
        self._is_closed = False
        # Blocked in a write it can be neither stopped nor waited for, hence a daemon.
        self._thread = threading.Thread(target=self._write_all, name="cadenza-log", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Lines that were not written and will not be."""
        return self._num_dropped

    def put(self, text: str) -> None:
        """Queues whole lines, or a flushed part of one; never waits."""
        encoded = text.encode(errors="replace")
        with self._changed:
            is_full = self._num_bytes + len(encoded) > self._max_bytes
            # After a drop nothing is queued until its count is written, to keep the order.
            if is_full or self._num_overflowed or self._is_closed:
                self._num_overflowed += 1
                self._num_dropped += 1
            else:
                self._texts.append(encoded)
                self._num_bytes += len(encoded)
            self._changed.notify()

    def close(self, within_s: float) -> bool:
        """Writes the queued lines within this time; whether all were written."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                while not (self._texts or self._num_overflowed or self._is_closed):
                    self._changed.wait()
                texts, self._texts = self._texts, deque()
                num_overflowed, self._num_overflowed = self._num_overflowed, 0
                self._num_bytes = 0
                is_last = self._is_closed and not texts
            for text in texts:
                self._tell_dropped()
                if not self._write(text):
                    self._num_untold += 1
                    with self._changed:
                        self._num_dropped += 1
            self._num_untold += num_overflowed
            self._tell_dropped()
            if is_last:
                return

    def _tell_dropped(self) -> None:
        if self._num_untold and self._write(self._describe_dropped(self._num_untold).encode()):
            self._num_untold = 0

    def _write(self, encoded: bytes) -> bool:
        """False where it cannot be written: the reader is gone, or the disk is full."""
        rest = memoryview(encoded)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # another process made the shared descriptor non-blocking
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll(_POLL_MS)
            except OSError:
                return False
        return True


class QueuedText(io.TextIOBase):
    """Lines into a queue, in place of `stream`: for the log, and as `sys.stderr`."""

    def __init__(self, queue: LogQueue, stream: TextIO) -> None:
        super().__init__()
        self._queue = queue
        self._stream = stream
        # Garbage collection may run within `write`, and a collected object may print a warning.
        self._lock = threading.RLock()
        self._part = ""

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "utf-8"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def write(self, text: str, /) -> int:
        with self._lock:
            whole, newline, self._part = (self._part + text).rpartition("\n")
            if newline:
                self._queue.put(whole + newline)
            if len(self._part) > MAX_PART_CHARS:
                self.flush()
        return len(text)

    def flush(self) -> None:
        """Queues the beginning of a line, which is otherwise kept until the line is complete."""
        with self._lock:
            part, self._part = self._part, ""
            if part:
                self._queue.put(part)


class TextLines(logging.Formatter):
    """Time, level and message; a request's fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        request: dict[str, Any] | None = getattr(record, "request", None)
        message = record.getMessage()
        if request is not None:
            message = " ".join(f"{name}={_shown(value)}" for name, value in request.items())
        line = f"{_time(record)} {record.levelname.lower()} {message}"
        if record.exc_info is not None:
            line += f"\n{self.formatException(record.exc_info)}"
        return line


class JsonLines(logging.Formatter):
    """One object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "request", {})
        if record.exc_info is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logging(format: LogFormat, level: int = logging.INFO) -> LogQueue:
    """Sends log records from `level` on to stderr in one format; neither logging nor printing waits
    for its reader."""
    formatter = JsonLines() if format == "json" else TextLines()
    stream: TextIO | None = sys.stderr
    if stream is None:  # the command was started with the descriptor closed
        stream = open(os.devnull, "w")  # noqa: SIM115  it is used until the process ends
    queue = LogQueue(stream.fileno(), lambda count: _dropped_line(formatter, count))
    handler = logging.StreamHandler(QueuedText(queue, stream))
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("cadenza").setLevel(level)
    sys.stderr = QueuedText(queue, stream)
    atexit.register(queue.close, LAST_LINES_S)
    return queue


def _dropped_line(formatter: logging.Formatter, num_dropped: int) -> str:
    text = f"{num_dropped} log lines dropped: stderr could not be written as fast as they came"
    found = {"name": __name__, "levelname": "WARNING", "msg": text}
    return formatter.format(logging.makeLogRecord(found)) + "\n"


def _time(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _shown(value: object) -> str:
    if isinstance(value, str) and not value.replace("-", "").replace("_", "").isalnum():
        return json.dumps(value)
    return "-" if value is None else str(value)
