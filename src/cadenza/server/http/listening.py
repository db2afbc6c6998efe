"""Addresses, listening sockets, and the connections that are accepted. Invariants: of two servers
started on one address exactly one gets it; a Unix socket's path is removed only by its maker;
accepted connections stay below the limit of open files by a reserve; while one is idle, a new one
is accepted, and the one that has been idle longest is closed for it."""

import asyncio
import contextlib
import errno
import fcntl
import logging
import math
import os
import resource
import socket
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cadenza.errors import ConfigError
from cadenza.server.metrics import ServedCounts

logger = logging.getLogger(__name__)

BACKLOG = 2048
METRICS_RETRY_S = 0.1

RESERVED_DESCRIPTORS = 64
"""For the engine process's pipes, files, and what one turn accepts before it closes others."""

UNLIMITED = 1 << 20
SPARE = 16
"""Connections on which probes are still answered when all others have requests in progress."""

ACCEPTS_AT_ONCE = 16
RETRY_S = 0.1
WARN_EVERY_S = 60.0
_REASONS = {
    errno.EADDRINUSE: "somebody else listens there; stop it, or choose another place",
    errno.EACCES: "this user may not; choose a port above 1023, or a folder that is writable",
    errno.EPERM: "this user may not; choose a port above 1023, or a folder that is writable",
    errno.EADDRNOTAVAIL: "that is no address of this machine; 127.0.0.1 and 0.0.0.0 always are",
    errno.ENOENT: "there is no such folder; make it first",
    errno.ENOTDIR: "there is no such folder; make it first",
    errno.EROFS: "its folder cannot be written to; choose another one",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A host and port, or a Unix socket and its permissions; a certificate; `metrics_port`: a
    further port for the metrics alone."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    uds_mode: int = 0o600
    metrics_port: int | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None

    @property
    def is_secure(self) -> bool:
        return self.ssl_certfile is not None

    def url(self, bound: socket.socket) -> str:
        if self.uds is not None:
            return f"unix:{self.uds}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.is_secure else ''}://{host}:{bound.getsockname()[1]}"


@contextlib.contextmanager
def listening(address: Address) -> Generator[socket.socket]:
    """A listening socket. Raises ConfigError where the address cannot be listened on."""
    check_certificate(address)
    with owned(address, _open(address)) as bound:
        yield bound


@contextlib.contextmanager
def listening_for_metrics(
    address: Address, patience_s: float = 0.0, wait: Callable[[float], None] = time.sleep
) -> Generator[socket.socket | None]:
    """None without a metrics port. `patience_s`: how long another, ending process may have it.
    Raises ConfigError."""
    if address.metrics_port is None:
        yield None
        return
    own = replace(address, port=address.metrics_port, uds=None)
    num_left = round(patience_s / METRICS_RETRY_S)
    while True:
        try:
            bound = _open_port(own)
        except ConfigError as error:
            if not num_left:
                reason = str(error).partition(": ")[2]
                raise ConfigError(f"--metrics-port {own.port}: {reason}") from None
        else:
            break
        num_left -= 1
        wait(METRICS_RETRY_S)
    with bound:
        yield bound


@contextlib.contextmanager
def owned(address: Address, bound: socket.socket) -> Generator[socket.socket]:
    """Closes the socket at the end; its path is removed unless another process listens on it."""
    try:
        yield bound
    finally:
        bound.close()
        if address.uds is not None:
            with contextlib.suppress(OSError), _held(address.uds.parent):
                _remove_what_was_left(address.uds)


def abandon(address: Address, bound: socket.socket) -> None:
    """Stops listening without waiting, for a process that is about to exit."""
    if address.uds is None:
        return
    with contextlib.suppress(OSError):
        bound.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        _remove_what_was_left(address.uds)


def why_not(error: Exception) -> str:
    """The reason of a failed bind or listen, with what to do."""
    if isinstance(error, socket.gaierror | UnicodeError):
        return "there is no such host; give an address of this machine"
    number = error.errno if isinstance(error, OSError) else None
    return _REASONS.get(number or 0, "nobody can listen there; choose another place")


def check_certificate(address: Address) -> None:
    """Raises ConfigError where TLS is asked for and cannot work."""
    if (address.ssl_certfile is None) != (address.ssl_keyfile is None):
        raise ConfigError("--ssl-certfile and --ssl-keyfile go together; give both or neither")
    if address.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(address.ssl_certfile, address.ssl_keyfile)
    except (OSError, ssl.SSLError):
        raise ConfigError(
            f"--ssl-certfile {address.ssl_certfile} and --ssl-keyfile {address.ssl_keyfile} are no "
            f"certificate and its key in PEM form; check both"
        ) from None


def _open(address: Address) -> socket.socket:
    if address.uds is None:
        return _open_port(address)
    return _open_path(address.uds, address.uds_mode)


def resolve(address: Address) -> tuple[int, Any]:
    """The family of a host and port, and what to bind. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, OverflowError, UnicodeError) as error:
        raise _refused(address, error) from None
    family, _, _, _, name = found[0]
    return family, name


def _open_port(address: Address) -> socket.socket:
    """Two processes can bind one port before either listens, so this listens at once."""
    family, name = resolve(address)
    try:
        with contextlib.ExitStack() as on_error:
            # asyncio sets TCP_NODELAY only where the protocol is named; without it, the second
            # part of an answer waits for the client's delayed acknowledgement of the first (40 ms).
            made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            bound = on_error.enter_context(made)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(name)
            bound.listen(BACKLOG)
            on_error.pop_all()
    except (OSError, OverflowError) as error:
        raise _refused(address, error) from None
    return bound


def _refused(address: Address, error: Exception) -> ConfigError:
    return ConfigError(f"--host {address.host} --port {address.port}: {why_not(error)}")


def _open_path(path: Path, mode: int) -> socket.socket:
    try:
        with _held(path.parent), contextlib.ExitStack() as on_error:
            _clear(path)
            bound = on_error.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            mask = os.umask(0o177)
            try:
                bound.bind(str(path))
            finally:
                os.umask(mask)
            path.chmod(mode)
            bound.listen(BACKLOG)
            on_error.pop_all()
    except OSError as error:
        # Python's own refusal of a long path has no number.
        reason = why_not(error) if error.errno is not None else "the path is too long; shorten it"
        raise ConfigError(f"--uds {path}: {reason}") from None
    return bound


@contextlib.contextmanager
def _held(folder: Path) -> Generator[None]:
    """While a server checks sockets and makes its own: between bind and listen one looks
    abandoned."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _clear(path: Path) -> None:
    if path.exists() and not path.is_socket():
        raise ConfigError(
            f"--uds {path}: something that is no socket is there; choose another path"
        )
    _remove_what_was_left(path)


def _remove_what_was_left(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        # Any other result than a refusal means that a process listens, perhaps a busy one.
        if probe.connect_ex(str(path)) == errno.ECONNREFUSED and path.is_socket():
            path.unlink(missing_ok=True)


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
        await self._loop.connect_accepted_socket(
            lambda: protocol, accepted, ssl=self._context, ssl_handshake_timeout=self._handshake_s
        )
