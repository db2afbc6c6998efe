"""Lines of the server's log: as text, or as one JSON object each.

Invariant: a line is a line: what a client sent cannot begin another one.
"""

import json
import logging
import sys
import time
from typing import Any, Literal

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


def set_up_logging(format: LogFormat, level: int = logging.INFO) -> None:
    """Everything Cadenza logs from `level` on goes to stderr, in lines of one format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if format == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("cadenza").setLevel(level)


def _time(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _shown(value: object) -> str:
    if isinstance(value, str) and not value.replace("-", "").replace("_", "").isalnum():
        return json.dumps(value)
    return "-" if value is None else str(value)
