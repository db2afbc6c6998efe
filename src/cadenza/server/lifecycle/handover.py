"""Hands an address to a successor process without refusing a connection, over an abstract Unix
control socket named after the address (the kernel removes it; it is handed over too). Invariants:
until the successor commits nothing changes; at most one accepts, and connections wait in the
kernel's queue; another user's process gets no socket."""

import asyncio
import contextlib
import logging
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec

from cadenza import __version__
from cadenza.errors import ConfigError
from cadenza.server.http.listening import Address, check_certificate, listening, owned, resolve

logger = logging.getLogger(__name__)

EXCHANGE_S = 10.0
ANSWER_S = 3 * EXCHANGE_S
RETRY_S = 0.1
NUM_WAITING = 8
PROTOCOL = 1  # increased when a message changes its meaning; `Hello` and `Refused` never change
MAX_MESSAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSockets:
    """`control`: None where it cannot be taken over from. `metrics` is not handed over: a successor
    opens its own later."""

    bound: socket.socket
    control: socket.socket | None = None
    metrics: socket.socket | None = None

    @property
    def listeners(self) -> tuple[socket.socket, ...]:
        return (self.bound,) if self.metrics is None else (self.bound, self.metrics)

    def close(self) -> None:
        for each in (*self.listeners, self.control):
            if each is not None:
                each.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeOptions:
    """One side of the exchange."""

    user_id: int = field(default_factory=os.geteuid)  # that the other side must be, too
    protocol: int = PROTOCOL
    exchange_s: float = EXCHANGE_S  # the longest time for which a predecessor serves one successor
    # a successor's longest wait for an answer; others may be served before it
    answer_s: float = ANSWER_S


def is_supported() -> bool:
    """Abstract sockets and SO_PEERCRED exist on Linux only."""
    return sys.platform == "linux"


def control_name(name: object) -> bytes:
    """The abstract name for a bound address: of `getsockname`, or the complete path."""
    digest = blake2b(repr(name).encode(), digest_size=16).hexdigest()
    return f"\0cadenza-handover-{digest}".encode()


# --- the messages: each is a packet of JSON on a Unix socket of packets ---------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """From the successor, first."""

    protocol: int
    pid: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """From a predecessor with another version of the protocol."""

    protocol: int


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """From the predecessor, in answer to `Hello`."""

    pid: int
    version: str


class Take(msgspec.Struct, frozen=True, tag="take"):
    """From the successor: asks for the sockets."""


class Sockets(msgspec.Struct, frozen=True, tag="sockets"):
    """From the predecessor, with the descriptors of the listening and the control socket."""


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """From the successor: it has the sockets and will accept."""


class Left(msgspec.Struct, frozen=True, tag="left"):
    """From the predecessor: it accepts no more connections."""


Message = Hello | Refused | Offer | Take | Sockets | Commit | Left
MessageT = TypeVar("MessageT", bound=msgspec.Struct)


class GoneError(Exception):
    """The other process has closed the connection."""


def user_of(connection: socket.socket) -> int:
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user_id, _ = struct.unpack("3i", credentials)
    return user_id


def send(connection: socket.socket, message: Message) -> None:
    connection.send(msgspec.json.encode(message))


def receive(connection: socket.socket, expected: type[MessageT]) -> MessageT:
    """Raises GoneError, OSError, msgspec.MsgspecError."""
    try:
        return decode(connection.recv(MAX_MESSAGE_BYTES), expected)
    except ConnectionError:
        raise GoneError from None


def decode(packet: bytes, expected: Any) -> Any:
    """Raises GoneError where there is none, msgspec.MsgspecError where it is another one."""
    if not packet:
        raise GoneError
    return msgspec.json.decode(packet, type=expected)


async def receive_from(connection: socket.socket, expected: type[MessageT]) -> MessageT:
    """Raises GoneError, OSError, msgspec.MsgspecError."""
    loop = asyncio.get_running_loop()
    return decode(await loop.sock_recv(connection, MAX_MESSAGE_BYTES), expected)


# --- the predecessor ------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(address: Address) -> Generator[ServerSockets]:
    """Sockets of a server that starts at a free address. Raises ConfigError, as `listening`."""
    with listening(address) as bound:
        control = _open_control(address, bound)
        try:
            yield ServerSockets(bound=bound, control=control)
        finally:
            bound.close()
            if control is not None:
                control.close()


