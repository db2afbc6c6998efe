"""`CompileThreads`: threads that take the smallest job first, and the jobs of one key in turn.
Invariant: a job whose future is cancelled does not begin; of the jobs with one key at most one
runs.
"""

import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Any, TypeVar

Result = TypeVar("Result")
NUM_THREADS = 2

_Job = tuple[Future[Any], Callable[[], Any]]


@dataclass(slots=True, eq=False)
class _Line:
    """The jobs with one key that have not begun, in order; `cpu_s`: that its jobs took since it
    exists."""

    size: int
    place: int
    jobs: deque[_Job] = field(default_factory=deque[_Job])
    cpu_s: float = 0.0
    is_running: bool = False

    @property
    def rank(self) -> tuple[float, int, int]:
        """The least time so far comes first, so that neither many jobs nor slow ones are in front
        of others; then the smallest."""
        return self.cpu_s, self.size, self.place


class CompileThreads:
    """Thread-safe; they start with the first jobs, and end by `close`. `cpu_time`: seconds of
    processor time of the thread that asks."""

    def __init__(
        self, num_threads: int = NUM_THREADS, cpu_time: Callable[[], float] = time.thread_time
    ) -> None:
        self._most_threads = num_threads
        self._cpu_time = cpu_time
        self._changed = Condition()
        self._lines: dict[Hashable, _Line] = {}
        self._num_come = self._num_threads = self._num_idle = 0
        self._is_closed = False

    def submit(
        self, size: int, work: Callable[[], Result], key: Hashable = None
    ) -> "Future[Result]":
        """Jobs with the same `key` run one after the other; None: of this job alone. Raises
        RuntimeError after `close`."""
        future: Future[Result] = Future()
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the threads have ended")
            place = self._num_come
            self._num_come += 1
            name = (place,) if key is None else (key, None)
            line = self._lines.setdefault(name, _Line(size, place))
            line.jobs.append((future, work))
            if self._num_idle < len(self._free()) and self._num_threads < self._most_threads:
                self._num_threads += 1
                Thread(target=self._run, name="cadenza-grammar", daemon=True).start()
            self._changed.notify()
        return future

    def close(self) -> None:
        """Jobs that have not begun are cancelled."""
        with self._changed:
            self._is_closed = True
            for line in self._lines.values():
                for future, _ in line.jobs:
                    future.cancel()
            self._lines.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._num_idle += 1
                while (name := self._next()) is None and not self._is_closed:
                    self._changed.wait()
                self._num_idle -= 1
                if self._is_closed or name is None:
                    return
                line = self._lines[name]
                line.is_running = True
                job = line.jobs.popleft()
            begun_s = self._cpu_time()
            _do(*job)
            del job
            with self._changed:
                line.cpu_s += self._cpu_time() - begun_s
                line.is_running = False
                if not line.jobs:
                    self._lines.pop(name, None)
                self._changed.notify()

    def _next(self) -> Hashable:
        return min(self._free(), key=lambda name: self._lines[name].rank, default=None)

    def _free(self) -> list[Hashable]:
        return [name for name, line in self._lines.items() if line.jobs and not line.is_running]


def _do(future: "Future[Any]", work: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001  it is raised where the result is read
        future.set_exception(error)
