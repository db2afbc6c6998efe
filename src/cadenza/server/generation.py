"""The handler of every endpoint that calls the engine: from a body to its answer or stream.

Owns the order: readiness, body, model and its load, tokenising, submitting, answering. A token's
way through a stream is `OpenCall.next_updates` (what is new of the call's requests),
`RequestRecord.take` (count, times, end), `StreamEncoder.take` (SSE bytes), `Exchange.stream`.
Invariant: however a request ends, its record ends once, its stream ends with the encoder's last
events, and nothing of it is left in the engine.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from hashlib import blake2b

from cadenza.engine.request_check import RequestCheck
from cadenza.errors import CadenzaError
from cadenza.events import FinishReason
from cadenza.frontend.output_processor import OutputProcessor, describe_fault
from cadenza.frontend.prepared_request import PreparedRequest, Terms
from cadenza.outputs import CompletionOutput, RequestOutput
from cadenza.server.endpoints.generating import CallContext, CallRequest, GeneratingEndpoint
from cadenza.server.errors import (
    ApiError,
    Headers,
    error_of,
    error_of_end,
    invalid_value,
    queue_full,
    server_error,
)
from cadenza.server.http_exchange import ClientDisconnected, Exchange, Handler, Response
from cadenza.server.request_log import RequestRecord, Usage
from cadenza.server.served_model import OpenCall, ServedModel
from cadenza.server.service import Service
from cadenza.server.sse import AnswerEncoder, AnswerHead, StreamEncoder
from cadenza.server.tenants import TenantUse
from cadenza.tenant import Tenant

logger = logging.getLogger("cadenza.server")

INLINE_BYTES = 16 << 10
"""Larger bodies are decoded on a thread, where all prompts are tokenised, instead of on the event
loop."""

MAX_INLINE_OUTPUTS = 16
"""Answers to more prompts are encoded on a thread."""

SPEC_PREFILL = "x-cadenza-spec-prefill"
"""The header that says how much of the prompts is computed."""

EndError = Callable[[CompletionOutput], ApiError]
"""The answer to a request that was accepted and then failed, from the sample that did."""


class Generation:
    """Handles one endpoint's requests."""

    def __init__(self, service: Service, endpoint: GeneratingEndpoint) -> None:
        self._service = service
        self._endpoint = endpoint

    async def __call__(self, exchange: Exchange) -> None:
        service = self._service
        begin_trace = service.options.begin_trace
        record = RequestRecord(
            request_id=exchange.request_id,
            endpoint=self._endpoint.route.name,
            counts=service.counts,
            clock=service.options.clock,
            is_logged=service.options.is_logging_requests,
            trace=None if begin_trace is None else begin_trace(exchange),
        )
        rest: FinishReason = "error"
        try:
            num_places = service.models.check_open()
            with service.tenants.calling(exchange.tenant, num_places) as use:
                service.models.check_turn(use.tenant)
                async with exchange.body() as body:
                    request = await self._read(body)
                del body
                exchange.extra_headers += service.ignored_names.headers(request.ignored)
                if request.request_id is not None:
                    service.check_id(request.request_id)
                    exchange.request_id = record.request_id = request.request_id
                record.user = request.user_label
                model = service.models.find(request.model)
                record.counts = model.counts
                model.check_turn(use.tenant, request.priority or 0)
                try:
                    await exchange.while_connected(
                        self._serve(exchange, request, model, record, use)
                    )
                finally:
                    use.take_answer(record.usage.completion_tokens)
        except (ClientDisconnected, asyncio.CancelledError):
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

    async def _read(self, body: bytes) -> CallRequest:
        limits, unknown = self._service.limits, self._service.options.unknown_fields
        read = self._endpoint.read
        if len(body) <= INLINE_BYTES:
            return read(body, limits, unknown)
        return await self._service.work.do(
            "generate", len(body), lambda: read(body, limits, unknown)
        )

    async def _serve(
        self,
        exchange: Exchange,
        request: CallRequest,
        model: ServedModel,
        record: RequestRecord,
        use: TenantUse,
    ) -> None:
        service = self._service
        request.enter(
            CallContext(
                tenant=exchange.tenant,
                request_id=exchange.request_id,
                responses=service.responses,
                seal=service.seal,
                engine=lambda: model.engine,
                fingerprint=model.fingerprint,
            )
        )
        async with service.models.using(model, request.num_bytes):
            await self._answer(exchange, request, model, record, use)

    async def _answer(
        self,
        exchange: Exchange,
        request: CallRequest,
        model: ServedModel,
        record: RequestRecord,
        use: TenantUse,
    ) -> None:
        """Answers by a model that is loaded."""
        service = self._service
        check = model.check_ready()
        terms = admit(request, model, use.tenant, check)
        head = AnswerHead(
            request_id=exchange.request_id,
            created=int(service.options.now()),
            model=model.names.in_answer(request.model),
            text=model.text,
            usage=record.usage,
            system_fingerprint=model.system_fingerprint,
            times=record.times,
            now=service.options.now,
        )
        immediate = request.immediate(head)
        if immediate is not None:
            await exchange.answer(Response(body=immediate))
            return
        with model.preparing(check.limits):
            try:
                prepared = await self._prepared(request, model, terms)
            except CadenzaError as error:
                raise error_of(error, model.engine_state, request.param_of) from error
            head = replace(head, system_fingerprint=_fingerprint_of(prepared, model))
            service.check_id(exchange.request_id)
            structured = prepared[0].request.params.structured if prepared else None
            formats = model.text.ignored_formats(structured)
            exchange.extra_headers += service.ignored_names.format_headers(formats)
            if record.trace is not None:
                prepared = record.trace.take(prepared, model.name)
            call = OpenCall(prepared, model, use)
            _submit(call, prepared, record, model)
        encoder = request.encoder(head)
        end_error = partial(error_of_end, monitor=model.engine, param_of=request.param_of)
        with closing(encoder), service.opened(exchange.request_id, call):
            async with call:
                if not (request.is_streamed and isinstance(encoder, StreamEncoder)):
                    outputs = await self._finish(call, record, end_error)
                    exchange.extra_headers += kept_headers(record.usage)
                    await exchange.answer(Response(body=await self._encode(encoder, outputs)))
                else:
                    await self._stream(exchange, call, encoder, record, end_error)

    async def _prepared(
        self, request: CallRequest, model: ServedModel, terms: Terms
    ) -> list[PreparedRequest]:
        """The call's requests, with the pixels of their images. Raises CadenzaError, ApiError."""
        service = self._service
        lane = "form" if request.has_form else "generate"

        async def make() -> list[PreparedRequest]:
            return await service.work.do(
                lane, request.num_bytes, lambda: request.prepare(model.text, terms)
            )

        prepared = await service.images.with_files(make)
        if all(each.pending is None for each in prepared):
            return prepared
        await service.images.open(prepared, model.text)
        return await service.work.do(
            lane,
            request.num_bytes,
            lambda: [model.text.completed(each, terms) for each in prepared],
        )

    async def _encode(self, encoder: AnswerEncoder, outputs: list[RequestOutput]) -> bytes:
        if len(outputs) <= MAX_INLINE_OUTPUTS:
            return encoder.whole(outputs)
        return await self._service.work.do("encode", 0, lambda: encoder.whole(outputs))

    async def _finish(
        self, call: OpenCall, record: RequestRecord, end_error: EndError
    ) -> list[RequestOutput]:
        """Waits for the end of a call whose answer is sent whole; the outputs in their order."""
        found: dict[int, OutputProcessor | RequestOutput] = {}
        while call.num_unfinished:
            for place, request, outputs in await call.next_updates():
                failed = record.take(place, request, outputs)
                if failed is not None:
                    raise end_error(failed)
                found[place] = request
        wholes: list[RequestOutput] = []
        for _, each in sorted(found.items()):
            whole = each.output() if isinstance(each, OutputProcessor) else each
            outputs = self._sealed(await self._checked(each, whole.outputs), call)
            wholes.append(replace(whole, outputs=tuple(outputs)))
        return wholes

    async def _stream(
        self,
        exchange: Exchange,
        call: OpenCall,
        encoder: StreamEncoder,
        record: RequestRecord,
        end_error: EndError,
    ) -> None:
        exchange.extra_headers += kept_headers(record.usage)
        await exchange.start_stream()
        opening = encoder.opening()
        if opening:
            await exchange.stream(opening)
        events = b""
        try:
            while call.num_unfinished:
                updates = await call.next_updates(exchange.limits.keep_alive_s)
                made: list[bytes] = [] if updates else [encoder.silence()]
                for place, request, outputs in updates:
                    failed = record.take(place, request, outputs)
                    if failed is not None:
                        raise end_error(failed)
                    checked = self._sealed(await self._checked(request, outputs), call)
                    made.append(encoder.take(place, request, checked))
                events = b"".join(made)
                if events and call.num_unfinished:
                    await exchange.stream(events)
            events += encoder.closing()
        except ApiError as error:
            record.status, events = error.status, encoder.failure(error)
        except Exception as error:  # noqa: BLE001  logged without what the client sent
            log_unexpected(error)
            record.status, events = 500, encoder.failure(server_error())
        await exchange.end_stream(events)

    def _sealed(
        self, outputs: Sequence[CompletionOutput], call: OpenCall
    ) -> Sequence[CompletionOutput]:
        """The outputs, their receipts with this server's seal."""
        if all(each.receipt is None for each in outputs):
            return outputs
        seal, tenant = self._service.seal, call.use.tenant.name
        return [
            each
            if each.receipt is None
            else replace(each, receipt=seal.sealed(each.receipt, tenant))
            for each in outputs
        ]

    async def _checked(
        self, request: OutputProcessor | RequestOutput, outputs: Sequence[CompletionOutput]
    ) -> Sequence[CompletionOutput]:
        """Outputs that end with a form whose grammar does not hold all of it are checked, on a
        thread."""
        if not isinstance(request, OutputProcessor) or request.answer_schema is None:
            return outputs
        if all(each.finish_reason is None for each in outputs):
            return outputs
        return await self._service.work.do(
            "form", 0, lambda: [request.checked(each) for each in outputs]
        )


