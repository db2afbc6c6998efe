"""A server whose stderr nobody reads answers as any other, and counts the log lines it drops."""

import json
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

from tests.cli.harness import COMMAND, ENGINE, write_model
from tests.ports import kept_port
from tests.server.harness import TIMEOUT_S
from tests.server.serve_process import PLAIN
from tests.server.test_streams import wait_until

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
