"""Many streams at one server at once, as clients read them; and what became of each.

Raw sockets on one event loop of a thread of its own, so that a loaded machine is not loaded more
by its clients. Invariant: every stream is read to its end, and when it ended is known.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 120.0
"""Where only a hang is meant."""


@dataclass(slots=True, eq=False)
class Stream:
    """One stream: its frames, and when the connection ended."""

    body: dict[str, Any]
    frames: list[str] = field(default_factory=list)
    ended_s: float | None = None

    @property
    def text(self) -> str:
        events = (json.loads(frame) for frame in self.frames if frame.startswith('{"id"'))
        return "".join(choice["text"] for event in events for choice in event["choices"])

    @property
    def is_whole(self) -> bool:
        """It ended as the protocol has it, by its own end or with an error."""
        return bool(self.frames) and self.frames[-1] == "[DONE]"

    @property
    def error(self) -> str | None:
        """The code of the error that ended it."""
        if not self.is_whole or len(self.frames) < 2:
            return None
        return json.loads(self.frames[-2]).get("error", {}).get("code")


class Streams:
    """Sends all bodies at once to a port of this machine and reads on its own thread."""

    def __init__(self, port: int, bodies: Sequence[dict[str, Any]]) -> None:
        self.all = [Stream(body) for body in bodies]
        self._port = port
        self._thread = threading.Thread(target=lambda: asyncio.run(self._read_all()))
        self._thread.start()

    @property
    def num_frames(self) -> int:
        return sum(len(stream.frames) for stream in self.all)

    @property
    def num_ended(self) -> int:
        return sum(stream.ended_s is not None for stream in self.all)

    def wait(self, look: Callable[[], object]) -> None:
        """Until there is something to see, or all have ended."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not look() and self._thread.is_alive():
            assert time.monotonic() < deadline_s, "no stream got on"
            self._thread.join(0.005)

    def join(self) -> list[Stream]:
        """All, read to their ends."""
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "a stream did not end"
        return self.all

    async def _read_all(self) -> None:
        await asyncio.gather(*(self._read(stream) for stream in self.all))

    async def _read(self, stream: Stream) -> None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(_request(stream.body))
            async for line in reader:
                if line.startswith(b"data: "):
                    stream.frames.append(line[len(b"data: ") :].decode().strip())
            writer.close()
        except OSError:
            pass  # cut off: the stream is not whole
        stream.ended_s = time.monotonic()


def _request(body: dict[str, Any]) -> bytes:
    content = json.dumps({**body, "stream": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"content-length: {len(content)}",
        "connection: close",
    )
    return "\r\n".join(head).encode() + b"\r\n\r\n" + content
