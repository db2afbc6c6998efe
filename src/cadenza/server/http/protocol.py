"""uvicorn's HTTP/1.1 connection with bounds on the head's size and time, and on slow readers.
Invariants: it holds one bounded head and 64 KiB of unread answer at most, each for a limited time;
an answer is not lost because its request was unread; a body is never parsed as a request, whatever
upgrade is offered."""

import asyncio
import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import cast

import httptools
from uvicorn._types import (
    ASGI3Application,
    ASGIReceiveCallable,
    ASGISendCallable,
    ASGISendEvent,
    Scope,
)
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from cadenza.server.errors import ApiError, bounds_exceeded, invalid_http, method_not_allowed
from cadenza.server.http.exchange import JSON_TYPE, new_request_id
from cadenza.server.http.listening import Connections
from cadenza.server.limits import ServerLimits

logger = logging.getLogger(__name__)

HTTP_VERSIONS = ("1.1", "1.0")
METHODS = "GET, POST"
SLACK_BYTES = 1024
"""A head may be this much longer than the bounds of its parts, which are checked exactly later."""


def bounded_protocol(limits: ServerLimits, all_open: Connections) -> type[asyncio.Protocol]:
    class Protocol(BoundedProtocol):
        bounds = limits
        all_open_connections = all_open

    return Protocol