def _open_control(address: Address, bound: socket.socket) -> socket.socket | None:
    if not is_supported():
        return None
    name = bound.getsockname() if address.uds is None else os.path.realpath(address.uds)
    with contextlib.ExitStack() as on_error:
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        on_error.callback(control.close)
        try:
            control.bind(control_name(name))
            control.listen(NUM_WAITING)
        except OSError as error:
            logger.warning(
                "no other process can take over from this one with --handover: its control socket "
                "cannot be opened (%s)",
                error.strerror,
            )
            return None
        on_error.pop_all()
    return control


async def hand_over(
    sockets: ServerSockets,
    pause: Callable[[], None],
    resume: Callable[[], None],
    exchange: ExchangeOptions | None = None,
) -> int:
    """Offers the sockets until a successor has taken them; returns its process id. Askers are
    answered in turn. `pause` and `resume` accepting."""
    assert sockets.control is not None, "a server without a control socket offers nothing"
    exchange = exchange or ExchangeOptions()
    sockets.control.setblocking(False)
    while True:
        try:
            connection = await _accept(sockets.control)
        except OSError:  # for want of descriptors, which may pass
            await asyncio.sleep(RETRY_S)
            continue
        with connection:
            try:
                async with asyncio.timeout(exchange.exchange_s):
                    successor = await _exchange(connection, sockets, exchange, (pause, resume))
            except (TimeoutError, GoneError, OSError, msgspec.MsgspecError) as error:
                logger.info("a process that asked to take over did not go on (%r)", error)
                continue
        if successor is not None:
            return successor


async def _accept(control: socket.socket) -> socket.socket:
    """(`loop.sock_accept` loses a connection if cancelled just after accepting.) Raises OSError."""
    loop = asyncio.get_running_loop()
    is_readable = asyncio.Event()
    loop.add_reader(control, is_readable.set)
    try:
        while True:
            await is_readable.wait()
            is_readable.clear()
            with contextlib.suppress(BlockingIOError):
                connection, _ = control.accept()
                connection.setblocking(False)
                return connection
    finally:
        loop.remove_reader(control)


async def _exchange(
    connection: socket.socket,
    sockets: ServerSockets,
    exchange: ExchangeOptions,
    accepting: tuple[Callable[[], None], Callable[[], None]],
) -> int | None:
    """With one process; its id if it has taken over. Raises GoneError, OSError,
    msgspec.MsgspecError."""
    if user_of(connection) != exchange.user_id:
        logger.warning("a process of user %d may not take over", user_of(connection))
        return None
    hello = await receive_from(connection, Hello)
    if hello.protocol != exchange.protocol:
        send(connection, Refused(exchange.protocol))
        return None
    send(connection, Offer(os.getpid(), __version__))
    try:
        await receive_from(connection, Take)
    except GoneError:  # it only asked
        return None
    assert sockets.control is not None
    descriptors = [sockets.bound.fileno(), sockets.control.fileno()]
    socket.send_fds(connection, [msgspec.json.encode(Sockets())], descriptors)
    await receive_from(connection, Commit)
    pause, resume = accepting
    pause()
    try:
        send(connection, Left())
    except OSError:
        resume()
        raise
    return hello.pid


# --- the successor --------------------------------------------------------------------------------


def find_predecessor(address: Address, exchange: ExchangeOptions | None = None) -> Offer | None:
    """None where there is none. Raises ConfigError where it cannot be taken over from, by this
    process or in this way."""
    if not is_supported():
        raise ConfigError(
            "--handover needs Linux; stop the other server and start this one without --handover"
        )
    if address.uds is None and address.port == 0:
        raise ConfigError(
            "--handover with --port 0: a server is taken over from at its own port; name that port"
        )
    check_certificate(address)
    asked = _ask(address, exchange or ExchangeOptions())
    if asked is None:
        return None
    connection, offer = asked
    connection.close()
    return offer


