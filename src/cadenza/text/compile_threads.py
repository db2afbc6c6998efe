"""`CompileThreads`: threads that take the smallest job first.

Knows no grammar. Invariant: a job that has not begun does not begin once its future is cancelled.
"""

import heapq
from collections.abc import Callable
from concurrent.futures import Future
from threading import Condition, Thread
from typing import Any, TypeVar

Result = TypeVar("Result")
NUM_THREADS = 2


class CompileThreads:
    """Thread-safe. They start with the first jobs, and end by `close`."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._most_threads = num_threads
        self._changed = Condition()
        self._jobs: list[tuple[int, int, Future[Any], Callable[[], Any]]] = []
        self._num_come = self._num_threads = self._num_idle = 0
        self._is_closed = False

    def submit(self, size: int, work: Callable[[], Result]) -> "Future[Result]":
        """Raises RuntimeError after `close`."""
        future: Future[Result] = Future()
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the threads have ended")
            heapq.heappush(self._jobs, (size, self._num_come, future, work))
            self._num_come += 1
            if self._num_idle < len(self._jobs) and self._num_threads < self._most_threads:
                self._num_threads += 1
                Thread(target=self._run, name="cadenza-grammar", daemon=True).start()
            self._changed.notify()
        return future

    def close(self) -> None:
        """Jobs that have not begun are cancelled."""
        with self._changed:
            self._is_closed = True
            for _, _, future, _ in self._jobs:
                future.cancel()
            self._jobs.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._num_idle += 1
                while not self._jobs and not self._is_closed:
                    self._changed.wait()
                self._num_idle -= 1
                if self._is_closed:
                    return
                _, _, future, work = heapq.heappop(self._jobs)
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001  it is raised where the result is read
                    future.set_exception(error)
            del future, work
