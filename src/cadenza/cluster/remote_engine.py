"""`RemoteChild`: an engine process of an `EngineHost`, as `ProcessLink` sees its child; `HostBook`;
the handshake of both ends. The host ends a process with its last connection, so that lost front
ends leave no engine."""

import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from cadenza.engine.process.child_process import EngineUnreachableError
from cadenza.engine.process.frame_socket import FrameSocket
from cadenza.engine.process.messages import WireError
from cadenza.engine.process.supervision import ProcessUsage

MAGIC = b"cadenza-engine-2"
NONCE_BYTES = 32
MAC_BYTES = 32
MIN_SECRET_BYTES = 16
GREETING_S = 10.0  # the longest that the other end may take for it

_PID = struct.Struct("<I")
_FRONT = struct.Struct("<I")


class HandshakeError(OSError):
    """The other end did not prove that it knows the secret."""


def greet_host(connection: socket.socket, secret: bytes, front: int = 0) -> int:
    """The front end's side; returns the id of the engine process that the host runs."""
    connection.settimeout(GREETING_S)
    own = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(MAGIC + own)
    theirs = _read(connection, NONCE_BYTES)
    number = _FRONT.pack(front)
    connection.sendall(number + _proof(secret, b"client" + number, own, theirs))
    _check(_read(connection, MAC_BYTES), _proof(secret, b"host", own, theirs))
    (pid,) = _PID.unpack(_read(connection, _PID.size))
    return pid


def greet_client(connection: socket.socket, secret: bytes) -> int:
    """The host's side; returns the front end's number. `tell_pid` follows once the process runs."""
    connection.settimeout(GREETING_S)
    if _read(connection, len(MAGIC)) != MAGIC:
        raise HandshakeError("it does not speak this protocol, or another version of it")
    theirs = _read(connection, NONCE_BYTES)
    own = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(own)
    number = _read(connection, _FRONT.size)
    _check(_read(connection, MAC_BYTES), _proof(secret, b"client" + number, theirs, own))
    connection.sendall(_proof(secret, b"host", theirs, own))
    (front,) = _FRONT.unpack(number)
    return front


def tell_pid(connection: socket.socket, pid: int) -> None:
    connection.sendall(_PID.pack(pid))


def _proof(secret: bytes, role: bytes, of_client: bytes, of_host: bytes) -> bytes:
    return hmac.digest(secret, role + of_client + of_host, "sha256")


def _check(given: bytes, wanted: bytes) -> None:
    if not hmac.compare_digest(given, wanted):
        raise HandshakeError("it has another secret")


def _read(connection: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        received = connection.recv(count - len(found))
        if not received:
            raise HandshakeError("it closed the connection")
        found += received
    return bytes(found)


# TCP asks an idle machine that often, and gives it up after so many silences.
KEEP_ALIVE_S, MOST_UNANSWERED = 2, 3

_POLL_S = 0.01


class RemoteChild:
    """`close` leaves no descriptor. Raises EngineUnreachableError where no engine is at
    `address`."""

    def __init__(self, address: tuple[str, int], secret: bytes, front: int = 0) -> None:
        try:
            connection = socket.create_connection(address, timeout=GREETING_S)
        except OSError as error:
            raise EngineUnreachableError(f"{_named(address)}: {error}") from error
        try:
            self.pid = greet_host(connection, secret, front)
            _keep_alive(connection)
        except OSError as error:
            connection.close()
            raise EngineUnreachableError(f"{_named(address)}: {error}") from error
        self.frames = FrameSocket(connection)
        self._watched_events = 0

    def register(self, selector: selectors.BaseSelector) -> None:
        has_unsent = self.frames.num_unsent_bytes > 0
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if has_unsent else 0)
        if events == self._watched_events:
            return
        change = selector.modify if self._watched_events else selector.register
        change(self.frames, events, "messages")
        self._watched_events = events

    def unregister(self, selector: selectors.BaseSelector) -> None:
        if self._watched_events:
            selector.unregister(self.frames)
            self._watched_events = 0

    def log_output(self) -> bool:
        return False

    def usage(self) -> ProcessUsage | None:
        return None

    def close(self, *, within_s: float) -> int:
        """Waits for the host to close the connection. The exit status is not known here."""
        end_s = time.monotonic() + within_s
        while not self.frames.has_hung_up and time.monotonic() < end_s:
            with suppress(WireError):  # what it still sends is of no use
                for _ in self.frames.receive():
                    pass
            time.sleep(_POLL_S)
        self.frames.close()
        return 0


def remote_opener(
    address: tuple[str, int], secret: bytes, front: int = 0
) -> Callable[[Sequence[str]], RemoteChild]:
    """For `ProcessOptions.open_child`; the host knows the program."""
    return lambda _: RemoteChild(address, secret, front)


def _named(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_ALIVE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, MOST_UNANSWERED)


Address = tuple[str, int]


class HostBook:
    """Which engine host each replica of a front end uses: at each start one that no other uses, the
    last one first. `find_hosts` returns addresses, the oldest first, so that all front ends take
    them in the same order; it may raise OSError. Thread-safe. Invariant: a host has one replica at
    most."""

    def __init__(
        self, find_hosts: Callable[[], Sequence[Address]], secret: bytes, front: int = 0
    ) -> None:
        self._find_hosts = find_hosts
        self._secret = secret
        self._front = front
        self._lock = threading.Lock()
        self._taken: dict[int, Address] = {}

    def opener(self, index: int) -> Callable[[Sequence[str]], RemoteChild]:
        """Raises EngineUnreachableError where no host is free."""

        def open_child(_: Sequence[str]) -> RemoteChild:
            return RemoteChild(self._take(index), self._secret, self._front)

        return open_child

    def _take(self, index: int) -> Address:
        try:
            known = [(str(host), int(port)) for host, port in self._find_hosts()]
        except OSError as error:
            raise EngineUnreachableError(f"hosts are not known: {error}") from error
        with self._lock:
            last = self._taken.pop(index, None)
            free = [each for each in known if each not in self._taken.values()]
            # The one that was lost last comes last: a machine that is gone is known for a while.
            free.sort(key=lambda each: each == last)
            if not free:
                raise EngineUnreachableError(
                    f"{len(known)} hosts are there, each of which serves another replica"
                )
            self._taken[index] = free[0]
            return free[0]
