"""The front end's handle on a process: what it prints, and what is done where it cannot start."""

import errno
import gc
import logging
import os
import resource
import selectors
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cadenza.engine.process.child_process import ChildProcess
from cadenza.engine.process.launch import LARGE_PAGES, FirstLaunch, Program, execute, loading
from cadenza.engine.process.messages import OUTPUT_LOGGER
from cadenza.engine.process.process_link import LOG_EVERY_S, SHORTAGE
from cadenza.errors import EngineUnavailableError
from tests.by_day import by_day
from tests.engine.process.conftest import QUICK, TIMEOUT_S, HandClock, OpenFront, request
from tests.engine.process.scripted_child import KILL

MANY_LINES = 10_000
"""More than a pipe holds."""
PRINTING = "import os\nwhile True: os.write(2, b'x' * 99 + b'\\n')"


class Follow(logging.Handler):
    """Takes lines no faster than the process prints them."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        super().__init__()
        self.selector = selector
        self.num_lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        assert record.getMessage() == "x" * 99
        self.num_lines += 1
        assert self.num_lines < MANY_LINES, "it goes on as long as the process does"
        assert self.selector.select(TIMEOUT_S)


def test_a_process_that_prints_without_end_does_not_keep_its_front_end() -> None:
    child = ChildProcess((sys.executable, "-c", PRINTING))
    logger = logging.getLogger(OUTPUT_LOGGER)
    with selectors.DefaultSelector() as selector:
        child.register(selector)
        follow = Follow(selector)
        logger.addHandler(follow)
        assert selector.select(TIMEOUT_S)
        assert child.log_output()
        logger.removeHandler(follow)
        child.unregister(selector)
    assert 0 < follow.num_lines < MANY_LINES
    assert child.close(within_s=0) < 0


@pytest.mark.parametrize("own", [None, "glibc.malloc.check=0"])
def test_the_engine_may_have_huge_pages_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, own: str | None
) -> None:
    (name, default), *_ = LARGE_PAGES.items()
    monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv(name, own)
    reader, writer = os.pipe()
    command = (sys.executable, "-c", f"import os; print(os.environ[{name!r}], end='')")
    assert execute(command, (), writer).wait(TIMEOUT_S) == 0
    os.close(writer)
    with open(reader, encoding="utf-8") as printed:
        assert printed.read() == (own or default)


def open_descriptors() -> set[int]:
    return {number for number in range(4096) if os.path.lexists(f"/proc/self/fd/{number}")}


@contextmanager
def descriptors_left(count: int) -> Generator[None]:
    """This process can open so many more."""
    opened, most = open_descriptors(), 0
    while count:
        count -= most not in opened
        most += 1
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/fd")
def test_a_start_for_want_of_descriptors_leaves_none_open() -> None:
    before = open_descriptors()
    for count in range(9):
        with descriptors_left(count), pytest.raises(OSError, match="Too many open files") as raised:
            ChildProcess((sys.executable, "-c", ""))
        assert raised.value.errno == errno.EMFILE
        assert open_descriptors() == before
    with descriptors_left(9):  # so that each that a start opens was met above
        child = ChildProcess((sys.executable, "-c", ""))
    assert child.close(within_s=TIMEOUT_S) == 0
    assert open_descriptors() == before


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/fd")
def test_a_process_that_was_launched_before_is_the_front_ends_first_one() -> None:
    before = open_descriptors()
    with closing(FirstLaunch((sys.executable, "-c", "import sys; sys.exit(7)"))) as first:
        child = ChildProcess(("/nowhere",), launched=first.take())
        assert first.take() is None
        assert child.close(within_s=TIMEOUT_S) == 7
    assert open_descriptors() == before


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/fd")
def test_a_process_that_nobody_takes_is_ended() -> None:
    before = open_descriptors()
    started: list[Program] = []

    def execute_noted(arguments: Sequence[str], fds: Sequence[int], output: int) -> Program:
        started.append(execute(arguments, fds, output))
        return started[-1]

    sleeping = (sys.executable, "-c", "import time; time.sleep(3600)")
    with closing(FirstLaunch(sleeping, execute_noted)):
        assert open_descriptors() != before
    assert started[0].wait(0) == -signal.SIGKILL
    assert open_descriptors() == before


def test_a_first_process_that_cannot_be_launched_is_left_to_the_next_launch() -> None:
    with closing(FirstLaunch(("/nowhere/at/all",))) as first:
        assert first.take() is None


class Wanting:
    """Opens processes, except where it is told that there is no room for one."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.num_refused = 0

    def __call__(self, command: Sequence[str]) -> ChildProcess:
        if self.number is not None:
            self.num_refused += 1
            raise OSError(self.number, os.strerror(self.number))
        return ChildProcess(command)


@pytest.mark.parametrize(
    "number", by_day([errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM], {errno.EMFILE})
)
def test_an_engine_killed_without_room_for_another_is_started_when_there_is_some(
    open_front: OpenFront, caplog: pytest.LogCaptureFixture, number: int
):
    clock, wanting = HandClock(), Wanting()
    watchdog = replace(QUICK, max_postponed_s=QUICK.backoff_s)
    front = open_front(watchdog=watchdog, clock=clock, open_child=wanting, on_failure="error")
    front.engine.wait_ready(TIMEOUT_S)
    wanting.number = number
    front.engine.submit(request(KILL))
    front.wait_ends(1)
    begin_s = clock()
    clock.let_pass_until(lambda: wanting.num_refused >= 20, step_s=LOG_EVERY_S / 8)
    assert front.engine.status().state == "restarting"
    assert front.engine.status().cause == SHORTAGE
    assert 2 <= caplog.text.count(SHORTAGE) <= 1 + (clock() - begin_s) / LOG_EVERY_S
    wanting.number = None
    clock.let_pass_until(lambda: front.engine.status().num_restarts)
    front.wait_state("ready")
    again = front.engine.submit(request())
    assert front.wait_ends(2)[again].finish_reason == "length"


def test_a_command_that_cannot_be_executed_is_given_up(open_front: OpenFront):
    wanting = Wanting()
    wanting.number = errno.ENOENT
    front = open_front(open_child=wanting)
    with pytest.raises(EngineUnavailableError, match="failed so 3 times"):
        front.engine.wait_ready(TIMEOUT_S)
    assert wanting.num_refused == 3


def test_a_load_without_descriptors_is_tried_until_it_has_some(
    open_front: OpenFront, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    room = tmp_path / "room"
    watchdog = replace(QUICK, max_postponed_s=QUICK.backoff_s)
    front = open_front(watchdog=watchdog, room=room)
    front.wait_restarts(3)
    status = front.engine.status()
    assert (status.state, status.cause) == ("loading", SHORTAGE)
    room.touch()
    front.engine.wait_ready(TIMEOUT_S)
    assert caplog.text.count(SHORTAGE) == 1
    assert "config.json cannot be read" in caplog.text


FREEZE = """
import gc
from cadenza.engine.process.launch import freeze_heap, loading
with loading():
    assert not gc.isenabled()
    freeze_heap()
    assert gc.isenabled() and gc.get_freeze_count() > 0
assert gc.isenabled()
"""


def test_no_garbage_is_collected_while_a_process_loads_or_fails_to():
    assert gc.isenabled()
    with loading():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="no model"), loading():
        raise ValueError("no model")
    assert gc.isenabled()


def test_garbage_is_collected_again_once_the_heap_is_frozen():
    subprocess.run([sys.executable, "-c", FREEZE], check=True)
