"""`cadenza serve` in a process of its own, with its engine in another."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.cli.harness import COMMAND
from tests.server.harness import TIMEOUT_S, read_events

POLL_S = 0.05
PLAIN: dict[str, Any] = {"timeout": TIMEOUT_S, "trust_env": False, "verify": False}
"""Of a client that speaks plain HTTP: without `verify` it need not read the certificates first."""


@dataclass(slots=True, eq=False)
class ServeProcess:
    """The command, what it logs, and where it listens."""

    process: subprocess.Popen[str]
    lines: list[dict[str, Any]] = field(default_factory=list)
    other_lines: list[str] = field(default_factory=list)
    reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("{"):
                self.lines.append(json.loads(line))
            else:
                self.other_lines.append(line)

    @property
    def log(self) -> str:
        return "\n".join([*(line["message"] for line in self.lines), *self.other_lines])

    def requests(self) -> list[dict[str, Any]]:
        """The lines of requests."""
        return [line for line in self.lines if "finish_reason" in line]

    @property
    def url(self) -> str:
        def found() -> str | None:
            """It is told first, but by a server that takes over, which has it last."""
            for line in self.lines:
                said = re.fullmatch(r"(?:loading .* for|ready at) (\S+)", line["message"])
                if said:
                    return said[1]
            return None

        return self.wait_for(found)

    def wait_for(self, look: Callable[[], Any], within_s: float = TIMEOUT_S) -> Any:
        """Looks until there is something."""
        deadline = time.monotonic() + within_s
        while True:
            found = look()
            if found:
                return found
            assert time.monotonic() < deadline, f"not within {within_s} s: {self.log}"
            assert self.process.poll() is None or look(), f"it has ended: {self.log}"
            time.sleep(POLL_S)

    def wait_ready(self) -> None:
        self.wait_for(lambda: self.status("/ready") == 200)

    def status(self, path: str) -> int | None:
        """None where nobody answers."""
        try:
            return self.get(path).status_code
        except httpx.TransportError:
            return None

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, **PLAIN)

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, **PLAIN)

    @contextmanager
    def streaming(self, body: dict[str, Any]) -> Generator[Iterator[str]]:
        """The lines of a completion's stream that are not empty, as they come."""
        with (
            httpx.Client(**PLAIN) as client,
            client.stream("POST", f"{self.url}/v1/completions", json=body) as response,
        ):
            assert response.status_code == 200, response.read()
            yield (line for line in response.iter_lines() if line)

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        with (
            httpx.Client(**PLAIN) as client,
            client.stream("POST", self.url + path, json=body) as response,
        ):
            assert response.status_code == 200, response.read()
            return list(read_events(response.iter_lines()))

    def engine_pid(self, num_starts: int = 1) -> int:
        """Of the engine process that was started last; of so many at least, for a line of the log
        may come after what it tells of.
        """

        def found() -> int | None:
            started = [
                line["message"].split()[2]
                for line in self.lines
                if line["message"].startswith("engine process ")
                and line["message"].endswith(" started")
            ]
            return int(started[-1]) if len(started) >= num_starts else None

        return self.wait_for(found)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, within_s: float = TIMEOUT_S) -> int:
        code = self.process.wait(within_s)
        self.reader.join(TIMEOUT_S)
        return code


@contextmanager
def serve_process(
    *arguments: object, before: Sequence[str] = (), **environment: str
) -> Generator[ServeProcess]:
    """Started, and surely gone afterwards. `before`: a command that executes the server's."""
    flags = ["--port", "0", "--log-format", "json", "--log-level", "debug"]
    command = [*before, *COMMAND, "serve", *flags, *map(str, arguments)]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    serving = ServeProcess(process)
    try:
        yield serving
    finally:
        if process.poll() is None:
            process.kill()
        serving.wait()
        assert process.stderr is not None
        process.stderr.close()


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
