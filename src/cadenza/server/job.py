"""The engine's requests behind one call: `Job`; and `PromptQueue`, calls whose prompts wait.

Owns the order in which prompts enter the engine's queue, and the streams from all of which news
comes together. Knows no HTTP and no shapes. Invariants: whoever leaves a job's context leaves no
request behind; a stream that raises ends the job; calls with many prompts take turns, and together
leave room for others.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from cadenza.config import EngineLimits
from cadenza.engine.open_requests import EngineLoad
from cadenza.errors import CadenzaError, QueueFullError
from cadenza.frontend.async_engine import OutputStream
from cadenza.frontend.text_frontend import PreparedRequest
from cadenza.outputs import CompletionOutput, RequestOutput
from cadenza.server.errors import ApiError, request_timeout

News = list[tuple[int, RequestOutput]]
"""What is new, each with its prompt's place in the call."""

Submit = Callable[[PreparedRequest, asyncio.Event], OutputStream]
"""Gives a prompt to the engine; the event is set when its stream has news. Raises CadenzaError."""


class Job:
    """One call's prompts and the streams of those that were submitted; enter it to read them.

    Args:
        on_news: called when news was taken, which may have ended requests.
        timeout_s: what several prompts may take together; one alone has the engine's deadline.
    """

    def __init__(
        self,
        prepared: Sequence[PreparedRequest],
        submit: Submit,
        *,
        on_news: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self._submit = submit
        self._on_news = on_news
        self._timeout_s = timeout_s
        self._num_unfinished = len(prepared)
        self._waiting = deque(enumerate(prepared))
        self._streams: dict[int, OutputStream] = {}
        self._dropped: News = []
        self._failure: ApiError | None = None
        self._has_news = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None
        self._waits_since_s: float | None = None
        self._silence: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        if self._num_unfinished > 1:
            loop = asyncio.get_running_loop()
            error = request_timeout(self._timeout_s)
            self._deadline = loop.call_later(self._timeout_s, self.fail, error)
        return self

    async def __aexit__(self, *_: object) -> None:
        for timer in (self._deadline, self._silence):
            if timer is not None:
                timer.cancel()
        self._waiting.clear()
        for stream in self._streams.values():
            stream.close()

    @property
    def is_finished(self) -> bool:
        return not self._num_unfinished

    @property
    def num_submitted(self) -> int:
        """Prompts that the engine has and whose end was not told yet."""
        return len(self._streams)

    @property
    def next_prompt(self) -> PreparedRequest | None:
        """The one that is to be submitted next."""
        return self._waiting[0][1] if self._waiting else None

    def submit_next(self) -> None:
        """Gives the engine the next prompt. Raises CadenzaError; then it is still the next."""
        place, prepared = self._waiting[0]
        self._streams[place] = self._submit(prepared, self._has_news)
        self._waiting.popleft()

    async def news(self, within_s: float | None = None) -> News:
        """Waits until there is some; being cancelled meanwhile loses nothing.

        Empty when there was none `within_s`, which must always be the same for one job. Raises
        ApiError where the call as a whole has failed.
        """
        loop = asyncio.get_running_loop()
        self._waits_since_s = start_s = loop.time()
        if within_s is not None and self._silence is None:
            self._silence = loop.call_at(start_s + within_s, self._end_silence, within_s)
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            if self._failure is not None:
                raise self._failure
            found = self._take()
            if found:
                self._waits_since_s = None
                self._on_news()
                return found
            if within_s is not None and loop.time() >= start_s + within_s:
                return []

    def abort(self) -> None:
        """Ends what runs and what waits; the last news say so."""
        for stream in self._streams.values():
            stream.abort()
        self._dropped += [(place, _aborted(place, each)) for place, each in self._waiting]
        self._waiting.clear()
        self._has_news.set()

    def fail(self, error: ApiError) -> None:
        """Whoever waits for news gets this error."""
        self._failure = error
        self._waiting.clear()
        self._has_news.set()

    def _end_silence(self, within_s: float) -> None:
        """Wakes who has waited for so long. One timer serves all waits: each would set its own, and
        cancel it a token later.
        """
        self._silence = None
        if self._waits_since_s is None:
            return
        loop, end_s = asyncio.get_running_loop(), self._waits_since_s + within_s
        if loop.time() >= end_s:
            self._has_news.set()
        else:
            self._silence = loop.call_at(end_s, self._end_silence, within_s)

    def _take(self) -> News:
        found, self._dropped = self._dropped, []
        for place, stream in self._streams.items():
            output = stream.take()
            if output is not None:
                found.append((place, output))
        for place, output in found:
            if output.finished:
                self._num_unfinished -= 1
                if place in self._streams:
                    self._streams.pop(place).close()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What the engine may hold, and what it holds."""

    limits: EngineLimits
    load: EngineLoad

    def has_place(self, job: Job) -> bool:
        """Whether a call's next prompt may enter the engine's queue.

        A call that has none there competes for any place; a further prompt enters only while half
        of the places and of the tokens are free, so that other calls find room at any time.
        """
        prompt = job.next_prompt
        assert prompt is not None, "only calls with a prompt to submit are asked about"
        most_reqs, most_tokens = self.limits.max_num_open_reqs, self.limits.max_num_queued_tokens
        if job.num_submitted:
            # Every row may be used, though: an idle engine computes with all of them.
            most_reqs = max(most_reqs // 2, min(self.limits.max_num_seqs, most_reqs - 1))
            most_tokens //= 2
        num_tokens = len(prompt.request.prompt_token_ids)
        return self.load.has_place(most_reqs) and self.load.has_tokens(num_tokens, most_tokens)


class PromptQueue:
    """Calls with prompts that the engine has not been given yet, in turns: one prompt each.

    Args:
        room: what the engine holds now.
        error_of: what a call is told whose prompt the engine refuses.
    """

    def __init__(
        self, room: Callable[[], Room], error_of: Callable[[CadenzaError], ApiError]
    ) -> None:
        self._room = room
        self._error_of = error_of
        self._jobs: deque[Job] = deque()

    def add(self, job: Job) -> None:
        """Submits the job's prompts from now on, as room frees."""
        self._jobs.append(job)
        self.fill()

    def discard(self, job: Job) -> None:
        """Forgets a job, if it is there."""
        if job in self._jobs:
            self._jobs.remove(job)
        self.fill()

    def fill(self) -> None:
        """Submits as many prompts as there is room for. To be called whenever room may be free."""
        while self._jobs:
            job = self._jobs[0]
            if job.next_prompt is None:
                self._jobs.popleft()
                continue
            if not self._room().has_place(job):
                return
            try:
                job.submit_next()
            except QueueFullError:
                return
            except CadenzaError as error:
                job.fail(self._error_of(error))
            self._jobs.rotate(-1)

    def fail_all(self, error: ApiError) -> None:
        """Ends every job that waits, because nothing is submitted any more."""
        while self._jobs:
            self._jobs.popleft().fail(error)


def _aborted(place: int, prepared: PreparedRequest) -> RequestOutput:
    """The one output of a prompt that the engine never got; it has its place for an id."""
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


class Whole:
    """Parts of one request's outputs put together."""

    def __init__(self) -> None:
        self._parts: list[RequestOutput] = []

    def take(self, part: RequestOutput) -> None:
        self._parts.append(part)

    def output(self) -> RequestOutput:
        """All of it. There must have been a part of each sample."""
        samples: dict[int, list[CompletionOutput]] = {}
        for part in self._parts:
            for output in part.outputs:
                samples.setdefault(output.index, []).append(output)
        last = self._parts[-1]
        prompt_logprobs = [part.prompt_logprobs for part in self._parts if part.prompt_logprobs]
        return RequestOutput(
            request_id=last.request_id,
            prompt=last.prompt,
            prompt_token_ids=last.prompt_token_ids,
            prompt_logprobs=prompt_logprobs[0] if prompt_logprobs else None,
            num_cached_tokens=last.num_cached_tokens,
            outputs=tuple(_joined(samples[index]) for index in sorted(samples)),
            finished=last.finished,
        )


def _joined(parts: list[CompletionOutput]) -> CompletionOutput:
    last = parts[-1]
    has_logprobs = any(part.logprobs is not None for part in parts)
    entries = [entry for part in parts for entry in part.logprobs or ()]
    return CompletionOutput(
        index=last.index,
        text="".join(part.text for part in parts),
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
        logprobs=tuple(entries) if has_logprobs else None,
        cumulative_logprob=last.cumulative_logprob,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        num_generated_tokens=last.num_generated_tokens,
        error=last.error,
        error_kind=last.error_kind,
    )
