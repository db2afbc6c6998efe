"""A response: its object, its events, and the routes of stored ones. Invariants: events are
numbered from 0 without a gap; a stream's last event has the items of the events before; a response
is stored once it has begun, and again when it has ended; a tenant reaches its own responses
only."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import msgspec

from cadenza.events import FinishReason
from cadenza.outputs import PartKind
from cadenza.server.calls.endpoint import AnswerHead, Block, BlockEncoder, BlockEvent, event_bytes
from cadenza.server.calls.record import Usage
from cadenza.server.errors import ApiError, invalid_value, not_built, response_not_found
from cadenza.server.fields.tools import ResponseTool, text_of_input
from cadenza.server.fields.types import OneOf, Schema, or_null
from cadenza.server.http.exchange import Exchange, Response, send_object
from cadenza.server.openapi import TEXT, AnswerSchema, ApiRoute, list_of, object_of, one_of
from cadenza.server.response_store import ResponseStore, StoredResponse
from cadenza.server.service import Service

RESPONSE_PREFIX = "resp_"
MAX_LISTED, NUM_LISTED = 100, 20
_ORDERS = ("asc", "desc")
CANCEL_S = 5.0  # how long an answer to a cancellation waits for the response to end

Status = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]

_STATUSES: dict[FinishReason, Status] = {
    "stop": "completed",
    "length": "incomplete",
    "abort": "cancelled",
    "error": "failed",
}
_PART_TYPES: dict[PartKind, str] = {"content": "output_text", "reasoning": "reasoning_text"}
_ITEM_PREFIXES: dict[PartKind, str] = {"content": "msg", "reasoning": "rs", "tool_call": "fc"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFrame:
    """What is known of a response before it begins."""

    fields: dict[str, Any]  # the object without status, output and usage
    input: bytes  # the items, with their ids, as JSON; only what is stored needs them
    tenant: str
    store: ResponseStore | None  # None: it is not stored
    # by their names in calls
    tools: Mapping[str, ResponseTool] = field(default_factory=dict[str, ResponseTool])


class ResponseEncoder(BlockEncoder):
    """The object and the events of a response."""

    def __init__(self, head: AnswerHead, frame: ResponseFrame) -> None:
        super().__init__(head)
        self._frame = frame
        self._has_failed = False
        self._num_events = 0
        self._put(self._object())

    def opening(self) -> bytes:
        begun = self._object()
        return self._event("created", response=begun) + self._event("in_progress", response=begun)

    def closing(self) -> bytes:
        name = "completed" if self._status == "completed" else "incomplete"
        return self._event(name, response=self._whole_object())

    def failure(self, error: ApiError) -> bytes:
        self._has_failed = True
        return self._event("failed", response=self._whole_object(error))

    def close(self) -> None:
        """Forgets the response if the client left before its end."""
        if self._status == "in_progress" and self._frame.store is not None:
            self._frame.store.delete(self._frame.tenant, self._frame.fields["id"])

    @property
    def _status(self) -> Status:
        if self._has_failed:
            return "failed"
        reason = None if self.ended is None else self.ended.finish_reason
        return "in_progress" if reason is None else _STATUSES[reason]

    def _whole_object(self, error: ApiError | None = None) -> dict[str, Any]:
        found = self._object(error)
        self._put(found)
        return found

    def _put(self, response: dict[str, Any]) -> None:
        frame = self._frame
        if frame.store is None:
            return
        stored = StoredResponse(
            id=frame.fields["id"],
            previous_id=frame.fields["previous_response_id"],
            input=frame.input,
            body=msgspec.json.encode(response),
            is_open=self._status == "in_progress",
        )
        frame.store.put(frame.tenant, stored)

    def _object(self, error: ApiError | None = None) -> dict[str, Any]:
        is_open, is_cut = self._status == "in_progress", self._status == "incomplete"
        return {
            **self._frame.fields,
            "system_fingerprint": self.head.system_fingerprint,
            "status": self._status,
            "error": None if error is None else _error_of_response(error),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(block) for block in self._reader.blocks],
            "usage": None if is_open else usage_object(self.head.usage),
            **self._reader.mark,
        }

    def _item(self, block: Block) -> dict[str, Any]:
        """A block as an output item; while it is open it has no text."""
        is_last = block.index == len(self._reader.blocks) - 1
        is_cut = is_last and self._status not in ("in_progress", "completed")
        status = "in_progress" if not block.is_ended else "incomplete" if is_cut else "completed"
        common = {"id": self._item_id(block), "status": status}
        if block.kind == "tool_call":
            return {**common, **self._call(block)}
        content = [_part(block, block.text)] if block.is_ended else []
        if block.kind == "reasoning":
            rest = {"summary": [], "content": content, "encrypted_content": None}
            return {**common, "type": "reasoning", **rest}
        return {**common, "type": "message", "role": "assistant", "content": content}

    def _call(self, block: Block) -> dict[str, Any]:
        """A call under the name and in the form of the tool that the client gave."""
        tool = self._frame.tools.get(block.name or "")
        called = {"call_id": block.call_id, "name": block.name if tool is None else tool.own_name}
        text = block.text if block.is_ended else ""
        if self._is_custom(block):
            text = text_of_input(text) if text else ""
            return {"type": "custom_tool_call", **called, "input": text}
        space = {} if tool is None or tool.namespace is None else {"namespace": tool.namespace}
        return {"type": "function_call", **called, "arguments": text, **space}

    def _is_custom(self, block: Block) -> bool:
        tool = self._frame.tools.get(block.name or "")
        return tool is not None and tool.kind == "custom"

    def _item_id(self, block: Block) -> str:
        prefix = "ctc" if self._is_custom(block) else _ITEM_PREFIXES[block.kind]
        return f"{prefix}_{self.head.request_id}_{block.index}"

    def _event(self, name: str, /, **members: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return event_bytes(f"response.{name}", {"sequence_number": number, **members})

    def _within(self, name: str, block: Block, /, **members: Any) -> bytes:
        indices: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind != "tool_call":
            indices["content_index"] = 0
        return self._event(name, **indices, **members)

    def _events_of(self, event: BlockEvent) -> Iterator[bytes]:
        block = event.block
        match event.kind:
            case "begin":
                yield self._whole_item("added", block)
                if block.kind != "tool_call":
                    yield self._within("content_part.added", block, part=_part(block, ""))
            case "text" if self._is_custom(block):
                return  # its text is known at its end
            case "text":
                rest: dict[str, Any] = {"logprobs": []} if block.kind == "content" else {}
                name = f"{_content_name(block)}.delta"
                yield self._within(name, block, delta=event.text, **rest)
            case "end":
                yield from self._end_content(block)
                yield self._whole_item("done", block)

    def _whole_item(self, name: str, block: Block) -> bytes:
        item = self._item(block)
        return self._event(f"output_item.{name}", output_index=block.index, item=item)

    def _end_content(self, block: Block) -> Iterator[bytes]:
        name = f"{_content_name(block)}.done"
        match block.kind:
            case "tool_call" if self._is_custom(block):
                text, name = text_of_input(block.text), "custom_tool_call_input"
                yield self._within(f"{name}.delta", block, delta=text)
                yield self._within(f"{name}.done", block, input=text)
            case "tool_call":
                called = self._call(block)["name"]
                yield self._within(name, block, name=called, arguments=block.text)
            case "reasoning":
                yield self._within(name, block, text=block.text)
            case "content":
                yield self._within(name, block, text=block.text, logprobs=[])
        if block.kind != "tool_call":
            yield self._within("content_part.done", block, part=_part(block, block.text))


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": sum(usage.cached.values()),
            "cache_write_tokens": 0,  # writing costs nothing, so that it is not counted
            **usage.image_tokens,
            **usage.kept_tokens,
            **usage.cache_miss,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _content_name(block: Block) -> str:
    return _PART_TYPES.get(block.kind, "function_call_arguments")


def _part(block: Block, text: str) -> dict[str, Any]:
    rest: dict[str, Any] = {"annotations": [], "logprobs": []} if block.kind == "content" else {}
    return {"type": _PART_TYPES[block.kind], "text": text, **rest}


def _error_of_response(error: ApiError) -> dict[str, Any]:
    code = "invalid_prompt" if error.status == 400 else "server_error"
    return {"code": code, "message": error.message}


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
        index = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if index is None:
            raise invalid_value("after is the id of no input item of this response", "after")
        items = items[index + 1 :]
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


_OBJECT: Schema = {"type": "object"}
RESPONSE_ANSWER = AnswerSchema(
    name="Response",
    schema=object_of(
        {
            "id": TEXT,
            "object": one_of("response"),
            "created_at": {"type": "integer"},
            "status": one_of(*get_args(Status)),
            "model": TEXT,
            "output": list_of(_OBJECT),
            "usage": or_null(_OBJECT),
            "error": or_null(_OBJECT),
            "incomplete_details": or_null(_OBJECT),
        }
    ),
)

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
