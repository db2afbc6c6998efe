"""The messages between a server and its successor, and how they are sent.

Each is one packet of JSON on a Unix socket of packets.
"""

import asyncio
import socket
import struct
from typing import Any, TypeVar

import msgspec

PROTOCOL = 1
"""To be raised when a message changes its meaning; `Hello` and `Refused` stay as they are."""
MAX_MESSAGE_BYTES = 4096


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Successor: who asks."""

    protocol: int
    pid: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Predecessor: it has another version of the protocol."""

    protocol: int


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """Predecessor: who would be taken over from."""

    pid: int
    version: str


class Take(msgspec.Struct, frozen=True, tag="take"):
    """Successor: asks for the sockets."""


class Sockets(msgspec.Struct, frozen=True, tag="sockets"):
    """Predecessor: comes with the descriptors of the listening and the control socket."""


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """Successor: has the sockets and will accept."""


class Left(msgspec.Struct, frozen=True, tag="left"):
    """Predecessor: has accepted its last connection."""


Message = Hello | Refused | Offer | Take | Sockets | Commit | Left
Kind = TypeVar("Kind", bound=msgspec.Struct)


class GoneError(Exception):
    """The other process has closed the connection."""


def user_of(connection: socket.socket) -> int:
    """The user id of the process at the other end; of a listening one, of who began to listen."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user_id, _ = struct.unpack("3i", credentials)
    return user_id


def send(connection: socket.socket, message: Message) -> None:
    connection.send(msgspec.json.encode(message))


def receive(connection: socket.socket, kind: type[Kind]) -> Kind:
    """Raises GoneError, OSError, msgspec.MsgspecError."""
    try:
        return decode(connection.recv(MAX_MESSAGE_BYTES), kind)
    except ConnectionError:
        raise GoneError from None


def decode(packet: bytes, kind: Any) -> Any:
    """Raises GoneError where there is none, msgspec.MsgspecError where it is another one."""
    if not packet:
        raise GoneError
    return msgspec.json.decode(packet, type=kind)


async def receive_from(connection: socket.socket, kind: type[Kind]) -> Kind:
    """Raises GoneError, OSError, msgspec.MsgspecError."""
    loop = asyncio.get_running_loop()
    return decode(await loop.sock_recv(connection, MAX_MESSAGE_BYTES), kind)
