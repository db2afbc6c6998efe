"""`ServedModel`: a model and the engine of each load; `OpenCall`: the requests of one call.
Invariants: an engine's limits and fingerprint stay known when it is unloaded; leaving a call's
context cancels its requests and stops counting them; calls with many prompts take turns and leave
room for others."""

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from cadenza.config import EngineLimits
from cadenza.engine.batch_engine import EngineState, ServedEngine
from cadenza.engine.request_check import RequestCheck
from cadenza.engine.stats import EngineStats
from cadenza.errors import CadenzaError, EngineClosedError, EngineUnavailableError, QueueFullError
from cadenza.fingerprint import Fingerprint
from cadenza.frontend.async_engine import AsyncEngine, OutputStream
from cadenza.frontend.live_steps import LiveSteps
from cadenza.frontend.output_processor import OutputProcessor
from cadenza.frontend.prepared_request import PreparedRequest
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.outputs import CompletionOutput
from cadenza.server.errors import (
    UNAVAILABLE_CODES,
    ApiError,
    error_of,
    queue_error,
    queue_full,
    request_timeout,
    unavailable,
)
from cadenza.server.metrics import ServedCounts
from cadenza.server.model_turns import ModelTurn
from cadenza.server.tenants import TenantUse
from cadenza.tenant import Tenant

DEFAULT_TAG = ":latest"  # the tag that Ollama's clients add to a model's name that has none
MAX_LOAD_S = 24 * 3600.0
RETRY_S = 0.25  # between two attempts to submit a prompt to an engine that is being restarted
FURTHER_PER_ROW, FURTHER_AT_ONCE = 2, 48
"""Open requests, by row and in any case, up to which calls with many prompts submit further ones:
enough to keep every row busy."""

Updates = list[tuple[int, OutputProcessor, Sequence[CompletionOutput]]]
"""A prompt's index in its call, its request, and what is new of its samples."""

OnProgress = Callable[[Updates], object]

