"""`EngineHost`: runs engine processes for front ends on other machines.

Listens on one address. Each connection that proves to know the secret has an engine process of its
own, with which it speaks as a front end does with its child: the host passes bytes on and reads
none of them. Invariants: a process ends with its connection, and a connection with its process;
what a process prints is logged here; `close` leaves neither.
"""

import logging
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from cadenza.cluster.handshake import MIN_SECRET_BYTES, greet_client, tell_pid
from cadenza.engine.process.launch import COMMAND, Execute, Launched, execute, launch
from cadenza.engine.process.messages import LogLines
from cadenza.errors import ConfigError

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 64
_BYTES = 1 << 18
_EXIT_S = 1.0


class EngineHost:
    """Args:
    address: host and port to listen at; port 0 takes a free one.
    secret: that front ends must know.
    command: the engine process's program.
    on_start: called with the id of each process, such as to give it CPUs.

    Raises:
        ConfigError: the secret is too short.
        OSError: it cannot listen there.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        command: Sequence[str] = COMMAND,
        execute: Execute = execute,
        on_start: Callable[[int], object] = lambda pid: None,  # noqa: ARG005
    ) -> None:
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"the engine host's secret has {len(secret)} bytes; it must have at least "
                f"{MIN_SECRET_BYTES}"
            )
        self._secret = secret
        self._command, self._execute = command, execute
        self._on_start = on_start
        self._lock = threading.Lock()
        self._relays: set[_Relay] = set()
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
        return len(self._relays)

    def close(self) -> None:
        """Ends every engine process and connection."""
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        with self._lock:
            threads, relays = list(self._threads), list(self._relays)
        for each in relays:
            each.end()
        for each in threads:
            each.join()

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
            thread = threading.Thread(target=self._serve_one, args=arguments, daemon=True)
            with self._lock:
                self._threads.add(thread)
            thread.start()

    def _serve_one(self, connection: socket.socket, peer: str) -> None:
        """On a thread of its own, which the engine process ends with: it is that one's child."""
        try:
            self._relay(connection, peer)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _relay(self, connection: socket.socket, peer: str) -> None:
        try:
            greet_client(connection, self._secret)
            launched = launch(self._command, self._execute)
            self._on_start(launched.program.pid)
            tell_pid(connection, launched.program.pid)
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            logger.warning("a connection from %s is refused: %s", peer, error)
            connection.close()
            return
        relay = _Relay(connection, launched)
        with self._lock:
            self._relays.add(relay)
        logger.info("engine process %d serves %s", launched.program.pid, peer)
        if self._is_closed:
            relay.end()
        relay.join()
        with self._lock:
            self._relays.discard(relay)


class _Relay:
    """Between a connection and its engine process; three threads, each of which waits for bytes."""

    def __init__(self, connection: socket.socket, launched: Launched) -> None:
        self._connection = connection
        self._launched = launched
        self._pid = launched.program.pid
        self._threads = [
            threading.Thread(target=self._pass_on, args=(connection, launched.connection)),
            threading.Thread(target=self._pass_on, args=(launched.connection, connection)),
            threading.Thread(target=self._log_output),
        ]
        for each in self._threads:
            each.daemon = True
            each.start()

    def end(self) -> None:
        """Both ends see that the other one is gone."""
        for each in (self._connection, self._launched.connection):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Until both have ended; the process is then closed, and killed if it does not exit."""
        first, second, output = self._threads
        first.join()
        second.join()
        with suppress(subprocess.TimeoutExpired):
            self._launched.program.wait(_EXIT_S)
        self._launched.program.kill()
        code = self._launched.program.wait()
        output.join()
        self._connection.close()
        self._launched.close()
        logger.info("engine process %d ended (exit status %d)", self._pid, code)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while received := source.recv(_BYTES):
                target.sendall(received)
        self.end()

    def _log_output(self) -> None:
        lines = LogLines()
        while received := os.read(self._launched.output, _BYTES):
            for level, name, text in lines.feed(received):
                logging.getLogger(name).log(level, "%s", text, extra={"engine_pid": self._pid})
        for level, name, text in lines.flush():
            logging.getLogger(name).log(level, "%s", text, extra={"engine_pid": self._pid})
