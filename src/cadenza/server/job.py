"""The engine's requests behind one call: `Job`.

Owns their streams, from all of which news comes together. Knows no HTTP and no shapes. Invariants:
whoever leaves a job's context leaves no request behind, and a stream that raises ends the job.
"""

import asyncio
from typing import Self

from cadenza.engine.async_engine import OutputStream
from cadenza.outputs import CompletionOutput, RequestOutput

News = list[tuple[int, RequestOutput]]
"""What is new, each with its prompt's place in the call."""


class Job:
    """Enter it before its news are asked for."""

    def __init__(self, streams: list[OutputStream]) -> None:
        self._streams = streams
        self._pumps: list[asyncio.Task[None]] = []
        self._news: asyncio.Queue[tuple[int, RequestOutput] | Exception] = asyncio.Queue(
            len(streams)
        )
        self._failure: Exception | None = None
        self._num_running = len(streams)

    async def __aenter__(self) -> Self:
        if len(self._streams) > 1:
            self._pumps = [
                asyncio.create_task(self._pump(place, stream))
                for place, stream in enumerate(self._streams)
            ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.close()
        for pump in self._pumps:
            pump.cancel()
        if self._pumps:
            await asyncio.wait(self._pumps)

    @property
    def is_finished(self) -> bool:
        return not self._num_running

    async def news(self) -> News:
        """Waits until there is some; being cancelled meanwhile loses nothing.

        Raises what one of the streams has raised, again whenever it is called after that.
        """
        if not self._pumps:
            news = [(0, await self._streams[0].next())]
        else:
            news = await self._pumped_news()
        self._num_running -= sum(output.finished for _, output in news)
        return news

    def abort(self) -> None:
        """Ends what runs; the last news say so."""
        for stream in self._streams:
            stream.abort()

    async def _pumped_news(self) -> News:
        found = [] if self._failure is not None else [await self._news.get()]
        while not self._news.empty():
            found.append(self._news.get_nowait())
        for each in found:
            if isinstance(each, Exception):
                self._failure = self._failure or each
        if self._failure is not None:
            raise self._failure
        return [each for each in found if not isinstance(each, Exception)]

    async def _pump(self, place: int, stream: OutputStream) -> None:
        try:
            while not stream.is_finished:
                await self._news.put((place, await stream.next()))
        except Exception as error:  # noqa: BLE001  raised where the news are asked for
            await self._news.put(error)


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
