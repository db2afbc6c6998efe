"""`Supervision`, `StepForecast` and `LogLines`: pure, by the numbers."""

import errno
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cadenza.engine.process.messages import (
    MAX_LOG_LINE_BYTES,
    OUTPUT_LOGGER,
    LineFormatter,
    LogLines,
)
from cadenza.engine.process.supervision import (
    IDLE_CPU_S,
    Loss,
    ProcessUsage,
    Supervision,
    WatchdogTimeouts,
    is_descriptor_shortage,
    num_oom_kills,
    usage_of,
)
from cadenza.engine.process.worker import UNMEASURED_STEP_S, StepForecast

WATCHDOG = WatchdogTimeouts(
    hung_after_s=5,
    hung_after_steps=10,
    load_hung_after_s=20,
    max_failed_loads=3,
    backoff_s=0.5,
    max_backoff_s=30.0,
)
DIED = Loss(error="it died", cause="it died")


def serving(now_s: float = 100.0) -> Supervision:
    """One that was started 4 seconds ago and is ready now."""
    supervision = Supervision(WATCHDOG, now_s - 4)
    supervision.started(now_s - 4)
    supervision.loaded(now_s, {"load": 3.0})
    supervision.ready()
    return supervision


def test_the_first_start_is_due_at_once_and_only_one_is():
    supervision = Supervision(WATCHDOG, 10.0)
    assert (supervision.state, supervision.may_start(10.0)) == ("loading", True)
    supervision.started(10.0)
    assert not supervision.may_start(1000.0)
    assert supervision.hung_at_s() is None
    assert supervision.retry_after_s(12.0) == 3.0
    supervision.loaded(14.0, {"load": 3.0})
    supervision.ready()
    assert supervision.startup_s == {"python": 1.0, "load": 3.0}
    assert (supervision.state, supervision.retry_after_s(14.0)) == ("ready", None)


def test_silence_is_a_hang_after_five_seconds_or_ten_predicted_steps():
    supervision = serving()
    supervision.beat(101.0, 7, 0.1, is_idle=False)
    assert not supervision.is_hung(105.9)
    assert supervision.is_hung(106.0)
    supervision.beat(102.0, 8, 2.0, is_idle=False)
    assert not supervision.is_hung(121.9)
    assert supervision.is_hung(122.0)


def test_a_pause_of_the_whole_machine_is_not_held_against_the_engine():
    supervision = serving()
    supervision.beat(101.0, 7, 0.1, is_idle=False)
    supervision.note_late_wakeup(0.9)
    assert supervision.is_hung(106.0)
    supervision.note_late_wakeup(30.0)
    assert not supervision.is_hung(135.9)
    assert supervision.is_hung(136.0)


def test_beats_without_steps_are_no_progress_unless_idle():
    supervision = serving()
    for second in range(101, 108):
        supervision.beat(float(second), 7, 0.1, is_idle=False)
    assert supervision.is_hung(107.0)
    supervision = serving()
    for second in range(101, 150):
        supervision.beat(float(second), 7, 0.0, is_idle=True)
    assert not supervision.is_hung(149.0)


def test_a_slow_step_that_is_announced_gets_its_own_time():
    supervision = serving()
    supervision.beat(101.0, 7, 0.1, is_idle=False)
    supervision.beat(104.0, 7, 3.0, is_idle=False)
    assert not supervision.is_hung(133.9)
    assert supervision.is_hung(134.0)


def usage(cpu_s: float = 0.0, read_bytes: int = 0, num_major_faults: int = 0) -> ProcessUsage:
    return ProcessUsage(cpu_s=cpu_s, read_bytes=read_bytes, num_major_faults=num_major_faults)


def loading() -> Supervision:
    supervision = Supervision(WATCHDOG, 0.0)
    supervision.started(0.0)
    assert supervision.read_usage_at_s() == 2.5
    supervision.record_usage(2.5, usage())
    return supervision


