"""`ProcessLink` to a real process that breaks on command: one end for each request, always."""

import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cadenza.config import EngineConfig
from cadenza.engine.front import EngineFront, InProcessLink
from cadenza.engine.process.child_process import ChildProcess
from cadenza.engine.process.process_link import ProcessLink, ProcessOptions
from cadenza.engine.process.supervision import WatchdogTimeouts, usage_of
from cadenza.engine.timeouts import RequestTimeouts
from cadenza.errors import (
    CheckpointError,
    ConfigError,
    EngineClosedError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    RunnerError,
)
from cadenza.events import Event, Finished, Token
from tests.by_day import by_day
from tests.engine.process.conftest import (
    IMPATIENT,
    QUICK,
    SCRIPT,
    TIMEOUT_S,
    Front,
    HandClock,
    OpenFront,
    request,
)
from tests.engine.process.scripted_child import (
    HANG,
    KILL,
    PRINT,
    RAISE,
    SPIN,
    VOCAB_SIZE,
    make_core,
)

CONFIG = EngineConfig(max_num_seqs=8)


def open_descriptors() -> set[tuple[str, str]]:
    """What this process has open."""
    found: set[tuple[str, str]] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
        except OSError:
            continue
    return found


def children_of_this_process() -> set[str]:
    """The processes that it has started and not reaped."""
    mine: set[str] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[1] == str(os.getpid()):
            mine.add(path.parent.name)
    return mine


@pytest.fixture
def children() -> Callable[[], set[str]]:
    """Those that the test has started; a server of other tests may run beside them."""
    before = children_of_this_process()
    return lambda: children_of_this_process() - before


def test_streams_equal_those_of_an_engine_in_this_process(open_front: OpenFront):
    requests = [request(*range(1, 2 + index * 9 % 40), max_tokens=20) for index in range(24)]
    service, events = EngineFront(InProcessLink(make_core(CONFIG))), list[Event]()
    for each in requests:
        service.submit(each)
    service.drain(TIMEOUT_S)
    service.serve(events.extend)
    front = open_front()
    front.engine.wait_ready(TIMEOUT_S)
    assert [front.engine.submit(each) for each in requests] == list(range(24))
    front.wait_ends(24)
    expected: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, Token):
            expected.setdefault(event.request_id, []).append(event.token_id)
    assert front.streams() == expected
    assert front.engine.request_stats().ends == {"length": 24}


def test_the_last_statistics_of_a_busy_time_count_everything(open_front: OpenFront):
    front = open_front()
    front.engine.wait_ready(TIMEOUT_S)
    for _ in range(12):
        front.engine.submit(request(max_tokens=10))
    front.wait_ends(12)

    def is_settled() -> bool:
        stats = front.engine.stats()
        return (
            stats is not None
            and stats.numbers["num_requests_running"] + stats.numbers["num_requests_waiting"] == 0
        )

    front.wait(is_settled)
    stats = front.engine.stats()
    assert stats is not None
    # The last token of a stream is never computed.
    assert stats.histograms["iteration_tokens_total"].total == 12 * (3 + 10 - 1)
    assert stats.numbers["prefix_cache_queries"] == 12 * 3
    assert stats.by_label["pages"]["live"] == 0


def test_an_invalid_request_is_refused_here_with_the_engines_words(open_front: OpenFront):
    front = open_front()
    front.engine.wait_ready(TIMEOUT_S)
    bad = request(VOCAB_SIZE)
    with pytest.raises(InvalidRequestError) as here:
        front.engine.submit(bad)
    with pytest.raises(InvalidRequestError) as there:
        make_core(CONFIG).submit(bad)
    assert str(here.value) == str(there.value)
    assert front.engine.request_stats().num_accepted == 0


def test_a_killed_engine_ends_each_stream_once_and_another_one_serves(open_front: OpenFront):
    front = open_front(
        steps=50, on_failure="error"
    )  # and then no stream gets on, so that none ends by itself
    front.engine.wait_ready(TIMEOUT_S)
    for _ in range(64):
        front.engine.submit(request(max_tokens=200))
    front.wait(lambda: len(front.events) > 100)
    pid = front.link.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    front.wait_ends(64)
    front.wait_restarts(1)
    assert {end.error_kind for end in front.ends().values()} == {"engine_lost"}
    generated = {request_id: len(tokens) for request_id, tokens in front.streams().items()}
    for request_id, end in front.ends().items():
        assert end.num_generated_tokens == generated.get(request_id, 0)
    front.wait_state("ready")
    status = front.engine.status()
    assert (status.num_restarts, status.error) == (1, None)
    again = front.engine.submit(request())
    assert again == 64
    assert front.wait_ends(65)[again].finish_reason == "length"


