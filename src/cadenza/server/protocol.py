"""uvicorn's HTTP/1.1 connection with bounds: on the head's size and time, and on slow readers.

Owns what no application can see: bytes before a request is one, and bytes that nobody reads.
Invariants: a connection holds at most one bounded head and 64 KiB of unread answer, and neither for
longer than its limit; an answer is not lost because its request was not read to the end.
"""

import asyncio
from collections.abc import Sequence
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from cadenza.server.errors import ApiError, bounds_exceeded
from cadenza.server.exchange import new_request_id
from cadenza.server.limits import ServerLimits

SLACK_BYTES = 1024
"""A head may be this much longer than its parts' bounds; those are checked to the byte later."""


def bounded_protocol(limits: ServerLimits) -> type[asyncio.Protocol]:
    """The protocol class for a uvicorn configuration."""

    class Protocol(BoundedProtocol):
        bounds = limits

    return Protocol


class CycleTransport:
    """The part of a transport that a request's answer uses; how it ends is the connection's."""

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

    bounds = ServerLimits()
    is_lingering = False
    """Nothing more is said, and what comes is passed over."""
    _is_in_head = True
    _num_head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _rest_timer: asyncio.TimerHandle | None = None
    _cycles: Sequence[RequestResponseCycle] = ()
    """Of a client that sends requests before their answers there are several."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        # Whatever is unread counts as a stall: the last of an answer must not keep a connection.
        # (Not 0: under TLS, asyncio then pauses writing when everything has been read.)
        transport.set_write_buffer_limits(high=1)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_stall_timer()
        self._stop_rest_timer()
        super().connection_lost(exc)
        self._disconnect_cycles()

    def data_received(self, data: bytes) -> None:
        if self.is_lingering:
            return
        if self._is_in_head:
            if self._head_timer is None:
                self._start_head_timer()
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._num_head_bytes > self._max_head_bytes:
            self._refuse(bounds_exceeded("headers_too_large", "the request's head is too large"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._num_head_bytes = 0
        self._stop_head_timer()
        super().on_headers_complete()
        self.cycle.transport = cast(asyncio.Transport, CycleTransport(self))
        self._cycles = [*self._unanswered(), self.cycle]

    def on_message_complete(self) -> None:
        self._stop_rest_timer()
        super().on_message_complete()
        self._is_in_head = True

    def on_response_complete(self) -> None:
        if self.is_lingering:
            self.flow.resume_reading()
            return
        super().on_response_complete()
        if not self._is_in_head and self._rest_timer is None:  # answered before it was all there
            self._rest_timer = self.loop.call_later(self.bounds.body_s, self._close)

    def close(self) -> None:
        """After an answer that is the connection's last."""
        if self._is_in_head:  # all of the request was read
            self.transport.close()
        else:
            self._linger()

    def pause_writing(self) -> None:
        """The client leaves too much unread: the stream waits, and is dropped if it stays so."""
        super().pause_writing()
        self._stop_stall_timer()
        self._stall_timer = self.loop.call_later(self.bounds.write_stall_s, self._abort)

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        del msg  # the parser's words, not ours
        self._refuse(ApiError(400, "invalid_http", "this is not an HTTP/1.1 request"))

    def _disconnect_cycles(self) -> None:
        """uvicorn tells the newest request only; it may be another one, before it, that runs."""
        for cycle in self._unanswered():
            cycle.disconnected = True
            cycle.message_event.set()

    def _unanswered(self) -> list[RequestResponseCycle]:
        return [cycle for cycle in self._cycles if not cycle.response_complete]

    @property
    def _max_head_bytes(self) -> int:
        return self.bounds.max_url_bytes + self.bounds.max_head_bytes + SLACK_BYTES

    def _refuse(self, error: ApiError) -> None:
        """Answers before there is a request, and closes."""
        if self.transport.is_closing():
            return
        body = error.body()
        head = (
            f"HTTP/1.1 {error.status} Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {new_request_id()}\r\n"
            f"connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self._disconnect_cycles()
        self._linger()

    def _linger(self) -> None:
        """Ends our side, and waits as long as for a head that the client ends its own: to close a
        connection with bytes unread is to reset it, and what was said last may be lost on the way.
        """
        self.is_lingering = True
        self._stop_head_timer()
        self._stop_rest_timer()
        self._rest_timer = self.loop.call_later(self.bounds.head_s, self._close)
        if self.transport.can_write_eof():  # not under TLS, where the answer's length tells
            self.transport.write_eof()

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
        """Drops the connection with all that was not read."""
        cast(asyncio.WriteTransport, self.transport).abort()