def test_a_load_without_work_is_a_hang_and_says_where():
    supervision = loading()
    supervision.entered(10.0, "compile")
    for seconds in (12.5, 25.0, 29.0):
        supervision.record_usage(seconds, usage(cpu_s=IDLE_CPU_S / 2))
        assert not supervision.is_hung(seconds)
    assert supervision.hung_at_s() == 30.0
    assert supervision.is_hung(30.0)
    assert "'compile', for 20 seconds" in supervision.hang(30.0).error


@pytest.mark.parametrize(
    "step", [usage(cpu_s=IDLE_CPU_S), usage(read_bytes=1), usage(num_major_faults=1)], ids=str
)
def test_a_load_takes_as_long_as_it_works(step: ProcessUsage):
    supervision = loading()
    for turn in range(1, 100):
        done = usage(turn * step.cpu_s, turn * step.read_bytes, turn * step.num_major_faults)
        supervision.record_usage(19.0 * turn, done)
        assert not supervision.is_hung(19.0 * turn)


def test_slow_computing_adds_up_to_work():
    supervision = loading()
    for second in range(3, 200):
        supervision.record_usage(float(second), usage(cpu_s=second * IDLE_CPU_S / 10))
        assert not supervision.is_hung(float(second))


def test_a_start_that_is_postponed_is_no_crash_and_is_tried_ever_later_up_to_a_bound():
    supervision = serving(100.0)
    supervision.crashed(100.0, DIED)
    now_s, waits_s = 100.5, list[float]()
    for _ in range(50):
        assert supervision.may_start(now_s)
        supervision.postponed(now_s, "no descriptors")
        assert supervision.start_at_s is not None
        waits_s.append(supervision.start_at_s - now_s)
        now_s = supervision.start_at_s
    assert (supervision.state, supervision.cause) == ("restarting", "no descriptors")
    assert waits_s == [0.5, 2.0, 8.0, *[WATCHDOG.max_postponed_s] * 47]
    supervision.started(now_s)
    supervision.loaded(now_s, {})
    supervision.ready()
    assert (supervision.state, supervision.cause) == ("ready", None)
    supervision.crashed(now_s, DIED)
    assert supervision.state == "restarting"
    supervision.postponed(now_s, "no descriptors")
    assert supervision.start_at_s == now_s + 0.5


def test_the_first_start_may_be_postponed():
    supervision = Supervision(WATCHDOG, 10.0)
    supervision.postponed(10.0, "no descriptors")
    assert (supervision.state, supervision.may_start(10.4)) == ("loading", False)
    assert supervision.may_start(10.5)


def test_no_start_is_tried_again_while_draining():
    supervision = serving()
    supervision.crashed(100.0, DIED)
    supervision.state = "draining"
    supervision.postponed(100.5, "no descriptors")
    assert supervision.state == "dead"


def test_where_work_cannot_be_told_no_load_is_a_hang():
    supervision = Supervision(WATCHDOG, 0.0)
    supervision.started(0.0)
    supervision.record_usage(2.5, None)
    assert supervision.hung_at_s() is None
    supervision.record_usage(5.0, usage())
    supervision.record_usage(7.5, None)
    assert not supervision.is_hung(1e9)


def test_a_process_that_serves_is_not_judged_by_its_work():
    supervision = serving()
    assert supervision.read_usage_at_s() is None
    assert supervision.hung_at_s() == 105.0


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counts of work")
def test_computing_and_reading_are_work_and_waiting_is_none():
    before = usage_of(os.getpid())
    assert before is not None
    with open("/dev/zero", "rb", buffering=0) as file:
        file.read(10)
    read = usage_of(os.getpid())
    assert read is not None
    assert read.is_beyond(before)
    end_s = time.process_time() + 2 * IDLE_CPU_S
    while time.process_time() < end_s:
        pass
    computed = usage_of(os.getpid())
    assert computed is not None
    assert computed.cpu_s >= read.cpu_s + IDLE_CPU_S
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.stdout.read(1) == b"x"  # so that it waits for more, and has started
        asleep = waits(process.pid)
        assert not waits(process.pid).is_beyond(asleep)
        process.kill()
    assert usage_of(process.pid) is None


