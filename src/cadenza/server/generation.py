"""The handler of every endpoint that calls the engine: from a body to its answer or stream.

Owns the order: readiness, body, model and its load, tokenising, submitting, answering. A token's
way through a stream is `Job.news` (what is new of the call's requests), `RequestRecord.take`
(count, times, end), `StreamEncoder.take` (SSE bytes), `Exchange.stream`. Invariant: however a
request ends, its record ends once, its stream ends with the encoder's last events, and nothing of
it is left in the engine.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

from cadenza.errors import CadenzaError
from cadenza.events import FinishReason
from cadenza.frontend.output_processor import OutputProcessor, describe_fault
from cadenza.outputs import CompletionOutput, RequestOutput
from cadenza.server.endpoints.generating import CallContext, CallRequest, GeneratingEndpoint
from cadenza.server.errors import ApiError, error_of, error_of_end, server_error
from cadenza.server.http_exchange import ClientLeftError, Exchange, Response
from cadenza.server.job import Job
from cadenza.server.request_log import RequestRecord
from cadenza.server.served_model import ServedModel
from cadenza.server.service import Service
from cadenza.server.sse import AnswerEncoder, AnswerHead, StreamEncoder

logger = logging.getLogger("cadenza.server")

INLINE_BYTES = 16 << 10
"""Larger bodies are decoded on a thread, where all prompts are tokenised, instead of on the event
loop."""

MAX_INLINE_OUTPUTS = 16
"""Answers to more prompts are encoded on a thread."""

EndError = Callable[[CompletionOutput], ApiError]
"""The answer to a request that was accepted and then failed, from the sample that did."""


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
        try:
            num_places = service.models.check_open()
            with service.calling(exchange.tenant, num_places):
                async with exchange.body() as body:
                    request = await self._read(body)
                del body
                exchange.extra_headers += service.ignored_names.headers(request.ignored)
                self._take_identity(exchange, request, record)
                await exchange.while_connected(self._serve(exchange, request, record))
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
            record.end(rest)
            service.take_answer(exchange.tenant, record.usage.completion_tokens)

    async def _read(self, body: bytes) -> CallRequest:
        options, read = self._service.options, self._endpoint.read
        if len(body) <= INLINE_BYTES:
            return read(body, options.limits, options.unknown_fields)
        return await self._service.work.do(
            "generate", len(body), lambda: read(body, options.limits, options.unknown_fields)
        )

    def _take_identity(
        self, exchange: Exchange, request: CallRequest, record: RequestRecord
    ) -> None:
        if request.request_id is not None:
            self._service.check_id(request.request_id)
            exchange.request_id = record.request_id = request.request_id
        record.user = request.user_label

    async def _serve(self, exchange: Exchange, request: CallRequest, record: RequestRecord) -> None:
        service = self._service
        model = service.models.find(request.model)
        record.counts = model.counts
        request.enter(
            CallContext(
                tenant=exchange.tenant,
                request_id=exchange.request_id,
                responses=service.responses,
            )
        )
        async with service.models.using(model, request.num_bytes):
            await self._answer(exchange, request, model, record)

    async def _answer(
        self,
        exchange: Exchange,
        request: CallRequest,
        model: ServedModel,
        record: RequestRecord,
    ) -> None:
        """Answers by a model that is loaded."""
        service = self._service
        check = model.check_ready()
        head = AnswerHead(
            request_id=exchange.request_id,
            created=int(service.options.now()),
            model=request.model or model.name,
            system_fingerprint=model.system_fingerprint,
            times=record.times,
        )
        immediate = request.immediate(head)
        if immediate is not None:
            await exchange.answer(Response(body=immediate))
            return
        with model.preparing(check.limits):
            try:
                prepared = await service.work.do(
                    "form" if request.has_form else "generate",
                    request.num_bytes,
                    lambda: service.prepare(request, model, exchange.tenant, check),
                )
            except CadenzaError as error:
                raise error_of(error, model.engine_state, request.param_of) from error
            service.check_id(exchange.request_id)
            structured = prepared[0].request.params.structured if prepared else None
            formats = model.text.ignored_formats(structured)
            exchange.extra_headers += service.ignored_names.format_headers(formats)
            job = service.submit(prepared, model, exchange.tenant, record)
        streamed = request.stream_encoder(head, record.usage, model.text)
        encoder = streamed or request.encoder(head, record.usage, model.text)
        end_error = partial(error_of_end, monitor=model.monitor, param_of=request.param_of)
        with (
            closing(encoder),
            service.opened(exchange.request_id, model, exchange.tenant, job),
        ):
            async with job:
                if streamed is None:
                    outputs = await self._finish(job, record, end_error)
                    await exchange.answer(Response(body=await self._encode(encoder, outputs)))
                else:
                    await self._stream(exchange, job, streamed, record, end_error)

    async def _encode(self, encoder: AnswerEncoder, outputs: list[RequestOutput]) -> bytes:
        if len(outputs) <= MAX_INLINE_OUTPUTS:
            return encoder.whole(outputs)
        service = self._service
        try:
            return await service.work.do("encode", 0, lambda: encoder.whole(outputs))
        except CadenzaError as error:  # the server is ending
            raise error_of(error, "draining") from error

    async def _finish(
        self, job: Job, record: RequestRecord, end_error: EndError
    ) -> list[RequestOutput]:
        """Waits for the end of a call whose answer is sent whole; the outputs in their order."""
        found: dict[int, OutputProcessor | RequestOutput] = {}
        while job.num_unfinished:
            for place, request, outputs in await job.news():
                failed = record.take(place, request, outputs)
                if failed is not None:
                    raise end_error(failed)
                found[place] = request
        wholes: list[RequestOutput] = []
        for _, each in sorted(found.items()):
            whole = each.output() if isinstance(each, OutputProcessor) else each
            wholes.append(replace(whole, outputs=tuple(await self._checked(each, whole.outputs))))
        return wholes

    async def _stream(
        self,
        exchange: Exchange,
        job: Job,
        encoder: StreamEncoder,
        record: RequestRecord,
        end_error: EndError,
    ) -> None:
        await exchange.start_stream()
        opening = encoder.opening()
        if opening:
            await exchange.stream(opening)
        events = b""
        try:
            while job.num_unfinished:
                news = await job.news(exchange.limits.keep_alive_s)
                made: list[bytes] = [] if news else [encoder.silence()]
                for place, request, outputs in news:
                    failed = record.take(place, request, outputs)
                    if failed is not None:
                        raise end_error(failed)
                    checked = await self._checked(request, outputs)
                    made.append(encoder.take(place, request, checked))
                events = b"".join(made)
                if events and job.num_unfinished:
                    await exchange.stream(events)
            events += encoder.closing()
        except ApiError as error:
            record.status, events = error.status, encoder.failure(error)
        except Exception as error:  # noqa: BLE001  logged without what the client sent
            log_unexpected(error)
            record.status, events = 500, encoder.failure(server_error())
        await exchange.end_stream(events)

    async def _checked(
        self, request: OutputProcessor | RequestOutput, outputs: Sequence[CompletionOutput]
    ) -> Sequence[CompletionOutput]:
        """Outputs that end with a form whose grammar does not hold all of it are checked, on a
        thread."""
        if not isinstance(request, OutputProcessor) or request.answer_schema is None:
            return outputs
        if all(each.finish_reason is None for each in outputs):
            return outputs
        service = self._service
        try:
            return await service.work.do(
                "form", 0, lambda: [request.checked(each) for each in outputs]
            )
        except CadenzaError as error:  # the server is ending
            raise error_of(error, "draining") from error


def log_unexpected(error: Exception) -> None:
    """Logs an exception's type and place, without what the client sent."""
    logger.error("unexpected error in the server: %s", describe_fault(error))
