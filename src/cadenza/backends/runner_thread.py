"""`RunnerThread`: the only thread in which a runner computes, and what it holds there. Invariants:
work runs in the order in which it was given, and none after `close`."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

from cadenza.errors import RunnerError

Result = TypeVar("Result")


class _Closing(Protocol):
    def close(self) -> None: ...


Held = TypeVar("Held", bound=_Closing)


class RunnerThread(Generic[Held]):
    """`make` makes what the thread holds, in it; `begin` is called there first."""

    def __init__(
        self, name: str, make: Callable[[], Held], begin: Callable[[], None] | None = None
    ) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=begin)
        try:
            self._held: Held | None = self.run(make).result()
        except BaseException:
            self._executor.shutdown()
            raise

    @property
    def held(self) -> Held:
        """Raises RunnerError after `close`."""
        if self._held is None:
            raise RunnerError("the runner was closed; make a new one")
        return self._held

    def run(self, work: Callable[[], Result]) -> "Future[Result]":
        """Raises RunnerError after `close`."""
        try:
            return self._executor.submit(work)
        except RuntimeError as error:  # also when the interpreter exits
            raise RunnerError("the runner was closed; make a new one") from error

    def close(self) -> None:
        """Closes what the thread holds, in it, and ends the thread. Idempotent."""
        held, self._held = self._held, None
        if held is not None:
            self._executor.submit(held.close).result()
        self._executor.shutdown()