def waits(pid: int) -> ProcessUsage:
    """Its work once it sleeps."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        os.sched_yield()
    found = usage_of(pid)
    assert found is not None
    return found


def test_after_a_crash_it_says_when_it_may_serve_again():
    supervision = serving()
    supervision.crashed(110.0, DIED)
    assert (supervision.state, supervision.start_at_s) == ("restarting", 110.5)
    assert supervision.retry_after_s(110.0) == 4.5
    supervision.started(110.5)
    supervision.loaded(113.0, {})
    supervision.ready()
    assert (supervision.state, supervision.error) == ("ready", None)


def waits_of(supervision: Supervision, losses: list[tuple[bool, Loss]]) -> list[float | None]:
    """Of each loss of a process that has loaded, and got requests on or not."""
    found: list[float | None] = []
    for turn, (has_progress, loss) in enumerate(losses):
        now_s = 1000.0 * turn
        supervision.started(now_s)
        supervision.loaded(now_s + 5, {})
        supervision.ready()
        supervision.has_progress = has_progress
        supervision.crashed(now_s + 10, loss)
        start_at_s = supervision.start_at_s
        found.append(None if start_at_s is None else start_at_s - now_s - 10)
    return found


def test_lives_without_progress_make_the_waits_longer_up_to_a_bound_and_never_end_it():
    supervision = serving()
    waits_s = waits_of(supervision, [(True, DIED)] * 3 + [(False, DIED)] * 20 + [(True, DIED)] * 2)
    assert waits_s[:3] == [0.5] * 3
    assert waits_s[3:11] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert waits_s[11:] == [30.0] * 12 + [0.5] * 2
    assert supervision.state == "restarting"


def test_what_a_request_explains_is_no_life_without_progress():
    supervision = serving()
    for turn in range(5):
        supervision.crashed(1000.0 * turn, DIED)
    supervision.crashed(9000.0, DIED, is_explained=True)
    assert supervision.start_at_s == 9000.5


def failing_loads(supervision: Supervision, faults: list[str | None]) -> None:
    for turn, fault in enumerate(faults):
        assert supervision.state != "dead", turn
        supervision.started(1000.0 * turn)
        loss = Loss(error=f"it said {fault}", cause="it ended", load_fault=fault)
        supervision.crashed(1000.0 * turn + 5, loss)


def test_the_third_load_with_the_same_fault_is_the_last():
    supervision = serving()
    failing_loads(supervision, ["no memory"] * 3)
    assert supervision.state == "dead"
    assert "it said no memory; the engine failed so 3 times in a row" in (supervision.error or "")
    assert not supervision.may_start(1e9)


@pytest.mark.parametrize(
    "faults", [["no memory", "no memory", "other weights"] * 9, [None] * 30], ids=["other", "ended"]
)
def test_loads_that_fail_otherwise_or_are_ended_from_outside_are_tried_again(
    faults: list[str | None],
):
    supervision = serving()
    failing_loads(supervision, faults)
    assert supervision.state == "restarting"


def test_loads_that_are_ended_from_outside_do_not_hide_those_that_fail():
    supervision = serving()
    failing_loads(supervision, ["no memory", None, None, "no memory", None, "no memory"])
    assert supervision.state == "dead"


def test_failed_loads_before_one_that_succeeds_are_forgotten():
    supervision = serving()
    failing_loads(supervision, ["no memory"] * 2)
    waits_of(supervision, [(False, DIED)])
    failing_loads(supervision, ["no memory"] * 2)
    assert supervision.state == "restarting"


def test_the_kernels_count_of_processes_killed_for_want_of_memory_is_read(tmp_path: Path):
    counts = tmp_path / "vmstat"
    assert num_oom_kills(counts) is None
    counts.write_text("pgfault 12\noom_kill_other 5\n")
    assert num_oom_kills(counts) is None
    counts.write_text("pgfault 12\noom_kill 3\n")
    assert num_oom_kills(counts) == 3


def test_each_further_process_is_judged_as_the_first_was():
    supervision = serving()
    for turn in range(1, 4):
        crashed_s = 1000.0 * turn
        supervision.crashed(crashed_s, DIED)
        assert supervision.hung_at_s() is None
        supervision.started(crashed_s + 1)
        supervision.record_usage(crashed_s + 2, usage())
        assert supervision.hung_at_s() == crashed_s + 22
        supervision.loaded(crashed_s + 5, {})
        supervision.ready()
        assert supervision.hung_at_s() == crashed_s + 10
        # The steps of the process before it are not its own.
        supervision.beat(crashed_s + 6, 7, 2.0, is_idle=False)
        assert not supervision.is_hung(crashed_s + 25.9)
        assert supervision.is_hung(crashed_s + 26)


def test_a_crash_while_draining_is_the_end():
    supervision = serving()
    supervision.state = "draining"
    supervision.crashed(110.0, DIED)
    assert (supervision.state, supervision.start_at_s) == ("dead", None)


def test_a_forecast_is_the_slowest_recent_step_of_that_size_or_below():
    forecast = StepForecast()
    assert forecast.predict_s(0) == 0.0
    assert forecast.predict_s(3) == UNMEASURED_STEP_S
    forecast.record(1, 0.010)
    forecast.record(500, 0.200)
    forecast.record(8, 0.020)
    assert forecast.predict_s(1) == 0.010
    assert forecast.predict_s(9) == 0.020
    assert forecast.predict_s(300) == 0.200


def test_a_forecast_grows_with_tokens_beyond_what_was_seen_and_fades():
    forecast = StepForecast()
    forecast.record(1, 0.010)
    assert forecast.predict_s(512) == pytest.approx(0.010 * 512)
    for _ in range(500):
        forecast.record(1, 0.001)
    assert forecast.predict_s(1) == pytest.approx(0.001)


def test_log_records_come_out_as_they_went_in_whatever_the_pieces():
    formatter = LineFormatter()
    lines = b"".join(
        formatter.format(logging.LogRecord(name, level, "", 0, text, None, None)).encode() + b"\n"
        for level, name, text in (
            (logging.INFO, "a.b", "two\nlines \u00fc"),
            (logging.ERROR, "c", ""),
        )
    )
    lines += b"Fatal: core \xff dumped\n\nunfinished"
    expected = [
        (logging.INFO, "a.b", "two\nlines \u00fc"),
        (logging.ERROR, "c", ""),
        (logging.WARNING, OUTPUT_LOGGER, "Fatal: core \ufffd dumped"),
        (logging.WARNING, OUTPUT_LOGGER, "unfinished"),
    ]
    for size in (1, 3, 1000):
        reader = LogLines()
        found = [
            record
            for start in range(0, len(lines), size)
            for record in reader.feed(lines[start : start + size])
        ]
        assert [*found, *reader.flush()] == expected


def test_a_line_without_an_end_is_cut():
    reader = LogLines()
    (record,) = reader.feed(b"x" * (MAX_LOG_LINE_BYTES + 1))
    assert len(record[2]) == MAX_LOG_LINE_BYTES + 1
    assert list(reader.flush()) == []


def test_an_error_that_was_raised_from_itself_is_looked_through_once():
    circle, shortage = ValueError("no"), OSError(errno.EMFILE, "too many open files")
    circle.__cause__ = circle
    assert not is_descriptor_shortage(circle)
    circle.__cause__ = shortage
    shortage.__cause__ = circle
    assert is_descriptor_shortage(circle)
