"""Bytes of all bodies that are being read: `BodyBudget`.

Owns one sum over every connection. Knows no HTTP. Invariant: what is held is at most `max_bytes`,
and whoever leaves `holding` holds nothing any more.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager


class HeldBytes:
    """What one body holds of the budget."""

    def __init__(self, budget: "BodyBudget") -> None:
        self.num_bytes = 0
        self._budget = budget

    def try_add(self, num_bytes: int) -> bool:
        """False where the budget is spent; then nothing is added."""
        if self._budget.num_bytes + num_bytes > self._budget.max_bytes:
            self._budget.on_full()
            return False
        self.num_bytes += num_bytes
        self._budget.num_bytes += num_bytes
        return True


class BodyBudget:
    """Use it on one event loop. `on_full` is called for each body that finds it spent."""

    def __init__(self, max_bytes: int, on_full: Callable[[], None]) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.on_full = on_full

    @contextmanager
    def holding(self) -> Generator[HeldBytes]:
        """For one body, from its first byte until it has been read and understood."""
        held = HeldBytes(self)
        try:
            yield held
        finally:
            self.num_bytes -= held.num_bytes
