"""Threads that compile: the smallest job first, and none for a future that was cancelled."""

from functools import partial
from threading import Event

import pytest

from cadenza.text.compile_threads import CompileThreads


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


def test_an_error_of_a_job_is_its_futures():
    threads = CompileThreads()

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        threads.submit(1, fail).result(60)
    threads.close()
    with pytest.raises(RuntimeError, match="ended"):
        threads.submit(1, fail)
