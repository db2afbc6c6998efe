"""`BatchEngine`: the engine-level seam that servers and async faces talk to.

One thread serves; any thread submits and cancels. `CoreService` is the first implementation,
over `EngineCore`; another process or another engine may stand behind the same three calls.
"""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from cadenza.engine.core import EngineCore
from cadenza.errors import EngineClosedError, QueueFullError
from cadenza.request import Event, Finished, Request

logger = logging.getLogger(__name__)

Emit = Callable[[list[Event]], None]
"""Takes the events of one step, on the serving thread; must not block."""

WAKE_S = 60.0
"""The longest an idle engine sleeps before it looks up; submitting wakes it at once."""


class BatchEngine(Protocol):
    """Requests in from any thread, events out of one."""

    def submit(self, request: Request) -> int:
        """The accepted request's id. Raises InvalidRequestError, QueueFullError."""
        ...

    def cancel(self, request_id: int) -> None:
        """Ends a request soon; events that were under way may still follow."""
        ...

    def serve(self, emit: Emit) -> None:
        """Runs until `shutdown`; open requests then end with an error, and the engine closes."""
        ...

    def shutdown(self) -> None:
        """Makes `serve` return."""
        ...


class CoreService:
    """`BatchEngine` over an `EngineCore`, which only the serving thread touches.

    Submitted requests pass through a bounded inbox; the engine sleeps while there is nothing to do.
    """

    def __init__(self, core: EngineCore) -> None:
        limits = core.limits
        self._core = core
        self._capacity = limits.max_num_queued_reqs + limits.max_num_seqs
        self._inbox: queue.SimpleQueue[tuple[int, Request] | int | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._is_shut_down = False

    def submit(self, request: Request) -> int:
        self._core.check(request)
        with self._lock:
            if self._is_shut_down:
                raise EngineClosedError("the engine was shut down")
            if len(self._open) >= self._capacity:
                raise QueueFullError(
                    f"{len(self._open)} requests are open, the most that --max-num-queued-reqs "
                    f"and --max-num-seqs allow; try again when some have finished"
                )
            request_id = self._core.new_request_id()
            self._open.add(request_id)
            self._inbox.put((request_id, request))
        return request_id

    def cancel(self, request_id: int) -> None:
        self._inbox.put(request_id)

    def shutdown(self) -> None:
        with self._lock:
            self._is_shut_down = True
        self._inbox.put(None)

    def serve(self, emit: Emit) -> None:
        try:
            while self._take_messages():
                events = self._core.step()
                self._forget_finished(events)
                if events:
                    emit(events)
        except Exception:
            logger.exception("the engine stopped")
            raise
        finally:
            emit(self._end_all("the engine was shut down"))
            self._core.close()

    def _take_messages(self) -> bool:
        """Handles what has arrived, sleeping when there is nothing else to do; False to stop."""
        while True:
            try:
                message = self._inbox.get(block=self._core.is_idle, timeout=WAKE_S)
            except queue.Empty:
                if self._core.is_idle:
                    continue
                return True
            if message is None:
                return False
            if isinstance(message, tuple):
                self._core.enqueue(*message)
            elif self._core.cancel(message):
                with self._lock:
                    self._open.discard(message)

    def _forget_finished(self, events: list[Event]) -> None:
        finished = [event.request_id for event in events if isinstance(event, Finished)]
        if finished:
            with self._lock:
                self._open.difference_update(finished)

    def _end_all(self, error: str) -> list[Event]:
        """One error for each open request, whether it had reached the core or not."""
        with self._lock:
            self._is_shut_down = True
            open_ids, self._open = sorted(self._open), set()
        for request_id in open_ids:
            self._core.cancel(request_id)
        return [
            Finished(
                request_id=request_id,
                finish_reason="error",
                stop_token_id=None,
                num_prompt_tokens=0,
                num_generated_tokens=0,
                num_cached_tokens=0,
                error=error,
            )
            for request_id in open_ids
        ]
