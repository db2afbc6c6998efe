"""Local ports reserved for a test.

Owns the sockets that hold them. Invariant: no other process can take a port between its choice and
its use.
"""

import socket
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def kept_port() -> Generator[int]:
    """A port on which the test may listen, and whoever asks the system for any port does not.

    It is bound for as long as it is kept, so that the system gives it to nobody; without listening
    and with SO_REUSEADDR, so that one that names it and sets that, too, can still have it.
    """
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield keeper.getsockname()[1]


@contextmanager
def silent_port() -> Generator[int]:
    """A port that drops what asks for a connection: its queue of them is full."""
    with socket.socket() as listening, socket.socket() as waiting:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        waiting.connect(listening.getsockname())
        yield listening.getsockname()[1]


@contextmanager
def refusing_port() -> Generator[int]:
    """A port at which every connection is refused: it is bound, and nobody listens."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        yield silent.getsockname()[1]
