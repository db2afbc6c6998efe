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

MAX_LINE_BYTES = 1 << 22
USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")
TIMEOUT_S = 120.0  # where only a hang is meant


@dataclass(slots=True, eq=False)
class Stream:
    """One stream: its frames, and when the connection ended."""

    body: dict[str, Any]
    status: int | None = None
    frames: list[str] = field(default_factory=list)
    ended_s: float | None = None

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(frame) for frame in self.frames if frame.startswith('{"id"')]

    @property
    def text(self) -> str:
        return "".join(choice["text"] for event in self.events for choice in event["choices"])

    @property
    def content(self) -> dict[str, Any]:
        """All that it says of each choice, however it was cut into events; and the usage."""
        choices: dict[int, dict[str, Any]] = {}
        counts: dict[str, int] = {}
        for event in self.events:
            for choice in event["choices"]:
                own = choices.setdefault(
                    choice["index"], {"text": "", "logprobs": [], "finish": None, "stop": None}
                )
                own["text"] += choice["text"]
                own["finish"] = choice["finish_reason"] or own["finish"]
                own["stop"] = choice.get("stop_reason") or own["stop"]
                own["logprobs"] += (choice.get("logprobs") or {}).get("token_logprobs", [])
            if event.get("usage"):
                counts = {name: event["usage"][name] for name in USAGE}
        return {"choices": choices, "usage": counts}

    @property
    def is_whole(self) -> bool:
        """It ended as the protocol has it, by its own end or with an error."""
        if not self.body.get("stream", True):
            return len(self.frames) == 1
        return bool(self.frames) and self.frames[-1] == "[DONE]"

    @property
    def error(self) -> str | None:
        """The code of the error that ended it."""
        last = 1 if not self.body.get("stream", True) else 2
        if not self.is_whole or len(self.frames) < last:
            return None
        return json.loads(self.frames[-last]).get("error", {}).get("code")


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

    def join(self, within_s: float = TIMEOUT_S) -> list[Stream]:
        """All, read to their ends."""
        self._thread.join(within_s)
        assert not self._thread.is_alive(), "a stream did not end"
        return self.all

    async def _read_all(self) -> None:
        await asyncio.gather(*(self._read(stream) for stream in self.all))

    async def _read(self, stream: Stream) -> None:
        try:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", self._port, limit=MAX_LINE_BYTES
            )
            writer.write(_request(stream.body))
            stream.status = int((await reader.readline()).split()[1])
            async for line in reader:
                if line.startswith(b"data: "):
                    stream.frames.append(line[len(b"data: ") :].decode().strip())
                elif line.startswith(b"{"):  # an answer that is not streamed
                    stream.frames.append(line.decode())
            writer.close()
        except (OSError, IndexError):
            pass  # cut off: the stream is not whole
        stream.ended_s = time.monotonic()


def _request(body: dict[str, Any]) -> bytes:
    content = json.dumps({"stream": True, **body}).encode()
    head = (
        "POST /v1/completions HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {len(content)}",
        "connection: close",
    )
    return "\r\n".join(head).encode() + b"\r\n\r\n" + content