@pytest.mark.parametrize("command", by_day([HANG, SPIN], {SPIN}))
def test_an_engine_without_progress_is_killed_and_replaced(
    open_front: OpenFront, tmp_path: Path, command: int, children: Callable[[], set[str]]
):
    clock, stuck = HandClock(), tmp_path / "stuck"
    front = open_front(
        watchdog=IMPATIENT, clock=clock, stuck=stuck, on_failure="error", open_child=ChildProcess
    )
    front.engine.wait_ready(TIMEOUT_S)
    front.engine.submit(request())
    front.wait_ends(1)
    pid = front.link.pid
    victim, bystander = front.engine.submit(request(command)), front.engine.submit(request())
    front.wait(stuck.exists)
    assert front.engine.status().num_restarts == 0
    clock.let_pass_until(lambda: front.engine.status().num_restarts)
    ends = front.wait_ends(3)
    assert {ends[victim].error_kind, ends[bystander].error_kind} == {"engine_lost"}
    front.wait_state("ready")
    assert front.link.pid != pid
    assert str(pid) not in children()


def test_a_pause_of_the_whole_machine_is_not_taken_for_a_hang(
    open_front: OpenFront, tmp_path: Path
):
    clock, stuck = HandClock(), tmp_path / "stuck"
    watchdog = replace(IMPATIENT, hung_after_s=4.0, hung_after_steps=0.0)
    front = open_front(watchdog=watchdog, clock=clock, stuck=stuck, on_failure="error")
    front.engine.wait_ready(TIMEOUT_S)
    front.engine.submit(request(HANG))
    front.wait(stuck.exists)
    clock.let_pass(60.0)
    paused_until_s = clock()
    clock.let_pass_until(lambda: front.engine.status().num_restarts)
    assert clock() > paused_until_s + 2.0


def test_an_idle_engine_beats_and_is_left_alone_until_it_is_stopped(open_front: OpenFront):
    clock = HandClock()
    front = open_front(watchdog=IMPATIENT, clock=clock)
    front.engine.wait_ready(TIMEOUT_S)
    pid = front.link.pid
    assert pid is not None
    for _ in range(4):
        clock.let_pass(0.9 * IMPATIENT.hung_after_s)
        front.wait(lambda: front.engine.status().since_beat_s == 0)
    assert (front.engine.status().num_restarts, front.link.pid) == (0, pid)
    os.kill(pid, signal.SIGSTOP)
    clock.let_pass_until(lambda: front.engine.status().num_restarts)
    front.wait_state("ready")
    assert front.link.pid != pid


def test_a_slow_step_that_was_announced_is_not_taken_for_a_hang(
    open_front: OpenFront, tmp_path: Path
):
    clock, stuck, go = HandClock(), tmp_path / "stuck", tmp_path / "go"
    front = open_front(watchdog=IMPATIENT, clock=clock, steps=0, stuck=stuck, go=go)
    front.engine.wait_ready(TIMEOUT_S)
    front.engine.submit(request())
    front.wait(stuck.exists)
    for _ in range(5):
        clock.let_pass(0.9 * IMPATIENT.hung_after_s, lambda: front.engine.submit(request()))
    go.touch()
    assert {end.finish_reason for end in front.wait_ends(6).values()} == {"length"}
    assert front.engine.status().num_restarts == 0


def test_a_step_that_fails_twice_ends_its_request_and_the_engine_goes_on(open_front: OpenFront):
    front = open_front()
    front.engine.wait_ready(TIMEOUT_S)
    pid = front.link.pid
    for _ in range(8):
        broken = front.engine.submit(request(RAISE))
        assert front.wait_ends(broken + 1)[broken].error_kind == "step_failed"
        fine = front.engine.submit(request())
        assert front.wait_ends(fine + 1)[fine].finish_reason == "length"
    assert front.link.pid == pid


def test_failed_steps_in_a_row_have_the_engine_replaced(open_front: OpenFront):
    config = EngineConfig(max_num_seqs=8, max_consecutive_step_errors=3)
    front = open_front(config)
    front.engine.wait_ready(TIMEOUT_S)
    for broken in range(3):
        front.wait_state("ready")
        front.engine.submit(request(RAISE))
        assert front.wait_ends(broken + 1)[broken].error_kind == "step_failed"
    # Each but the first one's first failure is the third in a row; a new engine goes on with it.
    assert front.engine.status().num_restarts == 2


