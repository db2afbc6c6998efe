"""The connections that a server accepts: `Connections`, `Acceptor`. Invariants: accepted
connections stay below the limit of open files by a reserve; while any connection is idle a new one
is accepted, and the one that has been idle longest is closed for it."""

import asyncio
import logging
import math
import resource
import socket
import ssl
from collections import OrderedDict
from collections.abc import Callable

from cadenza.server.metrics import ServedCounts

logger = logging.getLogger(__name__)

RESERVED_DESCRIPTORS = 64
"""For the engine process's pipes, files, and what one turn accepts before it closes others."""
UNLIMITED = 1 << 20
SPARE = 16
"""Connections on which probes are still answered when all others have requests in progress."""
ACCEPTS_AT_ONCE = 16
RETRY_S = 0.1
WARN_EVERY_S = 60.0


def max_connections() -> int:
    """How many connections this process's limit of open files (RLIMIT_NOFILE) allows."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED if soft == resource.RLIM_INFINITY else room_within(soft)


def room_within(num_descriptors: int) -> int:
    """The limit less the reserve, but at least half of the limit."""
    return max(1, num_descriptors // 2, num_descriptors - RESERVED_DESCRIPTORS)


class Connections:
    """The open connections, each idle or with a request in progress. For one event loop.
    `max_open`: idle and busy ones together. `clock`: seconds, monotonic."""

    def __init__(self, max_open: int, counts: ServedCounts, clock: Callable[[], float]) -> None:
        self.max_open = max_open
        self._max_busy = max_open - min(SPARE, max_open // 4)
        self._counts = counts
        self._clock = clock
        self.is_winding_down = False
        self._idle: OrderedDict[object, Callable[[], object]] = OrderedDict()
        self._idle_since_s = clock()
        self._busy: set[object] = set()
        self._warn_at_s = clock()

    @property
    def num_open(self) -> int:
        return len(self._idle) + len(self._busy)

    @property
    def idle_s(self) -> float:
        """How long all have been idle: 0 if one is busy, infinite if none is open."""
        if self._busy:
            return 0.0
        return self._clock() - self._idle_since_s if self._idle else math.inf

    @property
    def can_accept(self) -> bool:
        return self.num_open < self.max_open or bool(self._idle)

    @property
    def is_crowded(self) -> bool:
        """Only the connections that are reserved for probes are left."""
        return len(self._busy) > self._max_busy

    def add(self, connection: object, close: Callable[[], object]) -> None:
        """Adds a new one, idle; where there are too many, closes the one idle longest."""
        if self.num_open >= self.max_open:
            self.close_longest_idle()
        self.mark_idle(connection, close)

    def mark_idle(self, connection: object, close: Callable[[], object]) -> None:
        self._busy.discard(connection)
        self._idle[connection] = close
        self._idle_since_s = self._clock()

    def mark_busy(self, connection: object) -> None:
        self._idle.pop(connection, None)
        self._busy.add(connection)

    def remove(self, connection: object) -> None:
        self._idle.pop(connection, None)
        self._busy.discard(connection)

    def close_longest_idle(self) -> None:
        if not self._idle:
            return
        _, close = self._idle.popitem(last=False)
        close()
        self._counts.num_idle_closed += 1
        self.warn_rate_limited("the longest idle one is closed for each new one")

    @property
    def has_busy(self) -> bool:
        return bool(self._busy)

    def refuse(self) -> None:
        """Counts a request that was refused because `is_crowded`."""
        self._counts.reject("connections_full")
        self.warn_rate_limited("requests are refused")

    def warn_rate_limited(self, what: str) -> None:
        """Warns, once a minute at most."""
        now_s = self._clock()
        if now_s < self._warn_at_s:
            return
        self._warn_at_s = now_s + WARN_EVERY_S
        logger.warning(
            "%d connections are open, of %d that the limit of open files allows: %s (so far %d "
            "closed, %d requests refused); raise the limit (ulimit -n, or LimitNOFILE of systemd)",
            self.num_open,
            self.max_open,
            what,
            self._counts.num_idle_closed,
            self._counts.rejections["connections_full"],
        )


class Acceptor:
    """Accepts from one listening socket while there is room, on the running event loop. In place of
    asyncio's own server, which accepts until the descriptors are used up. `make_protocol`: makes a
    connection's protocol, which reports its state to `connections`. `handshake_s`: how long a TLS
    handshake may take."""

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        make_protocol: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext | None,
        handshake_s: float,
    ) -> None:
        self._listener = listener
        self._connections = connections
        self._make_protocol = make_protocol
        self._context = context
        self._handshake_s = None if context is None else handshake_s
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._is_listening = False
        self._retry: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._listener.setblocking(False)
        self._listen()

    def stop(self) -> None:
        """Accepts no more, until `start`; connections that are being opened go on."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._is_listening:
            self._loop.remove_reader(self._listener)
            self._is_listening = False

    def close(self) -> None:
        """Accepts no more; connections that are open stay so."""
        self.stop()
        for task in self._opening:
            task.cancel()

    def _listen(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener, self._accept)
        self._is_listening = True

    def _pause(self) -> None:
        """Stops accepting for a moment; new connections wait in the kernel's queue."""
        self.stop()
        self._retry = self._loop.call_later(RETRY_S, self._listen)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            if not self._connections.can_accept:
                self._connections.warn_rate_limited("new ones wait")
                self._pause()
                return
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # the machine, or something else here, has used them up
                self._connections.close_longest_idle()
                self._connections.warn_rate_limited(
                    f"another one cannot be accepted ({error.strerror})"
                )
                self._pause()
                return
            self._open(accepted)

    def _open(self, accepted: socket.socket) -> None:
        protocol = self._make_protocol()
        task = self._loop.create_task(self._connect(accepted, protocol))
        self._opening.add(task)

        def end(task: asyncio.Task[None]) -> None:
            self._opening.discard(task)
            error = None if task.cancelled() else task.exception()
            if task.cancelled() or error is not None:
                self._connections.remove(protocol)
                accepted.close()
            if error is not None and not isinstance(error, OSError):
                logger.error("a connection could not be opened", exc_info=error)

        task.add_done_callback(end)
        self._connections.add(protocol, task.cancel)

    async def _connect(self, accepted: socket.socket, protocol: asyncio.Protocol) -> None:
        """Raises OSError where the client has left, or failed the handshake."""
        await self._loop.connect_accepted_socket(
            lambda: protocol,
            accepted,
            ssl=self._context,
            ssl_handshake_timeout=self._handshake_s,
        )
