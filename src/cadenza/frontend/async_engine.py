"""`AsyncEngine`: the asyncio interface, each request an async iterator. A thread serves; each
step's events reach the event loop in one call, which makes text of them, then calls listeners, few
in a pass. Invariants: leaving an iterator cancels its request; a slow reader's output accumulates,
never a queue of outputs."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack

from cadenza.config import EngineOptions, config_from_options
from cadenza.engine.batch_engine import BatchEngine
from cadenza.engine.front import EngineFront, InProcessLink
from cadenza.engine.step_watch import OnNews
from cadenza.engine.timeouts import RequestTimeouts
from cadenza.errors import EngineClosedError, InvalidRequestError, show
from cadenza.events import Event
from cadenza.fingerprint import Fingerprint
from cadenza.frontend.live_steps import LiveEntry, LiveSteps
from cadenza.frontend.loaded_model import EngineOwner, ModelTokenizer, load_model
from cadenza.frontend.output_processor import OutputProcessor, OutputRouter, check_kind
from cadenza.frontend.prepared_request import (
    PLAIN,
    Message,
    PreparedRequest,
    Prompt,
    RequestOptions,
    conversation_of,
    takes_long,
)
from cadenza.frontend.text_frontend import Params, TextFrontend
from cadenza.outputs import EmbeddingRequestOutput, OutputKind, RequestOutput, embedding_of
from cadenza.request import PoolingParams, Request

DEFAULT_TIMEOUTS = RequestTimeouts()
JOIN_S = 60.0
NOTIFIED_AT_ONCE = 16
"""Requests whose listeners are called in one pass of the event loop: connections come between."""


class AsyncEngine:
    """Serves many callers of one event loop; `engine.serve` runs on a thread of this object.
    `fingerprint` reads that of the engine's answers, None while it is not known; `live` has the
    viewers of its steps, where they may outlive it."""

    def __init__(
        self,
        engine: BatchEngine,
        text: TextFrontend,
        fingerprint: Callable[[], Fingerprint | None] = lambda: None,
        live: LiveSteps | None = None,
    ) -> None:
        self._engine = engine
        self._text = text
        self._fingerprint = fingerprint
        self._live = LiveSteps() if live is None else live
        self._owner = EngineOwner()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._router = OutputRouter(engine.cancel)
        self._listeners: dict[int, Callable[[], object]] = {}
        self._to_notify: OrderedDict[int, Callable[[], object]] = OrderedDict()
        self._is_notifying = False
        self._arrived: list[Event] = []
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="cadenza-engine", daemon=True)

    @classmethod
    def from_model(
        cls,
        model: str | Path | None = None,
        *,
        queue_timeout: float | None = None,
        request_timeout: float = DEFAULT_TIMEOUTS.total_s,
        **options: Unpack[EngineOptions],
    ) -> Self:
        """Loads a model as `LLM` does. A request that waits longer than `queue_timeout` seconds for
        its first step (by default `request_timeout`), or takes longer than `request_timeout` in
        all, ends with an error; one that would wait for longer is refused."""
        timeouts = RequestTimeouts.of(queue_timeout, request_timeout)
        loaded = load_model(model, config_from_options(options))
        return cls(
            EngineFront(InProcessLink(loaded.core, timeouts)),
            loaded.text,
            lambda: loaded.fingerprint,
        )

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def start(self) -> None:
        """Binds to the running event loop and starts serving, unless it does already; requests
        begin with it. Once that loop is closed, another one may follow. Raises EngineClosedError:
        another event loop runs it, or this is a forked child."""
        self._owner.check()
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is None:
            self._loop = loop
            self._thread.start()
            self._live.attach(self._listen)
        elif self._loop.is_closed():
            self._move_to(loop)
        else:
            raise EngineClosedError(
                "the engine is bound to another event loop, which is not closed; make all requests "
                "on one loop, or load one AsyncEngine for each"
            )

    async def stop(self) -> None:
        """Ends every stream with an error and joins the thread. Nothing in a forked child."""
        if not self._owner.is_here:
            return
        self._engine.shutdown()
        if self._loop is None:
            self.start()  # the serving thread frees the engine, also one that has served nothing
        await asyncio.to_thread(self._thread.join, JOIN_S)

    def _move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        for request_id in [*self._listeners]:
            self._leave(request_id)
        with self._lock:  # an event that comes from here on is delivered to the new loop
            self._loop, self._arrived = loop, []
        self._is_notifying = False
        self._live.forget_viewers()

    def get_tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer with its chat template. Raises InvalidRequestError without one."""
        self._text.describe_tokenizer()
        return ModelTokenizer(self._text)

    async def generate(
        self,
        request: Request | Prompt,
        params: Params = None,
        *,
        kind: OutputKind = "cumulative",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields an output whenever there is something new; the last one is finished. Closing the
        iterator, or cancelling its task, cancels the request. Raises as `submit`."""
        self.start()
        prepared = await self._prepare(request, params)
        with self.submit(prepared, kind=kind) as stream:
            async for output in stream:
                yield output

    async def chat(
        self,
        messages: SequenceOf[Message],
        params: Params = None,
        *,
        kind: OutputKind = "cumulative",
        tools: SequenceOf[Message] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answers one conversation through the model's chat template; yields and raises as
        `generate`."""
        self.start()
        prepared = await asyncio.to_thread(
            lambda: self._text.prepare(
                conversation_of(messages, tools, chat_template_kwargs), params
            )
        )
        with self.submit(prepared, kind=kind) as stream:
            async for output in stream:
                yield output

    async def embed(
        self, prompt: Prompt, params: PoolingParams | None = None
    ) -> EmbeddingRequestOutput:
        """The embedding of a prompt. Cancelling the task cancels the request. Raises as
        `submit`."""
        self.start()
        pooling = PoolingParams() if params is None else params
        prepared = await self._prepare(prompt, None, RequestOptions(pooling=pooling))
        with self.submit(prepared, kind="final") as stream:
            return embedding_of(await stream.next())

    async def watch(self) -> AsyncGenerator[LiveEntry, None]:
        """Yields summaries of the engine's steps, at most each `SUMMARY_EVERY_S`, as long as it
        serves; those of a slow reader are skipped. Only meanwhile are any made. Raises
        QueueFullError: there are `MAX_VIEWERS` already."""
        self.start()
        with self._live.viewing() as viewer:
            for entry in viewer.history:
                yield entry
            while viewer.has_unread or (self._live.is_attached and not viewer.is_closed):
                for entry in await viewer.next():
                    yield entry

    def submit(
        self,
        request: Request | PreparedRequest,
        *,
        kind: OutputKind = "cumulative",
        on_news: Callable[[], object] | None = None,
    ) -> "OutputStream":
        """Starts a request at once, on the event loop only; its outputs come through the stream. A
        `Request` is prepared here, which takes time; `on_news` is called after each step that
        brought new output, which `take` then returns, and the stream cannot be iterated. Raises
        InvalidRequestError, QueueFullError, EngineClosedError: as `BatchEngine.submit`."""
        self.start()
        check_kind(kind)
        if not isinstance(request, PreparedRequest):
            request = self._text.prepare_request(request)
        request_id = self._engine.submit(request.checked or request.request)
        processor = OutputProcessor(request_id, request, self._text, self._fingerprint())
        stream = OutputStream(processor, kind, self._leave, on_news)
        self._router.add(processor)
        self._listeners[request_id] = stream.on_news
        return stream

    async def _prepare(
        self, request: Request | Prompt, params: Params, options: RequestOptions = PLAIN
    ) -> PreparedRequest:
        if isinstance(request, Request):
            if params is not None:
                raise InvalidRequestError(
                    f"params is {show(params)}, and a Request has its own; give a prompt with "
                    f"params, or a Request alone",
                    param="params",
                )
            return self._text.prepare_request(request)
        if takes_long(request):
            return await asyncio.to_thread(self._text.prepare, request, params, options)
        return self._text.prepare(request, params, options)

    def _leave(self, request_id: int) -> None:
        self._listeners.pop(request_id, None)
        self._to_notify.pop(request_id, None)
        if self._router.remove(request_id):
            self._engine.cancel(request_id)

    def _listen(self, on_news: OnNews | None) -> None:
        self._engine.watch(
            None if on_news is None else lambda news: self._call(partial(on_news, news))
        )

    def _serve(self) -> None:
        try:
            self._engine.serve(self._emit)
        finally:
            self._call(self._fail_rest)

    def _emit(self, events: list[Event]) -> None:  # on the serving thread
        with self._lock:
            is_called = bool(self._arrived)
            self._arrived += events
        if not is_called:
            self._call(self._deliver)

    def _call(self, callback: Callable[[], object]) -> None:
        assert self._loop is not None, "start() binds the loop before it starts the thread"
        with suppress(RuntimeError):  # the loop is closed, so nothing can be delivered
            self._loop.call_soon_threadsafe(callback)

    def _deliver(self) -> None:  # on the event loop
        with self._lock:
            events, self._arrived = self._arrived, []
        self._add_news(self._router.push(events))
        if not self._is_notifying:
            self._notify_some()

    def _add_news(self, processors: SequenceOf[OutputProcessor]) -> None:
        for processor in processors:
            self._to_notify[processor.request_id] = self._listeners[processor.request_id]

    def _notify_some(self) -> None:
        """In the order of events; the others in later passes of the event loop."""
        self._is_notifying = len(self._to_notify) > NOTIFIED_AT_ONCE
        if self._is_notifying:
            asyncio.get_running_loop().call_soon(self._notify_some)
        for _ in range(min(NOTIFIED_AT_ONCE, len(self._to_notify))):
            self._notify_next()

    def _notify_next(self) -> None:
        if self._to_notify:  # one may make another leave
            _, listener = self._to_notify.popitem(last=False)
            listener()

    def _fail_rest(self) -> None:
        """Ends open streams after the last events; calls all listeners, for the loop may end with
        the engine."""
        self._add_news(self._router.fail_all("the engine has ended"))
        while self._to_notify:
            self._notify_next()
        self._live.detach()


class OutputStream:
    """Outputs of one request as they come, an async iterator; to be closed, as by its context
    manager."""

    __slots__ = ("_event", "_is_finished", "_kind", "_leave", "on_news", "processor")

    def __init__(
        self,
        processor: OutputProcessor,
        kind: OutputKind,
        leave: Callable[[int], None],
        on_news: Callable[[], object] | None = None,
    ) -> None:
        self.processor = processor
        self._kind: OutputKind = kind
        self._leave = leave
        self._event = asyncio.Event()
        self.on_news = self._event.set if on_news is None else on_news
        self._is_finished = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_finished:
            raise StopAsyncIteration
        return await self.next()

    @property
    def request_id(self) -> int:
        return self.processor.request_id

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    async def next(self) -> RequestOutput:
        """Waits for the next output, which holds all that is new; cancelling it loses nothing."""
        while True:
            await self._event.wait()
            self._event.clear()
            output = self.take()
            if output is not None:
                return output

    def take(self) -> RequestOutput | None:
        output = self.processor.make_output(self._kind)
        if output is not None:
            self._is_finished = output.finished
        return output

    def abort(self) -> None:
        """Its last output, with the reason `abort`, is then there."""
        if not self.processor.is_finished:
            self.processor.abort()
            self._leave(self.request_id)
            self.on_news()

    def close(self) -> None:
        """Cancels the request unless it has finished. Idempotent."""
        self._leave(self.request_id)