MakeEngine = Callable[[EngineLimits | None], ServedEngine]
"""For a model's next load, with an earlier one's sizes, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNames:
    """Requests may also use aliases, which are in no list or answer, and where it `takes_any`, any
    name of no other model."""

    listed: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    takes_any: bool = False

    @property
    def first(self) -> str:
        return self.listed[0]

    def in_answer(self, asked: str | None) -> str:
        if asked is not None and any(each in self.listed for each in spellings(asked)):
            return asked
        return self.first


def spellings(name: str) -> tuple[str, ...]:
    return (name, name.removesuffix(DEFAULT_TAG), name + DEFAULT_TAG)


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """The last load failed."""

    reason: str
    until_s: float  # no other is tried until then
    num_failed: int  # in a row


class ServedModel:
    """On one event loop."""

    def __init__(self, names: ModelNames, text: TextFrontend, make_engine: MakeEngine) -> None:
        self.names = names
        self.text = text
        self.counts = ServedCounts()
        self.turn = ModelTurn()
        self.live = LiveSteps()
        self.num_loads = 0
        self.failure: LoadFailure | None = None
        self.is_refusing = False
        """The server is shutting down."""
        self._make_engine = make_engine
        self.engine = make_engine(None)
        self._serving: AsyncEngine | None = None
        self._is_spent = False
        self.keeps_limits = True
        """The next load has the sizes of the first one; otherwise it chooses them anew."""
        self._known: RequestCheck | None = None
        self._engine_fingerprint: Fingerprint | None = None
        self._fingerprint: Fingerprint | None = None
        self.waiting = PromptQueue(self)
        self._num_preparing = 0

    @property
    def name(self) -> str:
        return self.names.first

    @property
    def request_check(self) -> RequestCheck | None:
        """The engine's check of requests; None until it has been loaded once."""
        return self.engine.status().request_check or self._known

    @property
    def limits(self) -> EngineLimits | None:
        check = self.request_check
        return None if check is None else check.limits

    @property
    def engine_state(self) -> EngineState:
        """As errors name it: draining once new calls are refused, whatever the engine's own is."""
        return "draining" if self.is_refusing else self.engine.status().state

    def stats(self) -> EngineStats | None:
        return None if self._serving is None else self.engine.stats()

    def start(self) -> None:
        """Starts the engine, which then loads. On the event loop to which its streams belong."""
        assert self._serving is None, "it is stopped before it is started again"
        if self._is_spent:
            self.engine = self._make_engine(self.limits if self.keeps_limits else None)
        self._is_spent = self.keeps_limits = True
        self._serving = AsyncEngine(self.engine, self.text, self.fingerprint, self.live)
        self._serving.start()

    async def stop(self) -> None:
        """Ends the open requests, each with an error, and the engine, whose memory is then free."""
        self._known = self.request_check
        self.waiting.fail_all(unavailable("draining"))
        serving, self._serving = self._serving, None
        if serving is not None:
            await serving.stop()

    def check_accepting(self) -> None:
        """Raises ApiError (503) where the server is shutting down. Open calls continue."""
        if self.is_refusing:
            self.counts.reject("unavailable")
            raise unavailable("draining")

    def check_ready(self) -> RequestCheck:
        """The engine's check of requests. Raises ApiError (503) where it is not ready."""
        status = self.engine.status()
        if not status.is_ready:
            self.counts.reject("unavailable")
            raise unavailable(UNAVAILABLE_CODES[status.state], status.retry_after_s)
        assert status.request_check is not None, "an engine that is ready has been loaded"
        if status.fingerprint is not self._engine_fingerprint:
            self._engine_fingerprint = status.fingerprint
            self._fingerprint = self.text.with_forms(status.fingerprint)
        self._known = status.request_check
        return self._known

    def fingerprint(self) -> Fingerprint | None:
        """The engine's, as of the last admission of a call; None before it, or if it is unknown."""
        return self._fingerprint

    def check_room(self) -> None:
        """Raises ApiError (429) where as many requests are open as are allowed."""
        assert self._known is not None, "there is room in an engine that is ready"
        room = self._known.limits.max_num_open_reqs
        if not self.engine.load().has_room(room - self._num_preparing):
            self.counts.reject("queue_full")
            raise queue_full(
                message=f"{room} requests are open, the most that --max-num-queued-reqs and "
                f"--max-num-seqs allow; try again when some have finished"
            )

    def check_turn(self, tenant: Tenant, priority: int) -> None:
        """Raises ApiError (429) where a request of the tenant would start too late."""
        refusal = self.engine.refusal(tenant, priority)
        if refusal is not None:
            self.counts.reject("queue_too_long")
            raise queue_error(refusal)

    @contextmanager
    def preparing(self) -> Generator[None]:
        """Counts a call that is being tokenised. Raises ApiError (429) when there are too many."""
        self.check_room()
        self._num_preparing += 1
        try:
            yield
        finally:
            self._num_preparing -= 1

    @property
    def serving(self) -> AsyncEngine:
        """Raises EngineClosedError: it was stopped, perhaps while a prompt was tokenised."""
        if self._serving is None:
            raise EngineClosedError(f"{self.name} is stopped")
        return self._serving

    def has_room(self, num_tokens: int, *, is_further: bool) -> bool:
        """Whether a prompt of a call may enter the engine's queue. A call's only prompt there may
        take any place; a further one enters only while half of the places and of the tokens are
        free, and few requests are open for each row, so that there is always room for other calls,
        and a short wait."""
        limits, load = self.limits, self.engine.load()
        assert limits is not None, "prompts wait only where an engine has taken some"
        most_reqs, most_tokens = limits.max_num_open_reqs, limits.max_num_queued_tokens
        if is_further:
            busy = max(FURTHER_AT_ONCE, FURTHER_PER_ROW * limits.max_num_seqs)
            # But at least as many as there are rows, so that one call can use an idle engine fully.
            rows = min(limits.max_num_seqs, most_reqs - 1)
            most_reqs = max(min(most_reqs // 2, busy), rows)
            most_tokens //= 2
        return load.has_room(most_reqs) and load.has_tokens(num_tokens, most_tokens)

    def error_of(self, error: CadenzaError) -> ApiError:
        return error_of(error, self.engine_state)


class OpenCall:
    """One call's prompts, and the streams of those that were submitted. Its context submits the
    further prompts, in turns with those of other calls; leaving it cancels what still runs.
    `num_unfinished` is the number of prompts whose end has not been taken. `use`: of the tenant; it
    counts the prompts that are submitted, each but the first, which the call itself counts for."""

    def __init__(
        self, prepared: Sequence[PreparedRequest], model: ServedModel, use: TenantUse
    ) -> None:
        self.use = use
        self._model = model
        self._num_further = 0
        self.num_unfinished = len(prepared)
        self._waiting = deque(enumerate(prepared))
        self._serving = model.serving
        self._whole_fingerprint = model.fingerprint()
        self._pruned: dict[int, OutputProcessor | None] = {
            index: None for index, each in self._waiting if each.request.sparse_prefill is not None
        }
        """Prompts that are to be pruned; None until they are submitted."""
        self._streams: dict[int, OutputStream] = {}
        self._dropped: Updates = []
        self._failure: ApiError | None = None
        self._has_updates = False
        self._waiter: asyncio.Future[None] | None = None
        self._on_progress: OnProgress | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._waits_since_s: float | None = None
        self._silence: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        if self.num_unfinished > 1:  # one alone has the engine's deadline
            timeout_s = self._model.engine.timeouts.total_s
            error = request_timeout(seconds=timeout_s)
            self._deadline = asyncio.get_running_loop().call_later(timeout_s, self.fail, error)
        self._model.waiting.add(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        for timer in (self._deadline, self._silence):
            if timer is not None:
                timer.cancel()
        self._waiting.clear()
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._count_further()
        self._model.waiting.discard(self)

    @property
    def num_submitted(self) -> int:
        return len(self._streams)

    @property
    def system_fingerprint(self) -> str | None:
        """A pruned prompt's if one of the call's is; None while that, or the engine's, is not
        known."""
        whole = self._whole_fingerprint
        if whole is None:
            return None
        found = [None if each is None else each.fingerprint for each in self._pruned.values()]
        pruned = [each.digest for each in found if each is not None and each.sparse_prefill]
        return pruned[0] if pruned else None if None in found else whole.digest

    @property
    def next_prompt(self) -> PreparedRequest | None:
        return self._waiting[0][1] if self._waiting else None

    def submit_next(self) -> None:
        """Submits the next prompt, which stays the next one where it raises CadenzaError."""
        index, prepared = self._waiting[0]
        stream = self._serving.submit(prepared, kind="delta", on_news=self.notify)
        self._streams[index] = stream
        if index in self._pruned:
            self._pruned[index] = stream.processor
        self._waiting.popleft()
        self._count_further()

    async def next_updates(
        self, within_s: float | None = None, on_progress: OnProgress | None = None
    ) -> Updates:
        """Waits for updates; cancelling it loses nothing. Empty where there was none `within_s`,
        which must always be the same for one call. Of a call with one prompt `on_progress` is given
        the updates until its end, without a turn of the waiting task for each. Raises ApiError
        where the call as a whole has failed, and what `on_progress` raises."""
        loop = asyncio.get_running_loop()
        self._waits_since_s = start_s = loop.time()
        if within_s is not None and self._silence is None:
            self._silence = loop.call_at(start_s + within_s, self._end_silence, within_s)
        while True:
            if not self._has_updates:
                self._waiter, self._on_progress = loop.create_future(), on_progress
                await self._waiter
            self._has_updates = False
            if self._failure is not None:
                raise self._failure
            found = self._take()
            if found:
                self._waits_since_s = None
                self._fill()
                return found
            if within_s is not None and loop.time() >= start_s + within_s:
                return []

    def notify(self) -> None:
        """There are updates, or a failure, or a silence: wakes `next_updates`, unless they are
        progress, for which somebody else is there."""
        self._has_updates = True
        if self._waiter is None or self._waiter.done():
            return
        if self._on_progress is None or not self._is_progress:
            self._waiter.set_result(None)
            return
        self._has_updates = False
        try:
            self._on_progress(self._take())
            self._fill()
        except Exception as error:  # noqa: BLE001  the waiting task raises it; others are told, too
            self._waiter.set_exception(error)

    @property
    def _is_progress(self) -> bool:
        """The only prompt has not ended, nor has the call."""
        streams = self._streams.values()
        is_running = not any(each.processor.is_finished for each in streams)
        return self.num_unfinished == len(streams) == 1 and is_running and self._failure is None

    def _fill(self) -> None:
        if self._model.waiting.calls:
            self._model.waiting.fill()

    def abort(self) -> None:
        """Ends the running prompts and drops the waiting ones; all end with the reason `abort`."""
        for stream in self._streams.values():
            stream.abort()
        for index, prepared in self._waiting:
            dropped = OutputProcessor(index, prepared, self._model.text)  # its place for an id
            dropped.abort()
            self._dropped.append((index, dropped, dropped.take()))
        self._waiting.clear()
        self.notify()

    def fail(self, error: ApiError) -> None:
        self._failure = error
        self._waiting.clear()
        self.notify()

    def _end_silence(self, within_s: float) -> None:
        """Wakes `next_updates`. One timer serves all waits, so that a token costs none."""
        self._silence = None
        if self._waits_since_s is None:
            return
        loop, end_s = asyncio.get_running_loop(), self._waits_since_s + within_s
        if loop.time() >= end_s:
            self.notify()
        else:
            self._silence = loop.call_at(end_s, self._end_silence, within_s)

    def _take(self) -> Updates:
        found, self._dropped = self._dropped, []
        self.num_unfinished -= len(found)
        ended: list[int] = []
        for index, stream in self._streams.items():
            processor = stream.processor
            outputs = processor.take()
            if outputs:
                found.append((index, processor, outputs))
                if processor.is_finished:
                    ended.append(index)
        for index in ended:
            self.num_unfinished -= 1
            self._streams.pop(index).close()
        if ended:
            self._count_further()
        return found

    def _count_further(self) -> None:
        num_further = max(0, len(self._streams) - 1)
        if num_further != self._num_further:
            self.use.num_open += num_further - self._num_further
            self._num_further = num_further


class PromptQueue:
    """The calls of a model that have prompts to submit; they take turns, one prompt each."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._retry: asyncio.TimerHandle | None = None
        self.calls: deque[OpenCall] = deque()

    def add(self, call: OpenCall) -> None:
        """Submits the call's further prompts, now and as room becomes free."""
        if call.next_prompt is not None:
            self.calls.append(call)
            self.fill()

    def discard(self, call: OpenCall) -> None:
        """Removes a call, if it is there; its requests have ended, so that there may be room."""
        if call in self.calls:
            self.calls.remove(call)
        self.fill()

    def fill(self) -> None:
        """Submits as many prompts as there is room for. To be called when there may be room."""
        while self.calls:
            call = self.calls[0]
            prompt = call.next_prompt
            if prompt is None:
                self.calls.popleft()
                continue
            num_tokens = len(prompt.request.prompt_token_ids)
            if not self._model.has_room(num_tokens, is_further=call.num_submitted > 0):
                return
            try:
                call.submit_next()
            except QueueFullError:
                return
            except CadenzaError as error:
                state = self._model.engine.status().state
                if isinstance(error, EngineUnavailableError) and state == "restarting":
                    self._fill_later()
                    return
                call.fail(self._model.error_of(error))
            self.calls.rotate(-1)

    def _fill_later(self) -> None:
        """There may be no update by which to see that the engine is ready again."""
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._fill_again)

    def _fill_again(self) -> None:
        self._retry = None
        self.fill()

    def fail_all(self, error: ApiError) -> None:
        """Ends every call here with an error, because no more prompts are submitted."""
        while self.calls:
            self.calls.popleft().fail(error)
