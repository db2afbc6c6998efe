"""Runs a server: signals and shutdown.

Owns draining: new calls are refused at once, open ones may finish within the drain time, the rest
end with an error. Invariant: `run_server` leaves no socket, file or task.
"""

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
from cadenza.server.listening import BACKLOG, Acceptor, Address, Connections, abandon
from cadenza.server.protocol import bounded_protocol
from cadenza.server.service import Service

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 30
POLL_S = 0.02
LAST_FRAMES_S = 1.0
"""After the drain time: for the error frames to be sent."""
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
        self._acceptors: list[Acceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        for listener in sockets or []:
            acceptor = Acceptor(
                listener, self._connections, self._protocol, self.config.ssl, self._handshake_s
            )
            self._acceptors.append(acceptor)
            acceptor.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        await super().shutdown(sockets=sockets)

    def _protocol(self) -> asyncio.Protocol:
        make = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        return make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class Shutdown:
    """Shuts a server down: a first request drains it, a second one ends it at once."""

    def __init__(self, service: Service, front: Front, force: Callable[[], None]) -> None:
        self._service = service
        self._front = front
        self._force = force
        self._is_asked = False
        self._draining: asyncio.Task[None] | None = None

    def drain(self) -> None:
        """On the event loop. Further calls change nothing."""
        if self._draining is None:
            logger.info("draining: new requests are refused, open ones may finish")
            self._service.drain()
            self._draining = asyncio.create_task(self._drain())

    def ask(self) -> None:
        """On the event loop."""
        if not self._is_asked:
            self._is_asked = True
            self.drain()
            return
        logger.info("ending at once")
        self._force()
        self._front.force_exit = True
        self._front.should_exit = True

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._service.options.limits.drain_s
        while self._service.num_open and loop.time() < deadline:
            await asyncio.sleep(POLL_S)
        if self._service.num_open:
            logger.info("the drain time is over: %d requests end", self._service.num_open)
            await self._service.stop()
            deadline = loop.time() + LAST_FRAMES_S
            while self._service.num_open and loop.time() < deadline:
                await asyncio.sleep(POLL_S)
        self._front.should_exit = True


def shut_down_on_signals(loop: asyncio.AbstractEventLoop, shutdown: Shutdown) -> None:
    """SIGTERM and SIGINT end the server, a second one at once.

    SIGHUP drains, but never ends it at once: when a terminal closes it may come twice, from the
    kernel and from the shell, and a service manager may send it right after SIGTERM. A process
    that was started to ignore it, as by nohup, still does.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, shutdown.ask)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, shutdown.drain)


def make_front(service: Service, address: Address) -> Front:
    """uvicorn, configured; nothing is opened yet."""
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
    service: Service,
    address: Address,
    bound: socket.socket,
    on_shutdown: Callable[[Shutdown], None] | None = None,
) -> None:
    """Serves until a signal, or until the `Shutdown` that `on_shutdown` is given is asked."""
    front = make_front(service, address)
    shutdown = Shutdown(service, front, lambda: _exit_soon(address, bound))
    if on_shutdown is None:
        shut_down_on_signals(asyncio.get_running_loop(), shutdown)
    else:
        on_shutdown(shutdown)
    service.start()
    try:
        await front.serve(sockets=[bound])
    finally:
        await service.stop()


def _exit_soon(address: Address, bound: socket.socket) -> None:
    """Exits on a thread of its own, so that a hanging step cannot keep the process alive."""

    def leave() -> None:
        abandon(address, bound)
        os._exit(TERMINATED)

    timer = threading.Timer(SECOND_SIGNAL_S, leave)
    timer.daemon = True
    timer.start()
