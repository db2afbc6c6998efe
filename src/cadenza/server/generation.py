"""The handler of endpoints that call the engine: read, admit, prepare, submit, answer. A token's
way: `OpenCall.next_updates`, `RequestRecord.take` (counts, times), `StreamEncoder.take`,
`Exchange.stream`. Invariant: a request's record ends once, its stream with the encoder's last
events, and the engine keeps nothing."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b

from cadenza.errors import CadenzaError
from cadenza.events import FinishReason
from cadenza.frontend.output_processor import OutputProcessor, describe_fault
from cadenza.frontend.prepared_request import PreparedRequest, Terms
from cadenza.outputs import CompletionOutput, RequestOutput
from cadenza.server.calls.endpoint import (
    AnswerEncoder,
    AnswerHead,
    CallContext,
    CallRequest,
    GeneratingEndpoint,
    StreamEncoder,
)
from cadenza.server.calls.record import RequestRecord, Usage
from cadenza.server.errors import (
    ApiError,
    Headers,
    error_of,
    error_of_end,
    invalid_value,
    queue_full,
    server_error,
)
from cadenza.server.http.exchange import ClientDisconnected, Exchange, Handler, Response
from cadenza.server.served_model import OpenCall, ServedModel, Updates
from cadenza.server.service import Service
from cadenza.server.tenants import TenantUse

logger = logging.getLogger("cadenza.server")

INLINE_BYTES = 16 << 10
"""Larger bodies are decoded on a thread, as all prompts are tokenised, not on the event loop."""

MAX_INLINE_OUTPUTS = 16  # answers to more prompts are encoded on a thread
SPEC_PREFILL = "x-cadenza-spec-prefill"  # the header that says how much of the prompts is computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """An admitted call: its model, tenant and terms; `head` is its answer's."""

    call: CallRequest
    model: ServedModel
    use: TenantUse
    record: RequestRecord
    terms: Terms
    head: AnswerHead

    def error_of_end(self, failed: CompletionOutput) -> ApiError:
        return error_of_end(failed, self.model.engine, self.call.param_of)


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
            endpoint=self._endpoint.name,
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
                call = await self._read(exchange, record)
                model = service.models.find(call.model)
                record.counts = model.counts
                model.check_turn(use.tenant, call.priority or 0)
                serving = self._serve(exchange, call, model, record, use)
                try:
                    await exchange.while_connected(serving)
                finally:
                    use.take(tokens=record.usage.completion_tokens)
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

    async def _read(self, exchange: Exchange, record: RequestRecord) -> CallRequest:
        service, read = self._service, self._endpoint.read
        limits, unknown = service.limits, service.options.unknown_fields
        async with exchange.body() as body:
            if len(body) <= INLINE_BYTES:
                call = read(body, limits, unknown)
            else:
                call = await service.work.do(
                    "generate", len(body), lambda: read(body, limits, unknown)
                )
        exchange.extra_headers += service.ignored_names.headers(call.ignored)
        if call.request_id is not None:
            service.check_id(call.request_id)
            exchange.request_id = record.request_id = call.request_id
        record.user = call.user_label
        return call

    async def _serve(
        self,
        exchange: Exchange,
        call: CallRequest,
        model: ServedModel,
        record: RequestRecord,
        use: TenantUse,
    ) -> None:
        service = self._service
        call.enter(
            CallContext(
                tenant=exchange.tenant,
                request_id=exchange.request_id,
                responses=service.responses,
                seal=service.seal,
                model=model,
            )
        )
        async with service.models.using(model, call.num_bytes):
            ticket = self._admit(call, model, record, use)
            immediate = call.immediate(ticket.head)
            if immediate is not None:
                await exchange.answer(Response(body=immediate))
                return
            with model.preparing():
                prepared = await self._prepared(ticket)
                opened = self._submitted(exchange, ticket, prepared)
            await self._answer(exchange, ticket, opened)

    def _admit(
        self, call: CallRequest, model: ServedModel, record: RequestRecord, use: TenantUse
    ) -> Ticket:
        service, check = self._service, model.check_ready()
        if call.request_options(model.text).has_receipt and model.fingerprint() is None:
            raise invalid_value("receipt needs an engine whose fingerprint is known", "receipt")
        call.check_size(check.hidden_size)
        terms = Terms(
            check=check,
            tenant=use.tenant,
            cache_salt=_salt(use.tenant.name, call.cache_salt or ""),
            priority=call.priority or 0,
            opens_images=False,
            seal=partial(service.seal.sealed, tenant=use.tenant.name),
        )
        head = AnswerHead(
            request_id=record.request_id,
            created=int(service.options.now()),
            model=model.names.in_answer(call.model),
            text=model.text,
            usage=record.usage,
            times=record.times,
            now=service.options.now,
        )
        return Ticket(call=call, model=model, use=use, record=record, terms=terms, head=head)

    async def _prepared(self, ticket: Ticket) -> list[PreparedRequest]:
        service, call, text = self._service, ticket.call, ticket.model.text
        lane = "form" if call.has_form else "generate"

        def do(work: Callable[[], list[PreparedRequest]]) -> Awaitable[list[PreparedRequest]]:
            return service.work.do(lane, call.num_bytes, work)

        try:
            prepared = await service.images.with_files(
                lambda: do(lambda: call.prepare(text, ticket.terms))
            )
            if all(each.pending is None for each in prepared):
                return prepared
            await service.images.open(prepared, text)
            return await do(lambda: [text.completed(each, ticket.terms) for each in prepared])
        except CadenzaError as error:
            raise error_of(error, ticket.model.engine_state, call.param_of) from error

    def _submitted(
        self, exchange: Exchange, ticket: Ticket, prepared: list[PreparedRequest]
    ) -> OpenCall:
        """Submits the first prompt; the call's context submits the others. Raises ApiError."""
        service, model, use, record = self._service, ticket.model, ticket.use, ticket.record
        service.check_id(exchange.request_id)
        structured = prepared[0].request.params.structured if prepared else None
        formats = model.text.ignored_formats(structured)
        exchange.extra_headers += service.ignored_names.format_headers(formats)
        if record.trace is not None:
            record.trace.take(prepared, model.name)
        num_tokens = sum(len(each.request.prompt_token_ids) for each in prepared)
        use.check_rates(num_tokens)
        try:
            call = OpenCall(prepared, model, use)
            call.submit_next()
        except CadenzaError as error:
            raise model.error_of(error) from error
        use.take(requests=1, tokens=num_tokens)
        record.start(prepared)
        return call

    async def _answer(self, exchange: Exchange, ticket: Ticket, call: OpenCall) -> None:
        head = replace(ticket.head, read_fingerprint=lambda: call.system_fingerprint)
        encoder = ticket.call.encoder(head)
        with closing(encoder), self._service.opened(exchange.request_id, call):
            async with call:
                if ticket.call.stream and isinstance(encoder, StreamEncoder):
                    await self._stream(exchange, call, encoder, ticket)
                    return
                outputs = await self._finish(call, ticket)
                exchange.extra_headers += kept_headers(ticket.head.usage)
                await exchange.answer(Response(body=await self._encode(encoder, outputs)))

    async def _encode(self, encoder: AnswerEncoder, outputs: list[RequestOutput]) -> bytes:
        if len(outputs) <= MAX_INLINE_OUTPUTS:
            return encoder.whole(outputs)
        return await self._service.work.do("encode", 0, lambda: encoder.whole(outputs))

    async def _finish(self, call: OpenCall, ticket: Ticket) -> list[RequestOutput]:
        """Waits for the end of a call whose answer is sent whole; the outputs in their order."""
        found: dict[int, OutputProcessor] = {}

        def take(updates: Updates) -> None:
            for index, request, outputs in updates:
                failed = ticket.record.take(index, request, outputs)
                if failed is not None:
                    raise ticket.error_of_end(failed)
                found[index] = request

        while call.num_unfinished:
            take(await call.next_updates(on_progress=take))
        wholes: list[RequestOutput] = []
        for _, each in sorted(found.items()):
            whole = each.output()
            outputs = await self._checked(each, whole.outputs)
            wholes.append(replace(whole, outputs=tuple(outputs)))
        return wholes

    async def _stream(
        self, exchange: Exchange, call: OpenCall, encoder: StreamEncoder, ticket: Ticket
    ) -> None:
        exchange.extra_headers += kept_headers(ticket.head.usage)
        await exchange.start_stream()
        opening = encoder.opening()
        if opening:
            await exchange.stream(opening)
        events = b""
        try:
            while call.num_unfinished:
                updates = await call.next_updates(exchange.limits.keep_alive_s)
                made: list[bytes] = [] if updates else [encoder.silence()]
                for index, request, outputs in updates:
                    failed = ticket.record.take(index, request, outputs)
                    if failed is not None:
                        raise ticket.error_of_end(failed)
                    checked = await self._checked(request, outputs)
                    made.append(encoder.take(index, request, checked))
                events = b"".join(made)
                if events and call.num_unfinished:
                    await exchange.stream(events)
            events += encoder.closing()
        except ApiError as error:
            ticket.record.status, events = error.status, encoder.failure(error)
        except Exception as error:  # noqa: BLE001  logged without what the client sent
            log_unexpected(error)
            ticket.record.status, events = 500, encoder.failure(server_error())
        await exchange.end_stream(events)

    async def _checked(
        self, request: OutputProcessor, outputs: Sequence[CompletionOutput]
    ) -> Sequence[CompletionOutput]:
        """Checks outputs at their end, on a thread, where the grammar does not hold all of the
        response format."""
        if request.answer_schema is None or all(each.finish_reason is None for each in outputs):
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
        """Raises ApiError (429) besides what the handler does."""
        if self._is_busy:
            raise queue_full(message=self._busy)
        self._is_busy = True
        try:
            await self._handler(exchange)
        finally:
            self._is_busy = False


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
    """Tenants and salts share no cached prefix: no call can bring about another tenant's salt. It
    is the same after a restart, as are pages that were stored."""
    if not tenant and not cache_salt:
        return ""
    return blake2b(f"{tenant}\0{cache_salt}".encode(), digest_size=16).hexdigest()


def log_unexpected(error: Exception) -> None:
    """Logs an exception's type and place, without what the client sent."""
    logger.error("unexpected error in the server: %s", describe_fault(error))
