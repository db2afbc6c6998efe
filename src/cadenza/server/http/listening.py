"""`Address`, `listening`. Invariants: of two servers started on one address exactly one gets it; a
Unix socket's path is removed only by its maker, and taken over only where no server listens on
it."""

import contextlib
import errno
import fcntl
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cadenza.errors import ConfigError

logger = logging.getLogger(__name__)

BACKLOG = 2048
METRICS_RETRY_S = 0.1

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
    address: Address,
    patience_s: float = 0.0,
    wait: Callable[[float], None] = time.sleep,
) -> Generator[socket.socket | None]:
    """None without a metrics port. `patience_s`: how long another, ending process may have it.
    Raises ConfigError."""
    if address.metrics_port is None:
        yield None
        return
    place = replace(address, port=address.metrics_port, uds=None)
    num_left = round(patience_s / METRICS_RETRY_S)
    while True:
        try:
            bound = _open_port(place)
        except ConfigError as error:
            if not num_left:
                reason = str(error).partition(": ")[2]
                raise ConfigError(f"--metrics-port {place.port}: {reason}") from None
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
    family, _, _, _, place = found[0]
    return family, place


def _open_port(address: Address) -> socket.socket:
    """Two processes can bind one port before either listens, so this listens at once."""
    family, place = resolve(address)
    try:
        with contextlib.ExitStack() as on_error:
            # asyncio sets TCP_NODELAY only where the protocol is named; without it, the second
            # part of an answer waits for the client's delayed acknowledgement of the first (40 ms).
            made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            bound = on_error.enter_context(made)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(place)
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
    """Removes an abandoned socket. Raises ConfigError where the path is no socket."""
    if path.exists() and not path.is_socket():
        raise ConfigError(
            f"--uds {path}: something that is no socket is there; choose another path"
        )
    _remove_what_was_left(path)


def _remove_what_was_left(path: Path) -> None:
    """Removes a socket on which no process listens any more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        # Any other result than a refusal means that a process listens, perhaps a busy one.
        if probe.connect_ex(str(path)) == errno.ECONNREFUSED and path.is_socket():
            path.unlink(missing_ok=True)
