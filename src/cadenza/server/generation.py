"""What an endpoint that generates does: from a body to an answer or a stream.

Owns the order of things: ready, body, model, tokenise, submit, answer. Invariant: whatever happens
a request's record ends once, a stream ends with `[DONE]`, and nothing is left in the engine.
"""

import asyncio
import logging
from dataclasses import dataclass

from cadenza.engine.request_check import RequestCheck
from cadenza.engine.status import EngineMonitor
from cadenza.errors import CadenzaError
from cadenza.frontend.output_processor import describe_fault
from cadenza.outputs import RequestOutput
from cadenza.request import FinishReason
from cadenza.server.endpoints.generating import GeneratingEndpoint, GenerationRequest
from cadenza.server.errors import ApiError, error_of, error_of_end, server_error
from cadenza.server.http_exchange import ClientLeftError, Exchange, Response
from cadenza.server.job import Job, Whole
from cadenza.server.request_log import RequestRecord
from cadenza.server.service import Service
from cadenza.server.sse import KEEP_ALIVE, AnswerEncoder, AnswerHead

logger = logging.getLogger("cadenza.server")

INLINE_BYTES = 16 << 10
"""Larger bodies are read on another thread than the event loop's, as all are tokenised there."""


class Generation:
    """Handles one endpoint's requests."""

    def __init__(self, service: Service, endpoint: GeneratingEndpoint) -> None:
        self._service = service
        self._endpoint = endpoint

    async def __call__(self, exchange: Exchange) -> None:
        service = self._service
        record = RequestRecord(
            request_id=exchange.request_id,
            endpoint=self._endpoint.route.name,
            counts=service.counts,
            clock=service.options.clock,
            is_logged=service.options.is_logging_requests,
        )
        rest: FinishReason = "error"
        num_choices = 0
        try:
            check = service.check_ready()
            service.check_room(check.limits)
            async with exchange.body() as body:
                request = await self._read(body)
            del body
            num_choices = request.num_choices
            self._take_identity(exchange, request, record)
            await exchange.while_connected(self._serve(exchange, request, check, record))
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

    async def _read(self, body: bytes) -> GenerationRequest:
        options = self._service.options

        def read() -> GenerationRequest:
            return self._endpoint.read(body, options.limits, options.unknown_fields)

        if len(body) <= INLINE_BYTES:
            return read()
        return await self._service.work.do("generate", len(body), read)

    def _take_identity(
        self, exchange: Exchange, request: GenerationRequest, record: RequestRecord
    ) -> None:
        if request.request_id is not None:
            self._service.check_id(request.request_id)
            exchange.request_id = record.request_id = request.request_id
        record.user = request.user

    async def _serve(
        self,
        exchange: Exchange,
        request: GenerationRequest,
        check: RequestCheck,
        record: RequestRecord,
    ) -> None:
        service = self._service
        model = service.check_model(request.model)
        with service.preparing(check.limits):
            try:
                prepared = await service.work.do(
                    "generate",
                    request.num_bytes,
                    lambda: service.prepare(request, exchange.tenant, check),
                )
            except CadenzaError as error:
                state = service.monitor.status().state
                raise error_of(error, state, request.prompt_field) from error
            service.check_id(exchange.request_id)
            job = service.submit(prepared, record)
        head = AnswerHead(
            request_id=exchange.request_id, created=int(service.options.now()), model=model
        )
        encoder = request.encoder(head, record.usage, service.text)
        watch = _Watch(record, service.monitor)
        with service.opened(exchange.request_id, exchange.tenant, job):
            async with job:
                if request.stream:
                    await _stream(exchange, job, encoder, watch)
                else:
                    await _answer(exchange, job, encoder, watch)


@dataclass(frozen=True, slots=True)
class _Watch:
    """The record of a call, and the monitor that knows why an engine's request has failed."""

    record: RequestRecord
    monitor: EngineMonitor

    def take(self, prompt: int, news: RequestOutput) -> None:
        """Counts a prompt's news. Raises ApiError where an output of it has failed."""
        failed = self.record.take(prompt, news)
        if failed is not None:
            raise error_of_end(failed.error_kind, self.monitor)


async def _answer(exchange: Exchange, job: Job, encoder: AnswerEncoder, watch: _Watch) -> None:
    wholes = [Whole() for _ in encoder.usage.prompt]
    while not job.is_finished:
        for prompt, news in await job.news():
            watch.take(prompt, news)
            wholes[prompt].take(news)
    await exchange.answer(Response(body=encoder.whole(whole.output() for whole in wholes)))


async def _stream(exchange: Exchange, job: Job, encoder: AnswerEncoder, watch: _Watch) -> None:
    await exchange.start_stream()
    opening = encoder.opening()
    if opening:
        await exchange.stream(opening)
    waiting: list[bytes] = []
    try:
        while not job.is_finished:
            waiting = await _next_events(exchange, job, encoder, watch)
            if not job.is_finished and waiting:
                await exchange.stream(b"".join(waiting))
        ending = encoder.closing()
    except ApiError as error:
        watch.record.status = error.status
        waiting, ending = [], encoder.failure(error)
    except Exception as error:  # noqa: BLE001  logged without what the client sent
        log_unexpected(error)
        watch.record.status = 500
        waiting, ending = [], encoder.failure(server_error())
    await exchange.end_stream(b"".join(waiting) + ending)


async def _next_events(
    exchange: Exchange, job: Job, encoder: AnswerEncoder, watch: _Watch
) -> list[bytes]:
    """Events of the next news, or a comment after a silence."""
    found = await job.news(exchange.limits.keep_alive_s)
    if not found:
        return [KEEP_ALIVE]
    made: list[bytes] = []
    for prompt, news in found:
        watch.take(prompt, news)
        events = encoder.take(prompt, news)
        if events:
            made.append(events)
    return made


def log_unexpected(error: Exception) -> None:
    """A fault of the server's own: where it was, without what the client sent."""
    logger.error("in the server: %s", describe_fault(error))
