"""The engine process's program: `run_child`. It exits when the front end does, whatever it is
doing, and ignores the signals of the terminal and the service manager, which are for the front end.
Invariant: only frames are written to the socket; everything printed goes to the pipe that is
logged."""

import ctypes
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from cadenza.engine.batch_engine import STOPPED
from cadenza.engine.core import EngineCore
from cadenza.engine.process.heap import freeze_heap, loading
from cadenza.engine.process.messages import (
    Failed,
    FrameBuffer,
    FromEngine,
    LineFormatter,
    Loading,
    Ready,
    Start,
    Stop,
    ToEngine,
    WireError,
    decode_to_engine,
    encode,
)
from cadenza.engine.process.supervision import is_descriptor_shortage
from cadenza.engine.process.worker import Worker
from cadenza.engine.route_report import RouteReporter
from cadenza.errors import CadenzaError
from cadenza.fingerprint import Fingerprint

logger = logging.getLogger(__name__)

COULD_NOT_LOAD = 3
STOPPED_ON_ERRORS = 4
FRONT_END_GONE = 5

_RECEIVE_BYTES = 1 << 18
_PR_SET_PDEATHSIG = 1


class OnPhase(Protocol):
    """Called when a phase of the start begins."""

    def __call__(self, phase: str, /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A warm core, the digest of what decides its bits, and the number of programs compiled since
    warm-up; `held` is kept as long as the process serves."""

    core: EngineCore
    identity: str = ""
    fingerprint: Fingerprint | None = None
    count_compiles: Callable[[], int] = lambda: 0
    held: object = None


Load = Callable[[Start, OnPhase], Serving]


class FrontEndGone(Exception):
    """The other end of the socket is closed."""


class SocketLink:
    """Sending blocks while the socket is full. All but `close` raise FrontEndGone."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = FrameBuffer()
        self._messages: deque[ToEngine] = deque()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def receive(self, timeout_s: float) -> list[ToEngine] | None:
        if timeout_s and not self._messages:
            self._poll.poll(timeout_s * 1000)
        self._read()
        messages = list(self._messages)
        self._messages.clear()
        return None if Stop in map(type, messages) else messages

    def receive_one(self) -> ToEngine:
        """Waits without a limit."""
        while not self._messages:
            self._poll.poll()
            self._read()
        return self._messages.popleft()

    def send(self, message: FromEngine) -> None:
        try:
            self._connection.sendall(encode(message))
        except OSError as error:
            raise FrontEndGone from error

    def _read(self) -> None:
        try:
            received = self._connection.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            raise FrontEndGone from error
        if not received:
            raise FrontEndGone
        self._messages.extend(map(decode_to_engine, self._frames.feed(received)))


@dataclass(slots=True, eq=False)
class _Startup:
    link: SocketLink
    clock: Callable[[], float]
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    phase: str | None = None
    since_s: float = 0.0

    def begin(self, phase: str) -> None:
        self.end()
        self.phase, self.since_s = phase, self.clock()
        self.link.send(Loading(phase))

    def end(self) -> None:
        if self.phase is not None:
            taken_s = self.clock() - self.since_s
            self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + taken_s
            self.phase = None


def run_child(
    arguments: list[str], load: Load, load_libraries: Callable[[], None] | None = None
) -> None:
    """Serves one front end and exits. `arguments`: socket, lifeline, the front end's process id.
    `load_libraries` may run before the front end can say what to load."""
    connection_fd, lifeline_fd, parent_pid = map(int, arguments)
    _follow_front_end(lifeline_fd, parent_pid)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    code = 1
    try:
        startup = _Startup(SocketLink(socket.socket(fileno=connection_fd)), time.monotonic)
        with loading():
            if load_libraries is not None:
                startup.begin("imports")
                load_libraries()
                startup.end()
            code = _serve(startup, load)
    except FrontEndGone:
        code = FRONT_END_GONE
    except BaseException:
        logger.exception("the engine process exits on an error")
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        # A normal exit would wait for threads that may be in native code.
        os._exit(code)


def _serve(startup: _Startup, load: Load) -> int:
    link = startup.link
    try:
        start = link.receive_one()
        if not isinstance(start, Start):
            raise WireError(f"the first message is a {type(start).__name__}")
        _log_to_stderr(start.log_level)
        serving = load(start, startup.begin)
    except FrontEndGone:
        raise
    except Exception as error:
        is_shortage = is_descriptor_shortage(error)
        if not is_shortage and not isinstance(error, CadenzaError):
            raise
        if not is_shortage:
            logger.debug("could not load", exc_info=True)
        link.send(Failed(type(error).__name__, str(error), is_shortage))
        return COULD_NOT_LOAD
    startup.end()
    freeze_heap()
    reporter = None if start.prefix_secret is None else RouteReporter(serving.core)
    worker = Worker(serving.core, link, reporter, count_compiles=serving.count_compiles)
    link.send(
        Ready(
            request_check=serving.core.request_check,
            identity=serving.identity,
            fingerprint=serving.fingerprint,
            kernel_proof=serving.core.kernel_proof,
            startup_s=startup.seconds,
            stats=worker.meter.stats(),
        )
    )
    try:
        worker.serve()
    except FrontEndGone:
        raise
    except Exception as error:
        logger.exception("the engine stopped")
        text = str(error) if isinstance(error, CadenzaError) else STOPPED
        link.send(Failed(type(error).__name__, text))
        return STOPPED_ON_ERRORS
    serving.core.close()
    return 0


def _log_to_stderr(level: int) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("cadenza").setLevel(level)


def _follow_front_end(lifeline_fd: int, parent_pid: int) -> None:
    """A thread sees the lifeline close even while native code computes; on Linux the kernel's
    signal arrives even while native code holds the GIL."""

    def watch() -> None:
        os.read(lifeline_fd, 1)
        os._exit(FRONT_END_GONE)

    threading.Thread(target=watch, name="cadenza-lifeline", daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The front end may have exited before the prctl call.
        if os.getppid() != parent_pid:
            os._exit(FRONT_END_GONE)
