"""`AsyncEngine`: the asyncio face. Each request is an async iterator over one running batch.

Owns the serving thread and the passing of events to the event loop. Knows text through `TextFace`
and the engine through `BatchEngine`. Invariant: leaving an iterator cancels its request.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

from cadenza.config import config_from_options
from cadenza.engine.assembly import OutputAssembler
from cadenza.engine.batch_engine import BatchEngine, CoreService
from cadenza.engine.build import load_model
from cadenza.engine.text_face import Prompt, TextFace
from cadenza.outputs import RequestOutput
from cadenza.request import Event, Request, SamplingParams

JOIN_S = 60.0

_Inbox = asyncio.Queue[Event]


class AsyncEngine:
    """Serves many callers of one event loop.

    Args:
        engine: what computes; it is served on a thread of this object's own.
        text: the model's text side.
    """

    def __init__(self, engine: BatchEngine, text: TextFace) -> None:
        self._engine = engine
        self._text = text
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inboxes: dict[int, _Inbox] = {}
        self._thread = threading.Thread(target=self._serve, name="cadenza-engine", daemon=True)

    @classmethod
    def from_model(cls, model: str | Path | None = None, **options: Any) -> Self:
        """Loads a model as `LLM` does."""
        loaded = load_model(model, config_from_options(options))
        return cls(CoreService(loaded.core), loaded.text)

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def start(self) -> None:
        """Binds to the running event loop and starts serving."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends every stream with an error and joins the thread."""
        self._engine.shutdown()
        await asyncio.to_thread(self._thread.join, JOIN_S)

    async def generate(
        self, request: Request | Prompt, params: SamplingParams | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Yields the output so far whenever there are new tokens; the last one is finished.

        Raises:
            InvalidRequestError, QueueFullError: as `BatchEngine.submit`.
        """
        prompt = request if isinstance(request, str) else None
        if not isinstance(request, Request):
            request = Request(
                prompt_token_ids=self._text.encode(request),
                params=params or self._text.default_params(),
            )
        request_id = self._engine.submit(request)
        inbox = self._open(request_id)
        assembler = OutputAssembler(request_id, prompt, request.prompt_token_ids, self._text)
        try:
            while not assembler.is_finished:
                assembler.push(await inbox.get())
                while not inbox.empty():
                    assembler.push(inbox.get_nowait())
                yield assembler.output()
        finally:
            del self._inboxes[request_id]
            if not assembler.is_finished:
                self._engine.cancel(request_id)

    def _open(self, request_id: int) -> _Inbox:
        inbox: _Inbox = asyncio.Queue()
        self._inboxes[request_id] = inbox
        return inbox

    def _serve(self) -> None:
        self._engine.serve(self._emit)

    def _emit(self, events: list[Event]) -> None:
        """On the serving thread: hands a step's events to the event loop in one call."""
        assert self._loop is not None, "start() binds the loop before it starts the thread"
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            inbox = self._inboxes.get(event.request_id)
            if inbox is not None:
                inbox.put_nowait(event)
