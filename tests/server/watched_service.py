"""An `EngineFront` in this process that sees its batches, and waits for company when it is told to.

Owns a count of who was in one batch, taken on the serving thread after each step that has news, so
that no look comes too late. Invariant: no stream is over before all that are to come have come.
"""

import threading

from cadenza.engine.batch_engine import Emit
from cadenza.engine.core import EngineCore
from cadenza.engine.front import EngineFront, InProcessLink
from cadenza.engine.request_check import CheckedRequest
from cadenza.events import Event
from cadenza.fingerprint import Fingerprint
from cadenza.request import Request
from tests.server.harness import TIMEOUT_S


class WatchedService(EngineFront):
    """`most_running` is how many were in one batch since `gather`."""

    def __init__(self, core: EngineCore, fingerprint: Fingerprint | None = None) -> None:
        super().__init__(InProcessLink(core, fingerprint=fingerprint))
        self.most_running = 0
        self._num_missing = 0
        self._all_came = threading.Event()
        self._all_came.set()

    def gather(self, num_requests: int) -> None:
        """Counts anew; the next requests get nothing until so many have come."""
        self.most_running, self._num_missing = 0, num_requests
        self._all_came.clear()

    def submit(self, given: Request | CheckedRequest) -> int:
        request_id = super().submit(given)
        self._num_missing -= 1
        if self._num_missing <= 0:
            self._all_came.set()
        return request_id

    def serve(self, emit: Emit) -> None:
        def watch_and_emit(events: list[Event]) -> None:
            stats = self.stats()
            assert stats is not None
            self.most_running = max(self.most_running, stats.numbers["num_requests_running"])
            assert self._all_came.wait(TIMEOUT_S), f"{self._num_missing} did not come"
            emit(events)

        super().serve(watch_and_emit)