class CycleTransport:
    """The part of a transport that an answer uses; the connection decides how it is closed."""

    def __init__(self, connection: "BoundedProtocol") -> None:
        self._connection = connection

    def write(self, data: bytes) -> None:
        if not self._connection.is_lingering:
            self._connection.transport.write(data)

    def is_closing(self) -> bool:
        return self._connection.is_lingering or self._connection.transport.is_closing()

    def close(self) -> None:
        self._connection.close()


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    parser: httptools.HttpRequestParser
    bounds: ServerLimits
    all_open_connections: Connections
    is_lingering = False  # nothing more is sent, and received bytes are discarded
    _is_in_head = True
    _num_head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _rest_timer: asyncio.TimerHandle | None = None
    _cycles: Sequence[RequestResponseCycle] = ()
    """More than one where the client pipelines requests."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._mark_idle()
        # Any unread byte counts as a stall: an unread answer must not keep a connection open.
        # (Not 0: under TLS, asyncio then pauses writing when everything has been read.)
        transport.set_write_buffer_limits(high=1)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_stall_timer()
        self._stop_rest_timer()
        super().connection_lost(exc)
        self._disconnect_cycles()
        # They refer to this object in turn: what refers to itself waits for a garbage collection.
        self._cycles = ()
        self.cycle = None  # type: ignore[assignment]
        self.all_open_connections.remove(self)

    def data_received(self, data: bytes) -> None:
        if self.is_lingering:
            return
        if self._is_in_head and self._head_timer is None:
            self._start_head_timer()
        self._unset_keepalive_if_required()
        self._num_head_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            logger.debug("a connection sent bytes that are no HTTP request")
            cause = error.__context__  # what a callback raised
            refusal = "this is not an HTTP/1.1 request"
            self._refuse(cause if isinstance(cause, ApiError) else invalid_http(message=refusal))
            return
        if self._num_head_bytes > self._max_head_bytes:
            self._refuse(bounds_exceeded("headers_too_large", "the request's head is too large"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if (
            self._is_in_head
        ):  # a trailer is no header: it could contain a header that a proxy has removed
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Raises ApiError, which the parser's own error then has as its context."""
        self._check_head()
        if self.parser.should_upgrade():
            return  # `_parse` has this head parsed again
        self._is_in_head = False
        self._num_head_bytes = 0
        self._stop_head_timer()
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False
        super().on_headers_complete()
        self.cycle.transport = cast(asyncio.Transport, CycleTransport(self))
        self._cycles = [*self._unanswered(), self.cycle]
        self.all_open_connections.mark_busy(self)
        if self.all_open_connections.is_winding_down:
            self.wind_down()

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._num_head_bytes = 0
        self._stop_rest_timer()
        super().on_message_complete()
        self._is_in_head = True

    def on_response_complete(self) -> None:
        if self.is_lingering:
            self.flow.resume_reading()
            return
        super().on_response_complete()
        self._mark_idle()
        if (
            not self._is_in_head and self._rest_timer is None
        ):  # answered before the body was complete
            self._rest_timer = self.loop.call_later(self.bounds.body_s, self._close)

    def wind_down(self) -> None:
        """The newest request's answer says that it is the last, or, if it has begun, the next
        one."""
        for cycle in self._unanswered()[-1:]:
            if not cycle.response_started:
                cycle.keep_alive = False

    def close(self) -> None:
        if self._is_in_head:  # all of the request was read
            self.transport.close()
        else:
            self._linger()

    def pause_writing(self) -> None:
        """The client leaves too much unread: the stream waits, and is dropped after a time."""
        super().pause_writing()
        self._stop_stall_timer()
        self._stall_timer = self.loop.call_later(self.bounds.write_stall_s, self._abort)

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        super().resume_writing()
        self._mark_idle()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = _close_delimited(app, cycle)
        super()._start_asgi_task(cycle, app)

    def _parse(self, data: bytes) -> None:
        """Offers to upgrade are ignored (RFC 9110, 7.8). The parser takes a request with an
        `Upgrade` header to end with its head, and its body for the new protocol. So the head is
        parsed once more without that header, and then its body. Raises httptools.HttpParserError:
        this is no HTTP, or a callback has raised."""
        rest = memoryview(data)
        while True:
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:
                (num_parsed_bytes,) = upgrade.args
                rest = rest[num_parsed_bytes:]
                self.parser.feed_data(self._head_without_upgrade())
            else:
                return

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _check_head(self) -> None:
        version = self.parser.get_http_version()
        if version not in HTTP_VERSIONS:
            raise invalid_http(message=f"the request is HTTP/{version}; send HTTP/1.1")
        if self.parser.get_method() == b"CONNECT":  # what follows would be another protocol's
            raise method_not_allowed(method="CONNECT", listed=METHODS)
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (version == "1.1" and not num_hosts):
            raise invalid_http(message=f"the request has {num_hosts} host headers; send one")

    def _disconnect_cycles(self) -> None:
        """uvicorn disconnects only the newest request; an earlier one may be the one that runs."""
        for cycle in self._unanswered():
            cycle.disconnected = True
            cycle.message_event.set()

    def _unanswered(self) -> list[RequestResponseCycle]:
        return [cycle for cycle in self._cycles if not cycle.response_complete]

    @property
    def _max_head_bytes(self) -> int:
        return self.bounds.max_url_bytes + self.bounds.max_head_bytes + SLACK_BYTES

    def _refuse(self, error: ApiError) -> None:
        if self.transport.is_closing():
            return
        body = error.body()
        headers = {
            **dict(error.headers),
            "content-type": JSON_TYPE,
            "content-length": str(len(body)),
            "x-request-id": new_request_id(),
            "connection": "close",
        }
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self._disconnect_cycles()
        self._linger()

    def _linger(self) -> None:
        """Closes the sending side and waits `head_s` for the client: closing with unread bytes
        resets the connection, and may lose the answer."""
        self.is_lingering = True
        self._mark_idle()
        self._stop_head_timer()
        self._stop_rest_timer()
        self._rest_timer = self.loop.call_later(self.bounds.head_s, self._close)
        if self.transport.can_write_eof():  # not under TLS, where the answer's length marks its end
            self.transport.write_eof()

    def _mark_idle(self) -> None:
        is_answered = self.is_lingering or not self._unanswered()
        is_read = not cast(asyncio.WriteTransport, self.transport).get_write_buffer_size()
        if is_answered and is_read and not self.transport.is_closing():
            self.all_open_connections.mark_idle(self, self._abort)

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.bounds.head_s, self._close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _stop_rest_timer(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _close(self) -> None:
        self.transport.close()

    def _abort(self) -> None:
        cast(asyncio.WriteTransport, self.transport).abort()


def _close_delimited(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """`app` for HTTP/1.0, which has no chunks: a stream ends with its connection."""

    async def answer(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async def send_plainly(message: ASGISendEvent) -> None:
            if message["type"] == "http.response.body":
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        cycle.chunked_encoding = False
        await app(scope, receive, send_plainly)

    return answer