@pytest.mark.parametrize("kind", [CheckpointError, ConfigError])
def test_a_load_that_fails_raises_the_engines_own_error_here(
    open_front: OpenFront, kind: type[Exception], caplog: pytest.LogCaptureFixture
):
    front = open_front(fail=kind.__name__)
    with pytest.raises(kind, match="the script says so"):
        front.engine.wait_ready(TIMEOUT_S)
    assert front.engine.status().state == "dead"
    assert front.engine.status().num_restarts == 0
    assert caplog.text == "", "it is raised, and not told twice"


def test_a_path_that_is_no_text_is_refused_before_a_process_is_started():
    with pytest.raises(ConfigError, match=r"'/models/m\\udcff' is not UTF-8; rename it"):
        ProcessLink(os.fsdecode(b"/models/m\xff"), CONFIG)


def speak_other_words(command: Sequence[str]) -> ChildProcess:
    """A process that was sent what no engine process knows."""
    child = ChildProcess(command)
    child.frames.send(len(b"\xc1").to_bytes(4, "little") + b"\xc1")
    return child


def test_a_start_that_the_process_refuses_is_its_one_error_and_is_not_tried_again(
    open_front: OpenFront, caplog: pytest.LogCaptureFixture
):
    front = open_front(open_child=speak_other_words)
    with pytest.raises(RunnerError, match="the front end sent something unknown"):
        front.engine.wait_ready(TIMEOUT_S)
    assert front.engine.status().state == "dead"
    assert front.engine.status().num_restarts == 0
    assert caplog.text == ""


def test_a_load_that_crashes_is_tried_again_and_then_given_up(open_front: OpenFront):
    front = open_front(crash=True)
    with pytest.raises(EngineUnavailableError, match="failed so 3 times"):
        front.engine.wait_ready(TIMEOUT_S)
    assert front.engine.status().num_restarts == 2


def test_a_slow_start_says_what_it_does_and_refuses_meanwhile(
    open_front: OpenFront, tmp_path: Path
):
    gate = tmp_path / "gate"
    front = open_front(gate=gate)
    front.wait(lambda: front.engine.status().phase == "load")
    with pytest.raises(EngineUnavailableError, match="still loading") as refused:
        front.engine.submit(request())
    assert refused.value.retry_after_s is not None
    gate.touch()
    front.engine.wait_ready(TIMEOUT_S)
    status = front.engine.status()
    assert set(status.startup_s) == {"python", "load"}
    assert front.engine.request_stats().rejections == {"unavailable": 1}


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counts of work")
def test_a_load_that_hangs_is_killed_tried_again_and_given_up_with_the_reason(
    open_front: OpenFront, caplog: pytest.LogCaptureFixture
):
    front = open_front(watchdog=IMPATIENT, load_s=3600)
    front.wait(lambda: front.engine.status().cause)
    hang = r"no progress in its start, at '(python|load)', for \d+ seconds"
    assert re.search(hang, front.engine.status().cause or "")
    with pytest.raises(EngineUnavailableError, match=hang):
        front.engine.wait_ready(TIMEOUT_S)
    assert front.engine.status().num_restarts == 2
    assert "failed so 3 times" in (front.engine.status().error or "")
    assert len(re.findall(hang, caplog.text)) == 3


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counts of work")
def test_a_process_that_is_stopped_while_it_loads_is_replaced(
    open_front: OpenFront, tmp_path: Path
):
    clock, gate = HandClock(), tmp_path / "gate"
    front = open_front(watchdog=IMPATIENT, clock=clock, gate=gate)
    front.wait(lambda: front.engine.status().phase == "load")
    pid = front.link.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    clock.let_pass_until(lambda: front.engine.status().num_restarts)
    gate.touch()
    front.engine.wait_ready(TIMEOUT_S)
    assert front.link.pid != pid
    assert front.engine.status().cause is None


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counts of work")
def test_a_slow_load_that_goes_on_is_left_alone(open_front: OpenFront, tmp_path: Path):
    """The clock goes on as the load does, so that between any three looks there is work."""
    clock, gate = HandClock(), tmp_path / "gate"
    front = open_front(watchdog=IMPATIENT, clock=clock, gate=gate)
    front.wait(lambda: front.engine.status().phase == "load")
    pid = front.link.pid
    assert pid is not None
    for _ in range(12):
        before = num_bytes_read(pid)
        front.wait(lambda before=before: num_bytes_read(pid) > before)
        clock.let_pass(IMPATIENT.load_hung_after_s / 4)
    gate.touch()
    front.engine.wait_ready(TIMEOUT_S)
    assert front.engine.status().num_restarts == 0


