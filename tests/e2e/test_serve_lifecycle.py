"""By day: one kill, one handover and one end by signals of `cadenza serve`, under streams.

In full size, at random moments, over paths and TLS: the other files of this folder, by `make soak`.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cadenza.server.lifecycle.handover import is_supported
from tests.e2e.streams import Streams
from tests.e2e.test_serve_ends import leaving_nothing
from tests.e2e.test_serve_faults import FLAGS, SMALL, check_undisturbed, port_of, wholes
from tests.ports import kept_port
from tests.server.serve_process import ServeProcess, is_alive

FEW = SMALL[:10]


def streams_under_way(port: int) -> Streams:
    streams = Streams(port, FEW)
    streams.wait(lambda: streams.num_frames)
    return streams


@pytest.mark.slow
@pytest.mark.skipif(not is_supported(), reason="handing over needs Linux")
def test_a_kill_a_handover_and_signals_change_no_stream_and_leave_nothing(tmp_path: Path) -> None:
    folders = tmp_path / "old", tmp_path / "new"
    for each in folders:
        each.mkdir()
    with kept_port() as port:
        flags = (*FLAGS, "--shutdown-timeout", "600", "--port", port)
        with leaving_nothing(folders[0], *flags) as old:
            old.wait_ready()
            expected = wholes(old, FEW)
            kill_engine(old, expected)
            with leaving_nothing(folders[1], *flags, "--handover") as new:
                while "ready at " not in new.log:
                    check_undisturbed(Streams(port, FEW).join(), expected)
                assert old.wait() == 0
                assert "has taken over" in old.log
                end(new, port, expected)


def kill_engine(serving: ServeProcess, expected: list[Any]) -> None:
    """Its streams are resumed by the next engine."""
    streams, engine = streams_under_way(port_of(serving)), serving.engine_pid()
    os.kill(engine, signal.SIGKILL)
    check_undisturbed(streams.join(), expected)
    assert serving.engine_pid(num_starts=2) != engine
    assert not is_alive(engine)
    serving.wait_ready()


def end(serving: ServeProcess, port: int, expected: list[Any]) -> None:
    """By SIGHUP, again, and SIGTERM: open streams finish."""
    streams = streams_under_way(port)
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
        serving.process.send_signal(number)
    check_undisturbed(streams.join(), expected)
    assert serving.wait() == 0
    assert "draining" in serving.log
    assert "ending at once" not in serving.log
