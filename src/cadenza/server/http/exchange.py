"""`Exchange`: one HTTP request over ASGI: a bounded body, one answer or a stream, and disconnects,
in the `Dialect` of its API. Invariant: a body never exceeds its bound and the budget of all bodies;
work for a client that disconnected is cancelled."""

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from cadenza.errors import show_size
from cadenza.server.errors import (
    CLOSING,
    ApiError,
    Headers,
    bodies_full,
    bounds_exceeded,
    content_too_large,
    invalid_value,
    unsupported_encoding,
    unsupported_media_type,
)
from cadenza.server.limits import BodyBudget, ServerLimits

Result = TypeVar("Result")

NO_CONTENT = 204
NOT_MODIFIED = 304
JSON_TYPE = "application/json"
UNLABELLED_TYPES = ("", "application/x-www-form-urlencoded", "text/plain")
"""Of clients that set none, or their library's default. Browsers send these unasked, but with the
page's origin."""
_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}")
"""A Host header that is an address and nothing more."""
STREAM_HEADERS: Headers = (("cache-control", "no-cache"), ("x-accel-buffering", "no"))

SLICE_BYTES = 64 << 10
"""Of answers: a client is dropped only if it reads less than one within `write_stall_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one API shapes errors and heads; an error means the same in each, but for 503, which is
    529 in Anthropic's."""

    error_body: Callable[[ApiError, str], bytes]  # of the request with an id
    status_of: Callable[[ApiError], int] = lambda error: error.status
    id_headers: tuple[str, ...] = ("x-request-id",)
    version_header: bytes | None = None
    check_version: Callable[[bytes], None] = lambda _: None  # takes a header's value
    error_schema: str = "Error"  # its name in the API's description
    stream_type: str = "text/event-stream"
    # A body that is labelled as nothing, as text or as a form's is JSON, unless a page sent it:
    # clients of the API set no type.
    takes_unlabelled: bool = False


OPENAI = Dialect(error_body=lambda error, _: error.body())


class ClientDisconnected(Exception):
    """The client has disconnected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A whole answer."""

    status: int = 200
    body: bytes = b""
    content_type: str = JSON_TYPE
    headers: Headers = ()


