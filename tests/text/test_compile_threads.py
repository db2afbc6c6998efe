"""Threads that compile: the smallest job first, and none for a future that was cancelled."""

from functools import partial
from threading import Event

import pytest

from cadenza.text.constraints.token_constraint import CompileThreads


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
