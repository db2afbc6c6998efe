"""`RemoteChild`: an engine process that an `EngineHost` runs, as `ProcessLink` sees its child. The
host ends it with its last connection, so that lost front ends leave no engine. Invariant: `close`
leaves no descriptor.
"""

import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from cadenza.cluster.handshake import GREETING_S, greet_host
from cadenza.engine.process.frame_socket import FrameSocket
from cadenza.engine.process.messages import WireError
from cadenza.engine.process.process_link import EngineUnreachableError
from cadenza.engine.process.supervision import ProcessUsage

KEEP_ALIVE_S, MOST_UNANSWERED = 2, 3
"""TCP asks an idle machine that often, and gives it up after so many silences."""

_POLL_S = 0.01


class RemoteChild:
    """The engine process at `address`, for the front end with the number `front`. Raises
    EngineUnreachableError where there is none."""

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
