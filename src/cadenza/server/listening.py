"""Where a server listens: `Address`, and `listening`, which opens it or says why nobody can.

Invariants: whoever has the socket listens, so that of two servers that want one place exactly one
gets it; a Unix socket's path is removed by the server that made it and by no other, and taken over
only where nobody listens any more.
"""

import contextlib
import errno
import fcntl
import os
import socket
import ssl
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from cadenza.errors import ConfigError

BACKLOG = 2048

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
    """Where to listen: a host and port, or a Unix socket with its permissions; and with which
    certificate."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    uds_mode: int = 0o600
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None

    @property
    def is_secure(self) -> bool:
        return self.ssl_certfile is not None

    def url(self, bound: socket.socket) -> str:
        """What people open."""
        if self.uds is not None:
            return f"unix:{self.uds}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.is_secure else ''}://{host}:{bound.getsockname()[1]}"


@contextlib.contextmanager
def listening(address: Address) -> Generator[socket.socket]:
    """A socket that listens. Raises ConfigError where nobody could listen there."""
    _check_certificate(address)
    if address.uds is None:
        with contextlib.closing(_open_port(address)) as bound:
            yield bound
        return
    bound = _open_path(address.uds, address.uds_mode)
    try:
        yield bound
    finally:
        bound.close()
        with contextlib.suppress(OSError), _held(address.uds.parent):
            _remove_what_was_left(address.uds)


def abandon(address: Address, bound: socket.socket) -> None:
    """Leaves a place for good and at once, waiting for nobody: for a process about to end."""
    if address.uds is None:
        return
    with contextlib.suppress(OSError):
        bound.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        _remove_what_was_left(address.uds)


def why_not(error: Exception) -> str:
    """What is wrong with a place, and what to do."""
    if isinstance(error, socket.gaierror | UnicodeError):
        return "there is no such host; give an address of this machine"
    number = error.errno if isinstance(error, OSError) else None
    return _REASONS.get(number or 0, "nobody can listen there; choose another place")


def _check_certificate(address: Address) -> None:
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


def _open_port(address: Address) -> socket.socket:
    """Two may bind one port before either listens, so a port is had by listening."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, place = found[0]
        with contextlib.ExitStack() as on_error:
            bound = on_error.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(place)
            bound.listen(BACKLOG)
            on_error.pop_all()
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"--host {address.host} --port {address.port}: {why_not(error)}"
        ) from None
    return bound


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
    """One server at a time looks at a folder's sockets and makes its own: between binding and
    listening it would look like one that was left.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _clear(path: Path) -> None:
    """Makes room for a socket where there is none alive. Raises ConfigError for other things."""
    if path.exists() and not path.is_socket():
        raise ConfigError(
            f"--uds {path}: something that is no socket is there; choose another path"
        )
    _remove_what_was_left(path)


def _remove_what_was_left(path: Path) -> None:
    """Removes a socket at which nobody listens any more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        # Anything but a refusal is the answer of one who lives, be it that it is too busy.
        if probe.connect_ex(str(path)) == errno.ECONNREFUSED and path.is_socket():
            path.unlink(missing_ok=True)
