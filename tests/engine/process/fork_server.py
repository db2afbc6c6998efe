"""Scripted engine processes that are forked from one that has imported all they need.

Importing is most of what a scripted engine computes. `ForkServer` is the tests' end; run as a
script, this is the server. It forks a keeper for each engine, which as its parent can tell how it
ended. Knows Linux only. Invariant: an engine has the descriptors that it was sent and no other of
the tests'; when these are gone, so is the server.
"""

import importlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

NUM_FDS = 4
"""An engine's socket and lifeline, where it prints, and where its keeper reports."""
REPORT_BYTES = 8


class ForkServer:
    """Its process is nobody's child, so that tests can count their own."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            subprocess.run(
                [sys.executable, str(Path(__file__)), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                check=True,
            )

    def execute(self, arguments: Sequence[str], fds: Sequence[int], output: int) -> "Forked":
        """As `child_process.execute`, for the scripted engine; `arguments` say nothing more."""
        report, theirs = os.pipe()
        try:
            socket.send_fds(self._socket, [b"f"], [*fds, output, theirs])
        finally:
            os.close(theirs)
        return Forked(report)

    def close(self) -> None:
        self._socket.close()


class Forked:
    """A `Program`; the keeper reports its process id, and later its exit status."""

    def __init__(self, report: int) -> None:
        self._report = report
        self.pid = self._read()
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            poll = select.poll()
            poll.register(self._report, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("a forked engine", timeout or 0.0)
            self._code = self._read()
            os.close(self._report)
        return self._code

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, sig: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, sig)

    def _read(self) -> int:
        report = os.read(self._report, REPORT_BYTES)
        assert len(report) == REPORT_BYTES, "the fork server or a keeper has ended"
        return int.from_bytes(report, "little", signed=True)


def serve(connection: socket.socket) -> None:
    """Until the tests' end is closed. Keepers that end are not waited for."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        _, fds, _, _ = socket.recv_fds(connection, 1, NUM_FDS)
        if not fds:
            return
        if not os.fork():
            connection.close()
            keep(*fds)
        for fd in fds:
            os.close(fd)


def keep(link: int, lifeline: int, output: int, report: int) -> None:
    """Forks the engine, and exits after it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    engine = os.fork()
    if not engine:
        os.close(report)
        become_engine(link, lifeline, output)
    for fd in (link, lifeline, output):
        os.close(fd)
    with suppress(BrokenPipeError):
        os.write(report, engine.to_bytes(REPORT_BYTES, "little", signed=True))
        code = os.waitstatus_to_exitcode(os.waitpid(engine, 0)[1])
        os.write(report, code.to_bytes(REPORT_BYTES, "little", signed=True))
    os._exit(0)


def become_engine(link: int, lifeline: int, output: int) -> None:
    from scripted_child import load

    from cadenza.engine.process.worker import run_child

    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    run_child([str(link), str(lifeline), str(os.getppid())], load)


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    importlib.import_module("scripted_child")  # so that forked ones have it
    with socket.socket(fileno=int(sys.argv[1])) as ours:
        serve(ours)
