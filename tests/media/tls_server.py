"""A server of https in this process, which answers what a test writes for each path."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

CERTIFICATE = Path(__file__).parents[1] / "server" / "localhost.pem"
"""Of `localhost`, signed by itself."""


def trust() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(CERTIFICATE))


def answer(body: bytes = b"", *, status: str = "200 OK", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def redirect(location: str) -> bytes:
    return answer(status="302 Found", location=location)


@dataclass(slots=True, eq=False)
class TlsServer:
    """Its port, and the heads of the requests that it got."""

    answers: Mapping[str, bytes | None]
    port: int = 0
    heads: list[str] = field(default_factory=list[str])
    names: list[str | None] = field(default_factory=list[str | None])

    @property
    def paths(self) -> list[str]:
        return [head.split(" ")[1] for head in self.heads]

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        found = self.answers.get(head.split(" ")[1], answer(status="404 Not Found"))
        if found is None:
            await reader.read()  # until the client gives up
        else:
            writer.write(found)
        writer.close()


@asynccontextmanager
async def serving(answers: Mapping[str, bytes | None]) -> AsyncGenerator[TlsServer]:
    """None for a path: no answer at all."""
    server = TlsServer(answers)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATE)
    context.sni_callback = lambda _, name, __: server.names.append(name)
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0, ssl=context)
    server.port = listening.sockets[0].getsockname()[1]
    async with listening:
        yield server
        listening.close()
