"""A `BatchEngine` whose steps a test writes: it shows the faces without a model."""

import queue
from collections.abc import Sequence

from cadenza.engine.batch_engine import Emit
from cadenza.engine.request_check import CheckedRequest, request_of
from cadenza.engine.step_watch import OnNews
from cadenza.events import Event, Finished, FinishReason, Token
from cadenza.request import Request


class ScriptedEngine:
    """Emits what `play` is given, a step each; remembers what was submitted and cancelled."""

    def __init__(self) -> None:
        self.submitted: list[Request] = []
        self.cancelled: list[tuple[int, int | None]] = []
        self.on_news: OnNews | None = None
        self._steps: queue.SimpleQueue[list[Event] | Exception | None] = queue.SimpleQueue()

    def submit(self, given: Request | CheckedRequest) -> int:
        self.submitted.append(request_of(given))
        return len(self.submitted) - 1

    def cancel(self, request_id: int, sample: int | None = None) -> None:
        self.cancelled.append((request_id, sample))

    def serve(self, emit: Emit) -> None:
        while (step := self._steps.get()) is not None:
            if isinstance(step, Exception):
                raise step
            emit(step)

    def watch(self, on_news: OnNews | None) -> None:
        self.on_news = on_news

    def drain(self, within_s: float) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        self._steps.put(None)

    def play(self, *steps: Sequence[Event]) -> None:
        for step in steps:
            self._steps.put(list(step))

    def break_down(self) -> None:
        self._steps.put(RuntimeError("the device is gone"))


def token(request_id: int, token_id: int, index: int = 0, sample: int = 0) -> Token:
    return Token(request_id=request_id, token_id=token_id, index=index, sample=sample)


def finished(
    request_id: int, reason: FinishReason = "length", count: int = 1, sample: int = 0
) -> Finished:
    return Finished(
        request_id=request_id,
        finish_reason=reason,
        stop_token_id=None,
        num_prompt_tokens=1,
        num_generated_tokens=count,
        num_cached_tokens=0,
        sample=sample,
    )
