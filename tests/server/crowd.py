"""Many clients at once, on one event loop, over bare sockets: what they cost is the server's."""

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tests.server.harness import TIMEOUT_S, raw_post

STATUS_AT = slice(9, 12)
BYSTANDER = """
import asyncio

async def answer(reader, writer):
    await reader.readuntil(b"\\r\\n\\r\\n")
    writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: 0\\r\\n\\r\\n")
    await writer.drain()
    writer.close()

async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""
"""A server with nothing to do: how late it answers is the machine's doing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer, read to its end."""

    status: int
    head: bytes
    body: bytes
    seconds: float

    def header(self, name: str) -> str | None:
        for line in self.head.decode("latin-1").split("\r\n"):
            key, _, value = line.partition(": ")
            if key == name:
                return value
        return None

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@contextmanager
def bystander() -> Generator[int]:
    """The port of a server with nothing to do, in a process of its own."""
    process = subprocess.Popen([sys.executable, "-c", BYSTANDER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def closing_get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()


def closing_post(path: str, body: Any) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return raw_post(path, raw, "connection: close")


async def ask(port: int, request: bytes) -> Reply:
    """Sends a request that asks for the connection's end, and reads until there."""
    start = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        data = await asyncio.wait_for(reader.read(), 10 * TIMEOUT_S)
    finally:
        writer.close()
    head, _, body = data.partition(b"\r\n\r\n")
    seconds = time.monotonic() - start
    return Reply(status=int(head[STATUS_AT]), head=head, body=body, seconds=seconds)


async def frame_gaps(port: int, request: bytes) -> list[float]:
    """Seconds between the frames of a stream that is read as it comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    gaps: list[float] = []
    last: float | None = None
    try:
        writer.write(request)
        while line := await asyncio.wait_for(reader.readline(), 10 * TIMEOUT_S):
            if not line.startswith(b"data: {"):
                continue
            now = time.monotonic()
            if last is not None:
                gaps.append(now - last)
            last = now
    finally:
        writer.close()
    return gaps


async def leave_after(port: int, request: bytes, num_bytes: int) -> int:
    """Sends and then reads so many bytes in all, and is gone; how many they were."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = request[:num_bytes]
    left = num_bytes - len(sent)
    try:
        writer.write(sent)
        await writer.drain()
        while left > 0 and (part := await asyncio.wait_for(reader.read(left), 10 * TIMEOUT_S)):
            left -= len(part)
    finally:
        writer.transport.abort()
    return num_bytes - left


async def at_most(num_at_once: int, calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """What all of them give, in their order, so many under way at a time."""
    places = asyncio.Semaphore(num_at_once)

    async def one(call: Awaitable[Any]) -> Any:
        async with places:
            return await call

    return await asyncio.gather(*(one(call) for call in calls))


def share(values: Iterable[float], quantile: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * quantile))]


def saturate(port: int, num_streams: int, long_calls: Iterable[tuple[str, Any]]) -> None:
    """Streams without end, and one long call after the other, until it is killed."""
    bodies = [closing_post(*call) for call in long_calls]
    stream = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}

    async def ask_again(requests: list[bytes]) -> None:
        for request in itertools.cycle(requests):
            # An answer may come before a long body was taken, and go with its connection.
            with suppress(ConnectionResetError):
                await ask(port, request)

    async def play() -> None:
        streams = [ask_again([closing_post("/v1/completions", stream)]) for _ in range(num_streams)]
        await asyncio.gather(ask_again(bodies), *streams)

    asyncio.run(play())
