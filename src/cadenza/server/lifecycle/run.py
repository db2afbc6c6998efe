"""Runs a server: signals, draining, leaving its address to a successor. New calls are refused at
once, but after a takeover served on open connections, whose clients do not know of it. Invariant:
`run_server` leaves no socket, file or task."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator
from typing import cast

import uvicorn

from cadenza.server.app import App
from cadenza.server.http.listening import BACKLOG, Acceptor, Address, Connections, abandon
from cadenza.server.http.protocol import BoundedProtocol, bounded_protocol
from cadenza.server.lifecycle.handover import ServerSockets, hand_over
from cadenza.server.service import Service

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 30
POLL_S = 0.02
IDLE_GRACE_S = 5.0
"""Idle connections are closed so long after a takeover; a request on one gets an answer that is its
last."""
REFUSING_S = 1.0  # the same once the drain time is over and requests are refused
LAST_FRAMES_S = 1.0  # after the drain time: for the error frames to be sent
SECOND_SIGNAL_S = 1.5
"""After a second signal the process exits within this time, even if something hangs."""
TERMINATED = 128 + signal.SIGTERM


class Front(uvicorn.Server):
    """uvicorn's server, with signal handling and accepting replaced by this package's."""

    def __init__(
        self, config: uvicorn.Config, connections: Connections, handshake_s: float
    ) -> None:
        super().__init__(config)
        self._connections = connections
        self._handshake_s = handshake_s
        self._listeners: tuple[socket.socket, ...] = ()
        self._acceptors: list[Acceptor] = []

    def listen(self, listeners: tuple[socket.socket, ...]) -> None:
        """Accepts connections, from its start on."""
        self._listeners = listeners
        if self.started:
            self._start_accepting()

    def pause_accepting(self) -> None:
        for acceptor in self._acceptors:
            acceptor.stop()

    def resume_accepting(self) -> None:
        for acceptor in self._acceptors:
            acceptor.start()

    def wind_down(self) -> None:
        """Each open connection is closed after its next answer, which says so."""
        self._connections.is_winding_down = True
        for connection in self.server_state.connections:
            cast(BoundedProtocol, connection).wind_down()

    def close_connections(self) -> None:
        """Closes idle connections now and the others after their answers."""
        for connection in list(self.server_state.connections):
            cast(BoundedProtocol, connection).shutdown()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._start_accepting()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        for listener in self._listeners:
            listener.close()
        await super().shutdown(sockets=sockets)

    def _start_accepting(self) -> None:
        shared = self._connections, self._protocol, self.config.ssl, self._handshake_s
        self._acceptors = [Acceptor(listener, *shared) for listener in self._listeners]
        self.resume_accepting()

    def _protocol(self) -> asyncio.Protocol:
        make = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        return make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class Lifecycle:
    """A server from listening to its end, on the event loop. Asked to end, it refuses new calls;
    asked again, it ends at once. Taken over from, it stops accepting and serves open connections'
    calls."""

    def __init__(self, service: Service, front: Front, address: Address) -> None:
        self._service = service
        self._front = front
        self._address = address
        self._sockets: ServerSockets | None = None
        self._is_asked = False
        self._offering: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None

    def listen(self, sockets: ServerSockets) -> None:
        self._sockets = sockets
        self._front.listen(sockets.listeners)
        if sockets.control is not None:
            self._offering = asyncio.create_task(self._offer(sockets))

    def drain(self) -> None:
        """Refuses new calls from now on. Further calls change nothing."""
        if not self._service.is_draining:
            logger.info("draining: new requests are refused, open ones may finish")
            self._service.drain()
            self._end_when_done()

    def ask(self) -> None:
        """Drains, or, the second time, ends at once."""
        if not self._is_asked:
            self._is_asked = True
            self.drain()
            return
        logger.info("ending at once")
        self._exit_soon()
        self._front.force_exit = True
        self._front.should_exit = True

    def leave(self) -> None:
        """As `drain`, but logs nothing: the caller reports why the server ends."""
        self._service.drain()
        self._end_when_done()

    async def close(self) -> None:
        if self._offering is not None:
            self._offering.cancel()
            await asyncio.wait({self._offering})
        if self._sockets is not None:
            self._sockets.close()

    async def _offer(self, sockets: ServerSockets) -> None:
        front = self._front
        successor = await hand_over(sockets, front.pause_accepting, front.resume_accepting)
        logger.info(
            "process %d has taken over: new connections are its own, open ones may finish here",
            successor,
        )
        self._sockets = None
        sockets.close()
        front.wind_down()
        self._service.end_watching()
        self._end_when_done()

    def _end_when_done(self) -> None:
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._service.options.limits.drain_s
        while not self._is_done() and loop.time() < deadline:
            await asyncio.sleep(POLL_S)
        if self._service.num_open:
            logger.info("the drain time is over: %d requests end", self._service.num_open)
            await self._service.stop()
            deadline = loop.time() + LAST_FRAMES_S
            while self._service.num_open and loop.time() < deadline:
                await asyncio.sleep(POLL_S)
        await self._close_connections()
        self._front.should_exit = True

    async def _close_connections(self) -> None:
        """Not by uvicorn, which may cut an arriving request. After the drain time requests are
        refused; after a takeover waited for, since the successor answers the next."""
        loop, connections = asyncio.get_running_loop(), self._service.connections
        self._service.drain()
        is_taken_over = self._sockets is None
        enough_s, most_s = (REFUSING_S, IDLE_GRACE_S) if is_taken_over else (POLL_S, POLL_S)
        deadline = loop.time() + most_s
        while connections.idle_s < enough_s and loop.time() < deadline:
            await asyncio.sleep(POLL_S)
        deadline = loop.time() + LAST_FRAMES_S
        while True:
            self._front.close_connections()
            if not connections.has_busy or loop.time() > deadline:
                return
            await asyncio.sleep(POLL_S)

    def _is_done(self) -> bool:
        """No call is open and, unless new ones are refused, connections are idle for a while."""
        if self._service.num_open:
            return False
        return self._service.is_draining or self._service.connections.idle_s >= IDLE_GRACE_S

    def _exit_soon(self) -> None:
        """Exits on a thread of its own, so that a hanging step cannot keep the process alive."""

        def leave() -> None:
            if self._sockets is not None:
                abandon(self._address, self._sockets.bound)
            os._exit(TERMINATED)

        timer = threading.Timer(SECOND_SIGNAL_S, leave)
        timer.daemon = True
        timer.start()


def shut_down_on_signals(loop: asyncio.AbstractEventLoop, lifecycle: Lifecycle) -> None:
    """SIGTERM and SIGINT end the server, a second one at once. SIGHUP drains, but never ends it at
    once: when a terminal closes it may come twice, from the kernel and from the shell, and a
    service manager may send it right after SIGTERM. A process that was started to ignore it, as by
    nohup, still does."""
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lifecycle.ask)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, lifecycle.drain)


def make_front(service: Service, address: Address) -> Front:
    limits = service.options.limits
    config = uvicorn.Config(
        App(service),  # pyright: ignore[reportArgumentType]  starlette's names of ASGI's types
        http=bounded_protocol(limits, service.connections),
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        ssl_certfile=address.ssl_certfile,
        ssl_keyfile=address.ssl_keyfile,
    )
    return Front(config, service.connections, limits.head_s)


async def run_server(
    service: Service, address: Address, on_start: Callable[[Lifecycle], None]
) -> None:
    """Serves until `on_start`'s `Lifecycle`, which it may tell where to listen, is over."""
    front = make_front(service, address)
    lifecycle = Lifecycle(service, front, address)
    on_start(lifecycle)
    service.start()
    try:
        await front.serve(sockets=[])
    finally:
        await lifecycle.close()
        await service.stop()
