"""A `CoreService` that sees its batches, and waits for company when it is told to.

Owns a count of who was in one batch, taken on the serving thread after each step that has news, so
that no look comes too late. Invariant: no stream is over before all that are to come have come.
"""

import threading
from collections.abc import Callable

from cadenza.engine.batch_engine import CoreService, Emit
from cadenza.engine.core import EngineCore
from cadenza.engine.request_check import RequestCheck
from cadenza.errors import CadenzaError
from cadenza.events import Event
from cadenza.fingerprint import Fingerprint
from cadenza.request import Request
from tests.server.harness import TIMEOUT_S


class WatchedService(CoreService):
    """`most_running` is how many were in one batch since `gather`."""

    def __init__(self, core: EngineCore, fingerprint: Fingerprint | None = None) -> None:
        super().__init__(core, fingerprint=fingerprint)
        self.most_running = 0
        self._num_missing = 0
        self._all_came = threading.Event()
        self._all_came.set()

    def gather(self, num_requests: int) -> None:
        """Counts anew; the next requests get nothing until so many have come."""
        self.most_running, self._num_missing = 0, num_requests
        self._all_came.clear()

    def wait_ready(self, timeout_s: float) -> None:
        del timeout_s  # it was loaded before

    def call_at_death(self, on_death: Callable[[CadenzaError], object]) -> None:
        del on_death  # it is never given up

    def submit(self, request: Request, passed: RequestCheck | None = None) -> int:
        request_id = super().submit(request, passed)
        self._num_missing -= 1
        if self._num_missing <= 0:
            self._all_came.set()
        return request_id

    def serve(self, emit: Emit) -> None:
        def watch_and_emit(events: list[Event]) -> None:
            self.most_running = max(self.most_running, self.stats().num_running)
            assert self._all_came.wait(TIMEOUT_S), f"{self._num_missing} did not come"
            emit(events)

        super().serve(watch_and_emit)