def num_bytes_read(pid: int) -> int:
    work = usage_of(pid)
    assert work is not None, "it is gone"
    return work.read_bytes


def test_cancelled_requests_have_no_end_and_make_room(open_front: OpenFront, tmp_path: Path):
    go = tmp_path / "go"
    config = EngineConfig(max_num_seqs=1, max_num_queued_reqs=1)
    front = open_front(config, steps=5, go=go)
    front.engine.wait_ready(TIMEOUT_S)
    first, second = (front.engine.submit(request(max_tokens=200)) for _ in range(2))
    with pytest.raises(QueueFullError):
        front.engine.submit(request())
    front.engine.cancel(first)
    front.engine.cancel(second)
    third = front.engine.submit(request())
    go.touch()
    front.wait_ends(1)
    assert set(front.ends()) == {third}
    assert front.engine.request_stats().ends == {"abort": 2, "length": 1}


def test_samples_of_a_request_are_cancelled_and_lost_one_by_one(open_front: OpenFront):
    front = open_front(steps=20, on_failure="error")
    front.engine.wait_ready(TIMEOUT_S)
    request_id = front.engine.submit(request(max_tokens=200, n=3))
    front.wait(lambda: {token.sample for token in front.events} == {0, 1, 2})  # type: ignore[union-attr]
    front.engine.cancel(request_id, 1)
    pid = front.link.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    front.wait(lambda: front.engine.load().num_open == 0)
    ends = [event for event in front.events if isinstance(event, Finished)]
    assert sorted((end.request_id, end.sample) for end in ends) == [(0, 0), (0, 2)]
    assert front.engine.request_stats().ends == {"abort": 1, "error": 2}


def test_a_deadline_ends_a_request_and_the_engine_forgets_it(open_front: OpenFront):
    front = open_front(step_s=0.01, timeouts=RequestTimeouts(queue_s=9, total_s=0.5))
    front.engine.wait_ready(TIMEOUT_S)
    front.engine.submit(request(max_tokens=250))
    assert front.wait_ends(1)[0].error_kind == "request_timeout"

    def is_forgotten() -> bool:
        stats = front.engine.stats()
        return stats is not None and stats.numbers["num_requests_running"] == 0

    front.wait(is_forgotten)


def test_a_request_that_is_not_started_in_time_ends_and_the_one_before_it_goes_on(
    open_front: OpenFront, tmp_path: Path
):
    clock, go = HandClock(), tmp_path / "go"
    timeouts = RequestTimeouts(queue_s=20.0, total_s=1000.0)
    config = EngineConfig(max_num_seqs=1)
    front = open_front(config, timeouts=timeouts, clock=clock, steps=5, go=go)
    front.engine.wait_ready(TIMEOUT_S)
    first, second = (front.engine.submit(request(max_tokens=100)) for _ in range(2))
    front.wait(lambda: front.events)
    clock.let_pass_until(lambda: second in front.ends(), step_s=5.0)
    go.touch()
    ends = front.wait_ends(2)
    assert {key: end.error_kind for key, end in ends.items()} == {
        second: "queue_timeout",
        first: None,
    }
    assert front.engine.timeouts == timeouts


def test_draining_finishes_what_is_open_then_exits(open_front: OpenFront, tmp_path: Path):
    go = tmp_path / "go"
    front = open_front(steps=5, go=go)
    front.engine.wait_ready(TIMEOUT_S)
    front.engine.submit(request(max_tokens=40))
    front.engine.drain(within_s=TIMEOUT_S)
    with pytest.raises(EngineUnavailableError, match="takes no new"):
        front.engine.submit(request())
    go.touch()
    front.thread.join(TIMEOUT_S)
    assert front.ends()[0].finish_reason == "length"
    with pytest.raises(EngineClosedError):
        front.engine.submit(request())


def test_a_second_call_while_draining_ends_at_once_even_a_hung_engine(
    open_front: OpenFront, children: Callable[[], set[str]]
):
    watchdog = WatchdogTimeouts(hung_after_s=TIMEOUT_S, stop_s=0.5)
    front = open_front(watchdog=watchdog, open_child=ChildProcess)
    front.engine.wait_ready(TIMEOUT_S)
    front.engine.submit(request(HANG))
    front.engine.drain(within_s=TIMEOUT_S)
    front.engine.shutdown()
    front.thread.join(TIMEOUT_S / 2)
    assert not front.thread.is_alive()
    assert front.ends()[0].error_kind == "engine_closed"
    assert not children()


