"""Processes that check grammars: bounds of processor time, and what is not a verdict."""

import os
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Event

import pytest

from cadenza.errors import FormNotCheckedError
from cadenza.structured import StructuredOutput
from cadenza.text.constraints.token_constraint import CompileThreads
from cadenza.text.schemas.grammar import grammar_of
from cadenza.text.schemas.grammar_worker import (
    Checked,
    GrammarWorker,
    Job,
    Lane,
    OutOfCpuError,
    OutOfMemoryError,
)

GOOD = grammar_of(StructuredOutput(regex="a"))
SLOW = grammar_of(StructuredOutput(json={"type": "integer", "multipleOf": 999_983}))
TOO_SLOW = "it takes longer than {:g} seconds of processor time to compile; simplify it"


class FakeLane(Lane):
    """Finds what is scripted: seconds that a grammar takes, or an error."""

    def __init__(self, found: dict[str, float | Exception]) -> None:
        super().__init__()
        self.found = found
        self.asked: list[str] = []

    def ask(self, job: Job, cpu_s: float, until_s: float) -> Checked:
        grammar = job["grammar"]
        self.asked.append(grammar)
        found = self.found.get(grammar, 0.0)
        if isinstance(found, Exception):
            raise found
        if found > cpu_s:
            raise OutOfCpuError
        return Checked(f"not {grammar}", found)


def fake_worker(found: dict[str, float | Exception]) -> tuple[GrammarWorker, FakeLane, FakeLane]:
    quick, slow = FakeLane(found), FakeLane(found)
    return GrammarWorker(cpu_s=3.0, quick_cpu_s=0.25, lanes=(quick, slow)), quick, slow


def test_a_grammar_is_refused_for_processor_time_each_time_and_costs_its_process_only():
    worker = GrammarWorker(cpu_s=0.3, quick_cpu_s=0.05)
    try:
        assert [worker.check(SLOW) for _ in range(2)] == [TOO_SLOW.format(0.3)] * 2
        assert worker.check(GOOD) is None
    finally:
        worker.close()


def test_time_that_a_process_waits_for_the_machine_does_not_count():
    lanes = Lane(), Lane()
    worker = GrammarWorker(lanes=lanes)
    try:
        assert worker.check(GOOD) is None
        process = lanes[0].process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        with ThreadPoolExecutor() as threads:
            other = grammar_of(StructuredOutput(regex="b"))
            checking = threads.submit(worker.check, other)
            with pytest.raises(TimeoutError):
                checking.result(timeout=0.5)
            process.send_signal(signal.SIGCONT)
            assert checking.result(timeout=60) is None
    finally:
        worker.close()


def test_a_machine_that_does_nothing_for_a_minute_is_no_verdict():
    lanes = Lane(), Lane()
    worker = GrammarWorker(wall_s=30.0, lanes=lanes)
    hurried = GrammarWorker(wall_s=0.2, lanes=lanes)
    try:
        assert worker.check(GOOD) is None
        assert lanes[0].process is not None
        lanes[0].process.send_signal(signal.SIGSTOP)
        other = grammar_of(StructuredOutput(regex="b"))
        with pytest.raises(FormNotCheckedError, match="try again soon"):
            hurried.check(other)
        assert worker.check(other) is None
    finally:
        worker.close()


def test_a_worker_that_died_is_replaced_and_the_grammar_is_not_blamed():
    lanes = Lane(), Lane()
    worker = GrammarWorker(cpu_s=60.0, lanes=lanes)
    try:
        assert worker.check(GOOD) is None
        assert lanes[0].process is not None
        lanes[0].process.kill()
        lanes[0].process.wait()
        assert worker.check(grammar_of(StructuredOutput(regex="b"))) is None
    finally:
        worker.close()


