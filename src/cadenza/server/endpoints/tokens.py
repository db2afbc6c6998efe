"""/tokenize, /detokenize, and the counts of messages: text to token ids and back, no engine.

Owns their bodies and answers. Knows `Service` and `Exchange`. Invariant: what a body can hold is
counted, whatever the context.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from cadenza.errors import CadenzaError
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.server.endpoints.messages import MessagesBody
from cadenza.server.errors import beyond_context, invalid_value
from cadenza.server.http_exchange import Exchange, Handler, Response
from cadenza.server.openapi import COUNT, TEXT, AnswerSchema, ApiRoute, list_of, object_of
from cadenza.server.schemas.body import Body, optional, required
from cadenza.server.schemas.field_types import Boolean, String, TokenIds, or_null
from cadenza.server.schemas.messages import ConversationBody, Messages
from cadenza.server.schemas.prompts import MAX_PROMPT_CHARS, MAX_PROMPT_TOKENS
from cadenza.server.served_model import ServedModel
from cadenza.server.service import Service

Result = TypeVar("Result")
BodyT = TypeVar("BodyT", bound=Body)


class TokenizeBody(ConversationBody):
    """A prompt, or a conversation that is rendered through the chat template."""

    prompt = optional(String(max_chars=MAX_PROMPT_CHARS), "The text; or give messages.")
    messages = optional(Messages(), "A conversation, rendered through the chat template.")
    add_special_tokens = optional(
        Boolean(), "As for completions (default: true for prompt, false for messages)."
    )
    return_token_strs = optional(
        Boolean(), "Each token's piece of the vocabulary beside its id.", default=False
    )

    def check_together(self) -> None:
        """Raises ApiError (400) where the fields do not go together."""
        if (self.prompt is None) == (self.messages is None):
            raise invalid_value("give either prompt or messages", "prompt")
        self.template_kwargs()
        if self.messages is not None:
            return
        asked = {
            "add_generation_prompt": self.add_generation_prompt is False,
            "continue_final_message": self.continue_final_message,
            "chat_template_kwargs": bool(self.chat_template_kwargs),
        }
        for name, is_asked in asked.items():
            if is_asked:
                raise invalid_value(
                    f"{name} goes with messages; a prompt is tokenised as it is: leave the field "
                    f"out",
                    name,
                )

    def encode(self, text: TextFrontend) -> tuple[int, ...]:
        if self.messages is not None:
            _, ids = text.render_chat(
                self.messages,
                template_kwargs={
                    **text.read_by_template(self.chat_template_kwargs),
                    **self.template_kwargs(),
                },
                add_special_tokens=bool(self.add_special_tokens),
            )
            return ids
        assert self.prompt is not None, "it was checked to be there"
        return text.encode(self.prompt, add_special_tokens=self.add_special_tokens is not False)


class DetokenizeBody(Body):
    """Token ids."""

    tokens = required(TokenIds(MAX_PROMPT_TOKENS), "Token ids.")


class CountTokensBody(MessagesBody):
    """A message whose tokens are counted."""


class TokenHandlers:
    """One method for each of `TOKEN_ROUTES`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def by_route(self) -> Mapping[str, Handler]:
        return {
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
            "count_tokens": self._count,
        }

    async def _tokenize(self, exchange: Exchange) -> None:
        body, model = await self._read(exchange, TokenizeBody)
        body.check_together()
        answer = await self._work(exchange, body.num_bytes, lambda: _tokenized(body, model))
        await exchange.answer(Response(body=answer))

    async def _count(self, exchange: Exchange) -> None:
        body, model = await self._read(exchange, CountTokensBody)
        body.check_conversation()
        answer = await self._work(exchange, body.num_bytes, lambda: _counted(body, model))
        await exchange.answer(Response(body=answer))

    async def _detokenize(self, exchange: Exchange) -> None:
        body, model = await self._read(exchange, DetokenizeBody)
        _check_tokens(body.tokens, model)
        answer = await self._work(exchange, body.num_bytes, lambda: _detokenized(body, model))
        await exchange.answer(Response(body=answer))

    async def _read(self, exchange: Exchange, body_type: type[BodyT]) -> tuple[BodyT, ServedModel]:
        unknown = self._service.options.unknown_fields
        async with exchange.body() as raw:
            body = await self._work(exchange, len(raw), lambda: body_type.read(raw, unknown))
        exchange.extra_headers += self._service.ignored_names.headers(body.ignored)
        return body, self._service.models.find(body.model)

    async def _work(
        self, exchange: Exchange, num_body_bytes: int, work: Callable[[], Result]
    ) -> Result:
        service = self._service
        with service.tokenizing():
            try:
                doing = service.work.do("tokenize", num_body_bytes, work)
                return await exchange.while_connected(doing)
            except CadenzaError as error:
                raise service.models.first.error_of(error) from error


def _check_tokens(token_ids: Sequence[int], model: ServedModel) -> None:
    """A tokenizer silently skips unknown ids, so they are refused. Raises ApiError (400)."""
    check = model.request_check
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


def _tokenized(body: TokenizeBody, model: ServedModel) -> bytes:
    most = None if model.limits is None else model.limits.max_model_len
    ids = body.encode(model.text)
    found: dict[str, Any] = {"count": len(ids), "max_model_len": most, "tokens": ids}
    if body.return_token_strs:
        found["token_strs"] = [model.text.piece_of(token_id) for token_id in ids]
    return msgspec.json.encode(found)


def _counted(body: CountTokensBody, model: ServedModel) -> bytes:
    num_tokens = body.conversation().count(model.text)
    return msgspec.json.encode({"input_tokens": num_tokens})


def _detokenized(body: DetokenizeBody, model: ServedModel) -> bytes:
    return msgspec.json.encode({"prompt": model.text.decode(body.tokens)})


_STATUSES = (400, 413, 415, 404, 429, 500)

TOKEN_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        name="tokenize",
        method="POST",
        path="/tokenize",
        policy="key",
        summary="Text to token ids.",
        answers=AnswerSchema(
            name="Tokenized",
            schema=object_of(
                {
                    "count": COUNT,
                    "max_model_len": or_null(COUNT),
                    "tokens": list_of(COUNT),
                }
            ),
        ),
        statuses=_STATUSES,
        body=TokenizeBody,
    ),
    ApiRoute(
        name="detokenize",
        method="POST",
        path="/detokenize",
        policy="key",
        summary="Token ids to text.",
        answers=AnswerSchema(name="Detokenized", schema=object_of({"prompt": TEXT})),
        statuses=_STATUSES,
        body=DetokenizeBody,
    ),
    ApiRoute(
        name="count_tokens",
        method="POST",
        path="/v1/messages/count_tokens",
        policy="key",
        summary="The number of a message's tokens.",
        answers=AnswerSchema(name="TokenCount", schema=object_of({"input_tokens": COUNT})),
        statuses=_STATUSES,
        body=CountTokensBody,
    ),
)
