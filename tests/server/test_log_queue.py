"""The log's queue, over pipes that are read late, or never, or are broken."""

import logging
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from cadenza.server.operations.log_output import MAX_PART_CHARS, LogQueue, QueuedText

TIMEOUT_S = 60.0
SHORT_S = 0.05
"""For what must not end: a queue that cannot be written."""


@dataclass(slots=True, eq=False)
class Piped:
    """A queue that writes into a pipe, and the pipe's other end."""

    queue: LogQueue
    reader: int
    writer: int

    def read_to_end(self) -> list[str]:
        """All that was written, once the queue is closed; it is read meanwhile."""
        parts: list[bytes] = []

        def read() -> None:
            while part := os.read(self.reader, 1 << 16):
                parts.append(part)

        reading = threading.Thread(target=read)
        reading.start()
        assert self.queue.close(TIMEOUT_S)
        os.close(self.writer)
        self.writer = -1
        reading.join(TIMEOUT_S)
        return b"".join(parts).decode().splitlines()


@contextmanager
def piped(max_bytes: int = 1 << 20) -> Generator[Piped]:
    reader, writer = os.pipe()
    made = Piped(LogQueue(writer, "{} were dropped\n".format, max_bytes), reader, writer)
    try:
        yield made
    finally:
        os.close(made.reader)  # a writer that still waits ends by this
        made.queue.close(TIMEOUT_S)
        if made.writer >= 0:
            os.close(made.writer)


def line(number: int) -> str:
    return f"{number:0999}\n"


def test_lines_are_written_in_their_order() -> None:
    with piped() as made:
        for number in range(500):
            made.queue.put(line(number))
        assert [int(text) for text in made.read_to_end()] == list(range(500))
        assert made.queue.num_dropped == 0


def test_what_does_not_fit_is_dropped_without_waiting_and_told_in_its_place() -> None:
    with piped(max_bytes=10_000) as made:
        for number in range(200):
            made.queue.put(line(number))
        num_dropped = made.queue.num_dropped
        # The pipe holds 64 of them, the queue 10, and the batch that is being written 10 more.
        assert num_dropped >= 200 - 64 - 20
        texts = made.read_to_end()
    place = texts.index(f"{num_dropped} were dropped")
    assert [int(text) for text in texts[:place]] == list(range(200 - num_dropped))
    assert texts[place:] == [f"{num_dropped} were dropped"]


def test_a_line_beyond_the_queue_is_dropped_and_what_follows_is_not() -> None:
    with piped(max_bytes=10_000) as made:
        made.queue.put("x" * 20_000 + "\n")
        assert os.read(made.reader, 1 << 16) == b"1 were dropped\n"
        made.queue.put("small\n")
        assert made.read_to_end() == ["small"]


def test_closing_waits_for_an_unread_pipe_only_so_long() -> None:
    with piped() as made:
        for number in range(200):
            made.queue.put(line(number))
        assert not made.queue.close(SHORT_S)


def test_lines_for_a_reader_that_is_gone_are_counted() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    queue = LogQueue(writer, "{} were dropped\n".format)
    for number in range(3):
        queue.put(line(number))
    assert queue.close(TIMEOUT_S)
    assert queue.num_dropped == 3
    queue.put(line(4))
    assert queue.num_dropped == 4
    os.close(writer)


def test_a_descriptor_that_somebody_made_non_blocking_loses_nothing() -> None:
    with piped() as made:
        os.set_blocking(made.writer, False)
        for number in range(500):
            made.queue.put(line(number))
        assert [int(text) for text in made.read_to_end()] == list(range(500))


def test_a_full_disk_is_counted() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        queue = LogQueue(full.fileno(), "{} were dropped\n".format)
        queue.put(line(0))
        assert queue.close(TIMEOUT_S)
        assert queue.num_dropped == 1


def test_records_become_lines() -> None:
    with piped() as made, open(os.devnull, "w") as stream:
        handler = logging.StreamHandler(QueuedText(made.queue, stream))
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        handler.handle(logging.LogRecord("x", logging.INFO, "", 0, "a %s", ("b",), None))
        assert made.read_to_end() == ["INFO a b"]


def test_prints_are_lines_however_they_are_cut() -> None:
    with piped() as made, open(os.devnull, "w") as stream:
        text = QueuedText(made.queue, stream)
        print("one", 2, file=text)
        text.write("three\nfo")
        made.queue.put("between\n")
        text.write("ur")
        print(file=text)
        text.write("five")
        text.flush()
        text.write("x" * (MAX_PART_CHARS + 1))
        assert (text.fileno(), text.isatty()) == (stream.fileno(), False)
        texts = made.read_to_end()
    assert texts == ["one 2", "three", "between", "four", "five" + "x" * (MAX_PART_CHARS + 1)]