def test_what_takes_long_does_not_stand_before_what_does_not():
    found: dict[str, float | Exception] = {"slow": 2.0}
    has_begun, may_end = Event(), Event()

    class HeldLane(FakeLane):
        def ask(self, job: Job, cpu_s: float, until_s: float) -> Checked:
            has_begun.set()
            assert may_end.wait(60)
            return super().ask(job, cpu_s, until_s)

    quick, slow = FakeLane(found), HeldLane(found)
    worker = GrammarWorker(cpu_s=3.0, quick_cpu_s=0.25, lanes=(quick, slow))
    with ThreadPoolExecutor() as threads:
        try:
            held = threads.submit(worker.check, "slow")
            assert has_begun.wait(60)
            assert threads.submit(worker.check, "new").result(60) == "not new"
            assert not held.done()
        finally:
            may_end.set()
        assert held.result(60) == "not slow"
    assert (quick.asked, slow.asked) == (["slow", "new"], ["slow"])


def test_of_those_that_wait_the_smallest_goes_first():
    lane, order = Lane(), list[int]()
    has_begun = Event()

    def take(size: int) -> None:
        has_begun.set()
        with lane.turn(size, time.monotonic() + 60):
            order.append(size)

    with ThreadPoolExecutor(4) as threads:
        with lane.turn(0, time.monotonic() + 60):
            taking = []
            for count, size in enumerate((30, 10, 20), start=1):
                taking.append(threads.submit(take, size))
                while len(lane.waiting) < count:
                    time.sleep(0)
        for each in taking:
            each.result(60)
    assert order == [10, 20, 30]


def test_a_wait_that_is_too_long_is_no_verdict():
    lane = Lane()
    worker = GrammarWorker(wall_s=0.0, lanes=(lane, Lane()))
    with (
        lane.turn(0, time.monotonic() + 60),
        pytest.raises(FormNotCheckedError, match="too many wait"),
    ):
        worker.check("a")
    assert lane.waiting == []


def test_the_same_grammar_is_asked_once():
    worker, quick, _ = fake_worker({})
    assert [worker.check("a") for _ in range(3)] == ["not a"] * 3
    assert quick.asked == ["a"]


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (OutOfMemoryError(), "it takes too much memory; simplify it"),
        (OutOfCpuError(), TOO_SLOW.format(3.0)),
    ],
)
def test_what_was_not_found_out_is_not_kept(error: Exception, problem: str):
    found: dict[str, float | Exception] = {"a": error}
    worker, _, _ = fake_worker(found)
    assert worker.check("a") == problem
    found.clear()
    assert worker.check("a") == "not a"


def test_the_grammars_of_a_request_have_their_time_together_whatever_is_known():
    found: dict[str, float | Exception] = {"a": 1.25, "b": 1.25, "d": 1.0}
    worker, _, _ = fake_worker(found)
    for _ in range(2):  # the second time all of them are known
        check = worker.start_checks()
        assert [check(name) for name in "abc"] == ["not a", "not b", "not c"]
        together = "with the request's other forms it takes longer than 3 seconds"
        assert together in (check("d") or "")
        assert worker.start_checks()("d") == "not d", "another request has time of its own"


