"""`launch`: starts the engine process, with the three descriptors that tie it to its front end;
`freeze_heap`: leaves what a process has loaded out of garbage collections, each of which would take
a tenth of a second. Imports the standard library only, so that a process can be launched before its
front end has loaded anything (`FirstLaunch`)."""

import ctypes
import gc
import logging
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

COMMAND = (sys.executable, "-P", "-X", "faulthandler", "-m", "cadenza.loading.engine_program")
# Environment of the engine, unless it is set: large allocations may have huge pages, so that a KV
# pool takes a page fault for each 2 MiB that are written. Only glibc reads it.
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


# Objects, and collections of the younger ones, between two collections: with a thousand open
# requests one of everything takes 50 ms, and by Python's own thresholds came every two seconds.
THRESHOLDS = (1000, 10, 25)


class Program(Protocol):
    """The part of `subprocess.Popen` that is used."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...

    def send_signal(self, sig: int) -> None: ...


def execute(arguments: Sequence[str], fds: Sequence[int], output: int) -> Program:
    """It inherits `fds` and prints to `output`. Raises OSError."""
    return subprocess.Popen(  # noqa: S603 - this interpreter, our own module
        arguments,
        env={**LARGE_PAGES, **os.environ},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=fds,
        start_new_session=True,
    )


Execute = Callable[[Sequence[str], Sequence[int], int], Program]


@dataclass(frozen=True, slots=True)
class Launched:
    """Sees the front end's exit by its end of `lifeline`."""

    program: Program
    connection: socket.socket
    lifeline: int
    output: int

    def close(self) -> None:
        self.connection.close()
        os.close(self.lifeline)
        os.close(self.output)


def launch(command: Sequence[str], execute: Execute = execute) -> Launched:
    """With the numbers of its descriptors and this process's id as arguments. Raises OSError; then
    everything that was opened is closed."""
    with ExitStack() as theirs, ExitStack() as ours:
        connection, their_connection = socket.socketpair()
        theirs.callback(their_connection.close)
        ours.callback(connection.close)
        their_lifeline, lifeline = os.pipe()
        theirs.callback(os.close, their_lifeline)
        ours.callback(os.close, lifeline)
        output, their_output = os.pipe()
        theirs.callback(os.close, their_output)
        ours.callback(os.close, output)
        fds = (their_connection.fileno(), their_lifeline)
        arguments = [*command, *map(str, fds), str(os.getpid())]
        program = execute(arguments, fds, their_output)
        ours.pop_all()
    return Launched(program, connection, lifeline, output)


def raise_descriptor_limit() -> None:
    """To the hard one, for this process and its children."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems report a hard limit that they refuse to set.
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class FirstLaunch:
    """Launched before its front end is ready for it, so that both load their libraries at once. A
    failure is left to the front end's own launch to report."""

    def __init__(self, command: Sequence[str] = COMMAND, execute: Execute = execute) -> None:
        try:
            self._launched: Launched | None = launch(command, execute)
        except OSError:
            self._launched = None

    def take(self) -> Launched | None:
        """Once."""
        launched, self._launched = self._launched, None
        return launched

    def close(self) -> None:
        launched = self.take()
        if launched is not None:
            launched.program.kill()
            launched.program.wait()
            launched.close()


logger = logging.getLogger(__name__)


@contextmanager
def loading() -> Generator[None]:
    """No garbage is collected until `freeze_heap`, since what loading makes is kept; collections
    would take a sixth of a start."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def freeze_heap() -> None:
    """Called once, when the process is ready."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    gc.enable()
    _return_free_memory()
    logger.debug("%d objects are left out of garbage collections", gc.get_freeze_count())


def _return_free_memory() -> None:
    """glibc keeps what was freed in the middle of its heap."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