class OneAtATime:
    """Has `handler` answer one request at a time; another one is told `busy` meanwhile."""

    def __init__(self, handler: Handler, busy: str) -> None:
        self._handler = handler
        self._busy = busy
        self._is_busy = False

    async def __call__(self, exchange: Exchange) -> None:
        """Raises ApiError (429) beside what the handler does."""
        if self._is_busy:
            raise queue_full(message=self._busy)
        self._is_busy = True
        try:
            await self._handler(exchange)
        finally:
            self._is_busy = False


def admit(call: CallRequest, model: ServedModel, tenant: Tenant, check: RequestCheck) -> Terms:
    """On which terms a call's requests are made. Raises ApiError (400)."""
    if call.request_options.has_receipt and model.fingerprint() is None:
        raise invalid_value("receipt needs an engine whose fingerprint is known", "receipt")
    call.check_size(check.hidden_size)
    return Terms(
        check=check,
        tenant=tenant,
        cache_salt=_salt(tenant.name, call.cache_salt or ""),
        priority=call.priority or 0,
        opens_images=False,
    )


def _fingerprint_of(prepared: list[PreparedRequest], model: ServedModel) -> str | None:
    """That of thinned prompts if one of the call's is."""
    whole = model.fingerprint()
    if whole is None:
        return None
    requests = [each.request for each in prepared]
    thinned = next((each for each in requests if each.sparse_prefill is not None), None)
    return (whole if thinned is None else model.text.sparse.fingerprint_of(thinned, whole)).digest


