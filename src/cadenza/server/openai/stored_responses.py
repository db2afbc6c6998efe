"""Stored responses: reading, cancelling and deleting them. Invariant: a tenant reaches its own
responses only."""

from collections.abc import Mapping
from typing import Any

import msgspec

from cadenza.server.errors import invalid_value, not_built, response_not_found
from cadenza.server.fields.types import OneOf, Schema, or_null
from cadenza.server.http.exchange import Exchange, Response, send_object
from cadenza.server.openai.responses import RESPONSE_ANSWER, RESPONSE_PREFIX
from cadenza.server.openapi import TEXT, AnswerSchema, ApiRoute, list_of, object_of, one_of
from cadenza.server.response_store import StoredResponse
from cadenza.server.service import Service

MAX_LISTED, NUM_LISTED = 100, 20
_ORDERS = ("asc", "desc")
CANCEL_S = 5.0
"""How long an answer to a cancellation waits for the response to end."""


async def _response(service: Service, exchange: Exchange) -> None:
    query = exchange.query(_RESPONSE_QUERY)
    if query.get("stream", "false") != "false":
        raise not_built("stream", "streaming a stored response", ("false",))
    await exchange.answer(Response(body=_find(service, exchange).body))


async def _delete(service: Service, exchange: Exchange) -> None:
    found = _find(service, exchange)
    if found.is_open:
        service.abort(_request_id(found), exchange.tenant)
        await service.responses.wait_end(exchange.tenant, found.id, CANCEL_S)
    service.responses.delete(exchange.tenant, found.id)
    await send_object(exchange, {"id": found.id, "object": "response", "deleted": True})


async def _cancel(service: Service, exchange: Exchange) -> None:
    found = _find(service, exchange)
    if not found.is_open:
        raise invalid_value("the response has ended; only one in progress can be cancelled", "id")
    service.abort(_request_id(found), exchange.tenant)
    await service.responses.wait_end(exchange.tenant, found.id, CANCEL_S)
    await exchange.answer(Response(body=_find(service, exchange).body))


async def _input_items(service: Service, exchange: Exchange) -> None:
    query = exchange.query(_LIST_QUERY)
    limit = _limit(query.get("limit"))
    order = OneOf(_ORDERS).check("order", query.get("order", "desc"))
    items: list[dict[str, Any]] = msgspec.json.decode(_find(service, exchange).input)
    if order == "desc":
        items.reverse()
    after = query.get("after")
    if after is not None:
        place = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise invalid_value("after is the id of no input item of this response", "after")
        items = items[place + 1 :]
    page = items[:limit]
    listed = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }
    await send_object(exchange, listed)


def _find(service: Service, exchange: Exchange) -> StoredResponse:
    """Raises ApiError (404)."""
    response_id: str = exchange.path_params["id"]
    found = service.responses.find(exchange.tenant, response_id)
    if found is None:
        raise response_not_found(response_id)
    return found


def _request_id(response: StoredResponse) -> str:
    return response.id.removeprefix(RESPONSE_PREFIX)


def _limit(text: str | None) -> int:
    if text is None:
        return NUM_LISTED
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_LISTED))
    if not is_number or not 1 <= int(text) <= MAX_LISTED:
        raise invalid_value(f"limit must be a number from 1 to {MAX_LISTED}", "limit")
    return int(text)


_RESPONSE_QUERY: Mapping[str, Schema] = {"stream": {"type": "boolean", "enum": [False]}}
_LIST_QUERY: Mapping[str, Schema] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": NUM_LISTED},
    "order": {**one_of(*_ORDERS), "default": "desc"},
    "after": TEXT,
}
_PATH = "/v1/responses/{id}"
_DELETED = object_of({"id": TEXT, "object": one_of("response"), "deleted": {"type": "boolean"}})
_ITEM_LIST = object_of(
    {
        "object": one_of("list"),
        "data": list_of({"type": "object"}),
        "first_id": or_null(TEXT),
        "last_id": or_null(TEXT),
        "has_more": {"type": "boolean"},
    }
)

STORED_RESPONSE_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "response",
        "GET",
        _PATH,
        "A stored response.",
        RESPONSE_ANSWER,
        _response,
        statuses=(404,),
        query=_RESPONSE_QUERY,
    ),
    ApiRoute(
        "response_delete",
        "DELETE",
        _PATH,
        "Forget a stored response; end it, if it is in progress.",
        AnswerSchema("ResponseDeleted", _DELETED),
        _delete,
        statuses=(404,),
    ),
    ApiRoute(
        "response_cancel",
        "POST",
        f"{_PATH}/cancel",
        "End a response in progress.",
        RESPONSE_ANSWER,
        _cancel,
        statuses=(404,),
    ),
    ApiRoute(
        "response_input_items",
        "GET",
        f"{_PATH}/input_items",
        "The input items of a stored response.",
        AnswerSchema("ResponseItemList", _ITEM_LIST),
        _input_items,
        statuses=(404,),
        query=_LIST_QUERY,
    ),
)
