"""`greet_host`, `greet_client`: each end answers the other's random number with an HMAC of both.
What follows is neither encrypted nor signed: it is for a network that others cannot write into.
Invariant: no byte is interpreted before the other end has proved that it knows the secret.
"""

import hmac
import secrets
import socket
import struct

MAGIC = b"cadenza-engine-2"
NONCE_BYTES = 32
MAC_BYTES = 32
MIN_SECRET_BYTES = 16
GREETING_S = 10.0
"""The longest that the other end may take for it."""

_PID = struct.Struct("<I")
_FRONT = struct.Struct("<I")


class HandshakeError(OSError):
    """The other end did not prove that it knows the secret."""


def greet_host(connection: socket.socket, secret: bytes, front: int = 0) -> int:
    """The side of the front end with the number `front`; returns the id of the engine process that
    the host runs."""
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
    """The host's side; returns the front end's number. `tell_pid` follows once the engine process
    runs."""
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
