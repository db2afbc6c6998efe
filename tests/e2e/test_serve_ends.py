"""Bar 17 on `cadenza serve` and the bundled model: SIGTERM under load, starts and stops anywhen.

One SIGTERM by day is in `test_serve_lifecycle.py`. Whenever the end comes, streams end whole or
with a clean error, and no process, socket or file is left.
"""

import os
import random
import signal
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cadenza.cli.interrupts import TERMINATED
from tests.e2e.figures import Figures
from tests.e2e.streams import Stream, Streams
from tests.server.serve_process import ServeProcess, serve_process
from tests.server.test_listening import left_behind

FLAGS = ("--max-num-seqs", "16", "--max-model-len", "512", "--disable-log-requests")
NUM_STREAMS = 16
GONE_S = 60.0
MARK = "CADENZA_TEST_MARK"


def marked_processes(mark: str) -> set[int]:
    """Those whose environment has the mark: a server's, its engine's, whatever they started."""
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def wait_gone(mark: str) -> None:
    deadline_s = time.monotonic() + GONE_S
    while left := marked_processes(mark):
        assert time.monotonic() < deadline_s, f"processes are left: {left}"
        time.sleep(0.02)


@contextmanager
def leaving_nothing(folder: Path, *flags: object) -> Generator[ServeProcess]:
    """A server whose temporary files and Unix socket, if any, lie in `folder`; it must end in the
    block, and nothing of it may be there afterwards.
    """
    mark = uuid.uuid4().hex
    with serve_process(*FLAGS, *flags, TMPDIR=str(folder), **{MARK: mark}) as serving:
        yield serving
        assert serving.process.poll() is not None, "it has not ended"
        wait_gone(mark)
    check_empty(folder)


def check_empty(folder: Path) -> None:
    assert list(folder.iterdir()) == []


def terminate(serving: ServeProcess, figures: Figures, name: str, bar_s: float) -> int:
    start_s = time.monotonic()
    serving.terminate()
    code = serving.wait()
    figures.note(name, time.monotonic() - start_s, bar_s)
    return code


def open_streams(serving: ServeProcess, rng: random.Random) -> Streams:
    bodies = [
        {"prompt": "Once", "max_tokens": rng.randint(1, 400), "seed": index, "ignore_eos": True}
        for index in range(NUM_STREAMS)
    ]
    streams = Streams(int(serving.url.rpartition(":")[2]), bodies)
    at = rng.randint(1, 1000)
    streams.wait(lambda: streams.num_frames >= at)
    return streams


def check_ends(streams: list[Stream], codes: set[str | None]) -> None:
    assert {stream.error for stream in streams} <= codes
    # A stream that the server never took up has no frame at all; one that began ends whole.
    assert all(stream.is_whole for stream in streams if stream.frames)


def finish_in_time(folder: Path, rng: random.Random, figures: Figures) -> None:
    with leaving_nothing(folder, "--shutdown-timeout", "600") as serving:
        serving.wait_ready()
        streams = open_streams(serving, rng)
        code = terminate(serving, figures, "drained with all streams whole", 30)
        check_ends(streams.join(), {None})
        assert code == 0


def run_out_of_time(folder: Path, rng: random.Random, figures: Figures) -> None:
    drain_s = rng.choice([0, 0.05, 0.2])
    with leaving_nothing(folder, "--shutdown-timeout", drain_s) as serving:
        serving.wait_ready()
        streams = open_streams(serving, rng)
        code = terminate(serving, figures, "ended after a short drain time", drain_s + 3.5)
        check_ends(streams.join(), {None, "draining"})
        assert code == 0


def ask_twice(folder: Path, rng: random.Random, figures: Figures) -> None:
    """The engine hangs, so that only the second signal can end it."""
    with leaving_nothing(folder, "--shutdown-timeout", "600") as serving:
        serving.wait_ready()
        streams = open_streams(serving, rng)
        os.kill(serving.engine_pid(), signal.SIGSTOP)
        serving.terminate()
        # Its log has it even if the end comes soon; /ready may tell nobody any more.
        serving.wait_for(lambda: "draining" in serving.log)
        code = terminate(serving, figures, "ended by a second signal", 2.0)
        streams.join()
        assert code in {0, TERMINATED}


WAYS = (finish_in_time, run_out_of_time, finish_in_time, run_out_of_time, ask_twice)


def terminate_under_load(folder: Path, seed: int) -> None:
    figures = Figures()
    for turn, way in enumerate(WAYS):
        way(folder, random.Random(seed * len(WAYS) + turn), figures)
    figures.tell(f"SIGTERM under {NUM_STREAMS} streams, seed {seed}")


@pytest.mark.soak
@pytest.mark.parametrize("part", range(20))
def test_a_hundred_sigterms_under_load(tmp_path: Path, part: int) -> None:
    terminate_under_load(tmp_path, part)


def start_and_stop(folder: Path, turn: int, rng: random.Random, figures: Figures) -> None:
    """The end comes at once, soon, while it loads, or when it has served; over a port or a path."""
    place = ("--uds", folder / "cadenza.sock") if turn % 2 else ()
    with leaving_nothing(folder, *place) as serving:
        match turn % 5:
            case 0:
                pass
            case 1 | 2:
                assert serving.url
                assert all(path.stat().st_mode & 0o077 == 0 for path in folder.glob("*.sock"))
            case 3:
                serving.engine_pid()
                moment_s = time.monotonic() + rng.random()
                serving.wait_for(lambda: time.monotonic() >= moment_s)
            case _:
                serving.wait_for(lambda: "engine ready" in serving.log)
        code = terminate(serving, figures, "stopped", 3.5)
        # Before it listens it has nothing to leave, and the signal ends it as any program.
        assert code in {0, TERMINATED, -signal.SIGTERM}, serving.log


@pytest.mark.soak
@pytest.mark.parametrize("part", range(10))
def test_two_hundred_starts_and_stops_leave_nothing(tmp_path: Path, part: int) -> None:
    figures = Figures()
    for turn in range(20):
        start_and_stop(tmp_path, turn, random.Random(part * 20 + turn), figures)
    figures.tell(f"starts and stops, part {part}")


@pytest.mark.soak
def test_a_process_a_socket_or_a_file_that_is_left_would_be_seen(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    with serve_process(*FLAGS, **{MARK: mark}) as serving:
        serving.wait_for(lambda: len(marked_processes(mark)) >= 2)
        assert {serving.process.pid, serving.engine_pid()} <= marked_processes(mark)
    wait_gone(mark)
    left_behind(tmp_path / "cadenza.sock")
    with pytest.raises(AssertionError):
        check_empty(tmp_path)
