"""The engine's requests behind one call: `Job`; and `PromptQueue`: calls with prompts to submit.

Owns the order in which prompts enter the engine's queue, and one wait for the news of all of a
call's requests. Knows no HTTP and no endpoint. Invariants: leaving a job's context cancels its
requests, and they are counted no more; a stream that raises ends the job; calls with many prompts
take turns, and together leave room for others.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from cadenza.config import EngineLimits
from cadenza.engine.open_requests import EngineLoad
from cadenza.errors import CadenzaError, EngineUnavailableError, QueueFullError
from cadenza.frontend.async_engine import OutputStream
from cadenza.frontend.output_processor import OutputProcessor
from cadenza.frontend.text_frontend import PreparedRequest
from cadenza.outputs import CompletionOutput, RequestOutput
from cadenza.server.errors import ApiError, request_timeout

News = list[tuple[int, OutputProcessor | RequestOutput, Sequence[CompletionOutput]]]
"""The place of a prompt in its call, the prompt's request, and what is new of the request's
samples. A prompt that was dropped has a `RequestOutput` instead of a processor."""

SubmitPrompt = Callable[[PreparedRequest, Callable[[], None]], OutputStream]
"""Submits a prompt to the engine; the function is called when there is news of it. Raises
CadenzaError."""


RETRY_S = 0.25
"""Between two attempts to submit a prompt to an engine that is being restarted."""


class Job:
    """One call's prompts, and the streams of those that were submitted; a context manager.

    `num_unfinished` is the number of prompts whose end has not been taken.

    Args:
        queue: filled after news, which may mean that there is room.
        timeout_s: for several prompts together; one alone has the engine's deadline.
        add_open: is called with the change of the number of submitted prompts beside one, which the
            call itself counts for; the changes sum to zero when the job's context is left.
    """

    def __init__(
        self,
        prepared: Sequence[PreparedRequest],
        submit: SubmitPrompt,
        *,
        queue: "PromptQueue",
        timeout_s: float,
        add_open: Callable[[int], None],
    ) -> None:
        self._submit = submit
        self._queue = queue
        self._timeout_s = timeout_s
        self._add_open = add_open
        self._num_further = 0
        self.num_unfinished = len(prepared)
        self._waiting = deque(enumerate(prepared))
        self._streams: dict[int, OutputStream] = {}
        self._dropped: News = []
        self._failure: ApiError | None = None
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._waits_since_s: float | None = None
        self._silence: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        if self.num_unfinished > 1:
            loop = asyncio.get_running_loop()
            error = request_timeout(seconds=self._timeout_s)
            self._deadline = loop.call_later(self._timeout_s, self.fail, error)
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

    @property
    def num_submitted(self) -> int:
        """Prompts in the engine, and those whose end has not been taken."""
        return len(self._streams)

    @property
    def next_prompt(self) -> PreparedRequest | None:
        """The prompt to be submitted next."""
        return self._waiting[0][1] if self._waiting else None

    def submit_next(self) -> None:
        """Submits the next prompt. Raises CadenzaError; then it is still the next."""
        place, prepared = self._waiting[0]
        self._streams[place] = self._submit(prepared, self.notify)
        self._waiting.popleft()
        self._count_further()

    async def news(self, within_s: float | None = None) -> News:
        """Waits for news; cancelling it loses nothing.

        Empty where there was none `within_s`, which must always be the same for one job. Raises
        ApiError where the call as a whole has failed.
        """
        loop = asyncio.get_running_loop()
        self._waits_since_s = start_s = loop.time()
        if within_s is not None and self._silence is None:
            self._silence = loop.call_at(start_s + within_s, self._end_silence, within_s)
        while True:
            if not self._has_news:
                self._waiter = loop.create_future()
                await self._waiter
            self._has_news = False
            if self._failure is not None:
                raise self._failure
            found = self._take()
            if found:
                self._waits_since_s = None
                if self._queue.jobs:
                    self._queue.fill()
                return found
            if within_s is not None and loop.time() >= start_s + within_s:
                return []

    def notify(self) -> None:
        """There is news, or a failure, or a silence: wakes `news`."""
        self._has_news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def abort(self) -> None:
        """Ends the running prompts and drops the waiting ones; all end with the reason `abort`."""
        for stream in self._streams.values():
            stream.abort()
        for place, prepared in self._waiting:
            aborted = _aborted(place, prepared)
            self._dropped.append((place, aborted, aborted.outputs))
        self._waiting.clear()
        self.notify()

    def fail(self, error: ApiError) -> None:
        """Makes `news` raise this error."""
        self._failure = error
        self._waiting.clear()
        self.notify()

    def _end_silence(self, within_s: float) -> None:
        """Wakes `news` after a silence. One timer serves all waits, so that a token costs none."""
        self._silence = None
        if self._waits_since_s is None:
            return
        loop, end_s = asyncio.get_running_loop(), self._waits_since_s + within_s
        if loop.time() >= end_s:
            self.notify()
        else:
            self._silence = loop.call_at(end_s, self._end_silence, within_s)

    def _take(self) -> News:
        found, self._dropped = self._dropped, []
        self.num_unfinished -= len(found)
        ended: list[int] = []
        for place, stream in self._streams.items():
            processor = stream.processor
            outputs = processor.take()
            if outputs:
                found.append((place, processor, outputs))
                if processor.is_finished:
                    ended.append(place)
        for place in ended:
            self.num_unfinished -= 1
            self._streams.pop(place).close()
        if ended:
            self._count_further()
        return found

    def _count_further(self) -> None:
        num_further = max(0, len(self._streams) - 1)
        if num_further != self._num_further:
            self._add_open(num_further - self._num_further)
            self._num_further = num_further


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The engine's bounds, and its load."""

    limits: EngineLimits
    load: EngineLoad

    def has_place(self, job: Job) -> bool:
        """Whether a call's next prompt may enter the engine's queue.

        A call's only prompt there may take any place; a further one enters only while half of the
        places and of the tokens are free, so that there is always room for other calls.
        """
        prompt = job.next_prompt
        assert prompt is not None, "only calls with a prompt to submit are asked about"
        most_reqs, most_tokens = self.limits.max_num_open_reqs, self.limits.max_num_queued_tokens
        if job.num_submitted:
            # But at least as many as there are rows, so that one call can use an idle engine fully.
            most_reqs = max(most_reqs // 2, min(self.limits.max_num_seqs, most_reqs - 1))
            most_tokens //= 2
        num_tokens = len(prompt.request.prompt_token_ids)
        return self.load.has_place(most_reqs) and self.load.has_tokens(num_tokens, most_tokens)


class PromptQueue:
    """The calls that have prompts to submit; they take turns, one prompt each.

    Args:
        room: the engine's room now.
        error_of: the answer to a call of which the engine refuses a prompt.
        is_restarting: whether the engine refuses prompts only until it is ready again.
    """

    def __init__(
        self,
        room: Callable[[], Room],
        error_of: Callable[[CadenzaError], ApiError],
        is_restarting: Callable[[], bool],
    ) -> None:
        self._room = room
        self._error_of = error_of
        self._is_restarting = is_restarting
        self._retry: asyncio.TimerHandle | None = None
        self.jobs: deque[Job] = deque()

    def add(self, job: Job) -> None:
        """Submits the job's further prompts, now and as room becomes free."""
        if job.next_prompt is not None:
            self.jobs.append(job)
            self.fill()

    def discard(self, job: Job) -> None:
        """Removes a job, if it is there; its requests have ended, so that there may be room."""
        if job in self.jobs:
            self.jobs.remove(job)
        self.fill()

    def fill(self) -> None:
        """Submits as many prompts as there is room for. To be called when there may be room."""
        while self.jobs:
            job = self.jobs[0]
            if job.next_prompt is None:
                self.jobs.popleft()
                continue
            if not self._room().has_place(job):
                return
            try:
                job.submit_next()
            except QueueFullError:
                return
            except CadenzaError as error:
                if isinstance(error, EngineUnavailableError) and self._is_restarting():
                    self._fill_later()
                    return
                job.fail(self._error_of(error))
            self.jobs.rotate(-1)

    def _fill_later(self) -> None:
        """There may be no news by which to see that the engine is ready again."""
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._fill_again)

    def _fill_again(self) -> None:
        self._retry = None
        self.fill()

    def fail_all(self, error: ApiError) -> None:
        """Ends every job here with an error, because no more prompts are submitted."""
        while self.jobs:
            self.jobs.popleft().fail(error)


def _aborted(place: int, prepared: PreparedRequest) -> RequestOutput:
    """The only output of a prompt that was never submitted; its place stands for the id."""
    outputs = [
        CompletionOutput(
            index=sample,
            text="",
            token_ids=(),
            logprobs=None,
            cumulative_logprob=None,
            finish_reason="abort",
            stop_reason=None,
        )
        for sample in range(prepared.request.params.n)
    ]
    return RequestOutput(
        request_id=place,
        prompt=prepared.text,
        prompt_token_ids=prepared.request.prompt_token_ids,
        prompt_logprobs=None,
        num_cached_tokens=0,
        outputs=tuple(outputs),
        finished=True,
    )
