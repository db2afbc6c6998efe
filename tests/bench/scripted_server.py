"""A server that streams what it is told to, over raw HTTP on the loopback interface.

Owns the socket and the answers' bytes. An answer has `max_tokens` tokens, one to a chunk; what goes
wrong is decided by the prompt's first token.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 60.0
REFUSED, ERROR_FRAME, CUT, NO_USAGE, NOT_JSON, HANG_UP, NO_TEXT = 11, 12, 13, 14, 15, 16, 17


@dataclass(slots=True, eq=False)
class ScriptedServer:
    """What was asked for, and how many requests were open at most.

    The requests whose places in the order of arrival lie in `together` are answered once all
    of them have come, so that how many are open at once is no matter of who is faster.
    """

    models: list[str] = field(default_factory=lambda: ["scripted"])
    with_metrics: bool = True
    together: range = range(0)
    all_came: asyncio.Event = field(default_factory=asyncio.Event)
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    delay_s: float = 0.0  # before each chunk
    before_chunk: Callable[[], None] = lambda: None
    keeps_connections: bool = False
    # Closes a kept connection when its next request comes, as one that was idle for long.
    drops_kept: bool = False
    num_connections: int = 0
    keys: set[str | None] = field(default_factory=set[str | None])
    num_open: int = 0
    most_open: int = 0
    num_metrics: int = 0
    url: str = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        num_answers = 0
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if num_answers and self.drops_kept:
                    break
                num_answers += 1
                if not await self._answer(head.decode(), reader, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """False to hang up."""
        request_line, *lines = head.splitlines()
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines if line)
        }
        self.keys.add(headers.get("authorization"))
        if "/v1/models" in request_line:
            text = json.dumps({"data": [{"id": name} for name in self.models]})
            return await _send(writer, "200 OK", text)
        if "/metrics" in request_line:
            self.num_metrics += 1
            text = f"# HELP x\nprocess_cpu_seconds_total {2.5 * self.num_metrics}\n"
            return await _send(writer, "200 OK", text if self.with_metrics else "")
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        place = len(self.bodies)
        self.bodies.append(body)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            if place in self.together:
                await self._wait_for_the_others()
            return await self._complete(body, writer, is_chat="/chat/" in request_line)
        finally:
            self.num_open -= 1

    async def _wait_for_the_others(self) -> None:
        """Some that never come are missed for a minute; `most_open` tells it then."""
        if len(self.bodies) == self.together.stop:
            self.all_came.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.all_came.wait(), TIMEOUT_S)

    async def _complete(
        self, body: dict[str, Any], writer: asyncio.StreamWriter, *, is_chat: bool
    ) -> bool:
        prompt = body["messages"] if is_chat else body["prompt"]
        what, count = 0 if is_chat else prompt[0], body["max_tokens"]
        if what == HANG_UP:
            return False
        if what == REFUSED:
            return await _send(writer, "429 Too Many Requests", '{"error": {}}')
        how = b"transfer-encoding: chunked" if self.keeps_connections else b"connection: close"
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n" + how + b"\r\n\r\n")
        send = _send_chunk if self.keeps_connections else asyncio.StreamWriter.write
        send(writer, b": a comment\n\n")
        for index in range(count):
            # Half of a frame at a time, so that frames must be put together.
            text = "" if what == NO_TEXT else "a"
            shown: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
            choice = {"index": 0, **shown, "finish_reason": None}
            if body.get("return_token_ids"):
                choice["token_ids"] = [1]
            frame = _frame({"choices": [choice]})
            send(writer, frame[:9])
            await writer.drain()
            await asyncio.sleep(self.delay_s)
            self.before_chunk()
            send(writer, frame[9:])
            if what in {ERROR_FRAME, CUT, NOT_JSON} and index == 2:
                break
        if what == CUT:
            return False
        if what == ERROR_FRAME:
            send(writer, _frame({"error": {"message": "no"}}))
        if what == NOT_JSON:
            send(writer, b"data: {\n\n")
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
        send(writer, _frame({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}))
        if what != NO_USAGE:
            send(writer, _frame({"choices": [], "usage": usage}))
        send(writer, b"data: [DONE]\n\n")
        if self.keeps_connections:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return self.keeps_connections


def _send_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _frame(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def _send(writer: asyncio.StreamWriter, status: str, text: str) -> bool:
    body = text.encode()
    writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    return True


@contextmanager
def running(server: ScriptedServer) -> Iterator[ScriptedServer]:
    """Serves on a free port, on a thread of its own, until the block ends."""
    loop = asyncio.new_event_loop()
    started = threading.Event()
    stop = asyncio.Event()

    async def serve() -> None:
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        host, port = listener.sockets[0].getsockname()
        server.url = f"http://{host}:{port}"
        started.set()
        async with listener:
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(TIMEOUT_S)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "the server did not end"
        loop.close()