@pytest.mark.parametrize(("disk", "code"), [("folder", 0), (None, -signal.SIGKILL)])
def test_an_engine_with_a_disk_gets_time_to_write_what_is_left(
    open_front: OpenFront, disk: str | None, code: int, caplog: pytest.LogCaptureFixture
):
    """The process is stopped by a signal, so that it cannot exit before the front end waits."""
    caplog.set_level(logging.INFO, "cadenza")
    config = EngineConfig(max_num_seqs=8, prefix_cache_disk=disk)
    front = open_front(config, WatchdogTimeouts(hung_after_s=TIMEOUT_S, stop_s=0.0))
    front.engine.wait_ready(TIMEOUT_S)
    pid = front.link.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    front.engine.shutdown()
    if disk is not None:
        front.thread.join(0.2)
        os.kill(pid, signal.SIGCONT)
    front.thread.join(TIMEOUT_S)
    assert f"stopped (exit status {code})" in caplog.text


def test_a_stalled_engine_blocks_neither_submit_nor_cancel(open_front: OpenFront):
    front = open_front(EngineConfig(max_num_seqs=8, max_num_queued_reqs=2000), QUICK)
    front.engine.wait_ready(TIMEOUT_S)
    pid = front.link.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    for _ in range(2000):
        request_id = front.engine.submit(request(*[1] * 200, max_tokens=1))
        if request_id % 2:
            front.engine.cancel(request_id)
    os.kill(pid, signal.SIGCONT)
    front.wait_ends(1000)


def test_what_waits_for_a_stalled_engine_is_bounded(open_front: OpenFront):
    front = open_front(
        EngineConfig(max_num_seqs=8, max_num_queued_reqs=100_000),
        QUICK,
        max_unsent_bytes=100_000,
    )
    front.engine.wait_ready(TIMEOUT_S)
    pid = front.link.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)

    def submit_all() -> None:
        for _ in range(100_000):
            front.engine.submit(request(*[1] * 200, max_tokens=1))

    with pytest.raises(QueueFullError, match="does not take"):
        submit_all()
    accepted = front.engine.request_stats().num_accepted
    assert 100 < accepted < 10_000
    os.kill(pid, signal.SIGCONT)
    front.wait_ends(accepted)


def test_what_the_engine_prints_and_logs_is_logged_here(
    open_front: OpenFront, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO):
        front = open_front()
        front.engine.wait_ready(TIMEOUT_S)
        for index, command in enumerate((PRINT, RAISE)):
            front.engine.submit(request(command))
            front.wait_ends(index + 1)
        front.stop()
    records = {(record.name, record.levelname, record.getMessage()) for record in caplog.records}
    assert ("cadenza.engine.process.output", "WARNING", "the device speaks") in records
    failure, retried = (text for name, _, text in records if name == "cadenza.engine.loop")
    assert "the device was lost" in retried
    assert failure.startswith("launching step")
    assert "RuntimeError: the device was lost" in failure


def start_and_stop(times: int) -> None:
    """Each time a little otherwise: idle, busy, killed, stopped while loading."""
    options = ProcessOptions(command=(sys.executable, str(SCRIPT)), watchdog=QUICK)
    for turn in range(times):
        front = Front(ProcessLink(json.dumps({}), CONFIG, options))
        if turn % 4:
            front.engine.wait_ready(TIMEOUT_S)
            front.engine.submit(request(KILL if turn % 4 == 3 else 1, max_tokens=100))
            front.wait(lambda front=front: front.events or front.engine.status().num_restarts)
        front.stop()


def check_nothing_is_left(times: int) -> None:
    before = open_descriptors(), children_of_this_process(), set(threading.enumerate())
    start_and_stop(times)
    after = open_descriptors(), children_of_this_process(), set(threading.enumerate())
    # What others leave behind may go meanwhile.
    assert [now - then for now, then in zip(after, before, strict=True)] == [set()] * 3


@pytest.mark.soak
def test_twenty_starts_and_stops_leave_nothing_behind():
    check_nothing_is_left(20)


@pytest.mark.soak
def test_two_hundred_starts_and_stops_leave_nothing_behind():
    check_nothing_is_left(200)


@pytest.mark.soak
def test_a_process_left_open_would_be_seen():
    before = children_of_this_process()
    front = Front(ProcessLink("{}", CONFIG, ProcessOptions(command=(sys.executable, str(SCRIPT)))))
    front.engine.wait_ready(TIMEOUT_S)
    assert children_of_this_process() != before
    front.stop()
