"""The routes that are not about generating: health, models, tokens, cancel, metrics, description.

Knows `Service` and `Exchange`. Invariant: health, metrics and version are answered at once,
whatever the engine does, and give it no work.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

import cadenza
from cadenza.errors import CadenzaError, TextTooLongError
from cadenza.server.call import template_kwargs
from cadenza.server.errors import (
    beyond_context,
    invalid_value,
    unavailable,
)
from cadenza.server.exchange import Answer, Exchange
from cadenza.server.failures import UNAVAILABLE_CODES, error_of
from cadenza.server.fields import check_body
from cadenza.server.generation import Generation
from cadenza.server.json_body import read_json
from cadenza.server.metrics import CONTENT_TYPE
from cadenza.server.openapi import describe_api
from cadenza.server.service import Service

Handler = Callable[[Exchange], Awaitable[None]]
Result = TypeVar("Result")


def make_handlers(service: Service) -> Mapping[str, Handler]:
    """By the names of the table of routes."""
    handlers = Handlers(service)
    return {
        "chat": Generation(service, "chat"),
        "completions": Generation(service, "completions"),
        "cancel": handlers.cancel,
        "models": handlers.models,
        "model": handlers.model,
        "tokenize": handlers.tokenize,
        "detokenize": handlers.detokenize,
        "health": handlers.ready,
        "live": handlers.live,
        "ready": handlers.ready,
        "ping": handlers.ready,
        "ping_post": handlers.ready,
        "load": handlers.load,
        "tokenizer_info": handlers.tokenizer_info,
        "metrics": handlers.metrics,
        "version": handlers.version,
        "openapi": handlers.openapi,
    }


class Handlers:
    """One method a route."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._description = msgspec.json.encode(
            describe_api(
                needs_key=not service.options.keys.is_open,
                unknown_fields=service.options.unknown_fields,
            )
        )

    async def live(self, exchange: Exchange) -> None:
        await _send(exchange, {"status": "live"})

    async def ready(self, exchange: Exchange) -> None:
        status = self._service.monitor.status()
        if self._service.is_draining:
            raise unavailable("draining")
        if not status.is_ready:
            raise unavailable(UNAVAILABLE_CODES[status.state], status.retry_after_s, status.cause)
        await _send(exchange, {"status": "ready"})

    async def load(self, exchange: Exchange) -> None:
        await _send(exchange, {"server_load": self._service.num_open})

    async def tokenizer_info(self, exchange: Exchange) -> None:
        try:
            described = self._service.text.describe_tokenizer()
        except CadenzaError as error:
            raise error_of(error, self._service.monitor.status().state) from error
        await _send(exchange, described)

    async def version(self, exchange: Exchange) -> None:
        await _send(exchange, {"version": cadenza.__version__})

    async def metrics(self, exchange: Exchange) -> None:
        body = self._service.metrics.render()
        await exchange.answer(Answer(body=body, content_type=CONTENT_TYPE))

    async def openapi(self, exchange: Exchange) -> None:
        await exchange.answer(Answer(body=self._description))

    async def models(self, exchange: Exchange) -> None:
        names = self._service.options.model_names
        await _send(exchange, {"object": "list", "data": [self._card(name) for name in names]})

    async def model(self, exchange: Exchange) -> None:
        await _send(exchange, self._card(self._service.check_model(exchange.path_params["id"])))

    async def cancel(self, exchange: Exchange) -> None:
        request_id: str = exchange.path_params["id"]
        self._service.abort(request_id, exchange.tenant)
        await _send(exchange, {"id": request_id, "object": "request", "cancelled": True})

    async def tokenize(self, exchange: Exchange) -> None:
        values, num_bytes = await self._read(exchange, "tokenize")
        if ("prompt" in values) == ("messages" in values):
            raise invalid_value("give either prompt or messages", "prompt")
        _check_template_fields(values)
        body = await self._work(exchange, num_bytes, lambda: self._tokenize(values))
        await exchange.answer(Answer(body=body))

    async def detokenize(self, exchange: Exchange) -> None:
        values, num_bytes = await self._read(exchange, "detokenize")
        self._check_tokens(values["tokens"])
        body = await self._work(exchange, num_bytes, lambda: self._detokenize(values))
        await exchange.answer(Answer(body=body))

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        """A tokenizer has no text, and no error, for ids that it lacks. Raises ApiError (400)."""
        check = self._service.monitor.status().request_check
        if check is not None and len(token_ids) > check.limits.max_model_len:
            length = f"{len(token_ids)} tokens"
            raise beyond_context("tokens", length, check.limits.max_model_len)
        largest = max(token_ids, default=0)
        if check is not None and largest >= check.vocab_size:
            raise invalid_value(
                f"tokens holds the token id {largest}; this model's ids go from 0 to "
                f"{check.vocab_size - 1}",
                "tokens",
            )

    async def _read(
        self, exchange: Exchange, endpoint: Literal["tokenize", "detokenize"]
    ) -> tuple[dict[str, Any], int]:
        """The checked values, and the number of bytes that they came in."""
        unknown = self._service.options.unknown_fields
        async with exchange.body() as body:
            num_bytes = len(body)
            values = await self._work(
                exchange, num_bytes, lambda: check_body(endpoint, read_json(body), unknown)
            )
        self._service.check_model(values.get("model"))
        return values, num_bytes

    async def _work(
        self, exchange: Exchange, num_body_bytes: int, work: Callable[[], Result]
    ) -> Result:
        service = self._service
        with service.tokenizing():
            try:
                doing = service.work.do("tokenize", num_body_bytes, work)
                return await exchange.while_connected(doing)
            except CadenzaError as error:
                raise error_of(error, service.monitor.status().state) from error

    def _tokenize(self, values: Mapping[str, Any]) -> bytes:
        """The answer's body. Raises ApiError (400) for a text that no context holds."""
        text = self._service.text
        limits = self._service.engine_limits()
        most = None if limits is None else limits.max_model_len
        try:
            ids = self._encode(values, most)
        except TextTooLongError as error:
            assert most is not None, "only then is there a length to be beyond"
            field = "messages" if "messages" in values else "prompt"
            raise beyond_context(field, error.length, most) from None
        found: dict[str, Any] = {"count": len(ids), "max_model_len": most, "tokens": ids}
        if values.get("return_token_strs"):
            found["token_strs"] = [text.piece_of(token_id) for token_id in ids]
        return msgspec.json.encode(found)

    def _encode(self, values: Mapping[str, Any], max_num_tokens: int | None) -> tuple[int, ...]:
        text = self._service.text
        if "messages" in values:
            _, ids = text.render_chat(
                values["messages"],
                template_kwargs=template_kwargs(values),
                max_num_tokens=max_num_tokens,
                add_special_tokens=values.get("add_special_tokens", False),
            )
            return ids
        special = values.get("add_special_tokens", True)
        return text.encode(
            values["prompt"], add_special_tokens=special, max_num_tokens=max_num_tokens
        )

    def _detokenize(self, values: Mapping[str, Any]) -> bytes:
        return msgspec.json.encode({"prompt": self._service.text.decode(values["tokens"])})

    def _card(self, name: str) -> dict[str, Any]:
        check = self._service.monitor.status().request_check
        return {
            "id": name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "cadenza",
            "root": self._service.options.model_names[0],
            "parent": None,
            "max_model_len": None if check is None else check.limits.max_model_len,
            "vocab_size": None if check is None else check.vocab_size,
        }


def _check_template_fields(values: Mapping[str, Any]) -> None:
    """Raises ApiError (400) where they do not go together, or with a plain prompt."""
    template_kwargs(values)
    if "messages" in values:
        return
    for name, nothing in _TEMPLATE_FIELDS.items():
        if values.get(name, nothing) != nothing:
            raise invalid_value(
                f"{name} goes with messages; a prompt is tokenised as it is: leave the field out",
                name,
            )


_TEMPLATE_FIELDS: Mapping[str, object] = {
    "add_generation_prompt": True,
    "continue_final_message": False,
    "chat_template_kwargs": {},
}
"""And the values that ask for nothing."""


async def _send(exchange: Exchange, value: object) -> None:
    await exchange.answer(Answer(body=msgspec.json.encode(value)))