@dataclass(slots=True, eq=False, kw_only=True)
class Exchange:
    """A request, as its handler sees it."""

    scope: Scope
    receive: Receive
    send: Send
    limits: ServerLimits
    bodies: BodyBudget
    request_id: str
    tenant: str
    path_params: dict[str, Any] = field(default_factory=dict[str, Any])
    extra_headers: Headers = ()
    dialect: Dialect = OPENAI
    has_answered: bool = False
    is_complete: bool = False

    def header(self, name: bytes) -> bytes | None:
        """The value of a header, if it came exactly once."""
        found = [value for key, value in self.scope["headers"] if key == name]
        return found[0] if len(found) == 1 else None

    @property
    def accept(self) -> str:
        """The media types that the client asks for, those of several headers in one list."""
        found = [value for key, value in self.scope["headers"] if key == b"accept"]
        return b",".join(found).decode("latin-1")

    @property
    def address(self) -> str:
        """This server's, as the client called it."""
        name = (self.header(b"host") or b"").decode("latin-1")
        return f"{self.scope['scheme']}://{name}" if _HOST.fullmatch(name) else "http://HOST:PORT"

    def query(self, known: Collection[str]) -> dict[str, str]:
        """The parameters, each at most once. Raises ApiError (400)."""
        text = self.scope["query_string"].decode("latin-1")
        found: dict[str, str] = {}
        for name, value in parse_qsl(text, keep_blank_values=True):
            if name not in known or name in found:
                listed = ", ".join(known)
                raise invalid_value(
                    f"the query has {name[:64]!r} twice, or where it is not known; there are "
                    f"{listed}",
                    "query",
                )
            found[name] = value
        return found

    @asynccontextmanager
    async def body(self) -> AsyncGenerator[bytes]:
        """Counts against the budget until the context is left. Raises ApiError (400, 413, 415,
        429)."""
        if not self._is_json():
            raise unsupported_media_type()
        self._check_codings()
        length = self.header(b"content-length") or b"0"
        if len(length) > 18 or int(length) > self.limits.max_body_bytes:
            raise content_too_large(limit=show_size(self.limits.max_body_bytes))
        with self.bodies.holding() as try_add:
            try:
                async with asyncio.timeout(self.limits.body_s):
                    body = await self._read_parts(try_add)
            except TimeoutError:
                raise bounds_exceeded(
                    "body_timeout",
                    f"the body took more than {self.limits.body_s:g} s; send it faster",
                ) from None
            yield body

    def _is_json(self) -> bool:
        names = [name for name, _ in self.scope["headers"]]
        if names.count(b"content-type") > 1:
            return False
        label = self.header(b"content-type") or b""
        kind = label.partition(b";")[0].strip().lower().decode("latin-1")
        if kind in UNLABELLED_TYPES and self.dialect.takes_unlabelled:
            return b"origin" not in names
        return kind == JSON_TYPE

    def _check_codings(self) -> None:
        for name, plain in (("content-encoding", "identity"), ("transfer-encoding", "chunked")):
            found = [value for key, value in self.scope["headers"] if key == name.encode()]
            coding = b", ".join(found).decode("latin-1").strip().lower()
            if coding not in ("", plain):
                raise unsupported_encoding(header=name, coding=coding[:64])

    async def _read_parts(self, try_add: Callable[[int], bool]) -> bytes:
        body = bytearray()  # not a list of parts, which a client could make arbitrarily small
        has_more = True
        while has_more:
            part, has_more = await self._read_part()
            if len(body) + len(part) > self.limits.max_body_bytes:
                raise content_too_large(limit=show_size(self.limits.max_body_bytes))
            if not try_add(len(part)):
                error = bodies_full(limit=show_size(self.limits.max_bodies_bytes))
                if self.header(b"content-length") is None:  # else the rest of it is skipped
                    error.headers += CLOSING
                raise error
            body += part
        return bytes(body)

    async def _read_part(self) -> tuple[bytes, bool]:
        limit_s = self.limits.body_idle_s
        try:
            async with asyncio.timeout(limit_s):
                message = await self.receive()
        except TimeoutError:
            raise bounds_exceeded(
                "body_timeout", f"the body stood still for {limit_s:g} s"
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        return message.get("body", b""), message.get("more_body", False)

    async def while_connected(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs `work`; cancels it when the client disconnects. The body must have been read."""
        task = asyncio.create_task(work)
        watcher = asyncio.create_task(self._wait_for_disconnect())
        try:
            await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and not self.is_complete:
                raise ClientDisconnected
            return await task
        finally:
            await _cancel(watcher)
            await _cancel(task)
            del watcher, task  # an error of the task would refer to itself through this frame

    async def _wait_for_disconnect(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def answer(self, response: Response) -> None:
        headers = response.headers
        if response.status not in (NO_CONTENT, NOT_MODIFIED):
            length = str(len(response.body))
            headers = (
                ("content-type", response.content_type),
                ("content-length", length),
                *headers,
            )
        await self._start(response.status, headers)
        await self.end_stream(response.body)

    async def fail(self, error: ApiError) -> None:
        status = self.dialect.status_of(error)
        body = self.dialect.error_body(error, self.request_id)
        await self.answer(Response(status=status, body=body, headers=error.headers))

    async def start_stream(self) -> None:
        kind = f"{self.dialect.stream_type}; charset=utf-8"
        await self._start(200, (("content-type", kind), *STREAM_HEADERS))

    async def stream(self, frames: bytes) -> None:
        """Sends events; waits while the client leaves too much unread."""
        await self._send_body(frames, is_last=False)

    async def end_stream(self, frames: bytes) -> None:
        self.is_complete = True
        await self._send_body(frames, is_last=True)

    async def _send_body(self, body: bytes, *, is_last: bool) -> None:
        """Sends slices, each when the client has read those before it."""
        message = {"type": "http.response.body", "more_body": True}
        start = 0
        while len(body) - start > SLICE_BYTES:
            await self.send({**message, "body": body[start : start + SLICE_BYTES]})
            start += SLICE_BYTES
        await self.send({**message, "body": body[start:], "more_body": not is_last})

    async def _start(self, status: int, headers: Headers) -> None:
        self.has_answered = True
        ids = [(name, self.request_id) for name in self.dialect.id_headers]
        headers = (*headers, *self.extra_headers, *ids)
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        await self.send({"type": "http.response.start", "status": status, "headers": raw})


Handler = Callable[[Exchange], Awaitable[None]]


async def send_object(exchange: Exchange, value: object) -> None:
    await exchange.answer(Response(body=msgspec.json.encode(value)))


def new_request_id() -> str:
    return secrets.token_hex(16)


async def _cancel(task: "asyncio.Task[Any]") -> None:
    if task.done():
        return
    task.cancel()
    await asyncio.wait({task})
