"""The log's queue, over pipes that are read late, or never, or are broken; a server whose stderr
nobody reads."""

import json
import logging
import os
import re
import subprocess
import threading
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from cadenza.server.operations.log_output import MAX_PART_CHARS, LogQueue, QueuedText
from tests.cli.harness import COMMAND, ENGINE, write_model
from tests.ports import kept_port
from tests.server.harness import wait_until
from tests.server.serve_process import PLAIN

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


FLAGS = ("--max-num-seqs", "4", "--max-model-len", "256", "--log-format", "json")
WIDE_USER = "\N{GRINNING FACE}" * 256
"""In JSON 3 KB of a request's line: what the pipe and the queue take is full after 400 of them."""
NUM_REQUESTS = 500
DROPPED = re.compile(r"(\d+) log lines dropped: ")


@dataclass(slots=True, eq=False)
class UnreadServer:
    """`cadenza serve`, and the end of its stderr at which nobody reads yet."""

    process: subprocess.Popen[bytes]
    client: httpx.Client
    reader: int

    def status(self, path: str) -> int | None:
        try:
            return self.client.get(path).status_code
        except httpx.TransportError:
            return None

    def complete(self, user: str = "ann") -> httpx.Response:
        body = {"prompt": "Once", "max_tokens": 1, "user": user}
        return self.client.post("/v1/completions", json=body)

    def wait_ready(self) -> None:
        wait_until(lambda: self.status("/ready") == 200)

    def num_dropped(self) -> int:
        text = self.client.get("/metrics").text
        found = re.search(r"^cadenza:log_lines_dropped_total\{.*\} (\S+)$", text, re.MULTILINE)
        assert found is not None
        return int(float(found[1]))

    def read_lines(self) -> Iterator[dict]:
        """Until the server has ended."""
        with open(self.reader, "rb", closefd=False) as stream:
            yield from map(json.loads, stream)


@contextmanager
def unread_server(*flags: object, is_full: bool = False) -> Generator[UnreadServer]:
    """`is_full`: nothing can be written to its stderr from the first line on."""
    with ExitStack() as stack:
        port = stack.enter_context(kept_port())
        url = f"http://127.0.0.1:{port}"
        client = stack.enter_context(httpx.Client(base_url=url, **PLAIN))
        reader, writer = os.pipe()
        stack.callback(os.close, reader)
        if is_full:
            fill(writer)
        command = [*COMMAND, "serve", "--port", str(port), *FLAGS, *map(str, flags)]
        process = subprocess.Popen(command, stderr=writer)
        os.close(writer)
        stack.callback(process.wait)
        stack.callback(process.kill)
        yield UnreadServer(process, client, reader)


def fill(writer: int) -> None:
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"\n" * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)


def test_unread_lines_are_dropped_and_counted_and_everybody_is_answered(tmp_path: Path) -> None:
    with unread_server(write_model(tmp_path / "model"), *ENGINE) as server:
        server.wait_ready()
        assert {server.complete(WIDE_USER).status_code for _ in range(NUM_REQUESTS)} == {200}
        assert server.status("/live") == 200
        num_dropped = server.num_dropped()
        assert num_dropped > 0
        lines: list[dict] = []
        reading = threading.Thread(target=lambda: lines.extend(server.read_lines()))
        reading.start()
        wait_until(lambda: any(DROPPED.match(line["message"]) for line in lines))
        assert server.complete("later").status_code == 200
        assert server.num_dropped() == num_dropped
        server.process.terminate()
        assert server.process.wait(TIMEOUT_S) == 0
        reading.join(TIMEOUT_S)
    told = [found for line in lines if (found := DROPPED.match(line["message"]))]
    assert sum(int(found[1]) for found in told) == num_dropped
    requests = [line["user"] for line in lines if "finish_reason" in line]
    assert len(requests) + num_dropped == NUM_REQUESTS + 1
    assert requests[-1] == "later"


@pytest.mark.soak
def test_a_server_whose_stderr_is_full_from_the_start_serves_and_ends_in_time(
    tmp_path: Path,
) -> None:
    flags = (write_model(tmp_path / "model"), *ENGINE, "--shutdown-timeout", "5")
    with unread_server(*flags, is_full=True) as server:
        server.wait_ready()
        assert server.complete().status_code == 200
        server.process.terminate()
        assert server.process.wait(TIMEOUT_S) == 0


@pytest.mark.soak
def test_a_model_that_cannot_be_loaded_ends_the_command_though_its_stderr_is_full(
    tmp_path: Path,
) -> None:
    model = write_model(tmp_path / "model")
    for weights in model.glob("*.safetensors"):
        weights.write_bytes(b"\0" * 64)
    with unread_server(model, *ENGINE, is_full=True) as server:
        assert server.process.wait(TIMEOUT_S) == 2
