"""Lines of the server's log: as text, or as one JSON object each.

Invariant: a line is a line: what a client sent cannot begin another one.
"""

import atexit
import json
import logging
import os
import sys
import time
from typing import Any, Literal, TextIO

from cadenza.server.log_queue import LogQueue, QueuedText, QueueHandler

LAST_LINES_S = 1.0
"""How long the process's end waits for its last lines to be written."""

LogFormat = Literal["text", "json"]


class TextLines(logging.Formatter):
    """Time, level and message; a request's fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        request: dict[str, Any] | None = getattr(record, "request", None)
        message = record.getMessage()
        if request is not None:
            message = " ".join(f"{name}={_shown(value)}" for name, value in request.items())
        line = f"{_time(record)} {record.levelname.lower()} {message}"
        return (
            line if record.exc_info is None else f"{line}\n{self.formatException(record.exc_info)}"
        )


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
    """From now on what Cadenza logs from `level` on goes to stderr, in lines of one format; neither
    that nor a print to `sys.stderr` waits for whoever reads there, up to the process's end.
    """
    formatter = JsonLines() if format == "json" else TextLines()
    stream: TextIO | None = sys.stderr
    if stream is None:  # the command was started with the descriptor closed
        stream = open(os.devnull, "w")  # noqa: SIM115  it is used until the process ends
    queue = LogQueue(stream.fileno(), lambda count: _dropped_line(formatter, count))
    root = logging.getLogger()
    root.handlers[:] = [QueueHandler(queue, formatter)]
    root.setLevel(logging.WARNING)
    logging.getLogger("cadenza").setLevel(level)
    sys.stderr = QueuedText(queue, stream)
    atexit.register(queue.close, LAST_LINES_S)
    return queue


def _dropped_line(formatter: logging.Formatter, num_dropped: int) -> str:
    record = logging.LogRecord(
        name=__name__,
        level=logging.WARNING,
        pathname=__file__,
        lineno=0,
        msg="%d log lines dropped: stderr could not be written as fast as they came",
        args=(num_dropped,),
        exc_info=None,
    )
    return formatter.format(record) + "\n"


def _time(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _shown(value: object) -> str:
    if isinstance(value, str) and not value.replace("-", "").replace("_", "").isalnum():
        return json.dumps(value)
    return "-" if value is None else str(value)
