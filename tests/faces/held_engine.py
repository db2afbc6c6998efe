"""A `BatchEngine` that stands still once it has spoken: nobody can be too late for it.

Owns the hold; everything else is the engine's that it wraps. Invariant: between the first events
and the first cancelling or shutting down no step is made.
"""

import threading

from cadenza.engine.batch_engine import BatchEngine, Emit
from cadenza.engine.request_check import CheckedRequest
from cadenza.engine.step_watch import OnNews
from cadenza.events import Event
from cadenza.request import Request

TIMEOUT_S = 60.0


class HeldEngine:
    """Holds the serving thread after its first events, until something is ended."""

    def __init__(self, engine: BatchEngine) -> None:
        self._engine = engine
        self._may_go = threading.Event()

    def submit(self, given: Request | CheckedRequest) -> int:
        return self._engine.submit(given)

    def cancel(self, request_id: int, sample: int | None = None) -> None:
        self._engine.cancel(request_id, sample)
        self._may_go.set()

    def watch(self, on_news: OnNews | None) -> None:
        self._engine.watch(on_news)

    def drain(self, within_s: float) -> None:
        self._engine.drain(within_s)
        self._may_go.set()

    def shutdown(self) -> None:
        self._engine.shutdown()
        self._may_go.set()

    def serve(self, emit: Emit) -> None:
        def emit_and_hold(events: list[Event]) -> None:
            emit(events)
            assert self._may_go.wait(TIMEOUT_S), "nothing was ended"

        self._engine.serve(emit_and_hold)
