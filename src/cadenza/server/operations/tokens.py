"""/tokenize, /detokenize, and counts of messages' tokens; no engine. Invariant: what a body can
hold is counted, whatever the context."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from cadenza.errors import CadenzaError
from cadenza.frontend.prepared_request import ChatPrompt
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.media.image_input import need_files
from cadenza.server.anthropic.messages import MessagesBody
from cadenza.server.errors import beyond_context, invalid_value
from cadenza.server.fields.body import Body, optional, required
from cadenza.server.fields.messages import ConversationBody, chat_messages
from cadenza.server.fields.sampling import MAX_PROMPT_CHARS, MAX_PROMPT_TOKENS
from cadenza.server.fields.types import Boolean, String, TokenIds, or_null
from cadenza.server.http.exchange import Exchange, Response
from cadenza.server.openapi import (
    COUNT,
    TEXT,
    AnswerSchema,
    ApiRoute,
    RouteHandler,
    list_of,
    object_of,
)
from cadenza.server.served_model import ServedModel
from cadenza.server.service import Service

Result = TypeVar("Result")
BodyT = TypeVar("BodyT", bound=Body)


class TokenizeBody(ConversationBody):
    """A prompt, or a conversation that is rendered through the chat template."""

    prompt = optional(String(max_chars=MAX_PROMPT_CHARS), "The text; or give messages.")
    messages = optional(chat_messages, "A conversation, rendered through the chat template.")
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
            if text.prompts.takes_images:
                need_files(self.messages)
            kwargs = {**text.prompts.known(self.chat_template_kwargs), **self.template_kwargs()}
            conversation = ChatPrompt(messages=self.messages, template_kwargs=kwargs)
            has_special = bool(self.add_special_tokens)
            _, ids = text.render_chat(conversation, add_special_tokens=has_special)
            return ids
        assert self.prompt is not None, "it was checked to be there"
        return text.encode(self.prompt, add_special_tokens=self.add_special_tokens is not False)


class DetokenizeBody(Body):
    """Token ids."""

    tokens = required(TokenIds(MAX_PROMPT_TOKENS), "Token ids.")


class CountTokensBody(MessagesBody):
    """A message whose tokens are counted."""


async def _tokenize(service: Service, exchange: Exchange) -> None:
    body, model = await _read(service, exchange, TokenizeBody)
    body.check_together()
    await _answer(service, exchange, body.num_bytes, lambda: _tokenized(body, model))


async def _count(service: Service, exchange: Exchange) -> None:
    body, model = await _read(service, exchange, CountTokensBody)
    body.check_conversation()
    await _answer(
        service,
        exchange,
        body.num_bytes,
        lambda: {"input_tokens": body.conversation().count(model.text)},
    )


async def _detokenize(service: Service, exchange: Exchange) -> None:
    body, model = await _read(service, exchange, DetokenizeBody)
    _check_tokens(body.tokens, model)
    await _answer(
        service, exchange, body.num_bytes, lambda: {"prompt": model.text.decode(body.tokens)}
    )


async def _read(
    service: Service, exchange: Exchange, body_type: type[BodyT]
) -> tuple[BodyT, ServedModel]:
    unknown = service.options.unknown_fields
    async with exchange.body() as raw:
        body = await _work(service, exchange, len(raw), lambda: body_type.read(raw, unknown))
    exchange.extra_headers += service.ignored_names.headers(body.ignored)
    return body, service.models.find(body.model)


async def _answer(
    service: Service, exchange: Exchange, num_body_bytes: int, make: Callable[[], dict[str, Any]]
) -> None:
    answer = await _work(service, exchange, num_body_bytes, lambda: msgspec.json.encode(make()))
    await exchange.answer(Response(body=answer))


async def _work(
    service: Service, exchange: Exchange, num_body_bytes: int, work: Callable[[], Result]
) -> Result:
    async def do() -> Result:
        return await service.work.do("tokenize", num_body_bytes, work)

    with service.tokenizing():
        try:
            return await exchange.while_connected(service.images.with_files(do))
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


def _tokenized(body: TokenizeBody, model: ServedModel) -> dict[str, Any]:
    most = None if model.limits is None else model.limits.max_model_len
    ids = body.encode(model.text)
    found: dict[str, Any] = {"count": len(ids), "max_model_len": most, "tokens": ids}
    if body.return_token_strs:
        found["token_strs"] = [model.text.piece_of(token_id) for token_id in ids]
    return found


_TOKENIZED = object_of({"count": COUNT, "max_model_len": or_null(COUNT), "tokens": list_of(COUNT)})


def _route(
    path: str, summary: str, answers: AnswerSchema, handler: RouteHandler, body: type[Body]
) -> ApiRoute:
    statuses = (400, 413, 415, 404, 429, 500)
    name = path.rpartition("/")[2]
    return ApiRoute(name, "POST", path, summary, answers, handler, statuses=statuses, body=body)


TOKEN_ROUTES: tuple[ApiRoute, ...] = (
    _route(
        "/tokenize",
        "Text to token ids.",
        AnswerSchema("Tokenized", _TOKENIZED),
        _tokenize,
        TokenizeBody,
    ),
    _route(
        "/detokenize",
        "Token ids to text.",
        AnswerSchema("Detokenized", object_of({"prompt": TEXT})),
        _detokenize,
        DetokenizeBody,
    ),
    _route(
        "/v1/messages/count_tokens",
        "The number of a message's tokens.",
        AnswerSchema("TokenCount", object_of({"input_tokens": COUNT})),
        _count,
        CountTokensBody,
    ),
)