def kept_headers(usage: Usage) -> Headers:
    """How much of the call's prompts is computed, where sparse prefill was asked for. At the start
    of a stream it is what is planned."""
    found = usage.kept_tokens
    if not found:
        return ()
    text = f"kept={found['kept_tokens']}; of={found['kept_tokens'] + found['skipped_tokens']}"
    reason = found.get("whole_because")
    value = text if reason is None else f"{text}; reason={reason}"
    return ((SPEC_PREFILL, value),)


def _salt(tenant: str, cache_salt: str) -> str:
    """Tenants and salts share no cached prefix: no call can bring about another tenant's salt.

    It is the same after a restart, as are pages that were stored.
    """
    if not tenant and not cache_salt:
        return ""
    return blake2b(f"{tenant}\0{cache_salt}".encode(), digest_size=16).hexdigest()


def _submit(
    call: OpenCall, prepared: list[PreparedRequest], record: RequestRecord, model: ServedModel
) -> None:
    """Submits the first prompt; the call's context submits the others. Raises ApiError."""
    num_tokens = sum(len(each.request.prompt_token_ids) for each in prepared)
    call.use.check_rates(num_tokens)
    try:
        call.submit_next()
    except CadenzaError as error:
        raise model.error_of(error) from error
    call.use.take(num_tokens)
    record.start(prepared)


def log_unexpected(error: Exception) -> None:
    """Logs an exception's type and place, without what the client sent."""
    logger.error("unexpected error in the server: %s", describe_fault(error))
