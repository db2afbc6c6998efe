"""`EngineHost`: runs an engine process for front ends on other machines, which prove to know the
secret and share it (`SharedEngine`). Invariants: the process ends with its last connection, and all
connections with their process; what it prints is logged here; `close` leaves neither.
"""

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from cadenza.cluster.remote_engine import MIN_SECRET_BYTES, greet_client, tell_pid
from cadenza.cluster.shared_engine import SharedEngine
from cadenza.engine.process.child_process import ChildProcess
from cadenza.engine.process.launch import COMMAND, Execute, execute
from cadenza.engine.process.supervision import WatchdogTimeouts
from cadenza.engine.stats import EngineStats
from cadenza.errors import ConfigError

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """`on_start`: called with the id of each process, such as to give it CPUs; `keep_s`: how long a
    process outlives its last front end, where that was lost; `watchdog`: when it is killed as
    hung."""

    command: Sequence[str] = COMMAND
    execute: Execute = execute
    on_start: Callable[[int], object] = lambda pid: None  # noqa: ARG005
    keep_s: float = 0.0
    watchdog: WatchdogTimeouts = field(default_factory=WatchdogTimeouts)


class EngineHost:
    """Listens at `address`; port 0 takes a free one. Raises ConfigError if `secret` is too short,
    OSError."""

    def __init__(
        self, address: tuple[str, int], secret: bytes, options: HostOptions | None = None
    ) -> None:
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"the engine host's secret has {len(secret)} bytes; it must have at least "
                f"{MIN_SECRET_BYTES}"
            )
        self._secret = secret
        self._options = options or HostOptions()
        self._lock = threading.Lock()
        self._engines: list[SharedEngine] = []
        self._threads: set[threading.Thread] = set()
        self._is_closed = False
        self._listener = socket.create_server(address)
        self._thread = threading.Thread(
            target=self._listen, name="cadenza-engine-host", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        host, port, *_ = self._listener.getsockname()
        return host, port

    @property
    def is_listening(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_engines(self) -> int:
        return len(self._engines)

    @property
    def num_fronts(self) -> int:
        return sum(each.num_fronts for each in self._engines)

    @property
    def stats(self) -> EngineStats | None:
        with self._lock:
            return self._engines[-1].stats if self._engines else None

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        with self._lock:
            threads, engines = list(self._threads), list(self._engines)
        for engine in engines:
            engine.end()
        for thread in threads:
            thread.join()

    def _listen(self) -> None:
        while not self._is_closed:
            try:
                connection, peer = self._listener.accept()
            except OSError:
                return
            if len(self._threads) >= MOST_CONNECTIONS:  # also of those that prove nothing
                connection.close()
                continue
            arguments = connection, str(peer[0])
            thread = threading.Thread(target=self._greet, args=arguments, daemon=True)
            with self._lock:
                self._threads.add(thread)
            thread.start()

    def _greet(self, connection: socket.socket, peer: str) -> None:
        """On a thread of its own, since whoever connects may say nothing."""
        try:
            front = greet_client(connection, self._secret)
            engine = self._engine()
            tell_pid(connection, engine.pid)
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not engine.join(connection, front):
                raise ConnectionError("its engine process has just ended")
            logger.info("engine process %d serves front end %d at %s", engine.pid, front, peer)
        except OSError as error:
            logger.warning("a connection from %s is refused: %s", peer, error)
            connection.close()
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _engine(self) -> SharedEngine:
        """The one that runs, or a new one. Raises OSError where none can be started."""
        with self._lock:
            if self._is_closed:
                raise ConnectionError("the host is closed")
            for each in self._engines:
                if not each.has_ended:
                    return each
            engine = SharedEngine(self._open_child, self._options.keep_s, self._options.watchdog)
            engine.serve(lambda: self._forget(engine))
            self._engines.append(engine)
        self._options.on_start(engine.pid)
        return engine

    def _open_child(self) -> ChildProcess:
        return ChildProcess(self._options.command, self._options.execute)

    def _forget(self, engine: SharedEngine) -> None:
        with self._lock:
            self._engines.remove(engine)
