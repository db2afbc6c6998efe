"""/v1/completions and /v1/chat/completions: from a body to an answer or a stream.

Owns the order of things: ready, body, model, tokenise, submit, answer. Invariant: whatever happens
a request's record ends once, a stream ends with `[DONE]`, and nothing is left in the engine.
"""

import asyncio
import logging
from typing import Literal

from cadenza.engine.assembly import describe_fault
from cadenza.errors import CadenzaError
from cadenza.outputs import RequestOutput
from cadenza.request import FinishReason
from cadenza.server.call import Call, read_call
from cadenza.server.choices import make_choices
from cadenza.server.errors import ApiError, server_error
from cadenza.server.exchange import Answer, ClientLeftError, Exchange
from cadenza.server.failures import error_of, error_of_end
from cadenza.server.frames import KEEP_ALIVE, AnswerHead, Frames, error_frames
from cadenza.server.job import Job, Whole
from cadenza.server.request_log import RequestRecord
from cadenza.server.service import Service

logger = logging.getLogger("cadenza.server")

INLINE_BYTES = 16 << 10
"""Larger bodies are read on another thread than the event loop's, as all are tokenised there."""


class Generation:
    """One endpoint of the two."""

    def __init__(self, service: Service, endpoint: Literal["completions", "chat"]) -> None:
        self._service = service
        self._endpoint: Literal["completions", "chat"] = endpoint

    async def __call__(self, exchange: Exchange) -> None:
        service = self._service
        record = RequestRecord(
            request_id=exchange.request_id,
            endpoint=self._endpoint,
            counts=service.counts,
            clock=service.options.clock,
            is_logged=service.options.is_logging_requests,
        )
        rest: FinishReason = "error"
        num_choices = 0
        try:
            service.check_ready()
            service.check_room()
            async with exchange.body() as body:
                call = await self._read(body)
            del body
            num_choices = call.num_prompts * call.n
            self._take_identity(exchange, call, record)
            await exchange.while_connected(self._serve(exchange, call, record))
        except (ClientLeftError, asyncio.CancelledError):
            rest = "abort"
            raise
        except ApiError as error:
            record.status = error.status
            raise
        except Exception:
            record.status = 500
            raise
        finally:
            record.end(num_choices, rest)

    async def _read(self, body: bytes) -> Call:
        options = self._service.options

        def read() -> Call:
            return read_call(self._endpoint, body, options.limits, options.unknown_fields)

        if len(body) <= INLINE_BYTES:
            return read()
        return await self._service.work.do("generate", len(body), read)

    def _take_identity(self, exchange: Exchange, call: Call, record: RequestRecord) -> None:
        if call.request_id is not None:
            self._service.check_id(call.request_id)
            exchange.request_id = record.request_id = call.request_id
        record.user = call.user

    async def _serve(self, exchange: Exchange, call: Call, record: RequestRecord) -> None:
        service = self._service
        model = service.check_model(call.model)
        with service.preparing():
            try:
                prepared = await service.work.do(
                    "generate",
                    call.num_body_bytes,
                    lambda: service.prepare(call, exchange.tenant),
                )
            except CadenzaError as error:
                state = service.monitor.status().state
                raise error_of(error, state, call.prompt_field) from error
            service.check_id(exchange.request_id)
            job = service.submit(prepared, record)
        head = AnswerHead(
            request_id=exchange.request_id, created=int(service.options.now()), model=model
        )
        frames = Frames(head, call, make_choices(call, service.text))
        for place, each in enumerate(prepared):
            frames.usage.prompt[place] = len(each.request.prompt_token_ids)
        watch = _Watch(service, call.n, record)
        with service.opened(exchange.request_id, exchange.tenant, job):
            async with job:
                if call.is_stream:
                    await _stream(exchange, job, frames, watch)
                else:
                    await _answer(exchange, job, frames, watch)


class _Watch:
    """Counts news, and finds the failures among them."""

    def __init__(self, service: Service, n: int, record: RequestRecord) -> None:
        self.record = record
        self._service = service
        self._n = n
        self._num_tokens: dict[int, int] = {}

    def take(self, prompt: int, news: RequestOutput) -> None:
        """Raises ApiError where an output has failed."""
        num_new_tokens = 0
        for output in news.outputs:
            index = prompt * self._n + output.index
            num_new_tokens += output.num_generated_tokens - self._num_tokens.get(index, 0)
            self._num_tokens[index] = output.num_generated_tokens
        self.record.take(prompt, num_new_tokens)
        for output in news.outputs:
            if output.finish_reason is None:
                continue
            self.record.end_choice(prompt * self._n + output.index, output.finish_reason)
            if output.finish_reason == "error":
                raise error_of_end(output.error_kind, self._service.monitor)


async def _answer(exchange: Exchange, job: Job, frames: Frames, watch: _Watch) -> None:
    wholes = [Whole() for _ in frames.usage.prompt]
    while not job.is_finished:
        for prompt, news in await job.news():
            watch.take(prompt, news)
            wholes[prompt].take(news)
    await exchange.answer(Answer(body=frames.whole(whole.output() for whole in wholes)))


async def _stream(exchange: Exchange, job: Job, frames: Frames, watch: _Watch) -> None:
    await exchange.start_stream()
    opening = frames.opening()
    if opening:
        await exchange.stream(opening)
    waiting: list[bytes] = []
    try:
        while not job.is_finished:
            waiting = await _next_frames(exchange, job, frames, watch)
            if not job.is_finished and waiting:
                await exchange.stream(b"".join(waiting))
        ending = frames.closing()
    except ApiError as error:
        watch.record.status = error.status
        waiting, ending = [], error_frames(error)
    except Exception as error:  # noqa: BLE001  logged without what the client sent
        log_unexpected(error)
        watch.record.status = 500
        waiting, ending = [], error_frames(server_error())
    await exchange.end_stream(b"".join(waiting) + ending)


async def _next_frames(exchange: Exchange, job: Job, frames: Frames, watch: _Watch) -> list[bytes]:
    """Frames of the next news, or a comment after a silence."""
    try:
        async with asyncio.timeout(exchange.limits.keep_alive_s):
            found = await job.news()
    except TimeoutError:
        return [KEEP_ALIVE]
    made: list[bytes] = []
    for prompt, news in found:
        watch.take(prompt, news)
        made.append(frames.take(prompt, news))
    return [frame for frame in made if frame]


def log_unexpected(error: Exception) -> None:
    """A fault of the server's own: where it was, without what the client sent."""
    logger.error("in the server: %s", describe_fault(error))