@contextmanager
def many_descriptors(count: int):
    """Has `count` descriptors open, as a server with many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count + 256:
        pytest.skip(f"at most {hard} descriptors may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 256), hard))
    opened: list[int] = []
    try:
        opened += [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_grammars_are_checked_beside_more_than_a_thousand_connections():
    lanes = Lane(), Lane()
    worker = GrammarWorker(cpu_s=60.0, lanes=lanes)
    with many_descriptors(1100):
        try:
            assert worker.check(grammar_of(StructuredOutput(regex="a"))) is None
            assert lanes[0].process is not None
            assert lanes[0].process.stdout is not None
            assert lanes[0].process.stdout.fileno() >= 1024
        finally:
            worker.close()


class KilledLane(Lane):
    """Its process dies of each job in the same way."""

    def __init__(self, sent: signal.Signals) -> None:
        super().__init__()
        self.sent = sent

    def ask(self, job: Job, cpu_s: float, until_s: float) -> Checked:
        super().ask({"grammar": GOOD}, 60.0, until_s)
        assert self.process is not None
        self.process.send_signal(self.sent)
        self.process.wait()
        return super().ask(job, cpu_s, until_s)


@pytest.mark.parametrize(("sent", "is_verdict"), [("SIGABRT", True), ("SIGKILL", False)])
def test_a_grammar_is_blamed_for_the_death_of_a_process_that_was_not_killed(
    sent: str, is_verdict: bool
):
    worker = GrammarWorker(lanes=(KilledLane(signal.Signals[sent]), Lane()))
    other = grammar_of(StructuredOutput(regex="b"))
    try:
        if is_verdict:
            assert worker.check(other) == "it takes too much memory; simplify it"
        else:
            with pytest.raises(FormNotCheckedError, match="was killed"):
                worker.check(other)
    finally:
        worker.close()


def test_a_text_is_validated_within_processor_time():
    worker = GrammarWorker(cpu_s=0.5)
    hostile = '{"not": {"pattern": "^(a+)+$"}}'
    try:
        assert worker.is_valid('"a b"', hostile)
        assert not worker.is_valid('"aaa"', hostile)
        assert not worker.is_valid('"' + "a" * 40 + '!"', hostile), "it is not found out"
        assert not worker.is_valid('{"a": ', "true"), "it is no JSON"
    finally:
        worker.close()


def test_the_smallest_job_goes_first_and_a_cancelled_one_never():
    threads, order = CompileThreads(num_threads=1), list[int]()
    has_begun, may_go = Event(), Event()

    def hold() -> bool:
        has_begun.set()
        return may_go.wait(60)

    held = threads.submit(0, hold)
    assert has_begun.wait(60)
    jobs = {size: threads.submit(size, partial(order.append, size)) for size in (3, 1, 2)}
    assert jobs[2].cancel()
    may_go.set()
    assert held.result(60)
    jobs[3].result(60)
    assert order == [1, 3]
    threads.close()


def test_jobs_of_one_key_leave_the_other_thread_to_others():
    threads, order = CompileThreads(num_threads=2), list[str]()
    has_begun, may_go = Event(), Event()

    def hold() -> None:
        has_begun.set()
        may_go.wait(60)
        order.append("slow")

    slow = [threads.submit(1, hold, "samples of one request") for _ in range(5)]
    assert has_begun.wait(60)
    others = [threads.submit(9, partial(order.append, "other")) for _ in range(3)]
    for each in others:
        each.result(60)
    assert order == ["other"] * 3
    may_go.set()
    for each in slow:
        each.result(60)
    assert order == ["other"] * 3 + ["slow"] * 5
    threads.close()


def test_what_has_taken_more_time_is_behind_what_has_taken_less():
    """A short grammar may be a slow one; nobody knows before it has been compiled once."""
    clock, order = [0.0], list[str]()
    threads = CompileThreads(num_threads=1, cpu_time=lambda: clock[0])
    has_begun, may_go = Event(), Event()

    def hold() -> None:
        has_begun.set()
        may_go.wait(60)

    def take(name: str, cpu_s: float) -> None:
        order.append(name)
        clock[0] += cpu_s

    threads.submit(0, hold)
    assert has_begun.wait(60)
    samples = [threads.submit(1, partial(take, "short", 2.0), "short") for _ in range(3)]
    samples += [threads.submit(7, partial(take, "long", 0.5), "long") for _ in range(3)]
    samples += [threads.submit(9, partial(take, "last", 0.1), "last") for _ in range(2)]
    may_go.set()
    for each in samples:
        each.result(60)
    assert order == ["short", "long", "last", "last", "long", "long", "short", "short"]
    threads.close()


def test_a_key_is_free_again_when_its_jobs_are_done():
    threads = CompileThreads(num_threads=1)
    for count in range(4):
        assert threads.submit(1, partial(int, count), "key").result(60) == count
    threads.close()


def test_an_error_of_a_job_is_its_futures():
    threads = CompileThreads()

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        threads.submit(1, fail).result(60)
    threads.close()
    with pytest.raises(RuntimeError, match="ended"):
        threads.submit(1, fail)
