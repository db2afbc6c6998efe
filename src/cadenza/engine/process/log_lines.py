"""Log records as lines: the engine process writes them to its stderr, the front end logs them.

Owns the lines' form. What is not such a line (a library's warning, a crash's last words) is passed
on as a warning of the engine's. Invariant: one record is one line; none is kept beyond a cap.
"""

import json
import logging
from collections.abc import Iterator

MARK = "\x1e"
MAX_LINE_BYTES = 1 << 16
FOREIGN = "cadenza.engine.process.output"


class LineFormatter(logging.Formatter):
    """Level, logger and message as one marked line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return MARK + json.dumps([record.levelno, record.name, text])


class LogLines:
    """Bytes of the pipe in; (level, logger, message) out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> Iterator[tuple[int, str, str]]:
        """The lines that are now whole; a line that never ends is cut."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            yield from _record_of(line)

    def flush(self) -> Iterator[tuple[int, str, str]]:
        """What came without a line's end."""
        rest, self._rest = self._rest, b""
        yield from _record_of(rest)


def _record_of(line: bytes) -> Iterator[tuple[int, str, str]]:
    text = line.decode(errors="replace").rstrip()
    if not text:
        return
    if text.startswith(MARK):
        try:
            level, name, message = json.loads(text[len(MARK) :])
            yield int(level), str(name), str(message)
            return
        except (ValueError, TypeError):
            pass
    yield logging.WARNING, FOREIGN, text