@contextlib.contextmanager
def taken_over(
    address: Address,
    exchange: ExchangeOptions | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> Generator[ServerSockets]:
    """The sockets of the server at `address`, which stops accepting; if it has ended, this
    process's own. Raises ConfigError; then the other server continues as before."""
    exchange = exchange or ExchangeOptions()
    num_left = int(exchange.exchange_s / RETRY_S)
    with contextlib.ExitStack() as stack:
        while (sockets := _take(address, exchange)) is None:
            try:
                sockets = stack.enter_context(opened(address))
                break
            except ConfigError:  # one that is about to end may not have closed its sockets yet
                if not num_left:
                    raise
            num_left -= 1
            wait(RETRY_S)
        else:
            stack.enter_context(owned(address, sockets.bound))
            stack.callback(sockets.close)
        yield sockets


def _take(address: Address, exchange: ExchangeOptions) -> ServerSockets | None:
    """None where nobody can be taken over from. Raises ConfigError."""
    asked = _ask(address, exchange)
    if asked is None:
        return None
    connection, offer = asked
    with connection, contextlib.ExitStack() as on_error:
        try:
            sockets = _receive_sockets(connection)
            on_error.callback(sockets.close)
            _set_mode(address)
            send(connection, Commit())
            with contextlib.suppress(GoneError):  # it ended just then, so that it accepts no more
                receive(connection, Left)
        except (GoneError, ConnectionError):
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise _unanswered(address, exchange) from error
        on_error.pop_all()
    logger.info("took over from process %d, cadenza %s", offer.pid, offer.version)
    return sockets


def _ask(address: Address, exchange: ExchangeOptions) -> tuple[socket.socket, Offer] | None:
    """A connection to the server at `address`, and its offer. Raises ConfigError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as on_error:
        on_error.callback(connection.close)
        connection.settimeout(exchange.answer_s)
        try:
            connection.connect(control_name(_name_of(address)))
            user_id = user_of(connection)
            if user_id != exchange.user_id:
                raise ConfigError(
                    f"--handover: the server at {_flags_of(address)} is user {user_id}'s and this "
                    f"process user {exchange.user_id}'s; start it as the same user"
                )
            send(connection, Hello(exchange.protocol, os.getpid()))
            answer = decode(connection.recv(MAX_MESSAGE_BYTES), Offer | Refused)
        except (GoneError, ConnectionError):
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise _unanswered(address, exchange) from error
        if isinstance(answer, Refused):
            raise ConfigError(
                f"--handover: the server at {_flags_of(address)} has version {answer.protocol} of "
                f"the handover protocol, and this one version {exchange.protocol}; stop it with "
                f"SIGTERM and start this one without --handover"
            )
        on_error.pop_all()
    return connection, answer


def _receive_sockets(connection: socket.socket) -> ServerSockets:
    send(connection, Take())
    message, descriptors, _, _ = socket.recv_fds(
        connection, MAX_MESSAGE_BYTES, 2, socket.MSG_CMSG_CLOEXEC
    )
    found = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    with contextlib.ExitStack() as on_error:
        for each in found:
            on_error.callback(each.close)
        decode(message, Sockets)
        if len(found) != 2:
            raise msgspec.ValidationError(f"{len(found)} sockets came in place of 2")
        on_error.pop_all()
    bound, control = found
    return ServerSockets(bound=bound, control=control)


def _set_mode(address: Address) -> None:
    """Raises ConfigError where clients cannot reach the socket by its path any more."""
    if address.uds is None:
        return
    try:
        address.uds.chmod(address.uds_mode)
    except OSError:
        raise ConfigError(
            f"--uds {address.uds}: the socket of the server that runs is not there any more; stop "
            f"that server and start this one without --handover"
        ) from None


def _unanswered(address: Address, exchange: ExchangeOptions) -> ConfigError:
    return ConfigError(
        f"--handover: the server at {_flags_of(address)} did not answer within "
        f"{exchange.answer_s:g} seconds, or not as this version does; stop it with SIGTERM and "
        f"start this one without --handover"
    )


def _name_of(address: Address) -> object:
    """What `control_name` is made of. Raises ConfigError."""
    if address.uds is not None:
        return os.path.realpath(address.uds)
    _, name = resolve(address)
    return name


def _flags_of(address: Address) -> str:
    if address.uds is not None:
        return f"--uds {address.uds}"
    return f"--host {address.host} --port {address.port}"
